"""Error feedback: no gradient is lost, only sent later, whatever the plan; what is sent, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import schedules
from shardkit.on_device.precision import LossScale
from shardkit.testing import Row, laws
from shardkit.testing.program import Program, recording
from support import linear
from support.conformance import padding, toy_tp
from support.pipelines import pipelined_grad
from support.refusals import refused
from support.training import ONCE

KEY = jax.random.key(3)
STEPS = 3
small = partial(sk.algorithms.compressed, dtype=jnp.int4, block=8)
fed = partial(small, feedback=True)


@pytest.fixture
def data4():
    return sk.make_mesh(jax.devices()[:4], data=4)


def left_in(residuals):
    """What is left out, summed over the devices, in original shapes."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64).sum(0), jax.device_get(sk.unpadded(residuals)))


def applied(steps):
    return jax.tree.map(lambda *grads: sum(np.asarray(g, np.float64) for g in grads), *steps)


def check_sum(steps, residuals, batches):
    """The defining law: what the optimizer got and what is left out are together the exact gradients."""
    got, left, wanted = applied(steps), left_in(residuals), linear.gradients(batches)
    jax.tree.map(lambda g, r, w: np.testing.assert_allclose(g + r, w, rtol=0, atol=2e-5), got, left, wanted)
    return max(jax.tree.leaves(jax.tree.map(lambda r: np.max(np.abs(r)), left)))


# Each with the layouts of its residuals: the bias [7], the scalar shift, and the weight [8, 5].
ROWS = {
    "dp x tp, bf16": (
        Row(
            {"data": 4, "model": 2},
            sk.chain(sk.dp("data", reduce=fed()), toy_tp("model")),
            sk.value_and_grad(linear.loss("model")),
            precision="bf16",
        ),
        {"bias": (4, P("data")), "shift": (4, P("data")), "weight": (4, P("data", "model"))},
    ),
    "zero1 in two levels, accumulated": (
        Row(
            {"node": 2, "gpu": 2},
            sk.zero1(("node", "gpu"), min_size=1, reduce=fed(inner="gpu", inner_dtype=jnp.int8)),
            accumulate=2,
        ),
        {name: (4, P(("node", "gpu"))) for name in linear.params()},
    ),
    # What the last sum leaves out is put back where the first has cut, past a cut without feedback. The shift is summed
    # over all three axes, by the ring first.
    "dp x fsdp padded x zero1 without": (
        Row(
            {"data": 2, "fsdp": 2, "zero": 2},
            sk.chain(
                sk.dp("data", reduce=fed(compress_result=True)),
                sk.fsdp("fsdp", reduce=fed(dtype=jnp.float8_e5m2), min_size=1, uneven="pad", rules=lambda *_: 0),
                sk.zero1("zero", min_size=10, reduce=sk.algorithms.ring()),
            ),
        ),
        {"bias": (8, P(("data", "fsdp", "zero"))), "shift": (4, P(("data", "fsdp")))}
        | {"weight": (8, P(("data", "fsdp", "zero")))},
    ),
    # A part has a part of the residual, which is padded as it is.
    "dp x fsdp padded, only dp": (
        Row(
            {"node": 2, "gpu": 4},
            sk.chain(
                sk.dp("node", reduce=fed()),
                sk.fsdp("gpu", reduce=sk.algorithms.ring(), **{**padding(4), "min_size": 2}),
            ),
        ),
        {"bias": (2, P("node", "gpu")), "shift": (2, P("node")), "weight": (2, P("node", None, "gpu"))},
    ),
}


@pytest.mark.quick("dp x tp, bf16", "zero1 in two levels, accumulated", "dp x fsdp padded x zero1 without")
@pytest.mark.parametrize("name", ROWS)  # proves N2 in part: it is sharded, and adds what was left out
def test_no_gradient_is_lost(name):
    row, layouts = ROWS[name]
    batches = [linear.batch(step) for step in range(STEPS)]
    grad_fn = sk.value_and_grad(linear.loss())
    program = Program.of(row, grad_fn, optax.sgd(1.0), linear.params(), batches, KEY)
    assert check_sum([taken.grads for taken in program.ran.steps], program.ran.state.residuals, batches) > 0.01
    for state in (program.start, program.init.abstract(linear.params()), program.ran.state):
        stored = jax.tree.map(lambda x: x, state.residuals)
        found = {key: (x.shape[0], jax.tree.leaves(x)[0].sharding.spec) for key, x in stored.items()}
        assert found == layouts
        assert {key: x.shape[1:] for key, x in stored.items()} == {"bias": (7,), "shift": (), "weight": (8, 5)}
    for law in ONCE:  # compressed sums are not those of one device; all else holds, also what is sent
        if law is not laws.same_numbers:
            law(program, None)


# On an axis of one device nothing is left out: what another mesh left out is added once.
def test_one_device_adds_what_it_restored():
    mesh, plan = sk.make_mesh(jax.devices()[:1], data=1), sk.dp("data", reduce=fed())
    grad_fn = sk.value_and_grad(linear.loss())
    init, step = sk.make_train_step(grad_fn, recording(optax.sgd(1.0)), mesh=mesh, plan=plan)
    state = init(linear.params(), KEY)
    state = state._replace(residuals=jax.tree.map(lambda x: x + 2, state.residuals))
    state, _ = step(state, linear.batch(0))
    wanted = linear.gradients([linear.batch(0)])
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w + 2, atol=1e-6), state.opt_state.grads, wanted)
    assert not any(np.any(x) for x in jax.tree.leaves(state.residuals))


# Residuals are in units of the mean gradient: they outlive a loss scale that doubles, halves and skips steps, and
# weights that change.
def test_loss_scale_and_skipped_steps(data4):
    policy = sk.Precision(compute=jnp.float16, loss_scale="dynamic", growth_interval=1)
    options = {"mesh": data4, "plan": sk.dp("data", reduce=fed()), "precision": policy}
    init, step = sk.make_train_step(sk.value_and_grad(linear.loss()), recording(optax.sgd(1.0)), **options)
    state = init(linear.params(), KEY)._replace(loss_scale=LossScale(jnp.float32(64), jnp.int32(0)))
    taken, batches, scales = [], [], set()
    for i in range(8):
        before = jax.device_get(state.residuals)
        batch = linear.batch(i)
        batch["weight"] *= 1 + i % 3
        state, metrics = step(state, batch)
        if metrics["finite"]:
            taken.append(jax.device_get(state.opt_state.grads))
            batches.append(batch)
            scales.add(float(metrics["loss_scale"]))
        else:
            jax.tree.map(np.testing.assert_array_equal, state.residuals, before)
    assert len(scales) > 2 and len(taken) < 8
    check_sum(taken, state.residuals, batches)


def test_training_ends_nearer_to_the_exact_run(data4):  # proves N70
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 24)).astype("f"), rng.normal(size=(32, 4)).astype("f")
    grad_fn = sk.value_and_grad(lambda w, batch, keys: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))

    def end(**reduce):
        init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=data4, plan=sk.dp("data", **reduce))
        state = init(np.zeros((24, 4), "f"), KEY)
        for _ in range(100):
            state, _ = step(state, {"x": x, "y": y})
        return np.asarray(state.params)

    exact = end()
    for dtype in (jnp.int8, jnp.int4, "mxfp8", "mxfp4", "nvfp4"):
        with_feedback, without = (
            np.linalg.norm(end(reduce=sk.algorithms.compressed(dtype, feedback=feedback)) - exact)
            for feedback in (True, False)
        )
        assert 3 * with_feedback < without


# ---- what is sent, and what a plan says


def steps(plan, mesh, grad_fn=None):
    """The step of a plan, with its first state and a batch as shapes."""
    init, step = sk.make_train_step(grad_fn or sk.value_and_grad(linear.loss()), optax.sgd(1.0), mesh=mesh, plan=plan)
    return step, init.abstract(linear.params()), linear.batch(0)


@pytest.mark.check
def test_feedback_sends_nothing_more(data4):
    def sent(algorithm):
        rows = sk.census(*steps(sk.dp("data", reduce=algorithm), data4)).rows
        return [(row.kind, row.axes, row.bytes_in, row.total) for row in rows]

    assert sent(fed()) == sent(small())


@pytest.mark.check
def test_the_name_of_an_algorithm_says_it(mesh2x4):
    plan = sk.chain(sk.dp("data", reduce=fed()), sk.fsdp("model", reduce=fed(), min_size=10))
    text = sk.describe(plan, linear.params(), mesh2x4)
    assert (
        "fsdp('model') splits dim 0, gradient reduced by compressed(int4) with feedback; summed over 'data' by" in text
    )
    assert text.count("compressed(int4) with feedback") == 6
    assert str(fed(inner="model")) == "compressed(int4, inner='model') with feedback"


# Axes of one device send nothing and are in no layout; this is all about types.
@pytest.mark.check
def test_an_axis_of_one_device_and_two_cuts_of_a_padded_dim():
    mesh = sk.make_mesh(jax.devices()[:4], node=1, gpu=4)
    plan = sk.zero1(("node", "gpu"), min_size=1, reduce=fed(inner="gpu"))
    step, state, batch = steps(plan, mesh)
    assert state.residuals["weight"].sharding.spec == P("gpu")
    step.trace(state, batch)
    # A dim is padded for all its cuts at once: seven rows over two, then three devices are six each, and not four.
    split = sk.Split(0, gather="step", scatter="step", pad=True, secondary=("gpu",))
    place = lambda leaf: split if leaf.path == "bias" else None  # noqa: E731
    plan = sk.strategy("parts", ("node", "gpu"), rank=1, batch_dim=0, place=place, reduce=fed())
    step, state, batch = steps(plan, sk.make_mesh(jax.devices()[:6], node=3, gpu=2))
    assert state.residuals["bias"].shape == (6, 7)
    step.trace(state, {name: np.resize(x, (12, *x.shape[1:])) for name, x in batch.items()})


# ---- between plans


# Rows of residuals are no copies: they must arrive bit by bit where the new plan has as many.
def test_reshard_moves_residuals(mesh2x4):
    whole = sk.dp("data", reduce=fed())
    split = sk.chain(whole, toy_tp("model"))
    init, _ = sk.make_train_step(sk.value_and_grad(linear.loss()), optax.sgd(1.0), mesh=mesh2x4, plan=whole)
    state = init(linear.params(), KEY)
    rows = jax.tree.map(lambda x: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), state.residuals)
    moved = sk.reshard(state._replace(residuals=rows), whole, split, mesh=mesh2x4)
    assert moved.residuals["weight"].sharding.spec == P("data", "model")
    jax.tree.map(np.testing.assert_array_equal, moved.residuals, rows)
    assert sk.reshard(state._replace(residuals=None), whole, sk.dp("data"), mesh=mesh2x4).residuals is None


# ---- what is refused


@pytest.mark.check
@pytest.mark.parametrize(
    "words, plan",
    {
        "compressed(int4) with feedback: the gradient of a leaf must be reduced once per step; the gradient of leaf "
        "bias is reduced in each microbatch over axis 'data'. Use it in dp, or in zero1 or fsdp without layerwise, "
        "or "
        "leave out feedback=True.": lambda: sk.zero2("data", min_size=1, reduce=fed()),
        "compressed(int4) with feedback: the gradient of a leaf must be reduced once per step; the gradient of leaf "
        "weight is reduced layer by layer over axis 'data'. Use it in dp, or in zero1 or fsdp without layerwise, or "
        "leave out feedback=True.": lambda: sk.fsdp("data", min_size=8, layerwise=("weight",), reduce=fed()),
        "fsdp: gather= must be an Algorithm with all_gather; got compressed(int4) with feedback, which has "
        "'reduce_scatter', 'all_reduce'. Pass for example sk.algorithms.ring().": lambda: sk.fsdp("data", gather=fed()),
    }.items(),
)
def test_plans_without_feedback(plan, words, data4):
    params = {"bias": np.zeros(8, "f"), "weight": np.zeros((4, 8, 8), "f")}
    assert refused(lambda: plan().layouts(params, data4)) == words


@pytest.mark.check
def test_layers_in_the_order_of_stages():
    pieces = [lambda *args: args[0]] * 3
    schedule = schedules.lockstep(devices=2, microbatches=2, chunks=2)
    grad_fn = pipelined_grad(*pieces, schedule, "stage")
    plan = sk.chain(sk.dp("data", reduce=fed()), sk.pp("stage"))
    mesh = sk.make_mesh(jax.devices()[:4], data=2, stage=2)
    init, _ = sk.make_train_step(grad_fn, optax.sgd(1.0), mesh=mesh, plan=plan)
    assert refused(lambda: init.abstract({"layers": {"w": np.ones((4, 2), "f")}})) == (
        "compressed(int4) with feedback: a leaf must be stored in its original order; leaf layers.w is stored in the "
        "order of pipeline stages. Use a schedule with one chunk on each stage and stages of equal length, or leave "
        "out feedback=True."
    )


@pytest.mark.check
def test_states_of_other_plans(data4, mesh2x4):
    step, state, batch = steps(sk.dp("data", reduce=fed()), data4)
    plain, without, _ = steps(sk.dp("data"), data4)
    assert refused(lambda: step.trace(without, batch)) == (
        "step: with error feedback in the plan, the state must hold residuals; it holds none. Pass a state from "
        "init, or state._replace(residuals=sk.init_residuals(state.params, mesh=mesh, plan=plan)), which begin with "
        "zeros."
    )
    assert refused(lambda: plain.trace(state, batch)) == (
        "step: without error feedback in the plan, the state must hold no residuals; it holds residuals of 'bias', "
        "'shift', 'weight'. Pass state._replace(residuals=None): the steps after it never add what compressed "
        "reductions have left out so far."
    )
    longer = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape[1:]), x.dtype), state.residuals)
    assert refused(lambda: step.trace(state._replace(residuals=longer), batch)) == (
        "step: the residual of leaf bias must have shape (4, 7) under this plan and mesh; got (8, 7). Save a "
        "checkpoint and restore it for this plan, which keeps the sum of the residuals, or pass "
        "state._replace(residuals=sk.init_residuals(state.params, mesh=mesh, plan=plan)), which begin with zeros."
    )
    plans = [sk.dp("data", reduce=fed()), sk.dp("model", reduce=fed())]
    _, state, _ = steps(plans[0], mesh2x4)
    assert refused(lambda: sk.reshard_steps(state, *plans, mesh=mesh2x4)) == (
        "reshard_steps: target must be a plan with the residuals of the state; the residual of leaf bias has shape "
        "(4, 7) under the plan and (2, 7) in the state. Save a checkpoint and restore it for the target, which keeps "
        "the sum of the residuals, or pass state._replace(residuals=None), which drops them."
    )


@pytest.mark.check
def test_gradients_that_are_summed_already(data4):
    grad_fn = sk.value_and_grad(linear.loss())

    def summing(params, batch, keys, *, scale=1):
        loss, aux, grads = grad_fn(params, batch, keys, scale=scale)
        return loss, aux, sk.all_reduce(grads, "data")

    step, *args = steps(sk.dp("data", reduce=fed()), data4, summing)
    assert refused(lambda: step.trace(*args)) == (
        "step: with error feedback a GradFn must return gradients that are not summed yet; the gradient of leaf bias "
        "is summed over 'data'. Return local sums, as value_and_grad does, or leave out feedback=True."
    )
