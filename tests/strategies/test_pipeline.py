"""The laws of the pipeline: every schedule in every form gives the unpipelined model's loss and gradients."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import schedules
from shardkit._jax.jaxprs import walk
from shardkit.analysis.jaxpr.census import census_of
from shardkit.pipelines.pieces import PieceArguments, Pieces, StagedModel
from shardkit.schedules import Schedule
from shardkit.schedules.table import FIELDS
from support import pipelines
from support.pipelines import (
    BUILDERS,
    PIECES,
    TOKENS,
    D,
    check,
    embed,
    head,
    layer,
    make,
    make_batch,
    make_params,
    mesh_of,
    stage,
    traced_step,
)
from support.refusals import value_error
from support.tiers import covered

NAMES = (*BUILDERS, "from_csv")
ROW = (len(FIELDS),)


FORMS = [{"mode": mode, "recompute": recompute} for mode in ("masked", "branch") for recompute in (True, False)]


@st.composite
def cases(draw: Any) -> Any:
    """A schedule, its form, the layers of a stage and the examples of a microbatch; nothing need divide anything."""
    sizes = draw(st.integers(1, 8)), draw(st.integers(1, 10)), draw(st.integers(1, 3))
    return draw(st.sampled_from(NAMES)), sizes, draw(st.sampled_from(FORMS)), draw(st.integers(1, 2))


# Stages, microbatches and chunks: one stage, fewer microbatches than stages, more, as many devices as there are, and a
# tick in which one device takes the whole of a backward pass and another its first half (dualpipe_v with three stages).
ROWS = [
    ("gpipe", (4, 3, 1), FORMS[0], 2),
    ("one_f_one_b", (8, 11, 1), FORMS[1], 1),
    ("interleaved", (3, 4, 2), FORMS[0], 1),
    ("breadth_first", (3, 4, 2), FORMS[1], 2),
    ("lockstep", (4, 6, 2), FORMS[0], 1),
    ("zero_bubble_h1", (3, 7, 1), FORMS[1], 1),
    ("zero_bubble_v", (3, 3, 1), FORMS[1], 2),
    ("dualpipe_v", (3, 4, 1), FORMS[1], 1),
    ("from_csv", (2, 3, 1), FORMS[0], 1),
    ("one_f_one_b", (1, 3, 1), FORMS[2], 1),
    ("lockstep", (2, 4, 3), FORMS[3], 1),
    ("dualpipe_v", (2, 4, 1), FORMS[1], 1),
]
ROWS += [(name, (4, 3, 2), FORMS[0], 1) for name in BUILDERS if name not in {row[0] for row in ROWS}]


# proves S77, S78, S79, S80, S81, S82, F35, F36, F37, F38, F39, F41, F42: unequal weights, dropout, tied, aux means
# Whatever a masked device computes from zeros, or from what it was sent last, is left out, or its NaN would spread.
# testing/exact/test_steps.py proves a form of every schedule for all inputs in the default tier.
@pytest.mark.quick("0", "9")
@covered([{"case": row} for row in ROWS], case=cases())
def test_every_schedule_is_the_unpipelined_model(case):
    name, sizes, form, each = case
    schedule = make(name, *sizes)
    check(schedule, layers=schedule.devices * schedule.chunks * each, each=3 - each, **form)


def test_a_layer_is_nan_on_zeros():  # what a masked device computes would show in every test
    hidden = layer(None, ({"w": jnp.ones((D, D)), "b": jnp.ones(D)}, 0), jnp.zeros((1, TOKENS, D)))
    assert np.isnan(hidden).all()


def tutorial(stages: int, microbatches: list[int]) -> list[int]:
    """The loop of a tutorial: stage s - 1 overwrites what stage s has not read yet."""
    held, outputs = [0] * stages, list(microbatches)
    for tick in range(len(microbatches) + stages - 1):
        for s in range(stages):
            i = tick - s
            if 0 <= i < len(microbatches):
                held[s] = microbatches[i] if s == 0 else held[s - 1]
                outputs[i] = held[s] if s == stages - 1 else outputs[i]
    return outputs


@pytest.mark.quick("4-wrong1")
@pytest.mark.parametrize(("p", "wrong"), [(2, [1, 2, 3, 3]), (4, [3, 3, 3, 3])])
def test_every_microbatch_comes_out_in_its_place(p, wrong):  # proves S77, S79, T1
    assert tutorial(p, [0, 1, 2, 3]) == wrong

    def outputs(shared: Any, x: jax.Array, batch: Any) -> Any:
        places = {str(i): jnp.sum(jnp.where(batch == i, x, 0.0)) for i in range(4)}
        return jnp.sum(x), places

    identity = (lambda shared, batch, keys: 1.0 * batch, lambda layers, x, keys: x, outputs)
    for make_fn in (pipelines.pipelined_loss, lambda *args: partial(pipelines.pipelined_grad(*args), scale=1)):
        fn = make_fn(*identity, schedules.gpipe(p, 4), "stage")

        def device(layers: Any, batch: Any, fn: Any = fn) -> Any:
            return sk.all_reduce(fn({"layers": layers}, batch, None)[1], "stage")

        run = jax.shard_map(device, mesh=mesh_of(p), in_specs=(P("stage"), P()), out_specs=P())
        out = jax.jit(run)(jnp.zeros(p), jnp.arange(4.0))
        assert [int(out[str(i)].total) for i in range(4)] == [0, 1, 2, 3]


# ---- what is sent and computed


def jaxpr_of(schedule: Schedule, layers: int, pieces: Any = PIECES, **how: Any) -> Any:
    step = traced_step(schedule, layers, pieces, **how)
    examples = schedule.microbatches
    args = pipelines.make_params(layers), pipelines.make_batch(examples), sk.example_keys(jax.random.key(1), examples)
    return jax.make_jaxpr(step)(*args)


def packed(dtype: Any) -> Any:
    """Pieces whose activations are a tree with integers in it, in some dtype."""

    def widened(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)

    return (
        lambda shared, batch, keys: {"x": embed(shared, batch, keys).astype(dtype), "segments": batch["tokens"]},
        lambda layers, x, keys: x | {"x": stage(layers, widened(x["x"]), keys).astype(dtype)},
        lambda shared, x, batch: head(shared, widened(x["x"]), batch),
    )


# proves S78, S82, F39, F40
@pytest.mark.quick("gpipe", "lockstep", "interleaved", "zero_bubble_h1")
@pytest.mark.parametrize("name", NAMES)
def test_ticks_and_traffic_are_those_of_the_table(name):
    schedule, dtype = make(name, 4, 6, 2), (jnp.float32, jnp.bfloat16)[NAMES.index(name) % 2]
    closed = jaxpr_of(schedule, schedule.devices * schedule.chunks, packed(dtype), recompute=False)
    times = sent = 0
    for segment in schedule.table(saved=True).segments:
        for move in segment.moves:
            if move.shift:
                sizes = [TOKENS * D * jnp.dtype(dtype).itemsize] + [4 * TOKENS] * (move.buffer == "inputs")
                times, sent = times + segment.ticks * len(sizes), sent + segment.ticks * sum(sizes)
    rows = census_of(closed.jaxpr).select(kind="ppermute")
    assert {row.axes for row in rows} == {("stage",)}
    assert (sum(row.count for row in rows), sum(row.count * row.bytes_in for row in rows)) == (times, sent)
    # A tick reads one row of the table.
    scans = [(s.equation.params, s.times) for s in walk(closed.jaxpr) if s.name == "scan"]
    reads = [n * params["length"] for params, n in scans if ROW in [x.shape for x in params["jaxpr"].in_avals]]
    assert sum(reads) == max(map(len, schedule.rows))


@pytest.mark.quick("lockstep-4")
@pytest.mark.parametrize(
    ("name", "p"), [*((name, 2) for name in BUILDERS), ("interleaved", 1), ("lockstep", 4), ("zero_bubble_h1", 4)]
)
def test_the_program_does_not_grow_with_the_microbatches(name, p):
    few, many = (make(name, p, m, 2) for m in (16, 64))
    sizes = [sum(1 for _ in walk(jaxpr_of(s, s.devices * s.chunks).jaxpr)) for s in (few, many)]
    assert sizes[0] == sizes[1]


def dots(jaxpr: Any) -> int:
    return sum(site.times or 1 for site in walk(jaxpr) if site.name == "dot_general")


# proves F38: I and W together do what B does, and the step no more than its table says
def test_a_split_backward_does_no_work_twice():
    schedule, layers = schedules.zero_bubble_h1(4, 6), 8
    params, batch = pipelines.make_params(2), pipelines.make_batch(1)
    given = PieceArguments(
        params.pop("layers"), jnp.int32(0), jnp.int32(2), batch, sk.example_keys(jax.random.key(1), 1)
    )
    pieces = Pieces(StagedModel(*PIECES, True, "here"), params, given, (), 2)
    (x,), residuals = pieces.x, pieces.forward.out[1]
    second = jax.make_jaxpr(lambda given, left: pieces.halves.second(*jax.tree.leaves(given), residuals=left))
    first = jax.make_jaxpr(lambda *args: pieces.halves.first(*jax.tree.leaves(args)))(given, residuals, [x])
    i, w = dots(first.jaxpr), dots(second(given, pieces.halves.residuals).jaxpr)
    assert i > 0 and w > 0 and i + w == dots(pieces.backward.jaxpr)
    f, end = dots(pieces.forward.jaxpr), dots(pieces.head_backward.jaxpr)
    work = {"F": f, "I": f + i + end, "W": w}  # the backward pass begins again with the input
    wanted = sum(segment.ticks * sum(work[op] for op in segment.ops) for segment in schedule.table().segments)
    assert dots(jaxpr_of(schedule, layers).jaxpr) == wanted


def test_a_stage_that_cannot_be_split_says_so():  # proves F38
    def stubborn(layers: Any, x: jax.Array, keys: Any) -> jax.Array:
        return jax.lax.cond(x[0, 0, 0] > 5, lambda: x, lambda: stage(layers, x, keys))

    pieces = (embed, stubborn, head)
    with pytest.warns(UserWarning) as caught:
        check(schedules.zero_bubble_h1(2, 3), pieces=pieces)
    assert {re.sub(r" at \S+:\d+ \(.*?\),", " at LINE,", str(warning.message)) for warning in caught} == {
        "pipeline.value_and_grad: the schedule splits backward passes, but those of this stage run whole, in place of "
        "I. TwoHalves: the second results must have equations of their own, which the first results do not need; got "
        "`cond` at LINE, which both need. Split it, or run the function unsplit."
    }
    assert "test_pipeline.py:" in str(caught[0].message)


@pytest.mark.check
def test_a_step_knows_the_schedule_of_its_pipeline():
    """Nothing else reads it: a user does, to print or to draw it."""
    pipe = sk.pipeline(schedules.gpipe(2, 2), "stage")
    grad_fn = pipe.value_and_grad(*PIECES, layer_numbers=True)
    made = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh_of(2), plan=pipe.plan)
    assert made.step.schedule is pipe.schedule


def test_the_stack_may_have_another_name():
    """Catches a place that knows "layers" by name: the entry is split, trained, and asked for."""
    mesh = mesh_of(2)
    results = []
    for stack in ("layers", "blocks"):
        pipe = sk.pipeline(schedules.one_f_one_b(2, 4), "stage", stack=stack)
        params = make_params(4)
        params[stack] = params.pop("layers")
        grad_fn = pipe.value_and_grad(embed, stage, head, layer_numbers=True)
        plan = sk.pp("stage", stack=stack)
        train = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
        state, _ = train.step(train.init(params, jax.random.key(0)), make_batch(8))
        assert state.params[stack]["w"].sharding.spec == P("stage")
        results.append((state.params[stack], state.params["embed"]))
    jax.tree.map(np.testing.assert_array_equal, *results)
    with pytest.raises(ValueError, match=r"^pp\('stage'\): the parameters must have the stack 'blocks', of which"):
        train.step.trace(train.init(make_params(4), jax.random.key(0)), make_batch(8))
    for call in (lambda: sk.pp("stage", stack=""), lambda: sk.pipeline(schedules.gpipe(2, 4), "stage", stack="")):
        with pytest.raises(ValueError, match=r"stack must be the name of an entry of the parameters; got ''\. Pass"):
            call()


def by_hand(params, batch, keys):
    """A pipeline without a schedule: what is on device 0 has been through all stages when it is back."""
    x = sk.vary(batch, "stage")
    for _ in range(sk.axis_size("stage")):
        x = sk.shift(sk.scan_layers(lambda w, x: jnp.tanh(x @ w), params["layers"], x), "stage")
    counts = sk.axis_index("stage") == 0
    values = jnp.sum(jnp.ones_like(batch))
    return sk.Mean(jnp.where(counts, jnp.sum(x**2), 0.0), jnp.where(counts, values, 0.0))


def one_after_another(params, batch, keys):
    x = sk.scan_layers(lambda w, x: jnp.tanh(x @ w), params["layers"], batch)
    return sk.Mean(jnp.sum(x**2), jnp.float32(x.size))


def test_a_loss_of_your_own_under_pp():
    """A step whose devices silently have other layers than the loss knows of: proved, or refused in a sentence."""
    mesh = sk.make_mesh(jax.devices()[:4], data=2, stage=2)
    plan = sk.chain(sk.dp("data"), sk.pp("stage"))
    params = {"layers": np.linspace(-1, 1, 4 * 9, dtype=np.float32).reshape(4, 3, 3)}
    batch = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
    sk.testing.assert_same_training(
        sk.value_and_grad(by_hand),
        sk.value_and_grad(one_after_another),
        optax.sgd(0.1),
        mesh=mesh,
        plan=plan,
        params=params,
        batches=[batch, batch[::-1]],
    )

    def trace(loss, params):
        init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=plan)
        step.trace(init.abstract(params), batch)

    with value_error(
        "pp('stage'): the parameters must have the stack 'layers', of which it splits the layers; got the leaves "
        "'blocks', 'head'. Pass stack=, the entry with the layers, or leave it out of the plan."
    ):
        trace(one_after_another, {"blocks": params["layers"], "head": np.ones(3, np.float32)})
    # A loss that is no pipeline sees the layers of its stage alone; the types of axes tell. A layer of tp, which such
    # an error named before, would not mend it.
    remedy = (
        "A device has only its own layers along 'stage': pass sk.pipeline(schedule, 'stage').value_and_grad(embed, "
        "stage, head), or .loss(embed, stage, head) to make_eval_step."
    )
    evaluate = sk.make_eval_step(one_after_another, mesh=mesh, plan=plan)
    for run in (lambda: trace(one_after_another, params), lambda: evaluate(params, batch)):
        with value_error(
            "Mean 'loss': total and weight must vary over the same axes; the total varies over 'data', 'stage' and the "
            f"weight over none, which differ in 'stage'. {remedy}"
        ):
            run()

    def scanned(params, batch, keys):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"])
        return jnp.mean(x**2)

    with pytest.raises(TypeError, match="scan body function carry input and carry output") as error:
        trace(scanned, params)
    told = "make_train_step: the plan passes the loss a part of leaf layers, and the loss takes it whole."
    assert f"{told} {remedy}" in error.value.__notes__
