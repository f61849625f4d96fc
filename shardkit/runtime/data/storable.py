"""Typed keys as the integers that files store."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def is_key(x: Any) -> bool:
    """Whether a leaf is an array of typed keys."""
    return jax.dtypes.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key)


def to_storable(x: Any) -> Any:
    """Typed keys as their integers; other arrays unchanged."""
    return jax.random.key_data(x) if is_key(x) else x
