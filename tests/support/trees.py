"""Trees of arrays, compared."""

import jax
import jax.numpy as jnp
import numpy as np


def assert_close(got, wanted, relative=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=0, atol=relative * float(jnp.max(jnp.abs(y))))
