"""The lint: every planted mistake under its rule, nothing in the corrected twin, nothing in the library itself."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks import large_model
from shardkit._jax.jaxprs import PLAN
from shardkit.analysis import lint
from shardkit.analysis.judge import RULES
from shardkit.collectives import compressed
from shardkit.models import transformer
from support.planted import divergent
from support.planted.divergent import BOTH, DIVERGENT, MESH, PLANTED, X, on
from support.refusals import value_error
from support.tables import indented
from testing.kernels import tutorial

pytestmark = pytest.mark.check
PREDICATE = f"divergent.py:{divergent.chosen.__code__.co_firstlineno + 2} (chosen.<locals>.<lambda>)"


def ids(row):
    return row.name.replace(" ", "_")


# proves F75, S121, S129, S130: by rule
@pytest.mark.parametrize("row", PLANTED, ids=ids)
def test_planted_mistakes_are_named_and_their_corrected_twins_are_clean(row):
    found = lint(row.wrong, *row.args, **row.options)
    assert {f.rule for f in found} == {row.rule}, [str(f) for f in found]
    assert all(f.source.startswith("divergent.py:") for f in found)
    assert [str(f) for f in lint(row.right, *row.args, **row.options)] == []


def test_every_rule_is_planted_and_no_name_is_used_twice():
    names = [row.name for row in PLANTED]
    assert len(names) == len(set(names)) and len(DIVERGENT) >= 25
    rules = {rule.name for rule in RULES.values() if rule.reads == "trace"}
    # Futures are planted where jax has them (`test_futures.py`).
    assert {row.rule for row in PLANTED} == rules - {"unawaited-start"}


@pytest.mark.parametrize("row", PLANTED[:5], ids=ids)
def test_a_program_that_is_traced_already_is_not_traced_again(row):
    calls = []

    def counted(*args):
        calls.append(args)
        return row.wrong(*args)

    traced = jax.jit(counted).trace(*row.args)
    assert {f.rule for f in lint(traced, **row.options)} == {row.rule} and len(calls) == 1
    assert sk.census(traced).sent() == sk.census(counted, *row.args).sent()
    assert str(sk.explain(traced)) == str(sk.explain(jax.jit(row.wrong).trace(*row.args)))


def messages(name):
    (row,) = [row for row in PLANTED if row.name == name]
    return [(f.message, f.remedy) for f in lint(row.wrong, *row.args, **row.options)]


def line_of(function):
    return f"divergent.py:{function.__code__.co_firstlineno + 2} ({function.__qualname__})"


MESSAGES = f"""
all_reduce under cond
    all_reduce over 'model' is in a cond whose predicate, at {PREDICATE}, differs along 'model', so that only some
    of its devices call it: a deadlock.
    => Call it on every device and select the result with jnp.where, or make the predicate equal first, with
    all_reduce over 'model'.
ppermute under another axis' predicate
    ppermute over 'model' is in a cond whose predicate, at {PREDICATE}, differs along 'data'; a ppermute needs every
    device of the mesh, so that it deadlocks or returns wrong values.
    => Call it on every device and select the result with jnp.where.
a cond's result passes as equal
    a predicate that differs along 'data' decides output 0 of the shard_map, which out_specs P() declare replicated
    there: devices hold different values.
    => Cast the operands with vary over 'data', so that the type shows it, and reduce the result.
a ring one device too long
    ppermute over 'model' of 4 devices names target 4, a device that does not exist.
    => Name each device at most once as source and once as target, as shift does.
a chain one device too short
    ppermute over 'model' of 4 devices names no source for 0, 3, which receive zeros.
    => Name a source for every device, or replace the zeros with jnp.where; shift(wrap=False) is exempt.
to itself
    ppermute over 'model' of 4 devices sends every device's value to itself.
    => Leave it out, or name other targets.
a sum of a sum
    all_reduce over 'data', 'model' of a float32[8,64] that is equal along axis 'model' already, because it was
    reduced or gathered over it before; a sum multiplies it by 4, and a mean changes nothing.
    => Leave it out; to average gradients, cast the parameters with sk.vary before
    differentiating; to change only the type, gather with replicated=True.
weight decay counted by every device
    all_reduce over 'data', 'model' of a float32[] that is equal along axes 'data', 'model' already, because it
    comes from replicated arguments; a sum multiplies it by 8, and a mean changes nothing.
    => Leave it out, or split the argument over the axis.
a penalty in each device's total
    a term of the total of a Mean is the same on all devices along 'data', 'model', which sum it: it counts once for
    each of them, unless it is divided by their number.
    => Weight it, mean.total + mean.weight * term, or return mean + sk.Mean(term, 1).
gathered for the neighbor's piece
    all_gather over 'model' sends each device 6,144 bytes, and the slice at
    divergent.py:{divergent._neighbours_piece.__code__.co_firstlineno + 1} (_neighbours_piece), its only use, takes
    2,048.
    => Send only that piece: nothing for a device's own, which it has before; shift for a neighbor's, broadcast for
    one device's, all_to_all for a different one on each device.
reduced for its own piece
    all_reduce over 'model' sends 3,072 bytes, and the slice at {line_of(divergent._own_rows)}, its only use, keeps
    1/4 of dim 0 on each device.
    => Use reduce_scatter with dim=0, which sends half and leaves each device its own piece.
gradients reduced in place
    no result of the program depends on all_reduce over 'data', 'model' of float32[8,64], and the program goes on with
    the operand.
    => Assign the result, since a collective leaves its operand as it was; or leave the collective out.
a halo in a carry that nobody reads
    no result of the program depends on ppermute over 'model' of float32[8,64] (2,048 bytes, 3 times).
    => Return what it is for, or leave it out.
a large weight on every device
    w, an input of 16,384 bytes (float32[64,64]), is replicated over data=2, model=4.
    => Name a mesh axis in its spec, as specs_from_rules does, or raise `large` if that is intended.
a gain in crumbs
    all_gather over 'fsdp' of 64 devices sends pieces of 16 bytes (float32[4]); 1,024 bytes are not worth a message.
    => Replicate leaves of this size, or split them over fewer devices.
unchecked types
    shard_map over 'data', 'model' has check_vma off: a wrong out_specs and a missing reduction pass unnoticed, and
    gradients inside it are not summed.
    => Leave check_vma=True, and cast with vary where a type must match.
pmap
    jax.pmap supports one axis, needs a leading dim for it and checks no types.
    => Write jax.shard_map over a mesh from make_mesh.
process 0 alone
    the program runs 1 collectives as process 0 and 0 as process 1; the first difference is all_reduce over 'data',
    'model'(float32[]) against nothing: a deadlock.
    => Run the same program on every process, and pass differences as data or decide them outside.
another constant
    processes 0 and 1 trace different programs; the first difference is a constant float32[64,64] against a constant
    float32[64,64] of other values.
    => Run the same program on every process, and pass differences as data or decide them outside.
"""


@pytest.mark.parametrize(("name", "said"), indented(MESSAGES))
def test_messages(name, said):
    assert messages(name) == [tuple(said.split(" => "))]


def test_a_finding_prints_as_one_line_and_its_rule_can_be_left_out():
    (row,) = [row for row in PLANTED if row.name == "to itself"]
    (found,) = lint(row.wrong, X)
    assert isinstance(found, sk.Finding) and sk.lint is lint
    assert str(found) == f"{found.source}: identity-permutation: {found.message} {found.remedy}"
    assert lint(row.wrong, X, ignore=("identity-permutation",)) == []
    rules = ", ".join(map(repr, RULES))
    with value_error(f"lint: ignore must name rules, {rules}; got 'identity'. Pass some of them."):
        lint(row.wrong, X, ignore=("identity",))


def test_the_two_thresholds():
    (large,) = [row for row in PLANTED if row.name == "a large weight on every device"]
    assert lint(large.wrong, *large.args) == []
    assert lint(large.wrong, *large.args, large=64 * 64 * 4 + 1) == []
    (small,) = [row for row in PLANTED if row.name == "reduced for its own piece"]
    sends = 8 * 64 * 4 * 3 // 4
    assert lint(small.wrong, X, small=sends + 1) == []
    assert len(lint(small.wrong, X, small=sends)) == 1


def _prints_what_it_receives(x):
    jax.debug.print("{}", sk.shift(x, "model"))
    return x


def _writes_what_it_receives(x):
    """What a loop writes to a reference, and the program reads."""
    received = jax.new_ref(x)

    def body(_, x):
        received[...] = sk.shift(x, "model")
        return x + 1

    lax.fori_loop(0, 3, body, x)
    return received[...]


@jax.jit
def _with_statistics(x):
    return jnp.tanh(x), sk.all_reduce(x, BOTH)


def _adds_equal_shares_in_a_function(x):
    """What a plan adds: the names of scopes begin anew in the program of a function."""
    with jax.named_scope(PLAN):
        return jax.jit(lambda x: lax.psum(sk.vary(lax.psum(x, "model"), "model"), "model"))(x)


# What may look wrong and is meant.
@pytest.mark.parametrize(
    "kernel",
    [
        lambda x: x * lax.psum(1, BOTH),
        lambda x: x / lax.psum(sk.vary(jnp.float32(3), "model"), "model"),
        lambda x: x + sk.all_reduce(jnp.ones(()), "model"),
        # a count of rows, on the first device of each group alone
        lambda x: x / sk.all_reduce(sk.vary(jnp.where(sk.axis_index("model") == 0, x.shape[0], 0), "data"), BOTH),
        lambda x: sk.all_reduce(jnp.where(sk.axis_index("model") == 0, sk.all_reduce(x, "model"), 0), "model"),
        lambda x: lax.cond(sk.axis_size("model") > 2, lambda x: sk.shift(x, "model"), lambda x: x, x),
        lambda x: lax.fori_loop(0, 4, lambda i, x: sk.shift(x, "model"), x),
        lambda x: lax.cond(jnp.sum(sk.all_gather(x, BOTH)) > 0, lambda x: sk.shift(x, "model"), lambda x: x, x),
        lambda x: lax.ppermute(x, BOTH, [(i, i + 1) for i in range(7)]),
        lambda x: jnp.where(sk.axis_index("model") == 2, lax.ppermute(x, "model", [(0, 2)]), 0),
        lambda x: sk.all_gather(x, "model")[: x.shape[0]],
        _prints_what_it_receives,
        _writes_what_it_receives,
        _adds_equal_shares_in_a_function,
        # the value of a loss, which jax.grad drops
        lambda x: jax.grad(lambda x: sk.all_reduce(jnp.sum(x**2), BOTH))(x),
        lambda x: jax.vjp(lambda x: divergent.reduced("model", x @ x.T), x)[1](sk.vary(jnp.ones((8, 8)), BOTH))[0],
        lambda x: jax.grad(jax.checkpoint(lambda w: jnp.sum(jnp.tanh(x @ sk.all_gather(w, "model").T))))(x),
        # two iterations later the first carry has what the third sends
        lambda x: lax.scan(lambda c, _: ((c[0] + c[1], c[2], sk.shift(c[2], "model")), None), (x,) * 3, length=3)[0][0],
        # a function of which one caller reads the statistics and another one does not
        lambda x: _with_statistics(_with_statistics(x)[0])[0] + _with_statistics(x)[1],
    ],
)
def test_what_is_meant_is_left_alone(kernel):
    assert [str(f) for f in lint(on(kernel), X, small=0)] == []


def kernels():
    """Every collective of the library, over one axis and over both in either order."""
    for axis in ("model", BOTH, BOTH[::-1]):
        for op in ("sum", "mean", "max", "min"):
            yield f"all_reduce {op} {axis}", functools.partial(sk.all_reduce, axis=axis, op=op)
            combine = "sum" if op == "mean" else op
            yield f"prefix_scan {op} {axis}", functools.partial(sk.collectives.prefix_scan, axis=axis, op=combine)
        yield f"deterministic {axis}", functools.partial(sk.all_reduce, axis=axis, deterministic=True)
        yield f"all_gather {axis}", functools.partial(sk.all_gather, axis=axis)
        yield f"reduce_scatter {axis}", functools.partial(sk.reduce_scatter, axis=axis)
        yield f"all_to_all {axis}", functools.partial(sk.all_to_all, axis=axis, split_dim=0, concat_dim=1)
        yield f"broadcast {axis}", functools.partial(sk.broadcast, axis=axis, source=1)
        yield f"gather_to_one {axis}", functools.partial(sk.collectives.gather_to_one, axis=axis, target=1)
        yield f"exclusive prefix_scan {axis}", functools.partial(sk.collectives.prefix_scan, axis=axis, exclusive=True)
        for wrap in (True, False):
            yield (
                f"halo {wrap} {axis}",
                functools.partial(sk.collectives.halo_exchange, axis=axis, before=2, after=9, wrap=wrap),
            )
            for by in (1, -1, 3):
                yield f"shift {by} {wrap} {axis}", functools.partial(sk.shift, axis=axis, by=by, wrap=wrap)
            for name in ("all_gather", "reduce_scatter", "all_reduce"):
                kernel = functools.partial(getattr(sk.ring, name), axis=axis, bidirectional=wrap)
                yield f"ring {name} {wrap} {axis}", kernel
            for dtype in (jnp.int8, jnp.bfloat16):
                yield (
                    f"compressed {dtype.__name__} {wrap} {axis}",
                    lambda x, axis=axis, dtype=dtype, wrap=wrap: compressed.all_reduce(
                        x, axis, jnp.zeros_like(x, jnp.float32), dtype=dtype, compress_result=wrap
                    )[0],
                )
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        yield f"hierarchical {name}", functools.partial(getattr(sk.hierarchical, name), inner="model", outer="data")


# In the mesh's own order of the axes, which changes no rule: the deep tier.
ROWS = [
    pytest.param(*row, id=row[0].replace(" ", "_"), marks=[pytest.mark.deep] if row[0].endswith(str(BOTH)) else [])
    for row in kernels()
]


# Forward, differentiated from outside, and differentiated on the device.
@pytest.mark.parametrize(("name", "kernel"), ROWS)
def test_the_librarys_collectives_are_clean(name, kernel):
    def gradient(x):
        return jax.grad(lambda x: jnp.sum(sk.vary(kernel(x), BOTH) ** 2))(x)

    for fn in (on(kernel), on(gradient)):
        assert [str(f) for f in lint(fn, X, small=0)] == []


# Of all steps of the library: tests/laws.
@pytest.mark.quick("options1")
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "precision": "fp16", "nonfinite": "stop"}])
def test_a_step_over_two_axes_is_clean(options, mesh2x4):
    config = transformer.Config(vocabulary=64, layers=2, dim=32, heads=4, hidden=64, dropout=0.1)
    plan = sk.chain(
        sk.fsdp("data", layerwise=("layers",), min_size=1),
        sk.tp("model", transformer.tensor_rules(config, "model", 4), sequence=True),
    )
    loss = transformer.loss_fn(config, transformer.Axes(model="model", sequence=True))
    tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):  # as optax needs it
        init, step = sk.make_train_step(sk.value_and_grad(loss), optax.adamw(1e-3), mesh=mesh2x4, plan=plan, **options)
        state = init.abstract(lambda key: transformer.init(key, config))
        assert [str(f) for f in lint(step, state, {"tokens": tokens, "targets": tokens}, small=0)] == []


# 70 billion parameters on 4096 devices
def test_a_large_step_on_4096_devices():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        config = large_model.MODELS["70b"]
        step, args = large_model.describe_step(config, fsdp=512, tp=8, batch=1, tokens=4096)
        assert [str(f) for f in lint(step, *args)] == []


@st.composite
def uniform_programs(draw):
    """A kernel of branches and loops, at random, whose predicates all devices agree on."""
    steps = draw(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.sampled_from(["data", "model"])), max_size=5)
    )
    collectives = (
        lambda x, axis: sk.shift(x, axis),
        lambda x, axis: x + sk.vary(sk.all_reduce(x * sk.axis_index(axis).astype(x.dtype), axis), BOTH),
        lambda x, axis: x + jnp.sum(sk.all_gather(x, axis)),
        lambda x, axis: sk.all_to_all(x, axis, split_dim=0, concat_dim=0),
        lambda x, axis: jnp.tile(sk.reduce_scatter(x, axis), (sk.axis_size(axis), 1)),
    )

    def agreed(x):
        return sk.all_reduce(jnp.sum(x), BOTH, op="max")

    def kernel(x):
        for form, which, axis in steps:
            run = functools.partial(collectives[which], axis=axis)
            if form == 0:
                x = run(x)
            elif form == 1:
                x = lax.cond(agreed(x) > 0, run, lambda x: x, x)
            elif form == 2:
                x = lax.switch(jnp.int32(agreed(x)), [run, lambda x: x, lambda x: -x], x)
            elif form == 3:
                x = lax.while_loop(lambda x: agreed(x) < 9, run, x)
            elif form == 4:
                x = lax.scan(lambda x, _, run=run: (jax.checkpoint(run)(x), None), x, length=2)[0]
            else:
                step = lambda c, run=run: (c[0] + 1, jax.jit(run)(c[1]))  # noqa: E731
                x = lax.while_loop(lambda c: (c[0] < 3) & (agreed(c[1]) < 9), step, (0, x))[1]
        return x

    return kernel


@hypothesis.given(uniform_programs())
def test_programs_whose_predicates_agree_have_no_divergence(kernel):
    rules = {f.rule for f in lint(on(kernel), X, small=0)}
    assert not rules & {"divergent-collective", "ppermute-in-divergent-branch", "unequal-output"}


def test_a_sum_that_is_not_assigned_is_found_at_any_size_and_dropped_statistics_are_not():
    def forgets(x):
        mean = jnp.mean(x)
        sk.all_reduce(mean, BOTH, op="mean")
        return x - mean

    def drops(x):
        statistics = sk.all_reduce(jnp.mean(x), BOTH)
        del statistics
        return x

    (finding,) = lint(on(forgets), X)
    assert finding.rule == "unread-message" and finding.source.endswith("forgets)")
    assert lint(on(drops), X) == []
    assert [finding.rule for finding in lint(on(drops), X, small=0)] == ["unread-message"]


def test_of_a_step_the_forgotten_sum_of_a_loss_is_named_and_no_gather_of_the_plan(mesh2x4):
    """Of a leaf that the loss does not read; jit leaves that gather out."""

    def loss_fn(params, batch, keys):
        errors = jnp.mean((batch @ params["w"]) ** 2, axis=1)
        sk.all_reduce(errors, "data")
        return sk.Mean.of(errors)

    plan = sk.fsdp(("data", "model"), min_size=1)
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh2x4, plan=plan)
    state = init.abstract({"w": X, "teacher": X})
    for fn in (step, lambda state, x: step(state, x)):
        (finding,) = lint(fn, state, X, small=0)
        assert finding.rule == "unread-message" and "loss_fn" in finding.source


def test_a_program_that_only_one_process_can_trace():
    def fn(x):
        if jax.process_index():
            raise RuntimeError("no data here")
        return x

    (found,) = lint(fn, X)
    line = fn.__code__.co_firstlineno + 2
    assert str(found) == (
        f"test_lint.py:{line} (fn): process-dependent-program: it can be traced as process 0 and raises RuntimeError: "
        "no data here as process 1. Run the same program on every process, and pass differences as data or decide "
        "them outside."
    )


# Catches sets told apart by the order in which they were made: Python's hash seed decides whether one can see it.
def test_equal_sets_are_no_difference_of_processes():
    axes = next(two for two in itertools.permutations("abcdefghijkl", 2) if list({*two}) != list({*two[::-1]}))
    given = {"mesh": sk.abstract_mesh(**dict.fromkeys(axes, 2)), "in_specs": P(axes), "out_specs": P()}

    def fn(x):
        names = frozenset(axes[::-1] if jax.process_index() else axes)
        return jax.shard_map(lambda x: sk.all_reduce(x, axes), axis_names=names, **given)(x)

    assert lint(fn, X) == []


def test_a_closed_over_constant_counts_as_an_input():
    table = jax.device_put(np.ones((64, 64), np.float32))
    (found,) = lint(on(lambda x: x @ table), X, large=64 * 64 * 4)
    assert found.rule == "large-replicated"
    assert found.message == (
        "argument 0, a closed-over constant of 16,384 bytes (float32[64,64]), is replicated over data=2, model=4."
    )


def test_the_gradient_of_a_replicated_gather_is_told_apart():
    (row,) = [row for row in PLANTED if row.name == "reduced in the backward pass for its own piece"]
    (found,) = lint(row.wrong, X)
    assert found.remedy == "Gather without replicated=True: its gradient is then a reduce_scatter, which sends half."


def test_specs_of_an_axis_of_one_device_split_nothing_and_a_slice_at_one_place_needs_the_whole_sum():
    mesh = sk.abstract_mesh(data=1, model=4)
    kernel = lambda x: lax.cond(jnp.sum(x) > 0, lambda x: x + lax.pmax(sk.vary(x, "data"), "data"), lambda x: x, x)  # noqa: E731
    fn = jax.shard_map(
        lambda x: sk.vary(kernel(x), ("data", "model")), mesh=mesh, in_specs=P("data"), out_specs=P(BOTH)
    )
    assert lint(fn, X) == [] and MESH.shape["data"] == 2
    # What each keeps is not its own piece: no reduce_scatter would do.
    kernel = on(lambda x: lax.dynamic_slice_in_dim(sk.all_reduce(x, "model"), jnp.int32(2), 2))
    assert not [each for each in lint(kernel, X, small=0) if each.rule == "all-reduce-then-slice"]
    own = on(lambda x: lax.dynamic_slice_in_dim(sk.all_reduce(x, "model"), 2 * lax.axis_index("model"), 2))
    assert [each.rule for each in lint(own, X, small=0)] == ["all-reduce-then-slice"]


def test_an_axis_that_does_nothing_is_named_at_the_users_loss():
    """Not at the builder's own line, where the step is defined; a loss of the library's has no line at all."""

    def loss_fn(params, batch, keys):
        return jnp.mean((batch @ params["w"]) ** 2)

    def found(loss_fn, params, batch):
        options = {"mesh": MESH, "plan": sk.dp("data")}
        init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), **options)
        return lint(step, init.abstract(params), batch, ignore=set(RULES) - {"idle-axis"})

    (own,) = found(loss_fn, {"w": X}, X)
    assert own.source.startswith("test_lint.py:") and "loss_fn" in own.source
    config = transformer.Config(vocabulary=16, layers=1, dim=8, heads=2)
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct((8, 8), jnp.int32))
    (ours,) = found(transformer.loss_fn(config), params, batch)
    assert ours.source == "" and str(ours).startswith("idle-axis: the 4 devices along axis 'model'")


def once_each(add, plan, **options):
    """The rules that name a loss of `add(m, r, n)`: a masked mean, a penalty, and the examples of a device."""

    def loss(w, x, keys):
        return add(sk.Mean.of((x @ w - 1) ** 2, (x > 0).astype(np.float32)), jnp.sum(w**2), len(x))

    own = sk.value_and_grad(loss, local=options.pop("local", False))
    init, step = sk.make_train_step(own, optax.sgd(0.1), mesh=sk.abstract_mesh(data=8), plan=plan, **options)
    return {each.rule for each in lint(step, init.abstract(X), jax.ShapeDtypeStruct((128, 64), np.float32))}


ONCE_EACH = [
    lambda m, r, n: sk.Mean(m.total + r, m.weight),
    lambda m, r, n: sk.Mean(3e-4 * r - m.total, m.weight),
    lambda m, r, n: 0.1 * sk.Mean(jax.jit(lambda m, r: r + m.total)(m, jnp.sqrt(r)), m.weight),
    lambda m, r, n: sk.Mean(m.total + 1e-4 * r, n),
    lambda m, r, n: sk.Mean(m.total, lax.stop_gradient(r)),
]
WEIGHTED = [
    lambda m, r, n: sk.Mean(m.total + 1e-4 * m.weight * r, m.weight),
    lambda m, r, n: sk.Mean(m.total + 1e-4 * n * r, n),  # of 16 examples the factor 0.0016: not written by hand
    lambda m, r, n: m.total / n + 3e-4 * r,
    lambda m, r, n: sk.Mean(m.total / lax.stop_gradient(r), n),
]
SHARED_OUT = [  # these communicate, or are sums of means
    lambda m, r, n: sk.Mean(m.total, n) + 1e-4 * sk.Mean(r, 1),
    lambda m, r, n: sk.Mean(m.total + r / sk.axis_size("data"), m.weight),
    lambda m, r, n: sk.Mean(m.total + 0.1 / sk.axis_size("data") * r, m.weight),
    lambda m, r, n: sk.Mean(m.total + jnp.where(sk.axis_index("data") == 0, r, 0), m.weight),
    lambda m, r, n: sk.Mean(8 * m.total + sk.all_reduce(m.weight, "data") * r, 8 * m.weight),
]


@pytest.mark.parametrize("way", ["dp", "fsdp", "accumulate", "local"])
def test_a_term_of_each_device_is_told_from_one_that_is_weighted(way):
    plan = sk.fsdp("data", min_size=1) if way in ("fsdp", "local") else sk.dp("data")
    options = {"accumulate": {"accumulate": 2}, "local": {"local": True}}.get(way, {})
    right = WEIGHTED if options else WEIGHTED + SHARED_OUT
    assert [once_each(add, plan, **options) for add in ONCE_EACH] == [{"term-of-each-device"}] * len(ONCE_EACH)
    assert [once_each(add, plan, **options) for add in right] == [set()] * len(right)


def test_the_gradient_of_a_constant_has_two_remedies():
    row, _ = [row for row in PLANTED if row.rule == "inner-gradient-of-a-constant"]
    assert {each.remedy for each in lint(row.wrong, *row.args)} == {
        "Cast the constant before differentiating: sk.vary(constant, 'data'); or pass value_and_grad(loss_fn, "
        "local=True), if the loss does not communicate."
    }


# Alone in finding that a mask which is equal on all devices is wrong only where their elements differ.
def test_one_mask_for_what_a_ring_has_gathered_is_right():
    mesh = sk.abstract_mesh(model=4)

    def masked(gather):
        def kernel(x, key):
            x = gather(x)
            return x * jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)

        f = jax.shard_map(kernel, mesh=mesh, in_specs=(P("model"), P()), out_specs=P("model"))
        key = jax.eval_shape(lambda: jax.random.key(0))
        return [found.rule for found in sk.lint(f, jax.ShapeDtypeStruct((8,), "f"), key)]

    assert masked(lambda x: x) == ["repeated-draw"]
    assert masked(jnp.cos) == ["repeated-draw"]  # of the same draws
    assert masked(lambda x: sk.ring.all_gather(x, "model")) == []


@pytest.mark.parametrize("kernel", [tutorial.permute, tutorial.ring_sum, tutorial.ring_scatter])
def test_kernels_of_remote_copies_are_read(kernel):
    """Alone catches rules that fail at a `run_scoped`, whose program gets what it closes over as operands."""
    mapped = jax.shard_map(kernel, mesh=sk.abstract_mesh(x=4), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    assert {finding.rule for finding in lint(mapped, jax.ShapeDtypeStruct((64, 2), jnp.float32))} == {"check-vma-off"}
