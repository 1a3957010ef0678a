"""Shapes in the model room's signatures are checked in every test that runs it; tests that do not never import jax."""

from __future__ import annotations

from jaxtyping import install_import_hook

install_import_hook("spile.model", "beartype.beartype")
