"""Dense layers split over a mesh: one, an encoder of several with two heads, and one too large for a device."""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk

SIZES = {"layer1": (12, 16), "layer2": (16, 8), "mean": (8, 4), "logvar": (8, 4)}
SPECS = {
    "layer1": {"kernel": P(None, "model"), "bias": P("model")},
    "layer2": {"kernel": P("model", None), "bias": P()},
    "mean": {"kernel": P(None, "model"), "bias": P("model")},
    "logvar": {"kernel": P(None, "model"), "bias": P("model")},
}


def params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / 3).astype(np.float32)  # noqa: E731
    return {name: {"kernel": draw(*shape), "bias": draw(shape[1])} for name, shape in SIZES.items()}


def batch(step=0):
    rng = np.random.default_rng(step + 1)
    return {"x": rng.normal(size=(8, 12)).astype("f"), "noise": rng.normal(size=(8, 4)).astype("f")}


def column(layer, x, axis):
    return sk.layers.column_linear(x, layer["kernel"], axis) + layer["bias"][None]


def encode(w, x, axis=None):
    """Two layers, columns then rows, and both heads from one copy of the activations."""
    h = jnp.tanh(column(w["layer1"], x, axis))
    h = jnp.tanh(sk.layers.row_linear(h, w["layer2"]["kernel"], axis) + w["layer2"]["bias"][None])
    return tuple(column(w[name], h, axis) for name in ("mean", "logvar"))


def whole(x, axis):
    return x if axis is None else sk.all_gather(x, axis, dim=1, replicated=True)


def loss_fn(axis):
    def loss(w, batch, keys):
        mean, logvar = (whole(x, axis) for x in encode(w, batch["x"], axis))
        z = mean + jnp.exp(logvar / 2) * batch["noise"]
        return sk.Mean.of(jnp.sum(z**2 + mean**2 + jnp.exp(logvar) - logvar, axis=1))

    return loss


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), actual, expected)


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
def test_a_layer_split_by_columns_is_the_dense_layer(ways):  # proves S71
    mesh = sk.make_mesh(jax.devices()[:ways], model=ways)
    layer, x = params()["layer1"], batch()["x"]
    split = jax.shard_map(
        lambda w, x: column(w, x, "model"), mesh=mesh, in_specs=(SPECS["layer1"], P()), out_specs=P(None, "model")
    )
    close(jax.jit(split)(layer, x), column(layer, x, None))


@pytest.mark.quick("sizes1")
@pytest.mark.parametrize("sizes", [{"model": 4}, {"data": 2, "model": 4}, {"data": 4, "model": 2}])
def test_a_split_encoder_equals_the_whole_one(sizes):  # proves S72, S75
    mesh = sk.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    rows = "data" if "data" in sizes else None
    forward = jax.shard_map(
        lambda w, x: encode(w, x, "model"), mesh=mesh, in_specs=(SPECS, P(rows)), out_specs=P(rows, "model")
    )
    close(jax.jit(forward)(params(), batch()["x"]), encode(params(), batch()["x"]))

    plan = sk.chain(sk.tp("model", SPECS), *([sk.dp("data")] if rows else []))
    sk.testing.assert_same_training(
        sk.value_and_grad(loss_fn("model")),
        sk.value_and_grad(loss_fn(None)),
        optax.sgd(0.1),
        mesh=mesh,
        plan=plan,
        params=params(),
        batches=[batch(0), batch(1)],
    )


def test_activations_gathered_between_layers_that_are_both_split_by_columns():  # proves S73
    mesh = sk.make_mesh(jax.devices(), data=2, model=4)
    w, x = params(), batch()["x"]
    second = {"kernel": P(None, "model"), "bias": P("model")}

    def both(first, second, x):
        h_bf = jnp.tanh(column(first, x, "model"))  # laid out P('data', 'model')
        h_bF = sk.all_gather(h_bf, "model", dim=1, replicated=True)  # P('data', None)
        return column(second, h_bF, "model")

    specs = (SPECS["layer1"], second, P("data"))
    split = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=P("data", "model")))
    expected = column(w["layer2"], jnp.tanh(column(w["layer1"], x, None)), None)
    close(split(w["layer1"], w["layer2"], x), expected)
    sk.expects(sk.analysis.collective("all_gather", "model", times=1)).check(split, w["layer1"], w["layer2"], x)


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed: shardkit[aot]")
@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.deep)])
@pytest.mark.deep  # its numbers: the tests above
def test_a_layer_larger_than_a_device_runs_on_several(split):  # proves S74
    """Two matrices of 10 GiB on chips of 16 GB: split, partial results are summed by one all_reduce."""
    axis = "model" if split else None

    def layer(w, x):
        return sk.layers.row_linear(jax.nn.gelu(sk.layers.column_linear(x, w["up"], axis)), w["down"], axis)

    mesh = sk.abstract_mesh(model=8)
    specs = {"up": P(None, axis), "down": P(axis)}
    step = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=(specs, P()), out_specs=P()))
    laid_out = lambda shape, spec: jax.ShapeDtypeStruct(  # noqa: E731
        shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec)
    )
    shapes = {"up": (16_384, 327_680), "down": (327_680, 16_384)}
    w = {name: laid_out(shape, specs[name]) for name, shape in shapes.items()}
    report = sk.aot.compile(step, (w, laid_out((128, 16_384), P())), topology="v5e:2x4")
    assert report.fits == split
    if split:
        assert [row.kind for row in report.census.rows] == ["all_reduce"] and report.census.count() == 1
        assert report.memory.held < 2.7 * 2**30
