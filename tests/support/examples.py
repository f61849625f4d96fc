"""The examples, run for the tests that compare them with one device."""

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

PACKAGES = {"nnx": "flax", "linen": "flax", "equinox": "equinox", "haiku": "haiku"}


def example_of(name):
    """What the example of this name defines; skips where its library is missing."""
    package = PACKAGES.get(name.partition("_")[0])
    if package:
        pytest.importorskip(package, reason=f"{package} is not installed; pip install 'shardkit[test]' installs it")
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    return runpy.run_path(str(path))


def difference(tree, other):
    """The largest difference between the leaves of two trees."""
    pairs = zip(*map(jax.tree.leaves, jax.device_get((tree, other))), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)
