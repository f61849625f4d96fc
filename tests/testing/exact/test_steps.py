"""Training steps equal one device's for all parameters, weights and floats of a batch: plans, meshes, pipelines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import shardkit as sk
from shardkit import testing
from shardkit.testing import Row
from shardkit.testing.exact.law import equal_for_all_inputs
from shardkit.testing.one_device import Reference, Training
from shardkit.testing.program import Program
from support import conformance, pipelines, rows
from support.conformance import MESH_CONFIGS, MESH_MODELS, MODELS, PLANS, mesh_rows
from support.pipelines import PIECES, make_batch, make_params, pipelined_grad, unpipelined
from support.training import lenient

KEY, EXPLICIT = jax.random.key(5), AxisType.Explicit
ADAMW = lenient(optax.adamw(1e-2))
QUICK = ["zero2", "fsdp_pad_x_zero2_pad_x_dp", "toy_tp_x_fsdp_x_zero1", "fsdp_with_a_secondary_shard"]
WAYS = [(name, row) for name in MESH_CONFIGS for row in mesh_rows(name)]


def ids(names):
    return [name.replace(",", "").replace(" ", "_") for name in names]


def holds(row, grad_fn, alone, params, batches, optimizer=None):
    optimizer = optimizer or ADAMW
    given = Training(alone, optimizer, params, tuple(batches), KEY)
    program = Program.of(row, grad_fn, optimizer, params, batches, KEY)
    assert equal_for_all_inputs(program, Reference((), given)) is None


# proves N49, F14, F15, F17, F18, F19, F22
@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("plan", PLANS, ids=ids(row.name for row in PLANS))
def test_two_steps_of_every_plan(plan):
    [model] = [row for row in MODELS if row.name == "softmax"]
    grad_fn, alone = sk.value_and_grad(model.loss(plan.model_axis)), sk.value_and_grad(model.loss(None))
    holds(Row(plan.sizes, plan.plan()), grad_fn, alone, model.params(), [model.batch(i) for i in range(2)])


# What no other row has: sequence parallelism in each form of the matmuls, experts beside every other axis.
@pytest.mark.quick("dense-fsdp=2_model=4_sequence_bidirectional")
@pytest.mark.parametrize(("name", "plan"), WAYS, ids=ids(f"{name}-{row.name}" for name, row in WAYS))
def test_a_step_on_every_mesh(name, plan):
    [model] = [row for row in MESH_MODELS if row.name == name]
    grad_fn, alone = sk.value_and_grad(model.loss(plan.model_axis)), sk.value_and_grad(model.loss(None))
    batch = {name: x[:8] for name, x in model.batch(0).items()}
    holds(Row(plan.sizes, plan.plan()), grad_fn, alone, model.params(), [batch])


CASES = rows.cases()
# A row for each way to shard, and all options.
FEW = [4, 9, 10, 24, 26, 32, 34]
OPTIONS = [{"steps": 2}, {"precision": "bf16"}, {"precision": "fp16"}, {"deterministic": 4}, {"axis_types": EXPLICIT}]


@pytest.mark.check
def test_the_default_tier_has_every_option():
    options = [set(case.choice.items()) for case in CASES]
    assert set().union(*(options[number] for number in FEW)) == set().union(*options)


# proves N49, S75, S80, F24, F25, F30, F31, F32, F33, F36, F37, F45, F47, F56, F58, F59
@pytest.mark.quick(*map(str, FEW))
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_row_of_the_covering_list(number, monkeypatch):
    case = rows.shrink_case(monkeypatch, number)
    alone, params, batch = rows.alone(case), conformance.weights(case.config), rows.batch(0)
    holds(case.row, case.row.grad_fn, alone, params, [batch], rows.optimizer_of(case.choice["optimizer"], case.config))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_a_step(options):
    model, plan = MODELS[0], sk.fsdp("fsdp", min_size=1)
    grad_fn = sk.value_and_grad(model.loss(None))
    holds(Row({"fsdp": 4}, plan, **options), grad_fn, grad_fn, model.params(), [model.batch(i) for i in range(2)])


# By the laws of roots a product is the root of a product that only the other side takes: both need the same roots.
def test_norms_that_are_written_in_other_ways():
    def make_loss(normalize):
        def loss(params, batch, keys):
            x = batch["x"] @ params["w"]
            return jnp.mean(jax.nn.relu(normalize(x, (x * x).mean(-1, keepdims=True) + 1)))

        return sk.value_and_grad(loss)

    def divide_twice(x, square):
        return x / (jnp.sqrt(square) * jnp.sqrt(square + 1))

    def divide_once(x, square):
        return x / jnp.sqrt(square * (square + 1))

    params = {"w": np.ones((3, 4), np.float32)}
    batches = [{"x": np.ones((4, 3), np.float32)}] * 2
    holds(
        Row({"data": 2}, sk.dp("data")),
        make_loss(divide_once),
        make_loss(divide_twice),
        params,
        batches,
        optax.sgd(0.1),
    )


SCHEDULES = (*pipelines.BUILDERS, "from_csv")
FORMS = [(mode, recompute) for mode in ("masked", "branch") for recompute in (True, False)]
# Stages and microbatches: fewer than stages, as many, more.
SIZES = [(2, 3), (3, 4), (2, 2), (4, 3), (2, 4)]
# Of every schedule one form and size, all of which are there.
EACH = [f"{name}-{'-'.join(map(str, FORMS[i % 4]))}" for i, name in enumerate(SCHEDULES)]


# proves N49, S80, F36, F37, F38, F42: unequal weights, dropout, tied embeddings, two chunks where one may choose
@pytest.mark.quick(*EACH)
@pytest.mark.parametrize(("mode", "recompute"), FORMS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_form_of_every_schedule(name, mode, recompute):
    p, m = SIZES[(FORMS.index((mode, recompute)) + SCHEDULES.index(name)) % len(SIZES)]
    schedule = pipelines.make(name, p, m, 2)
    how = {"layer_numbers": True, "mode": mode, "recompute": recompute}
    grad_fn, alone = pipelined_grad(*PIECES, schedule, "stage", **how), sk.value_and_grad(unpipelined(PIECES))
    params, batch = make_params(p * schedule.chunks), make_batch(2 * m)
    holds(Row({"stage": p}, sk.pp("stage")), grad_fn, alone, params, [batch])


# proves N49: a model at full size is one that is proved in a second, and only what it was written for stays
def test_small_arguments_of_a_large_model():
    def loss(params, batch, keys):
        x = params["embed"][batch["tokens"]]
        for w in params["layers"]:
            q, k, v = jnp.split(x @ w["qkv"], 3, -1)
            heads = [z.reshape(*z.shape[:-1], 8, -1) for z in (q, k, v)]
            x += jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
        return sk.Mean.of(-jax.nn.log_softmax(x @ params["embed"].T)[..., 0], batch["weights"])

    d, tokens = 4096, np.arange(32 * 2048).reshape(32, 2048)
    layers = [{"qkv": jax.ShapeDtypeStruct((d, 3 * d), np.float32)}] * 2
    params = {"embed": jax.ShapeDtypeStruct((32_000, d), np.float32), "layers": layers}
    batch = {"tokens": tokens - 1, "weights": jax.ShapeDtypeStruct(tokens.shape, np.float32)}
    (params, batch, _), said = testing.small(loss, (params, batch, jax.random.split(KEY, 32)), multiple=2)
    assert said == "small: dims of 32 are 4, of 2048 are 6, of 4096 are 16, of 12288 are 48, of 32000 are 8"
    assert batch["tokens"][1].tolist() == [3, 0, 1, 2, 3, 0] and batch["tokens"][0, 0] == -1
    params, batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params), batch | {"weights": np.ones((4, 6), "f")}
    grad_fn = sk.value_and_grad(loss)
    holds(
        Row({"data": 2, "fsdp": 2}, sk.chain(sk.dp("data"), sk.fsdp("fsdp", min_size=1))),
        grad_fn,
        grad_fn,
        params,
        [batch],
    )

    assert testing.small(lambda x: x.reshape(96), (np.ones(96),))[1] == "small: no dim could shrink"
    stays = testing.small(lambda x, y: (x.reshape(96), y), (np.ones(96), np.ones(9)))
    assert stays[1] == "small: dims of 9 are 2; 96 stayed" and stays[0][1].shape == (2,)


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (["right"], "the metric right of step 0 is not"),
        ([], r"metrics must be .*; the mesh returns no 'right'\. Return"),
    ],
)
def test_a_metric_that_is_not_one_devices(names, wrong):
    model = MODELS[0]

    def loss(names, factor, params, batch, keys):
        mean, _ = model.loss(None)(params, batch, keys)
        return mean, {name: mean._replace(total=factor * mean.total) for name in names}

    grad_fns = [sk.value_and_grad(functools.partial(loss, *each)) for each in ((names, 1 + 1e-6), (["right"], 1))]
    with pytest.raises(AssertionError, match=wrong):
        holds(Row({"data": 2}, sk.dp("data")), *grad_fns, model.params(), [model.batch(0)])


def square(params, x, keys):
    return jnp.mean((x @ params["w"]) ** 2)


def test_a_step_that_rounds_is_told_from_one_that_is_wrong():
    """What is rounded on the mesh alone, as a small message, is none of one device's values, and is no mistake."""
    own = sk.algorithms.Algorithm("own", all_reduce=lambda leaves, axes: sk.all_reduce([*map(jnp.round, leaves)], axes))
    grad_fn, params, batch = sk.value_and_grad(square), {"w": np.ones(3, "f")}, np.ones((4, 3), "f")
    for plan, note in (
        (sk.dp("data", reduce=own), "not for all inputs: the step rounds, by round"),
        (sk.dp("data"), None),
    ):
        program = Program.of(Row({"data": 2}, plan), grad_fn, optax.sgd(0.1), params, [batch], KEY)
        given = Training(grad_fn, optax.sgd(0.1), params, (batch,), KEY)
        assert equal_for_all_inputs(program, Reference((), given)) == note


def test_a_relative_error_of_a_part_in_10_to_the_12_is_found():
    model = MODELS[0]

    def loss(params, batch, keys):
        mean, means = model.loss(None)(params, batch, keys)
        wrong = 1e-12 * sk.axis_index("data").astype(np.float32)
        return sk.Mean(mean.total + wrong * mean.total, mean.weight), means

    grad_fn, alone = sk.value_and_grad(loss), sk.value_and_grad(model.loss(None))
    with pytest.raises(AssertionError, match="the loss of step 0 is not the reference's for all inputs"):
        holds(Row({"data": 2}, sk.dp("data")), grad_fn, alone, model.params(), [model.batch(0)])


# proves N49: what is wrong inside a clipping alone is found, where few examples go
@pytest.mark.parametrize("wrong", [False, True])
def test_a_surrogate_that_is_clipped(wrong):
    def clipped(ratio):
        inside = (ratio > 0.8) & (ratio < 1.2)
        return jnp.where(inside, 0.0 if wrong else ratio, jnp.clip(ratio, 0.8, 1.2))

    def loss(clip):
        def loss_fn(params, batch, keys):
            ratio = jnp.exp(batch["x"] @ params["w"] - batch["old"])
            return sk.Mean.of(-jnp.minimum(ratio * batch["gain"], clip(ratio) * batch["gain"]))

        return sk.value_and_grad(loss_fn)

    params = {"w": np.ones(3, "f")}
    batch = {"x": np.ones((8, 3), "f"), "old": np.ones(8, "f"), "gain": np.ones(8, "f")}
    args = (
        Row({"data": 4}, sk.dp("data")),
        loss(clipped),
        loss(lambda ratio: jnp.clip(ratio, 0.8, 1.2)),
        params,
        [batch],
    )
    if wrong:
        with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
            holds(*args)
    else:
        holds(*args)
