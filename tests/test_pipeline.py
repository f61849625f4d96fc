"""The laws of the pipeline: every schedule in every form gives the unpipelined model's loss and gradients."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import _compat, schedules
from shardkit._compat import varying_axes
from shardkit.analysis.census import census_of
from shardkit.parallel.pieces import Given, Model, Pieces
from shardkit.schedules import Schedule

VOCABULARY, D, TOKENS, RATE = 7, 4, 2, 0.25
CHUNKED = ("interleaved", "breadth_first", "lockstep")
NAMES = ("gpipe", "one_f_one_b", *CHUNKED, "zero_bubble_h1", "zero_bubble_v", "dualpipe_v", "from_csv")
ROW = (len(schedules.FIELDS),)
SPECS = {"embed": P(), "gain": P(), "layers": P("stage")}


# ---- a model whose layers are NaN on zeros, which is what a masked device is given


def make_params(layers: int, dim: int = D) -> Any:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.5, jnp.float32)  # noqa: E731
    stack = {"w": draw(layers, dim, dim), "b": draw(layers, dim)}
    return {"embed": 1 + draw(VOCABULARY, dim), "gain": 1 + draw(dim), "layers": stack}


def make_batch(examples: int, seed: int = 0) -> Any:
    """Examples of unequal weights, some of none at all."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, VOCABULARY, (2, examples, TOKENS)).astype(np.int32)
    weights = rng.integers(0, 3, (examples, TOKENS)) + (np.arange(examples)[:, None] == 0)
    return {"tokens": tokens, "targets": targets, "weights": weights.astype(np.float32)}


def embed(shared: Any, batch: Any, keys: Any) -> jax.Array:
    return sk.dropout(shared["embed"][batch["tokens"]], keys, RATE / 2)


def layer(keys: Any, each: Any, x: jax.Array) -> jax.Array:
    weights, number = each
    h = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    h = 0.3 * jnp.tanh(h @ weights["w"] + weights["b"][None, None])
    return x + sk.dropout(h, None if keys is None else sk.fold_keys(keys, number), RATE)


def stage(layers: Any, x: jax.Array, keys: Any) -> jax.Array:
    return sk.scan_layers(partial(layer, keys), layers, x)


def head(shared: Any, x: jax.Array, batch: Any) -> Any:
    logits = (x * shared["gain"][None, None]) @ shared["embed"].T  # tied
    nats = -jax.nn.log_softmax(logits.astype(jnp.float32))
    nats = jnp.take_along_axis(nats, batch["targets"][..., None], axis=-1)[..., 0]
    hits = jnp.argmax(logits, axis=-1) == batch["targets"]
    aux = {"accuracy": sk.Mean.of(hits, batch["weights"]), "square": jnp.mean(jnp.square(x.astype(jnp.float32)))}
    return sk.Mean.of(nats, batch["weights"]), aux


def unpipelined(pieces: Any) -> Any:
    """The loss of the pieces, one after the other."""
    embed, stage, head = pieces

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        shared = {name: value for name, value in params.items() if name != "layers"}
        numbers = jnp.arange(jax.tree.leaves(params["layers"])[0].shape[0])
        return head(shared, stage((params["layers"], numbers), embed(shared, batch, keys), keys), batch)

    return loss


PIECES = (embed, stage, head)
# Unoptimized code is as right as any, and compiles sooner.
QUICKLY = {"xla_backend_optimization_level": 0}


def mesh_of(p: int) -> Any:
    return sk.make_mesh(jax.devices()[:p], stage=p)


def traced_step(schedule: Schedule, layers: int, pieces: Any = PIECES, **how: Any) -> Any:
    """`(params, batch, keys) -> (loss, aux, gradients)` on natural stacks, over `schedule.stages` devices."""
    grad_fn = sk.pipeline_value_and_grad(*pieces, schedule, "stage", numbered=True, **how)
    rows = np.array(grad_fn.stages.rows(layers) or range(layers))

    def summed(tree: Any) -> Any:
        return jax.tree.map(lambda x: sk.all_reduce(x, "stage") if varying_axes(x) else x, tree)

    def device(params: Any, batch: Any, keys: Any) -> Any:
        mean, aux, grads = grad_fn(params, batch, keys)
        shared = {name: summed(grad) for name, grad in grads.items() if name != "layers"}
        return *summed((mean, aux)), shared | {"layers": grads["layers"]}

    specs = {"in_specs": (SPECS, P(), P()), "out_specs": (P(), P(), SPECS)}
    per_device = jax.shard_map(device, mesh=mesh_of(schedule.stages), **specs)

    def step(params: Any, batch: Any, keys: Any) -> Any:
        held = jax.tree.map(lambda leaf: leaf[np.maximum(rows, 0)], params["layers"])
        # Rows that fill a stage up hold zeros.
        zeros = jax.tree.map(lambda leaf: jnp.where(rows.reshape(-1, *[1] * (leaf.ndim - 1)) < 0, 0.0, leaf), held)
        mean, aux, grads = per_device(params | {"layers": zeros}, batch, keys)
        natural = jax.tree.map(lambda leaf: leaf[np.argsort(rows, stable=True)[-layers:]], grads["layers"])
        return mean, aux, grads | {"layers": natural}

    return step


@cache
def reference(layers: int, examples: int, pieces: Any = PIECES) -> Any:
    keys = sk.example_keys(jax.random.key(1), examples)
    grad_fn = jax.jit(sk.value_and_grad(unpipelined(pieces)), compiler_options=QUICKLY)
    return grad_fn(make_params(layers), make_batch(examples), keys)


def assert_close(actual: Any, wanted: Any, relative: float = 1e-6) -> None:
    """Every leaf within `relative` of the largest value in it, and finite."""
    flat, wanted_flat = (jax.tree_util.tree_leaves_with_path(tree) for tree in (actual, wanted))
    for (path, x), (same, y) in zip(flat, wanted_flat, strict=True):
        assert path == same and x.shape == y.shape and np.isfinite(x).all(), path
        np.testing.assert_allclose(x, y, rtol=0, atol=relative * float(np.max(np.abs(y))), err_msg=str(path))


def check(schedule: Schedule, *, each: int = 1, layers: int = 0, pieces: Any = PIECES, **how: Any) -> None:
    """Loss, auxiliary means and gradients of a schedule equal those of the model without a pipeline."""
    layers = layers or schedule.stages * schedule.chunks
    examples = each * schedule.microbatches
    keys = sk.example_keys(jax.random.key(1), examples)
    step = jax.jit(traced_step(schedule, layers, pieces, **how), compiler_options=QUICKLY)
    mean, aux, grads = step(make_params(layers), make_batch(examples), keys)
    wanted, wanted_aux, wanted_grads = reference(layers, examples, pieces)
    assert_close((mean, aux["accuracy"]), (wanted, wanted_aux["accuracy"]))
    square, wanted_square = aux["square"], wanted_aux["square"]  # a scalar is a mean over equal microbatches
    assert square.weight == schedule.microbatches
    np.testing.assert_allclose(square.total / square.weight, wanted_square.total, rtol=1e-5)
    assert all(grad.dtype == jnp.float32 for grad in jax.tree.leaves(grads))
    assert_close(grads, wanted_grads)


def from_csv(p: int, m: int) -> Schedule:
    """A schedule that nobody published: all forwards, then backwards of which every other is split."""
    back = lambda d, i: f"{d}B{i}" if (d + i) % 2 else f"{d}I{i},{d}W{i}"  # noqa: E731
    lines = [",".join([f"{d}F{i}" for i in range(m)] + [back(d, i) for i in reversed(range(m))]) for d in range(p)]
    return Schedule.from_csv("\n".join(lines))


def make(name: str, p: int, m: int, v: int = 1) -> Schedule:
    if name == "from_csv":
        return from_csv(p, m)
    return getattr(schedules, name)(p, m, **({"chunks": v} if name in CHUNKED else {}))


FORMS = [{"mode": mode, "recompute": recompute} for mode in ("masked", "branch") for recompute in (True, False)]


@st.composite
def cases(draw: Any) -> Any:
    """A schedule, its form, the layers of a stage and the examples of a microbatch; nothing need divide anything."""
    name, p = draw(st.sampled_from(NAMES)), draw(st.integers(1, 8))
    schedule = make(name, p, draw(st.integers(1, 10)), draw(st.integers(1, 3)))
    layers = schedule.stages * schedule.chunks * draw(st.integers(1, 2))
    return schedule, {"layers": layers, "each": draw(st.integers(1, 2)), **draw(st.sampled_from(FORMS))}


# proves S77, S78, S79, S80, S81, S82, F35, F36, F37, F38, F39, F41, F42: unequal weights, dropout, tied, aux means
# An example is compiled for seconds: half as many as of others, and none to shrink one that fails.
@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2, phases=[Phase.explicit, Phase.generate])
@given(cases())
def test_every_schedule_is_the_unpipelined_model(case):
    schedule, how = case
    check(schedule, **how)


# proves F38, F39, F42: whatever a masked device computes from zeros, or from what it was sent last, is left out
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_its_own_leaves_no_trace(name):
    hidden = layer(None, ({"w": jnp.ones((D, D)), "b": jnp.ones(D)}, 0), jnp.zeros((1, TOKENS, D)))
    assert np.isnan(hidden).all()
    check(make(name, 3, 4, 2), mode="masked", recompute=NAMES.index(name) % 2 == 0)


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form['mode']}-{form['recompute']}")
@pytest.mark.parametrize("name", NAMES)
def test_every_form_of_every_schedule(name, form):  # proves S80, F35, F36, F37, F38, F42
    for p, m, v in ((1, 1, 3), (2, 5, 3), (4, 2, 2), (8, 11, 1)):
        check(make(name, p, m, v), **form)


# proves S79: trap T1
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


@pytest.mark.parametrize(("p", "wrong"), [(2, [1, 2, 3, 3]), (4, [3, 3, 3, 3])])
def test_every_microbatch_comes_out_in_its_place(p, wrong):  # proves S77, S79
    assert tutorial(p, [0, 1, 2, 3]) == wrong

    def outputs(shared: Any, x: jax.Array, batch: Any) -> Any:
        places = {str(i): jnp.sum(jnp.where(batch == i, x, 0.0)) for i in range(4)}
        return jnp.sum(x), places

    identity = (lambda shared, batch, keys: 1.0 * batch, lambda layers, x, keys: x, outputs)
    for make_fn in (sk.pipeline_loss, lambda *args: partial(sk.pipeline_value_and_grad(*args), scale=1)):
        fn = make_fn(*identity, schedules.gpipe(p, 4), "stage")

        def device(layers: Any, batch: Any, fn: Any = fn) -> Any:
            return sk.all_reduce(fn({"layers": layers}, batch, None)[1], "stage")

        run = jax.shard_map(device, mesh=mesh_of(p), in_specs=(P("stage"), P()), out_specs=P())
        out = jax.jit(run)(jnp.zeros(p), jnp.arange(4.0))
        assert [int(out[str(i)].total) for i in range(4)] == [0, 1, 2, 3]


# ---- what is sent and computed


def walk(jaxpr: Any, times: int = 1) -> Any:
    """Every equation and how often it runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        inside = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        for _, inner in _compat.inner_jaxprs(equation):
            yield from walk(inner, inside)


def jaxpr_of(schedule: Schedule, layers: int, pieces: Any = PIECES, **how: Any) -> Any:
    step = traced_step(schedule, layers, pieces, **how)
    examples = schedule.microbatches
    args = make_params(layers), make_batch(examples), sk.example_keys(jax.random.key(1), examples)
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
@pytest.mark.parametrize("name", NAMES)
def test_ticks_and_traffic_are_those_of_the_table(name):
    schedule, dtype = make(name, 4, 6, 2), (jnp.float32, jnp.bfloat16)[NAMES.index(name) % 2]
    closed = jaxpr_of(schedule, schedule.stages * schedule.chunks, packed(dtype), recompute=False)
    times = sent = 0
    for segment in schedule.table(saved=True).segments:
        for move in segment.moves:
            if not move.endswith("_self"):
                sizes = [TOKENS * D * jnp.dtype(dtype).itemsize] + [4 * TOKENS] * move.startswith("input")
                times, sent = times + segment.ticks * len(sizes), sent + segment.ticks * sum(sizes)
    rows = census_of(closed.jaxpr).select(kind="ppermute")
    assert {row.axes for row in rows} == {("stage",)}
    assert (sum(row.count for row in rows), sum(row.count * row.bytes_in for row in rows)) == (times, sent)
    # A tick reads one row of the table.
    scans = [(e.params, n) for e, n in walk(closed.jaxpr) if e.primitive.name == "scan"]
    reads = [n * params["length"] for params, n in scans if ROW in [x.shape for x in params["jaxpr"].in_avals]]
    assert sum(reads) == max(map(len, schedule.rows))


@pytest.mark.parametrize(
    ("name", "p"),
    [*((name, 2) for name in NAMES[:-1]), ("interleaved", 1), ("lockstep", 4), ("zero_bubble_h1", 4)],
)
def test_the_program_does_not_grow_with_the_microbatches(name, p):
    few, many = (make(name, p, m, 2) for m in (16, 64))
    sizes = [sum(1 for _ in walk(jaxpr_of(s, s.stages * s.chunks).jaxpr)) for s in (few, many)]
    assert sizes[0] == sizes[1]


def dots(jaxpr: Any) -> int:
    return sum(times for equation, times in walk(jaxpr) if equation.primitive.name == "dot_general")


# proves F38: I and W together do what B does, and the step no more than its table says
def test_a_split_backward_does_no_work_twice():
    schedule, layers = schedules.zero_bubble_h1(4, 6), 8
    params, batch = make_params(2), make_batch(1)
    given = Given(params.pop("layers"), jnp.int32(0), jnp.int32(2), batch, sk.example_keys(jax.random.key(1), 1))
    pieces = Pieces(Model(*PIECES, True, "here"), params, given, (), 2)
    (x,), residuals = pieces.x, pieces.forward.out[1]
    second = jax.make_jaxpr(lambda given, kept: pieces.split.second(*jax.tree.leaves(given), kept=kept))
    first = jax.make_jaxpr(lambda *args: pieces.split.first(*jax.tree.leaves(args)))(given, residuals, [x])
    i, w = dots(first.jaxpr), dots(second(given, pieces.split.kept).jaxpr)
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
        "pipeline_value_and_grad: the schedule splits backward passes, but those of this stage run whole, in place of "
        "I. Split: the second results must have equations of their own, which the first results do not need; got "
        "`cond` at LINE, which both need. Take it apart, or run the function unsplit."
    }
    assert "test_pipeline.py:" in str(caught[0].message)
