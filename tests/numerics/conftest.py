from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_promotion() -> Iterator[None]:
    """Refuse implicit dtype promotion."""
    with jax.numpy_dtype_promotion("strict"):
        yield
