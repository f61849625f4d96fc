"""Trees of arrays, compared."""

import jax
import numpy as np


def assert_laid_out(state, described):
    """Arrays of strong types that lie just as described, by `init.abstract` for example."""
    assert jax.tree.structure(state) == jax.tree.structure(described)
    for x, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(described), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)
        assert not getattr(x, "weak_type", False)  # keys have none


def assert_close(got, wanted, relative=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=0, atol=relative * np.abs(np.asarray(y)).max())
