"""Meshes as jax's own code meets them: as a context, with every type of axis, and round functions of both forms."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from support.refusals import value_error

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


@pytest.mark.quick("AxisType.Explicit")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_takes_a_mesh_takes_that_of_the_context(kind):
    """It alone would see one that still asks for `mesh=`, or takes another, or cannot take Explicit axes."""
    mesh2x4 = sk.make_mesh(data=2, model=4, axis_types=kind)
    plan = sk.chain(sk.dp("data"), sk.fsdp("model", min_size=1))
    params, batch = {"w": jnp.ones((8, 3))}, np.ones((8, 8), np.float32)
    loss_fn = lambda params, batch, keys: jnp.mean((batch @ params["w"]) ** 2)  # noqa: E731
    spec = plan.batch_spec(mesh2x4)
    samples = [np.ones(8, np.float32)] * 8

    def run(**mesh):
        init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), plan=plan, **mesh)
        state, metrics = step(init(params, jax.random.key(0)), sk.shard(batch, specs=spec, **mesh))
        evaluate = sk.make_eval_step(loss_fn, plan=plan, **mesh)
        found = {
            "loss": metrics["loss"],
            "evaluated": evaluate(state.params, sk.runtime.from_full(batch, spec=spec, **mesh))["loss"],
            "params": state.params["w"],
            "moved": sk.reshard(state.params, plan, sk.dp("data"), **mesh)["w"],
            "whole": sk.runtime.replicate(state.params, **mesh)["w"],
            "loaded": next(iter(sk.runtime.loader(samples, batch=8, seed=0, spec=spec, **mesh))),
        }
        rows = sk.runtime.local_rows(8, spec=spec, **mesh), sk.local_shape((8, 8), spec, **mesh)
        return found, rows, sk.describe(plan, params, **mesh)

    given, rows, text = run(mesh=mesh2x4)
    with jax.set_mesh(mesh2x4):
        found, found_rows, found_text = run()
        options = {"plan": plan, "params": params, "batches": [batch]}
        sk.testing.assert_same_training(
            sk.value_and_grad(loss_fn), sk.value_and_grad(loss_fn), optax.sgd(0.1), **options
        )
        row = sk.testing.Row({"data": 4}, sk.dp("data"))  # on its own mesh
        reference = sk.value_and_grad(loss_fn)
        laws = (sk.testing.laws.same_numbers, sk.runtime.restores_elsewhere)
        run = {"params": params, "batches": [batch], "optimizer": optax.sgd(0.1)}
        sk.testing.prove(reference, reference, rows=[row], laws=laws, **run)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, given)
    chex.assert_trees_all_equal(found, given)
    np.testing.assert_array_equal(found_rows[0], rows[0])
    assert (found_rows[1], found_text) == (rows[1], text)


def test_no_mesh_and_two_meshes(mesh2x4):
    message = (
        "shard: a mesh must be given; got none. Pass mesh=sk.make_mesh(data=8), or call this inside `with "
        "jax.set_mesh(mesh):`."
    )
    with value_error(message):
        sk.shard(X)
    message = (
        "shard: mesh must be the mesh of jax.set_mesh if you set one; got mesh data=8 in the context of data=2 x "
        "model=4. Leave mesh out, or call this inside `with jax.set_mesh(...):` of this mesh."
    )
    with jax.set_mesh(mesh2x4), value_error(message):
        sk.shard(X, sk.make_mesh(data=8))
    with jax.set_mesh(mesh2x4):
        assert sk.local_shape((8, 8), P("x"), sk.abstract_mesh(x=4)) == (2, 8)  # nothing runs there


def test_inside_jit_the_context_has_no_devices(mesh2x4):
    shapes = []

    @jax.jit
    def traced(x):
        shapes.append(sk.local_shape(x.shape, P("data", "model")))
        return x

    with jax.set_mesh(mesh2x4):
        traced(X)
    assert shapes == [(2, 2)]


@pytest.mark.check
def test_meshes_that_differ_in_the_types_of_their_axes_are_told_apart():
    devices = jax.devices()[:2]
    auto, explicit = sk.make_mesh(devices, data=2), sk.make_mesh(devices, data=2, axis_types=AxisType.Explicit)
    message = (
        "shard: mesh must be the mesh of jax.set_mesh if you set one; got mesh data=2 of Auto axes in the context of "
        "data=2 of Explicit axes. Leave mesh out, or call this inside `with jax.set_mesh(...):` of this mesh."
    )
    with jax.set_mesh(explicit), value_error(message):
        sk.shard(np.ones(2), auto, P("data"))


@pytest.mark.check
def test_a_mesh_that_may_be_left_out_says_so_in_the_signature():
    """A checker refuses a call without a mesh where the annotation says Mesh and the default is of another kind."""
    named = [getattr(face, name) for face in (sk, sk.runtime, sk.testing) for name in face.__all__]
    meshes = [inspect.signature(each).parameters.get("mesh") for each in filter(inspect.isfunction, named)]
    optional = [str(each) for each in meshes if each and each.default is not each.empty]
    assert len(optional) > 15 and [text for text in optional if not text.endswith("| None' = None")] == []
