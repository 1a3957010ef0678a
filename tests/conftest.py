"""Shapes in the model room's signatures are checked in every test that runs it; tests that do not never import jax."""

from __future__ import annotations

from hypothesis import settings
from jaxtyping import install_import_hook

install_import_hook("spile.model", "beartype.beartype")
settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")
