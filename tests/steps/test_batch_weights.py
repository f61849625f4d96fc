"""Weights in a batch are data: they are not rounded to the compute dtype, and they count once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit import schedules
from support.layouts import mesh_of
from support.pipelines import pipelined_grad
from support.refusals import value_error

KEY = jax.random.key(0)
PRECISIONS = (sk.Precision(compute=jnp.float16), "bf16")


def traced(loss_fn, batch, mesh, plan=None, params=None, **options):
    """The outcome of one step, without compiling it."""
    init, step = sk.make_train_step(
        sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh, plan=plan or sk.dp("data"), **options
    )
    return jax.eval_shape(step, init.abstract({"w": np.ones((4, 4), np.float32)} if params is None else params), batch)


def layered(p, batch, keys):
    """A loss whose weight passes a loop, a branch, a checkpoint and an integer on its way."""

    def layer(carry, w):
        x, weights = carry
        return (x + jnp.tanh(x @ w), weights), None

    def weighted(x, weights):
        (x, weights), _ = jax.lax.scan(layer, (x, weights), p["w"][None])
        weights = jax.lax.cond(jnp.sum(x) > 1e4, jnp.zeros_like, lambda w: w, weights)
        return x.astype(jnp.float32), weights.astype(jnp.int32)

    x, weights = jax.checkpoint(weighted)(batch["x"], batch["weight"])
    counted = jnp.where(batch["x"][:, 0] > 0, weights, 0)
    return sk.Mean.of(jnp.ones_like(x[:, 0]), counted), {"dtype": x[0, 0], "x": sk.Mean.of(x, jnp.ones_like(x))}


# 2049 is no float16 and no bfloat16: the sum was 16384, and the loss not 1.
@pytest.mark.filterwarnings("ignore:step. the metric 'dtype' must add over its examples")
@pytest.mark.quick("2-fp16")
@pytest.mark.parametrize("precision", PRECISIONS, ids=["fp16", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_of_a_batch_are_not_rounded(precision, accumulate):
    mesh, plan = mesh_of(data=2, fsdp=2, model=2), sk.chain(sk.dp("data"), sk.fsdp("fsdp", min_size=1))
    batch = {"x": np.full((16, 4), 1 / 3, np.float32), "weight": np.full(16, 2049, np.float32)}
    seen = {}

    def loss_fn(p, batch, keys):
        seen.update({name: leaf.dtype for name, leaf in batch.items()})
        return layered(p, batch, keys)

    init, step = sk.make_train_step(
        sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh, plan=plan, accumulate=accumulate, precision=precision
    )
    params = {"w": np.zeros((4, 4), np.float32)}
    _, metrics = step(init(params, KEY), batch)
    assert float(metrics["weight"]) == 16 * 2049
    assert float(metrics["loss"]) == 1.0
    compute = jnp.bfloat16 if precision == "bf16" else jnp.float16
    assert seen == {"x": compute, "weight": jnp.float32}  # a mask that is made of x does not keep x from being cast
    evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=plan, precision=precision)
    found = evaluate(step(init(params, KEY), batch)[0].params, batch)
    assert (float(found["weight"]), float(found["loss"])) == (16 * 2049, 1.0)


def pipelined(weight):
    def head(shared, x, b):
        total = jnp.sum(x.astype(jnp.float32)) * jnp.mean(shared["g"]).astype(jnp.float32)
        return sk.Mean(total, weight(b))

    stage = lambda layers, x, keys: sk.scan_layers(lambda w, x: x * w[None], layers, x)  # noqa: E731
    return (lambda shared, b, keys: b["x"]), stage, head, schedules.gpipe(2, 2), "stage"


# The weight of a pipeline's head goes through the executor's loops: only what it is made of stays float32.
def test_weights_of_a_pipeline_are_not_rounded():
    seen = {}

    def weight(b):
        seen.update({name: leaf.dtype for name, leaf in b.items()})
        return jnp.sum(b["weight"].astype(jnp.float32))

    grad_fn = pipelined_grad(*pipelined(weight))
    options = {"mesh": mesh_of(data=2, stage=2), "plan": sk.chain(sk.dp("data"), sk.pp("stage")), "precision": "bf16"}
    init, step = sk.make_train_step(grad_fn, optax.sgd(1.0), **options)
    params = {"layers": np.ones((2, 4), np.float32), "g": np.ones(4, np.float32)}
    batch = {"x": np.ones((8, 4), np.float32), "weight": np.full(8, 2049, np.float32)}
    jax.eval_shape(step, init.abstract(params), batch)
    assert seen == {"x": jnp.bfloat16, "weight": jnp.float32}


# As bfloat16 it was refused to count, with the remedy to sum it in float32: of rounded weights.
@pytest.mark.check
def test_a_weight_that_is_summed_as_it_is_counts_in_float32():
    seen = {}

    def loss_fn(p, b, keys):
        seen.update({name: x.dtype for name, x in b.items()})
        return sk.Mean(jnp.sum(b["x"]).astype(jnp.float32), jnp.sum(b["weight"]))

    batch = {"x": np.ones((8, 4), np.float32), "weight": np.ones(8, np.float32)}
    _, metrics = traced(loss_fn, batch, mesh_of(data=2), precision="bf16")
    assert seen == {"x": jnp.bfloat16, "weight": jnp.float32} and metrics["weight"].dtype == jnp.float32


SCALAR = (
    "Mean {name}: the weight of examples must be a sum over them, because the weights of all devices and microbatches "
    "are added; got one that depends only on leaf n, a scalar. Pass a weight for each example: an array with the "
    "examples along dim 0."
)


def by_scalar(p, b, keys):
    return sk.Mean(jnp.sum(b["x"] @ p["w"]), jnp.maximum(b["n"], 1))


# A scalar is on every device: as a weight it counted once on each, and the loss was divided by 8 n.
@pytest.mark.check
@pytest.mark.parametrize("n", [np.float32(8), np.int32(8), 8], ids=["float", "int", "python"])
@pytest.mark.parametrize("sizes, accumulate", [({"data": 8}, 1), ({"data": 2, "model": 2}, 1), ({"data": 1}, 2)])
def test_a_scalar_as_the_weight_of_examples_is_refused(n, sizes, accumulate):
    batch = {"x": np.ones((8, 4), np.float32), "n": n}
    with value_error(SCALAR.format(name="'loss'")):
        traced(by_scalar, batch, mesh_of(**sizes), accumulate=accumulate)


def by_example(p, b, keys, n=None):
    return sk.Mean.of(jnp.sum((b["x"] @ p["w"]) ** 2, axis=(1, 2)), b["n"] if n is None else n)


@pytest.mark.check
def test_what_all_devices_have_whole_is_refused_as_the_weight_of_their_parts():
    """It counted once on each device: the loss was 4 times too small."""
    batch = {"x": np.ones((4, 4, 4), np.float32), "n": np.ones(4, np.float32)}

    def run(weight, plan):
        loss_fn = lambda p, b, keys, c: by_example(p, b, keys, jnp.broadcast_to(weight(b, keys, c), len(b["x"])))  # noqa: E731
        init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), mesh=mesh_of(data=4), plan=plan)
        jax.eval_shape(step, init.abstract({"w": np.ones((4, 4), np.float32)}, np.float32(12)), batch)

    whole = (
        "Mean 'loss': the weight must count this device's parts of examples, because it is added once on each device "
        "along 'data'; got one that depends only on leaf n, which every device has whole. Pass a weight for each "
        "part, as an array with its dims, or vary(weight, axes) if the total is of whole examples too."
    )
    with value_error(whole):
        traced(by_example, batch, mesh_of(data=4), sk.cp("data"))
    evaluate = sk.make_eval_step(by_example, mesh=mesh_of(data=4), plan=sk.cp("data"))
    with value_error(whole):
        evaluate.trace({"w": np.ones((4, 4), np.float32)}, batch)
    with value_error(
        "Mean 'loss': the weight of examples must be a sum over them, because it counts once on each device along "
        "'data', and in each microbatch; got one that depends only on parameters or carried state. Pass the weights "
        "of this device's examples, or vary(weight, axes) of this device's share."
    ):
        run(lambda b, keys, c: c, sk.dp("data"))
    run(lambda b, keys, c: sk.vary(c / 4, "data"), sk.dp("data"))
    run(lambda b, keys, c: jnp.where(jax.vmap(jax.random.bernoulli)(keys), c, 0), sk.dp("data"))
    run(lambda b, keys, c: sk.vary(b["n"], "data"), sk.cp("data"))


@pytest.mark.check
def test_a_scalar_as_the_weight_is_refused_in_evaluation_in_aux_and_in_a_pipeline():
    batch = {"x": np.ones((8, 4), np.float32), "n": np.float32(8)}
    aux = lambda p, b, keys: (sk.Mean.of(b["x"] @ p["w"]), {"sum": sk.Mean(jnp.sum(b["x"]), b["n"])})  # noqa: E731
    mesh, params = mesh_of(data=2), {"w": np.ones((4, 4), np.float32)}
    for loss_fn, name in ((by_scalar, "'loss'"), (aux, "'sum'")):
        with value_error(SCALAR.format(name=name)):
            jax.eval_shape(sk.make_eval_step(loss_fn, mesh=mesh, plan=sk.dp("data")), params, batch)
    grad_fn = pipelined_grad(*pipelined(lambda b: b["n"]))
    init, step = sk.make_train_step(grad_fn, optax.sgd(1.0), mesh=mesh_of(stage=2), plan=sk.pp("stage"))
    with value_error(SCALAR.format(name="'loss'")):  # each microbatch of the schedule would add it
        state = init.abstract({"layers": np.ones((2, 4), np.float32), "g": np.ones(4, np.float32)})
        jax.eval_shape(step, state, batch)


@pytest.mark.check
@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda p, b, keys: sk.Mean(jnp.sum(b["x"] @ p["w"]) * b["n"], jnp.sum(b["x"][:, 0]) * b["n"]),
        lambda p, b, keys: (sk.Mean.of(b["x"] @ p["w"] * b["n"]), {"rate": b["n"], "own": sk.Mean(b["n"], b["n"])}),
    ],
    ids=["times a sum over examples", "metrics of the scalar itself"],
)
def test_scalars_that_count_as_they_should_are_taken(loss_fn):
    traced(loss_fn, {"x": np.ones((8, 4), np.float32), "n": np.float32(8)}, mesh_of(data=2), accumulate=2)
    # On one device, in one microbatch, a scalar may be the weight of all examples.
    traced(by_scalar, {"x": np.ones((8, 4), np.float32), "n": np.float32(8)}, mesh_of(data=1))
