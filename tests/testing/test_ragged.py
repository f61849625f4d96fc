"""lax.ragged_all_to_all without hardware: emulated and proved against its documentation; wrong dispatches are named."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import collectives
from shardkit.testing import assert_equal_for_all_inputs, emulate
from shardkit.testing._compare import UnequalError
from support.dispatches import EXPERTS, Dispatch, dense
from support.refusals import raises, refused, value_error
from support.tiers import DEEP

FEW = settings(max_examples=40 if DEEP else 8)
OVER = P("expert")


def send_and_receive(operands, outputs, offsets, groups):
    """The documentation of jax in numpy: lists of arrays, one for each device."""
    results = [np.array(output) for output in outputs]
    input_offsets, send_sizes, output_offsets, _ = offsets
    for group in groups:
        for sender in group:
            numbers = range(len(send_sizes[sender]))
            slices = len(numbers) // len(group)
            for number in numbers:
                size, start = send_sizes[sender][number], input_offsets[sender][number]
                target = output_offsets[sender][number]
                rows = operands[sender][start : start + size]
                results[group[number // slices]][target : target + size] = rows
    return results


def draw_exchange(rng, groups, slices, gaps=True):
    """Offsets and sizes [devices, slices of all] of a right call, with slices in any order and gaps between them."""
    n, g = groups.size, groups.shape[1]
    sizes = rng.integers(0, 3, (n, g * slices))
    starts, targets, expected = np.zeros_like(sizes), np.zeros_like(sizes), np.zeros_like(sizes)
    most = 0

    def lay_out(lengths):
        """Where arrays of these lengths begin, in a random order."""
        nonlocal most
        places, end = np.zeros(len(lengths), int), 0
        for number in rng.permutation(len(lengths)):
            end += rng.integers(0, 2) if gaps else 0
            places[number] = end
            end += lengths[number]
        most = max(most, end)
        return places

    for group in groups:
        for device in group:
            starts[device] = lay_out(sizes[device])
        for place, receiver in enumerate(group):
            mine = slice(place * slices, (place + 1) * slices)
            arriving = np.concatenate([sizes[sender][mine] for sender in group])
            places = lay_out(arriving)
            expected[receiver] = arriving
            for number, sender in enumerate(group):
                targets[sender][mine] = places[number * slices : (number + 1) * slices]
    return [starts, sizes, targets, expected], most + 1


def call(axes, groups=None):
    """A device's call, of arrays with its own rows and offsets."""

    def kernel(x, output, *offsets):
        offsets = [each[0] for each in offsets]
        return lax.ragged_all_to_all(x, output, *offsets, axis_name=axes, axis_index_groups=groups)

    return kernel


MESHES = [
    ({"a": 1}, "a"),
    ({"a": 3}, "a"),
    ({"a": 2, "b": 3}, "b"),
    ({"a": 2, "b": 2}, ("a", "b")),
    ({"a": 2, "b": 3}, ("b", "a")),
]


# Catches another order of devices over a tuple of axes, slices that stop at the first one of a sender, rows that are
# zeroed where nobody writes, and offsets of the device beside. The gradients are those of jax's own rule.
# proves N72
@FEW
@given(
    st.sampled_from(MESHES),
    st.integers(1, 2),
    st.sampled_from(["float32", "int32", "bfloat16", "bool"]),
    st.integers(0, 2**16),
)
def test_emulation_is_the_documentation(mesh, slices, dtype, seed):
    sizes, axes = mesh
    names = (axes,) if isinstance(axes, str) else axes
    rng = np.random.default_rng(seed)
    n = math.prod(sizes[name] for name in names)
    others = [name for name in sizes if name not in names]
    copies = math.prod(sizes[name] for name in others)
    groups = np.arange(n)[None]
    drawn = [draw_exchange(rng, groups, slices) for _ in range(copies)]
    room = max(most for _, most in drawn)
    everywhere = (*others, *names)  # the device of a row in the arrays below
    spec = P(everywhere)
    x = rng.integers(-9, 9, (copies * n * room, 2)).astype(dtype)
    output = rng.integers(-9, 9, (copies * n * room, 2)).astype(dtype)
    offsets = [np.concatenate(arrays) for arrays in zip(*[each for each, _ in drawn], strict=True)]
    run = emulate(call(axes), sizes, spec, spec)
    got = np.asarray(run(x, output, *offsets)).reshape(copies, n, room, 2)
    for copy, (of_copy, _) in enumerate(drawn):
        rows = slice(copy * n * room, (copy + 1) * n * room)
        blocks = [each[rows].reshape(n, room, 2) for each in (x, output)]
        np.testing.assert_array_equal(got[copy], send_and_receive(*blocks, of_copy, groups))
    if dtype != "float32":
        return
    weight = np.cos(np.arange(x.size, dtype="f")).reshape(x.shape)
    gradient = jax.grad(lambda x: jnp.vdot(run(x, output, *offsets), weight))(x)
    for copy, ((starts, sent, targets, expected), _) in enumerate(drawn):
        rows = slice(copy * n * room, (copy + 1) * n * room)
        block = weight[rows].reshape(n, room, 2)
        # Back, a slice lies where it was written, and goes to where it was read: of its receiver, in its order.
        exchange = lambda each: each.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1)  # noqa: E731
        back = [exchange(targets), expected, exchange(starts), sent]
        wanted = send_and_receive(block, np.zeros_like(block), back, groups)
        np.testing.assert_array_equal(gradient[rows].reshape(n, room, 2), wanted)


def test_groups_run_forward_and_are_refused_backward():
    """jax's gradient exchanges the offsets of a group between all devices."""
    groups = np.array([[0, 2], [3, 1]])
    offsets, room = draw_exchange(np.random.default_rng(3), groups, 2)
    x = np.arange(4.0 * room, dtype="f").reshape(4 * room, 1)
    kernel = call("a", groups.tolist())
    run = emulate(kernel, {"a": 4}, P("a"), P("a"))
    wanted = send_and_receive(x.reshape(4, room, 1), 0 * x.reshape(4, room, 1), offsets, groups)
    np.testing.assert_array_equal(np.asarray(run(x, 0 * x, *offsets)).reshape(4, room, 1), wanted)

    def reference(x):
        return jnp.concatenate(by_numpy_indices(x.reshape(4, room, 1), offsets, groups))

    prove = partial(
        assert_equal_for_all_inputs,
        lambda x, *offsets: kernel(x, jnp.zeros_like(x), *offsets),
        lambda x, *offsets: reference(x),
        mesh=sk.abstract_mesh(a=4),
        in_specs=P("a"),
        out_specs=P("a"),
        args=(x, *offsets),
    )
    prove(grad=False)
    why = "must run over whole axes if it is differentiated, because jax's gradient exchanges the offsets between all "
    assert why in refused(prove, AssertionError)
    assert why in refused(lambda: jax.grad(lambda x: run(x, 0 * x, *offsets).sum())(x))


def by_numpy_indices(blocks, offsets, groups):
    """`send_and_receive` of unknown rows into zeros: each row of a result is read from a place that is known."""
    n, room = blocks.shape[:2]
    numbers = np.arange(1, n * room + 1).reshape(n, room)  # 0 for a row that nobody writes
    places = send_and_receive(numbers, 0 * numbers, offsets, groups)
    rows = jnp.concatenate([jnp.zeros_like(blocks[:1, 0]), blocks.reshape(n * room, *blocks.shape[2:])])
    return [rows[place] for place in places]


# What jax makes of the exchange in the backward pass is a gradient only if it is that of gathers, whatever the rows
# are: of our own two forms it is the one that no CPU has run.
# proves N72
@pytest.mark.parametrize("n", [1, 2, 4])
def test_jaxs_transpose_is_the_gradient_of_the_dense_form_and_of_gathers(n):
    rng = np.random.default_rng(n)
    counts = rng.integers(0, 3, (n, n)).astype("int32")
    rows, has = int(counts.sum(0).max()) + 1, int(counts.sum(1).max()) + 1
    exchange = partial(collectives.ragged_all_to_all, counts=counts, axis="expert", rows=rows, limit=2)
    shift = lambda sizes, axis: np.cumsum(sizes, axis) - sizes  # noqa: E731
    offsets = [shift(counts, 1), counts, shift(counts, 0), counts.T]

    def gathers(x):
        blocks = x.reshape(n, has, 2)
        padded = jnp.pad(blocks, ((0, 0), (0, max(rows - has, 0)), (0, 0)))
        return jnp.concatenate(by_numpy_indices_of(padded, rows, offsets))

    def by_numpy_indices_of(blocks, rows, offsets):
        results = by_numpy_indices(blocks, offsets, np.arange(n)[None])
        return [result[:rows] for result in results]

    def both_gradients(x, y):
        """The gradient of the native form less that of the dense one, for cotangents y."""
        gradients = []
        for is_dense in (False, True):
            _, pull = jax.vjp(lambda x, is_dense=is_dense: exchange(x, dense=is_dense), x)
            gradients.append(pull(y)[0])
        return gradients[0] - gradients[1]

    specs = {"mesh": sk.abstract_mesh(expert=n), "in_specs": OVER, "out_specs": OVER}
    x, y = np.zeros((n * has, 2), "f"), np.zeros((n * rows, 2), "f")
    for is_dense in (False, True):
        assert_equal_for_all_inputs(partial(exchange, dense=is_dense), gathers, args=(x,), **specs)
    assert_equal_for_all_inputs(both_gradients, lambda x, y: 0 * x, args=(x, y), grad=False, **specs)
    # The same inside of the kernel forwards: jax's JVP.
    forward = lambda x, t: jax.jvp(partial(exchange, dense=False), (x,), (t,))[1]  # noqa: E731
    assert_equal_for_all_inputs(forward, lambda x, t: gathers(t), args=(x, x), **specs)


def draw_arguments(devices, tokens=2, seed=0, dtype="float32"):
    """Tokens, router, gain and experts; `devices` is that of the experts."""
    rng = np.random.default_rng(seed)
    shapes = (devices * tokens, 2), (2, EXPERTS * devices), (2,), (EXPERTS * devices, 2, 1)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


SPECS = (OVER, P(), P(), OVER)
SIZES = [{"expert": 1}, {"expert": 2}, {"data": 2, "expert": 2}]
IDS = ["1", "2", "2x2"]


@pytest.mark.quick("2x2")
@pytest.mark.parametrize("sizes", SIZES, ids=IDS)
def test_a_users_dispatch_runs_on_one_device_with_its_gradients(sizes):
    tokens = P(tuple(sizes))
    specs = (tokens, *SPECS[1:])
    devices = math.prod(sizes.values())
    _, *weights = draw_arguments(sizes["expert"])
    x = draw_arguments(devices, seed=1)[0]
    run = emulate(Dispatch(), sizes, specs, tokens)

    def total(function, *args):
        return jnp.sum(jnp.sin(function(*args)))

    wanted = jax.value_and_grad(partial(total, dense), argnums=(0, 1, 2, 3))(x, *weights)
    for function in (run, jax.jit(run), jax.checkpoint(run)):
        got = jax.value_and_grad(partial(total, function), argnums=(0, 1, 2, 3))(x, *weights)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5), got, wanted)


# proves N72
@pytest.mark.quick("2x2")
@pytest.mark.parametrize("sizes", SIZES, ids=IDS)
def test_a_users_dispatch_is_proved(sizes):
    """The sizes follow from a router, and so from floats: that the buffer has room is listed as seen in draws."""
    tokens = P(tuple(sizes))
    _, *weights = draw_arguments(sizes["expert"])
    x = draw_arguments(math.prod(sizes.values()))[0]
    proof = assert_equal_for_all_inputs(
        Dispatch(),
        dense,
        mesh=sk.abstract_mesh(**sizes),
        in_specs=(tokens, *SPECS[1:]),
        out_specs=tokens,
        args=(x, *weights),
    )
    if sizes["expert"] > 1:
        assert "never else than true: ragged_all_to_all with room for its rows at dispatches.py:" in str(proof)


# jax maps a ragged_dot by one vmap along dim 0: not of rows alone, with the same experts, and not over two axes.
@pytest.mark.parametrize("sizes", [{"a": 4}, {"a": 2, "b": 2}], ids=["4", "2x2"])
def test_a_ragged_dot_of_the_same_experts_is_mapped(sizes):
    rng = np.random.default_rng(5)
    x, w = (rng.normal(size=shape).astype("f") for shape in ((12, 3), (2, 3, 2)))
    groups = np.array([1, 2])
    rows = P(tuple(sizes))
    run = emulate(lambda x, w: lax.ragged_dot(x, w, groups), sizes, (rows, P()), rows)

    def total(function, *args):
        return jnp.sum(jnp.sin(function(*args)))

    by_hand = lambda x, w: jnp.concatenate([lax.ragged_dot(x[i : i + 3], w, groups) for i in range(0, 12, 3)])  # noqa: E731
    got, wanted = (jax.value_and_grad(partial(total, function), argnums=(0, 1))(x, w) for function in (run, by_hand))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, wanted)


def exchange(offsets, axis):
    return lax.all_to_all(offsets, axis, 0, 0, tiled=True)


def change(**functions):
    """The arguments of a call, some of which are functions of all and of the axis."""

    def changed(arguments, axis):
        return arguments | {name: function(arguments, axis) for name, function in functions.items()}

    return changed


def unit(rows, gain):
    return gain[None] * rows / jnp.sqrt(jnp.sum(rows * rows, -1, keepdims=True))


AT = "on mesh expert=2, ragged_all_to_all at dispatches.py:"
# A mistake, and what the proof says of it: parts of one sentence.
MISTAKES = {
    # marin pull request 4867: where the rows that this device receives begin, in place of where it writes
    "the offsets of the wrong side": (
        Dispatch(change=change(output_offsets=lambda there, axis: exchange(there["output_offsets"], axis))),
        (AT, "must write ", " along 'expert' write", " of device "),
    ),
    # marin issue 8077: only the forward pass was tested. Rows that nobody writes are zeros, of norm 0; their answers
    # are sent to nobody, and the gradient of the gain, which all rows share, is NaN.
    "NaN out of the backward pass": (
        Dispatch(norm=unit),
        ("the gradient of argument 2 is not the reference's", "in 2 of 2 elements it is NaN, where the reference is a"),
    ),
    "an offset exchanged twice": (
        Dispatch(back=change(output_offsets=lambda back, axis: exchange(back["output_offsets"], axis))),
        (AT, "must write ", " along 'expert' write", " of device "),
    ),
    "sizes to receive that are not transposed": (
        Dispatch(change=change(recv_sizes=lambda there, axis: there["send_sizes"])),
        (
            AT,
            "must have as recv_sizes what the senders send; device 0 along 'expert' sends ",
            "These recv_sizes would fit on the other side: pass lax.all_to_all(recv_sizes, ",
        ),
    ),
    "the offsets of the sender": (
        Dispatch(change=change(output_offsets=lambda there, axis: there["input_offsets"])),
        (AT, "must write ", " along 'expert' write", " of device "),
    ),
    "a sum that is not exclusive": (
        Dispatch(starts=jnp.cumsum),
        (AT, "must read rows of the operand; device 0 along 'expert' sends device ", "jnp.cumsum(send_sizes) - send_"),
    ),
    "rows by sender, counted by expert": (
        Dispatch(layout="sender"),
        ("the result is not the reference's for all inputs. The mistake is at dispatches.py:",),
    ),
    "too small a buffer": (
        Dispatch(room=3),
        (
            AT,
            "must write rows of the receiver's output; device 1 along 'expert' writes the rows ",
            "output has 3. Pass",
        ),
    ),
    "negative sizes": (
        Dispatch(change=change(send_sizes=lambda there, axis: there["send_sizes"] - 1)),
        (AT, "must have sizes of 0 or more; device 0 along 'expert' sends -1 rows to device 0. Pass 0 for a slice "),
    ),
    "the way back with the sizes of the way there": (
        Dispatch(back=change(send_sizes=lambda x, axis: x["recv_sizes"], recv_sizes=lambda x, axis: x["send_sizes"])),
        (AT, "must "),
    ),
    # jax sums the gradient of what is equal by its type, and keeps the first device's piece of what it needs for it.
    "a buffer that does not vary": (
        Dispatch(buffer=lambda x, rows: jnp.zeros((rows, x.shape[1]), x.dtype)),
        ("a result that is replicated along 'expert' differs between devices",),
    ),
    # jax's gradient of the buffer is wrong where a slice is empty: two slices begin at the same row.
    "a buffer with a gradient": (
        Dispatch(buffer=lambda x, rows: jnp.concatenate([x] * (rows // len(x)))),
        ("the gradient of argument 0 is not the reference's for all inputs",),
    ),
}


# Those of gradients alone look for the line of the mistake for longer.
SLOW = ("a buffer that does not vary", "a buffer with a gradient")


# proves N72: ten wrong dispatches and more are refuted, each in a sentence that says where
@pytest.mark.quick(*[mistake for mistake in MISTAKES if mistake not in SLOW])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_dispatches_are_named_by_the_proof(mistake):
    kernel, parts = MISTAKES[mistake]
    reference = partial(dense, norm=unit) if kernel.norm is unit else dense
    prove = partial(
        assert_equal_for_all_inputs,
        kernel,
        reference,
        mesh=sk.abstract_mesh(expert=2),
        in_specs=SPECS,
        out_specs=OVER,
        args=tuple(draw_arguments(2)),
    )
    message = refused(prove, AssertionError)
    for part in parts:
        assert part in message, message


def test_sizes_of_the_wrong_axis_are_named_with_the_device_of_the_other():
    """Each row of the mesh exchanges by itself: device 1 of the second row is not device 1 of the first."""
    tokens = P(("data", "expert"))
    x = draw_arguments(4)[0]
    args = (x, *draw_arguments(2)[1:])
    specs = (tokens, *SPECS[1:])
    kernel = Dispatch(sizes_over="data")
    sentence = "must have as recv_sizes what the senders send; device "
    sizes = {"data": 2, "expert": 2}
    message = refused(lambda: emulate(kernel, sizes, specs, tokens)(*args))
    assert message.startswith("emulate: ragged_all_to_all at dispatches.py:")
    assert sentence in message and ", where 'data' is 0. " in message
    mesh = sk.abstract_mesh(**sizes)
    options = {"mesh": mesh, "in_specs": specs, "out_specs": tokens, "args": args}
    assert sentence in refused(lambda: assert_equal_for_all_inputs(kernel, dense, **options), AssertionError)


# Of two devices, which send the first row of each to both: right forward, and no gradient of jax's.
def send_to_both(x):
    device = lax.axis_index("expert")
    zero, one = jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32)
    output = jnp.zeros_like(x, shape=(2, *x.shape[1:]))
    return lax.ragged_all_to_all(x, output, zero, one, one * device, one, axis_name="expert")


def test_a_row_that_is_sent_twice_has_a_wrong_gradient_in_jax():
    x = np.arange(4.0, dtype="f").reshape(4, 1)
    run = emulate(send_to_both, {"expert": 2}, OVER, OVER)
    np.testing.assert_array_equal(run(x), [[0], [2], [0], [2]])
    options = {"mesh": sk.abstract_mesh(expert=2), "in_specs": OVER, "out_specs": OVER, "args": (x,)}
    prove = partial(assert_equal_for_all_inputs, send_to_both, lambda x: jnp.concatenate([x[::2], x[::2]]), **options)
    prove(grad=False)
    why = (
        "must send a row once if it is differentiated, because jax's gradient of it writes rows where it should add "
        "them; devices 0 and 1 along 'expert' write the gradient of row 0 of device 0. Send copies of the row, as "
        "operand[index] has them."
    )
    assert why in refused(prove, AssertionError)
    # In the backward pass nothing is left that could raise a ValueError: jax fails with the sentence.
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(jax.grad(lambda x: run(x).sum())(x))
    assert why in str(error.value)
    # What it says to do is right.
    copied = lambda x: send_slices(x[jnp.zeros(2, int)])  # noqa: E731
    assert_equal_for_all_inputs(copied, lambda x: jnp.concatenate([x[::2], x[::2]]), **options)


def send_slices(x):
    """Row i to device i."""
    device = lax.axis_index("expert")
    one = jnp.ones(2, jnp.int32)
    return lax.ragged_all_to_all(x, jnp.zeros_like(x), jnp.arange(2), one, one * device, one, axis_name="expert")


def test_a_buffer_that_does_not_vary_is_refused_where_it_is_differentiated():
    """jnp.zeros is equal on all devices by its type; jax takes the result for equal too, and adds the gradients."""

    def kernel(x):
        device = lax.axis_index("expert")
        one = jnp.ones(2, jnp.int32)
        output = jnp.zeros(x.shape, x.dtype)
        return lax.ragged_all_to_all(x, output, jnp.arange(2), one, one * device, one, axis_name="expert")

    x = np.arange(4.0, dtype="f").reshape(4, 1)
    run = emulate(kernel, {"expert": 2}, OVER, OVER)
    np.testing.assert_array_equal(run(x), [[0], [2], [1], [3]])
    why = (
        "must have an output that varies over 'expert' by its type if it is differentiated, because the result has the "
        "type of the output, and of what is the same on all devices jax sums the gradients. Pass sk.vary(output, "
        "'expert')."
    )
    assert why in refused(lambda: jax.grad(lambda x: run(x).sum())(x))
    options = {"mesh": sk.abstract_mesh(expert=2), "in_specs": OVER, "out_specs": OVER, "args": (x,)}
    reference = lambda x: x[jnp.array([0, 2, 1, 3])]  # noqa: E731
    assert why in refused(lambda: assert_equal_for_all_inputs(kernel, reference, **options), AssertionError)
    # Without check_vma nothing is summed.
    assert_equal_for_all_inputs(kernel, reference, check_vma=False, **options)


RIGHT = {"input_offsets": [0, 1], "send_sizes": [1, 1], "output_offsets": [[0, 0], [1, 1]], "recv_sizes": [1, 1]}
FAULTS = {
    "must have sizes of 0 or more; device 0 along 'expert' sends -1 rows to device 1. Pass 0 for a slice without "
    "rows.": {"send_sizes": [1, -1]},
    "must have as recv_sizes what the senders send; device 0 along 'expert' sends 1 rows to device 0, whose "
    "recv_sizes say 0. Pass lax.all_to_all(send_sizes, 'expert', 0, 0, tiled=True) as recv_sizes.": {
        "recv_sizes": [0, 0]
    },
    "must read rows of the operand; device 0 along 'expert' sends device 1 the rows 2 to 2, and its operand has 2. "
    "Pass the first row of each slice as input_offsets: of slices one behind the other jnp.cumsum(send_sizes) - "
    "send_sizes.": {"input_offsets": [0, 2]},
    "must write rows of the receiver's output; device 1 along 'expert' writes the rows 3 to 3 of device 0, whose "
    "output has 3. Pass an output with room for all rows that a device may receive, and as output_offsets the first "
    "row of each slice on its receiver.": {"output_offsets": [[0, 0], [3, 1]]},
    "must write a row of the output once; devices 0 and 1 along 'expert' write row 1 of device 1, with the rows 1 to 1 "
    "and 1 to 1. Pass as output_offsets the first row of each slice on its receiver: of slices one behind the other "
    "lax.all_to_all(jnp.cumsum(recv_sizes) - recv_sizes, 'expert', 0, 0, tiled=True).": {
        "output_offsets": [[0, 1], [1, 1]]
    },
    "must write a row of the output once; devices 0 and 1 along 'expert' write row 0 of device 0, with the rows 0 to 0 "
    "and 0 to 0. These output_offsets would fit on the other side: pass lax.all_to_all(output_offsets, 'expert', 0, 0, "
    "tiled=True).": {"output_offsets": [[0, 1], [0, 1]]},
    "must have input_offsets, send_sizes, output_offsets and recv_sizes of one length, a multiple of the 2 devices "
    "along 'expert'; got lengths [3, 3, 3, 3]. Pass an entry for each slice, by receiver, and in recv_sizes by "
    "sender.": {name: [0, 0, 0] for name in RIGHT},
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_a_wrong_call_is_named_in_full(sentence):
    arguments = {name: np.asarray(value, np.int32) for name, value in (RIGHT | FAULTS[sentence]).items()}

    def kernel(x):
        device = lax.axis_index("expert")
        offsets = [jnp.asarray(value)[device] if value.ndim > 1 else jnp.asarray(value) for value in arguments.values()]
        output = jnp.zeros_like(x, shape=(3, 1))
        return lax.ragged_all_to_all(x, output, *offsets, axis_name="expert")

    x = np.arange(4.0, dtype="f").reshape(4, 1)
    line = f"test_ragged.py:{kernel.__code__.co_firstlineno + 4} ({kernel.__qualname__})"
    run = emulate(kernel, {"expert": 2}, OVER, OVER)
    with value_error(f"emulate: ragged_all_to_all at {line} {sentence}"):
        run(x)
    prove = partial(
        assert_equal_for_all_inputs,
        kernel,
        lambda x: jnp.zeros((6, 1)),
        mesh=sk.abstract_mesh(expert=2),
        in_specs=OVER,
        out_specs=OVER,
        args=(x,),
        grad=False,
    )
    subject = "assert_equal_for_all_inputs: on mesh expert=2, "
    with raises(UnequalError, f"{subject}ragged_all_to_all at {line} {sentence}"):
        prove()


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "bool"])
def test_under_an_outer_jit_jax_fails_with_the_sentence(dtype):
    """No call of emulate is there to raise it."""
    two = jnp.zeros(2, jnp.int32)
    kernel = lambda x: lax.ragged_all_to_all(x, x, two, two + 1, two, two + 1, axis_name="expert")  # noqa: E731
    run = jax.jit(emulate(kernel, {"expert": 2}, OVER, OVER))
    with pytest.raises(jax.errors.JaxRuntimeError, match="must write a row of the output once"):
        jax.block_until_ready(run(np.ones((4, 1), dtype)))


def test_the_census_counts_the_rows_that_an_even_exchange_sends():
    """Of a full buffer, evenly: then what jax is given says how much is sent. The rest is the padding of a buffer."""
    n, rows = 4, 8
    share = rows // n
    even = np.full(n, share, np.int32)
    starts = np.arange(0, rows, share, dtype=np.int32)

    def kernel(x):
        targets = jnp.full(n, share) * lax.axis_index("expert")
        return lax.ragged_all_to_all(x, jnp.zeros_like(x), starts, even, targets, even, axis_name="expert")

    mesh = sk.abstract_mesh(expert=n)
    x = np.arange(n * rows * 3, dtype="f").reshape(n * rows, 3)
    (row,) = sk.census(jax.shard_map(kernel, mesh=mesh, in_specs=OVER, out_specs=OVER), x).rows
    sender = np.repeat(np.arange(n), rows).reshape(-1, 1) + 0 * x
    arrived = np.asarray(emulate(kernel, {"expert": n}, OVER, OVER)(sender))
    receiver = np.repeat(np.arange(n), rows)[:, None]
    sent = int((arrived != receiver).sum()) * x.dtype.itemsize
    assert row.sent * n == sent == n * sk.cost.wire("all_to_all", rows * 3 * 4, n).sent
