"""The census and the contracts: every form of control flow, exact counts, and messages that name the line."""

import json
import threading
from contextlib import nullcontext
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax import backends
from shardkit.analysis import census, collective, expects
from shardkit.analysis.hlo.differences import changes
from shardkit.cost import wire
from support.refusals import raises, refused, value_error
from testing.kernels import tutorial

pytestmark = pytest.mark.check

MESH = sk.abstract_mesh(data=2, model=4)
X = jax.ShapeDtypeStruct((16, 8), jnp.float32)
PIECE = 2 * 8 * 4  # bytes of X on one of eight devices


def on(kernel, mesh=MESH):
    spec = P(tuple(mesh.axis_names))
    return jax.shard_map(lambda x: sk.vary(kernel(x), mesh.axis_names), mesh=mesh, in_specs=spec, out_specs=spec)


def summary(fn, *args):
    return [(r.kind, r.axes, r.n, r.count, r.bytes_in, r.bytes_out, r.sent) for r in census(fn, *args).rows]


# proves F76, F88: each kernel against the closed form of its docstring
@pytest.mark.parametrize(
    ("kernel", "kind", "axes", "size_out", "sent"),
    [
        (lambda x: sk.all_reduce(x, "model"), "all_reduce", ("model",), PIECE, Fraction(2 * PIECE * 3, 4)),
        (lambda x: sk.all_reduce(x, "data", op="max"), "all_reduce", ("data",), PIECE, PIECE),
        (lambda x: sk.all_gather(x, "model"), "all_gather", ("model",), 4 * PIECE, PIECE * 3),
        (lambda x: sk.all_gather(x, "data", replicated=True), "all_gather", ("data",), 2 * PIECE, PIECE),
        (lambda x: sk.reduce_scatter(x, "data"), "reduce_scatter", ("data",), PIECE // 2, Fraction(PIECE, 2)),
        (
            lambda x: sk.all_to_all(x, ("data", "model"), split_dim=1, concat_dim=0),
            "all_to_all",
            ("data", "model"),
            PIECE,
            Fraction(PIECE * 7, 8),
        ),
        (lambda x: sk.shift(x, "model"), "ppermute", ("model",), PIECE, PIECE),
        (lambda x: sk.broadcast(x, "model", source=2), "all_reduce", ("model",), PIECE, Fraction(2 * PIECE * 3, 4)),
    ],
)
def test_kernels_send_what_their_docstrings_say(kernel, kind, axes, size_out, sent):
    n = int(np.prod([dict(MESH.shape)[a] for a in axes]))
    assert summary(on(kernel), X) == [(kind, axes, n, 1, PIECE, size_out, sent)]


def test_what_sends_nothing():
    assert (
        census(on(lambda x: sk.vary(x, "data") * sk.axis_size("model") + sk.axis_index("data").astype(x.dtype)), X).rows
        == ()
    )
    assert str(census(jnp.sin, 1.0)) == "no collectives"


def test_rows_that_show_nothing_else_are_one_line():
    """A model of many leaves, each with its own collective, was a table of hundreds of equal lines."""

    def kernel(x):
        shifted = [sk.shift(x, "model") for _ in range(2)]
        rounds, _ = jax.lax.scan(lambda x, _: (sk.shift(x, "model"), None), x, length=3)
        return sum(shifted) + rounds + sk.shift(x, "data")

    found = census(on(kernel), X)
    lines = [line.split() for line in str(found).splitlines()]
    assert len(found.rows) == 4
    assert [line[1:6] for line in lines[1:3]] == [
        ["model=4", "2", "x", "1", f"{PIECE:,}"],
        ["model=4", "3", f"{PIECE:,}", f"{PIECE:,}", f"{3 * PIECE:,}"],
    ]
    assert lines[1][7] == f"{2 * PIECE:,}" and len(lines) == 7


def nested(kernel):
    """The kernel behind jit, remat, a custom derivative, a scan of 3 in a scan of 2, and a cond."""

    @jax.custom_jvp
    def custom(x):
        return kernel(x)

    custom.defjvp(lambda primals, tangents: (custom(*primals), tangents[0]))

    def twice(x, _):
        return lax.scan(lambda y, _: (jax.checkpoint(jax.jit(custom))(y), None), x, length=3)[0], None

    def run(x):
        y, _ = lax.scan(twice, x, length=2)
        return lax.cond(jnp.sum(y) > 0, kernel, lambda z: z, y)

    return run


def test_loops_multiply_branches_are_listed_and_the_length_of_a_while_is_not_known():
    rows = census(jax.jit(on(nested(lambda x: sk.shift(x, "model")))), X).rows
    assert [(r.kind, r.count, r.branch) for r in rows] == [("ppermute", 6, ""), ("ppermute", 1, "branch 2 of 2")]

    def kernel(x):
        return lax.while_loop(lambda y: jnp.sum(y) < 100, lambda y: sk.shift(y, "model"), x)

    found = census(on(kernel), X)
    assert [r.count for r in found.rows] == [None]
    assert found.count() == 1 and found.sent() == PIECE
    assert "  ?  " in str(found)
    assert str(found).endswith(
        "\ntimes ?: inside a while, whose length is not in the program; its body is counted once"
    )
    fixed = census(on(lambda x: lax.fori_loop(0, 5, lambda _, y: sk.shift(y, "model"), x)), X)
    assert [r.count for r in fixed.rows] == [5] and "times ?" not in str(fixed)


# proves S46: the transpose of a gather is a scatter, and the backward pass is marked
def test_the_backward_pass_is_told_apart():
    found = census(jax.grad(lambda x: jnp.sum(on(lambda x: sk.all_gather(x, "model") ** 2)(x))), X)
    assert [(r.kind, r.backward) for r in found.rows] == [("all_gather", False), ("reduce_scatter", True)]


def test_rows_name_the_users_line():
    def mine(x):
        return sk.all_reduce(x, "model")

    (row,) = census(on(mine), X).rows
    line = mine.__code__.co_firstlineno + 1
    assert row.source == f"test_census.py:{line} (test_rows_name_the_users_line.<locals>.mine)"


def test_the_table_and_its_json():
    found = census(on(lambda x: sk.shift(sk.all_reduce(x, "data"), "model")), X)
    lines = str(found).splitlines()
    assert lines[0].split() == ["kind", "axes", "times", "bytes", "in", "bytes", "out", "sent/device", "pass", "source"]
    assert lines[1].split()[:6] == ["all_reduce", "data=2", "1", "64", "64", "64"]
    assert lines[3:] == [
        "over data: 1 collectives, 64",
        "over model: 1 collectives, 64",
        "in all: 2 collectives, 128 sent per device",
    ]
    (first, second) = json.loads(found.to_json())
    assert (first["kind"], first["axes"], first["total"]) == ("all_reduce", ["data"], 64.0)
    assert second["primitive"] == "ppermute"
    assert (first["sums"], second["sums"]) == ("float32", "")


def test_the_way_from_the_step_to_jax_is_told_and_short(data8):
    """A gather was 24 calls below the step, in nine files, which nobody could follow."""
    for plan, most in ((sk.dp("data"), 3), (sk.fsdp("data", min_size=1), 4)):
        loss = sk.value_and_grad(lambda params, batch, keys: jnp.mean(batch @ params["w"]))
        init, step = sk.make_train_step(loss, optax.sgd(0.1), mesh=data8, plan=plan)
        found = census(step, init.abstract({"w": np.ones((8, 8), np.float32)}), np.ones((8, 8), np.float32))
        for row in found.rows:
            files = list(dict.fromkeys(line.partition(":")[0] for line in row.way))
            if row.bytes_in > 8:  # those of the plan
                assert files[0] == "steps/train.py" and "on_device/seam.py" in files and len(files) <= most, files
        assert found.ways().startswith(f"{found.rows[0].kind} over data, 1 time\n    steps/train.py:")


def test_two_censuses_are_compared():
    one, two = (
        census(on(kernel), X) for kernel in (lambda x: sk.shift(x, "model"), lambda x: sk.all_reduce(x, "data"))
    )
    assert one.compare(one) == ""
    assert one.compare(two) == (
        "all_reduce over data: 0 of 0 here, 1 of 64 there\nppermute over model: 1 of 64 here, 0 of 0 there"
    )


def reduces_twice(x):
    return sk.all_reduce(sk.all_reduce(x, "model") * 2, "model")


def test_a_broken_contract_lists_every_difference():
    line = reduces_twice.__code__.co_firstlineno + 1
    with (
        pytest.raises(AssertionError) as error,
        expects(collective("all_reduce", "model", times=1, sent=96), collective("all_gather", "data")) as check,
    ):
        check(on(lambda x: sk.shift(reduces_twice(x), "data")), X)
    lines = str(error.value).splitlines()
    assert lines[0] == "the program does not communicate as expected:"
    assert lines[1] == (
        "- expected 1 x all_reduce over 'model', 96 bytes sent; found 2 x all_reduce over 'model', 192 bytes sent"
    )
    assert lines[2] == f"    2 x at test_census.py:{line} (reduces_twice)"
    assert lines[3] == "- expected at least one all_gather over 'data'; there is none"
    assert lines[4] == "- not expected: 1 x ppermute over 'data', 64 bytes sent"
    assert len(lines) == 6


def test_contracts_that_cannot_hold_are_refused():
    assert refused(lambda: collective("psum", "data")) == (
        "collective: kind must be one of 'all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', 'ppermute'; "
        "got 'psum'. Pass for example 'all_reduce'."
    )
    assert refused(lambda: expects(collective("all_reduce", ("a", "b")), collective("all_reduce", ("b", "a")))) == (
        "expects: a kind over the same axes must have one row; got two for all_reduce over 'a', 'b'. Add them up."
    )
    message = "expects: the block must check a function; nothing was checked. Call check(fn, *args) inside it."
    with raises(AssertionError, message), expects():
        pass


HALF = X.update(dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("kernel", "sums"),
    [
        (lambda x: sk.all_reduce(x, "model"), ["bfloat16"]),
        (
            lambda x: sk.all_reduce((x, x.astype(jnp.float32), jnp.int32(1)), "model")[0],
            ["bfloat16", "float32", "int32"],
        ),
        (lambda x: sk.reduce_scatter(x.astype(jnp.float32), "model"), ["float32"]),
        (lambda x: sk.all_reduce(x, "model", op="max"), [""]),
        (lambda x: sk.all_gather(x, "model"), [""]),
        (lambda x: sk.ring.reduce_scatter(x, "model"), ["bfloat16"]),
        (lambda x: sk.ring.all_reduce(x, "model"), ["bfloat16", ""]),
        (lambda x: sk.all_reduce(x, "model", table=sk.tables.ring("all_reduce", 4)), ["bfloat16", ""]),
        (lambda x: sk.matmul_reduce_scatter(x, x.T, "model", impl="ring"), ["bfloat16"]),
        (lambda x: sk.shift(x, "model"), [""]),
        (lambda x: (lambda y: y + jnp.tanh(y))(sk.shift(x, "model")), [""]),  # a residual, not a sum of devices
        (lambda x: jnp.tanh(sk.shift(x, "model")) + x, [""]),
    ],
)
def test_rows_have_the_dtype_of_what_is_added(kernel, sums):
    kernel = jax.shard_map(kernel, mesh=MESH, in_specs=P(), out_specs=P(("data", "model")), check_vma=False)
    assert [row.sums for row in census(kernel, HALF).rows] == sums


def test_sums_in_a_narrower_dtype_are_named():
    line = reduces_twice.__code__.co_firstlineno + 1
    says = "the program does not communicate as expected:\n- expected sums in float32; all_reduce over 'model' adds in "
    says += f"bfloat16\n    2 x at test_census.py:{line} (reduces_twice)"
    twice = on(reduces_twice)
    for asked in ("float32", {"model": jnp.float32}):
        with raises(AssertionError, says):
            expects(sums=asked).check(twice, HALF)
        expects(sums=asked).check(twice, X)
    expects(collective("all_reduce", "model", times=2), sums="bfloat16").check(twice, HALF)
    expects(sums="float32").check(on(lambda x: sk.all_reduce(jnp.int32(x > 0), "model")), HALF)  # exact
    with raises(AssertionError, says[: says.index("-")] + "- expected sums over 'rows'; nothing is sent over it"):
        expects(sums={"rows": "float32"}).check(twice, X)
    with pytest.raises(
        AssertionError, match=r"- expected 1 x all_reduce over 'model'; found 2 x .*\n.*\n- expected sums"
    ):
        expects(collective("all_reduce", "model", times=1), sums="float32").check(twice, HALF)
    with pytest.raises(AssertionError, match="adds in float16"):
        expects(sums="bfloat16").check(twice, X.update(dtype=jnp.float16))


def test_sums_that_are_no_floats_or_compiled_are_refused():
    for wrong in (3, "int32", {"model": "x"}, len):
        with pytest.raises(
            TypeError, match=r"^expects: sums must be a dtype of floats, or a dict of them by axis; got "
        ):
            expects(sums=wrong)
    with value_error(
        "expects: sums= is the dtype of sums in the traced program, because a compiler may widen or narrow a sum; "
        "got it in check_compiled. Call check, or leave sums out."
    ):
        expects(sums="float32").check_compiled(on(reduces_twice), X)


def test_row_linear_sums_in_float32_for_who_asks():
    """Only the sum is wider: the result and both gradients keep their dtypes."""
    specs = {"mesh": MESH, "in_specs": (P(None, "model"), P("model")), "out_specs": P()}
    h, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 8), (8, 3)))
    kernel = jax.shard_map(
        lambda h, w: sk.layers.row_linear(h.astype(jnp.float32), w, "model").astype(h.dtype), **specs
    )
    expects(collective("all_reduce", "model", times=1), sums="float32").check(kernel, h, w)
    grads = jax.eval_shape(jax.grad(lambda h, w: jnp.sum(kernel(h, w)), argnums=(0, 1)), h, w)
    assert [x.dtype for x in grads] == [jnp.bfloat16, jnp.bfloat16]


def test_the_wire_knows_no_other_kind():
    assert refused(lambda: wire("gossip", 8, 2)) == (
        "wire: kind must be 'all_reduce', 'all_gather', 'reduce_scatter', 'all_to_all', 'ppermute' or 'broadcast'; "
        "got 'gossip'. Pass for example kind='all_reduce'."
    )
    assert wire("ppermute", 8, 2, [(0, 0), (1, 1)]).sent == 0


def test_a_step_that_stops_at_nonfinite_values_is_counted_too(data8):
    """It looks at its metrics in Python, so it is its compiled part that is traced."""
    loss = sk.value_and_grad(lambda params, batch, keys: sk.Mean.of((batch @ params["w"]) ** 2))
    init, step = sk.make_train_step(loss, optax.sgd(0.1), mesh=data8, plan=sk.dp("data"), nonfinite="stop")
    state = init.abstract({"w": np.zeros(4, np.float32)})
    assert sk.census(step, state, np.ones((8, 4), np.float32)).count(axis="data") == 2


def test_small_integers_groups_and_ragged_exchanges_are_counted():
    mesh = sk.abstract_mesh(x=8)

    def sent(kernel, *shapes):
        f = jax.shard_map(kernel, mesh=mesh, in_specs=(P("x"),) * len(shapes), out_specs=P("x"))
        (row,) = sk.census(f, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)).rows
        return row.kind, row.n, row.sent

    half_bytes = sent(lambda x: lax.all_gather(x, "x", tiled=True), ((64,), jnp.int4))
    assert half_bytes == ("all_gather", 8, 7 * 4)
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    grouped = lambda x: lax.all_gather(x, "x", axis_index_groups=groups, tiled=True)  # noqa: E731
    assert sent(grouped, ((64,), jnp.float32)) == ("all_gather", 4, 3 * 32)

    def ragged(x, out, *where):
        return lax.ragged_all_to_all(x, out, *where, axis_name="x")

    index = ((64,), jnp.int32)
    found = sent(ragged, ((64, 4), jnp.float32), ((64, 4), jnp.float32), index, index, index, index)
    assert found == ("all_to_all", 8, Fraction(7, 8) * 8 * 4 * 4)


@pytest.mark.parametrize("op", ["max", "min"])
def test_a_kernel_with_its_own_derivative_is_named_by_its_callers_line(op):
    mesh = sk.make_mesh(jax.devices()[:2], d=2)

    def largest(x):
        return sk.all_reduce(x, "d", op=op)

    found = sk.census(jax.shard_map(largest, mesh=mesh, in_specs=P("d"), out_specs=P()), np.ones(4, np.float32))
    assert [row.source.split(":")[0] for row in found.rows] == ["test_census.py"]


def dp_step(p, x):
    """Data parallelism by hand: the gradients of each device are summed after its backward pass."""
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(sk.vary(p, ("data", "model")))
    return sk.all_reduce(loss, ("data", "model"), op="mean"), p - sk.all_reduce(grads, ("data", "model"), op="mean")


def test_what_takes_gradients_after_the_backward_pass_is_the_update():
    """It was called forward, and the backward pass was said to send nothing without a word of this."""
    step = jax.shard_map(dp_step, mesh=MESH, in_specs=(P(), P(("data", "model"))), out_specs=P())
    rows = census(step, jax.ShapeDtypeStruct((8, 3), jnp.float32), X).rows
    assert [(row.backward, row.update) for row in rows] == [(False, False), (False, True)]
    assert " update " in str(census(step, jax.ShapeDtypeStruct((8, 3), jnp.float32), X))
    told = sk.explain(step, jax.ShapeDtypeStruct((8, 3), jnp.float32), X)
    assert (len(told), told.after) == (0, 1)
    assert str(told) == "the backward pass sends nothing\n1 collective after it takes its gradients: see census"


def test_a_scope_that_the_user_calls_transpose_is_no_backward_pass():
    def kernel(x):
        with jax.named_scope("transpose"):
            return sk.all_reduce(x, "data")

    (row,) = census(on(kernel), X).rows
    assert not row.backward


def test_casts_to_reduced_and_unreduced_send_nothing_and_a_broadcast_is_counted():
    """On jax 0.10 the census knew none of them."""
    both = ("data", "model")

    def reduced(w, x):
        return jnp.sum((x @ lax.pcast(w, both, to="reduced")) ** 2)[None]

    mapped = jax.shard_map(reduced, mesh=MESH, in_specs=(P(), P(both)), out_specs=P(both))
    w = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    assert census(mapped, w, X).rows == ()
    gradient = jax.grad(lambda w, x: mapped(w, x).sum())
    (row,) = census(gradient, w, X).rows
    assert (row.kind, row.axes, row.bytes_in, row.backward) == ("all_reduce", both, 8 * 4 * 4, True)
    (told,) = sk.explain(gradient, w, X)
    assert "is cast there to vary over them; the gradient of the cast is a sum." in told.why

    def unreduced(x):
        return lax.psum(lax.pcast(x, "model", to="unreduced"), "model")

    mapped = jax.shard_map(unreduced, mesh=MESH, in_specs=P(both), out_specs=P("data"))
    assert [row.kind for row in census(mapped, X).rows] == ["all_reduce"]

    def sent_on(x):
        return lax.pbroadcast(x, ("data",), 0)

    (row,) = census(jax.shard_map(sent_on, mesh=MESH, in_specs=P(both), out_specs=P(both)), X).rows
    assert (row.kind, row.n, row.sent) == ("broadcast", 2, PIECE)


def test_the_instruments_work_inside_an_outer_trace():
    """A closed-over tracer ended in ConcretizationTypeError."""
    seen = []

    def outer(w):
        fn = on(lambda x: sk.all_reduce(x * jnp.sum(w), "data"))
        seen.append((sk.lint(fn, X), census(fn, X).count(), str(sk.explain(fn, X))))
        return jnp.sum(w**2)

    w = jax.ShapeDtypeStruct((4,), jnp.float32)
    for traced in (outer, jax.grad(outer), jax.vmap(lambda x: outer(x[None]))):
        jax.eval_shape(traced, w)
    assert seen == 3 * [([], 1, "the backward pass sends nothing")]


def test_another_thread_keeps_its_process_index():
    """What it was told by a trace as process 1 it would have believed: a checkpoint, for example."""
    told, here, go_on = [], threading.Event(), threading.Event()

    def other():
        here.wait(10)
        told.append(jax.process_index())
        go_on.set()

    thread = threading.Thread(target=other)
    thread.start()
    with backends.as_process(1):
        assert jax.process_index() == 1
        here.set()
        assert go_on.wait(10)
    thread.join()
    assert told == [0] and jax.process_index() == 0


def test_only_the_solver_of_a_linear_solve_runs():
    """The product that only says what the solution's derivative is was counted, and its transpose."""

    def solved(x):
        ring = [(i, (i + 1) % 4) for i in range(4)]
        product = lambda u: 2 * u + lax.ppermute(u, "model", ring)  # noqa: E731
        return lax.custom_linear_solve(product, x, lambda product, b: product(b), symmetric=True)

    assert [row.count for row in census(on(solved), X).rows] == [1]


def test_what_vmap_stacks_is_summed_on_the_device():
    """A sum over a vmapped and a mesh axis was counted at its size before; one over vmapped axes alone was a row."""

    def over(*axes):
        return lambda x: jax.vmap(lambda row: lax.psum(row, axes), axis_name="rows")(x)

    specs = {"in_specs": P("data", "model"), "out_specs": P("data"), "check_vma": False}  # jax types no such sum
    (row,) = census(jax.shard_map(over("rows", "model"), mesh=MESH, **specs), X).rows
    assert (row.axes, row.bytes_in, row.bytes_out, row.sent) == (("model",), 8, 8, 12)
    alone = jax.shard_map(over("rows"), mesh=MESH, **specs)
    assert census(alone, X).rows == () == sk.audit(alone, X).census.rows


def copying(to_another, said=None):
    """A Pallas kernel that copies its block: to the next device, or where it is."""

    def kernel(source, target, *semaphores):
        if to_another:
            device = ((lax.axis_index("x") + 1) % 2,)
            if to_another == "by data":
                device = (source[0, 0].astype(int),)
            copy = pltpu.make_async_remote_copy(source, target, *semaphores, device_id=device)
        else:
            copy = pltpu.make_async_copy(source, target, semaphores[0])
        copy.start()
        copy.wait()

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    options = {"out_shape": jax.ShapeDtypeStruct((8, 128), jnp.float32), "in_specs": [anywhere], "out_specs": anywhere}
    call = pl.pallas_call(kernel, scratch_shapes=[pltpu.SemaphoreType.DMA] * 2, **options)

    def called(x):
        with nullcontext() if said is None else sk.analysis.sends("ppermute", "x", said):
            return call(x)

    return jax.shard_map(called, mesh=sk.abstract_mesh(x=2), in_specs=P("x"), out_specs=P("x"), check_vma=False)


def test_the_copies_of_a_kernel_are_counted():
    """They were counted as nothing, and then refused unless the writer said what they send."""
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    assert census(copying(to_another=False), x).rows == ()
    [row] = census(copying(to_another=True), x).rows
    assert (row.kind, row.primitive, row.axes, row.n, row.count) == ("ppermute", "pallas_call", ("x",), 2, 1)
    assert row.sent == 8 * 128 * 4


def gather_in_a_ring(x):
    return lax.scan(lambda x, _: (tutorial.ring_gather(x)[0], None), x, None, length=3)[0]


# proves N57: the copies of a ring in a scan are those of the closed form.
def test_the_copies_of_a_ring_are_counted():
    mesh = sk.abstract_mesh(x=4)
    mapped = jax.shard_map(gather_in_a_ring, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    [row] = census(mapped, jax.ShapeDtypeStruct((32, 128), jnp.float32)).rows
    assert (row.axes, row.n, row.count, row.sent) == (("x",), 4, 3, 3 * 8 * 128 * 4)


def test_a_kernel_whose_copies_depend_on_data_is_refused():
    x = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    line = copying.__code__.co_firstlineno + 11
    with value_error(
        f"census: every collective must be in the program; the primitive 'dma_start' at test_census.py:{line} "
        "(copying.<locals>.kernel) may send to other devices by itself. To say what it sends, call it inside `with "
        "sk.analysis.sends(kind, axis, sent):`."
    ):
        census(copying(to_another="by data"), x)
    [row] = census(copying(to_another="by data", said=4096), x).rows
    assert (row.kind, row.primitive, row.axes, row.n, row.sent) == ("ppermute", "pallas_call", ("x",), 2, 4096)


def test_a_foreign_call_with_effects_is_refused_inside_shard_map():
    def call(effect, x):
        return jax.ffi.ffi_call("exchange", jax.ShapeDtypeStruct(x.shape, x.dtype), has_side_effect=effect)(x)

    mapped = lambda effect: jax.shard_map(partial(call, effect), mesh=MESH, in_specs=P(), out_specs=P())  # noqa: E731
    assert census(mapped(False), X).rows == census(partial(call, True), X).rows == ()
    with pytest.raises(ValueError, match=r"the primitive 'ffi_call' at test_census\.py:"):
        census(mapped(True), X)


# proves N57
def test_what_is_said_of_a_foreign_call_is_counted():
    """In a loop, in a jit of its own, forward and backward; and the compiler's program is not held against it."""

    @jax.custom_vjp
    def exchanged(x):
        call = jax.ffi.ffi_call("exchange", jax.typeof(x), has_side_effect=True)
        with sk.analysis.sends("all_to_all", ("data", "model"), 48):
            return lax.scan(lambda x, _: (jax.jit(call)(x), None), x, length=3)[0]

    exchanged.defvjp(lambda x: (exchanged(x), None), lambda _, g: (exchanged(g),))

    def loss(x):
        return sk.all_reduce(jnp.sum(exchanged(x) ** 2), ("data", "model"))

    mapped = jax.shard_map(loss, mesh=MESH, in_specs=P(("data", "model")), out_specs=P())
    found = census(jax.grad(mapped), X)
    rows = [(r.primitive, r.count, r.n, float(r.total), r.backward) for r in found.select(kind="all_to_all")]
    assert rows == [("ffi_call", 3, 8, 144.0, False), ("ffi_call", 3, 8, 144.0, True)]
    assert {change.kind for change in changes(found, [])} == {"all_reduce"}
    with pytest.raises(ValueError, match=r"^sends: axis 'slow' is not an axis of this mesh; its axes are 'data', 'mo"):
        census(on(lambda x: sk.analysis.sends("all_to_all", "slow", 1) and x), X)


def test_audit_and_census_name_one_line(data8):
    """Every row of a step had the line of the builder that makes its shard_map."""
    loss = sk.value_and_grad(lambda params, batch, keys: jnp.mean((batch @ params["w"]) ** 2))
    init, step = sk.make_train_step(loss, optax.sgd(0.1), mesh=data8, plan=sk.dp("data"))
    args = init.abstract({"w": np.zeros(4, np.float32)}), np.ones((8, 4), np.float32)
    here = census(step, *args).rows
    assert here == sk.audit(step, *args).census.rows and "train.py" not in str(here)
