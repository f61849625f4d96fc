"""Meshes as jax's own code meets them: as a context, with every type of axis, and round functions of both forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk

X = np.arange(32, dtype=np.float32).reshape(4, 8)
SUMS = X.reshape(4, 4, 2).sum(1)  # over the four pieces of dim 1


def sums(x):
    return sk.all_reduce(x, "model")


# proves S18
def test_inside_a_mesh_nothing_is_told_the_mesh(mesh2x4):
    with jax.set_mesh(mesh2x4):
        x = jax.device_put(X, P("data", "model"))
        summed = jax.jit(jax.shard_map(sums, in_specs=P("data", "model"), out_specs=P("data")))(x)
        turned = jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * x, P("model", "data")))(x)
    assert x.sharding == NamedSharding(mesh2x4, P("data", "model"))
    assert summed.sharding == NamedSharding(mesh2x4, P("data"))
    assert turned.sharding == NamedSharding(mesh2x4, P("model", "data"))
    np.testing.assert_array_equal(summed, SUMS)
    np.testing.assert_array_equal(turned, 2 * X)
    with pytest.raises(ValueError, match="mesh"):
        jax.shard_map(sums, in_specs=P("data", "model"), out_specs=P("data"))(X)


# proves F7: the kernel gives one result in meshes of Auto and of Explicit axes, and where the other axis is not Manual
@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit, (AxisType.Explicit, AxisType.Auto)])
@pytest.mark.parametrize("manual", [{"data", "model"}, {"model"}], ids=["both Manual", "one Manual"])
def test_every_type_of_axis(types, manual):
    mesh = sk.make_mesh(data=2, model=4, axis_types=types)
    rows = "data" if "data" in manual else None
    on_mesh = jax.shard_map(sums, mesh=mesh, in_specs=P(rows, "model"), out_specs=P(rows), axis_names=manual)
    x = sk.shard(X, mesh, P("data", "model"))
    result = jax.jit(on_mesh)(x)
    asked = types if isinstance(types, tuple) else (types, types)
    explicit = [name for name, kind in zip(("data", "model"), asked, strict=True) if kind == AxisType.Explicit]
    assert [name for name in jax.typeof(x).sharding.spec if name] == explicit  # tracing shows those of a layout
    if rows:
        assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    np.testing.assert_array_equal(result, SUMS)


# proves S39: both forms, and inside the shapes of one device
def test_a_decorator_and_a_call(mesh2x4):
    seen = []

    @jax.shard_map(mesh=mesh2x4, in_specs=P("data", "model"), out_specs=P("data"))
    def decorated(x):
        seen.append((x.shape, sk.axis_size("data"), sk.axis_size("model")))
        return sums(x)

    called = jax.shard_map(sums, mesh=mesh2x4, in_specs=P("data", "model"), out_specs=P("data"))
    np.testing.assert_array_equal(decorated(X), SUMS)
    np.testing.assert_array_equal(called(X), SUMS)
    assert set(seen) == {((2, 2), 2, 4)}


# proves S40: code on whole arrays before and after it, in one jit and differentiated
def test_beside_ordinary_code(mesh2x4):
    on_mesh = jax.shard_map(sums, mesh=mesh2x4, in_specs=P("data", "model"), out_specs=P("data"))

    def loss(x):
        return jnp.sum(jnp.tanh(on_mesh(x * 0.01).T @ jnp.ones((4, 1))))

    def on_one(x):
        return jnp.sum(jnp.tanh((x * 0.01).reshape(4, 4, 2).sum(1).T @ jnp.ones((4, 1))))

    value, gradient = jax.jit(jax.value_and_grad(loss))(X)
    expected, expected_gradient = jax.value_and_grad(on_one)(jnp.asarray(X))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-8)
    np.testing.assert_array_equal(on_mesh(X) + 1, SUMS + 1)  # without jit, beside an operation on the whole
