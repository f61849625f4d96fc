"""Two stages on two halves of the devices, by hand and by the library."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk


def first(w, x):
    return jnp.tanh(x @ w)


def second(w, x):
    return x @ w


# proves S83, F5: where each half's arrays lie on the way, and the composition's numbers
def test_what_the_first_half_makes_is_put_on_the_second():
    left, right = sk.submeshes(sk.make_mesh(stage=2, data=4), "stage")
    rng = np.random.default_rng(0)
    w, v, x = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((12, 16), (16, 10), (8, 12)))
    params = [sk.shard(w, left, P()), sk.shard(v, right, P())]
    assert not params[0].devices() & params[1].devices()
    assert params[0].devices() | params[1].devices() == set(jax.devices())

    h = jax.jit(first)(params[0], sk.shard(x, left, P("data")))
    assert h.devices() == set(left.devices.flat)
    moved = jax.device_put(h, NamedSharding(right, P("data")))
    assert moved.devices() == set(right.devices.flat) and moved.sharding.shard_shape(moved.shape) == (2, 16)
    by_hand = jax.jit(second)(params[1], moved)

    seen = []

    def noted(w, x):
        seen.append(x.shape)  # of the whole microbatch's rows that one device has
        return second(w, x)

    (y,) = sk.device_put_pipeline([first, noted], [left, right], specs=P("data"))(params, x, microbatches=1)
    assert y.devices() == set(right.devices.flat) and set(seen) == {(2, 16)}
    np.testing.assert_allclose(y, by_hand, rtol=1e-6)
    np.testing.assert_allclose(y, second(v, first(w, x)), rtol=1e-5, atol=1e-6)
