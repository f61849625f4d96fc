"""Orders of events: few runs decide what all orders do, here against every order, tried one by one."""

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.all_gather import ag_kernel
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.remote_copies.events import KernelEvent, Semaphore, UnknownOrdersError, Wait
from shardkit.remote_copies.memory import Buffer
from shardkit.remote_copies.orders import Orders
from shardkit.testing.kernels import OrdersError, check_orders, write_out
from testing.kernels import tutorial

MESH = sk.abstract_mesh(x=4)
SMALL = np.zeros((8, 2), np.float32)
PIECES = np.zeros((32, 2), np.float32)


def draw_events(rng):
    """Three cores, each with a semaphore that it alone waits for, and engines that signal at any time."""
    semaphores = [Semaphore(device, Buffer("s", "s", (), None), ()) for device in range(3)]
    events, last = [], [-1] * 3
    for _ in range(9):
        device = rng.randrange(3)
        event = KernelEvent(device, 0, "", "", last[device])
        choice = rng.random()
        if choice < 0.4:
            event.wait = Wait(semaphores[device], rng.choice([1, 1, 2]), rng.random() < 0.8)
        elif choice < 0.8:
            event.signals.append((semaphores[rng.randrange(3)], rng.choice([1, 1, 2])))
        events.append(event)
        if choice > 0.9 and last[device] >= 0:
            event.signals.append((semaphores[rng.randrange(3)], 1))  # an engine, which nothing follows
        else:
            last[device] = len(events) - 1
    return events


def try_every_order(events):
    """The ends of all orders, and the pairs of events that can both happen next in some order."""
    ends, pairs, seen, open_states = set(), set(), set(), [frozenset()]
    while open_states:
        happened = open_states.pop()
        if happened in seen:
            continue
        seen.add(happened)
        counts = {}
        for number in happened:
            for semaphore, amount in events[number].signals:
                counts[semaphore] = counts.get(semaphore, 0) + amount
            wait = events[number].wait
            if wait is not None and wait.takes:
                counts[wait.semaphore] = counts.get(wait.semaphore, 0) - wait.amount
        able = []
        for number, event in enumerate(events):
            if number in happened or (event.after >= 0 and event.after not in happened):
                continue
            if event.wait is None or counts.get(event.wait.semaphore, 0) >= event.wait.amount:
                able.append(number)
        if not able:
            ends.add(happened)
        for first in able:
            open_states.append(happened | {first})
            pairs |= {(first, second) for second in able if second != first}
    return ends, pairs


@pytest.mark.parametrize("seed", range(60))
def test_few_runs_decide_all_orders(seed):
    # Alone catches a wrong answer of the theorem of orders.py: a race or a deadlock that only some orders have.
    events = draw_events(random.Random(seed))
    ends, pairs = try_every_order(events)
    orders = Orders(events)
    assert ends == {frozenset(orders.run().order)}
    for first in range(len(events)):
        for second in range(len(events)):
            if first != second:
                assert orders.concurrent(first, second) == ((first, second) in pairs)


KERNELS = {
    "permute": (tutorial.permute, SMALL, P("x"), lambda x: jnp.roll(x, 2, 0)),
    "gather": (tutorial.ring_gather, SMALL, P("x"), lambda x: jnp.tile(x.reshape(4, 2, 2), (4, 1, 1))),
    "sum": (tutorial.ring_sum, SMALL, P("x"), lambda x: jnp.tile(x.reshape(4, 2, 2).sum(0), (4, 1))),
    "scatter": (tutorial.ring_scatter, PIECES, P("x"), lambda x: x.reshape(4, 8, 2).sum(0)),
}


def check(name, repeats=2, **options):
    kernel, x, out_specs, _ = KERNELS[name]
    kernel = partial(kernel, **options)
    return check_orders(kernel, mesh=MESH, in_specs=P("x"), out_specs=out_specs, args=(x,), repeats=repeats)


def permute_without_barrier(x, **compiler_params):
    return pl.pallas_call(
        partial(tutorial.permute_kernel, enter=no_barrier),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[tutorial.HBM],
        out_specs=tutorial.HBM,
        scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
        compiler_params=pltpu.CompilerParams(**compiler_params),
    )(x)


# Alone catches a false alarm: Pallas puts a barrier before a kernel that communicates and has none of its own. The
# kernels of the tutorial rely on it.
def test_the_barrier_that_pallas_adds():
    options = {"mesh": MESH, "in_specs": P("x"), "out_specs": P("x"), "args": (np.zeros((8, 2), "f"),)}
    assert check_orders(permute_without_barrier, **options).calls == 2
    with pytest.raises(OrdersError, match="not entered"):
        check_orders(partial(permute_without_barrier, skip_device_barrier=True), **options)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_the_tutorial_are_proved(name):
    # Alone catches a model that is too strict: a mistake reported of a right kernel, or values that are not its own.
    kernel, x, out_specs, reference = KERNELS[name]
    assert check(name).devices == 4
    proof = sk.testing.assert_equal_for_all_inputs(
        write_out(kernel), reference, mesh=MESH, in_specs=P("x"), out_specs=out_specs, args=(x,), check_vma=False,
        grad=False,
    )  # fmt: skip
    assert proof.chance < 1e-15


def no_barrier(left, right):
    pass


def tell_right_only(left, right):
    semaphore = pltpu.get_barrier_semaphore()
    pl.semaphore_signal(semaphore, 1, device_id=(right,))
    pl.semaphore_wait(semaphore, 1)


def wait_for_one(left, right):
    tutorial.barrier(left, right, count=1)


def wait_for_three(left, right):
    tutorial.barrier(left, right, count=3)


def tell_itself(left, right):
    me = lax.axis_index("x")
    tutorial.barrier(me, me)


# kernel, what is planted, and the kinds of mistakes that are reported.
MISTAKES = [
    *[(name, {"enter": no_barrier}) for name in KERNELS],
    *[(name, {"enter": wait_for_one}) for name in KERNELS],
    *[(name, {"enter": wait_for_three}) for name in KERNELS],
    *[(name, {"enter": tell_itself}) for name in KERNELS],
    ("permute", {"enter": tell_right_only}),
    ("permute", {"mistake": "receive not awaited"}),
    ("permute", {"mistake": "send not awaited"}),
    ("permute", {"mistake": "never awaited"}),
    ("gather", {"mistake": "own piece sent before it is there"}),
    ("gather", {"mistake": "wrong side"}),
    ("gather", {"mistake": "receive not awaited"}),
    ("gather", {"mistake": "send not awaited"}),
    ("gather", {"mistake": "awaited late"}),
    ("gather", {"mistake": "shared semaphore"}),
    ("gather", {"mistake": "index off by one"}),
    ("sum", {"mistake": "local not awaited"}),
    ("sum", {"mistake": "no capacity"}),
    ("sum", {"mistake": "free buffer a step early"}),
    ("sum", {"mistake": "same buffer"}),
    ("sum", {"mistake": "wrong side"}),
    ("sum", {"mistake": "added before the copy"}),
    ("sum", {"mistake": "receive not awaited"}),
    ("sum", {"mistake": "signal left out"}),
    ("sum", {"mistake": "one signal too many"}),
    ("sum", {"mistake": "one signal too few"}),
    ("sum", {"mistake": "signal to the wrong side"}),
    ("scatter", {"mistake": "same buffer"}),
    ("scatter", {"mistake": "no capacity"}),
    ("scatter", {"mistake": "send not awaited"}),
    ("scatter", {"mistake": "signal left out"}),
    ("scatter", {"mistake": "signal to the wrong side"}),
    ("scatter", {"mistake": "receive not awaited"}),
]


@pytest.mark.parametrize(("name", "options"), MISTAKES)
def test_planted_mistakes_are_found(name, options):
    # Alone catches a model that is too lax: an order that it does not see.
    with pytest.raises(OrdersError) as error:
        check(name, **options)
    for mistake in error.value.mistakes:
        assert mistake.order or mistake.kind in ("deadlock", "not zero")


@pytest.mark.parametrize("devices", [4, 5, 6])
def test_the_barrier_that_raced_over_two_calls(devices):
    # jax#27963: a neighbour that is a call ahead signals twice, and stands for the one that has not come yet. Among
    # four devices none can be: the opposite device has the same two neighbours, and waits for the one that is late.
    mesh = sk.abstract_mesh(x=devices)
    x = np.zeros((2 * devices, 2), np.float32)
    raced = partial(tutorial.permute, enter=tutorial.barrier)
    check_orders(raced, mesh=mesh, in_specs=P("x"), out_specs=P("x"), args=(x,), repeats=1)
    check_orders(tutorial.permute, mesh=mesh, in_specs=P("x"), out_specs=P("x"), args=(x,))
    if devices == 4:
        check_orders(raced, mesh=mesh, in_specs=P("x"), out_specs=P("x"), args=(x,))
        return
    with pytest.raises(OrdersError, match="not entered"):
        check_orders(raced, mesh=mesh, in_specs=P("x"), out_specs=P("x"), args=(x,))


def test_a_wrong_index_is_found_by_the_proof_of_values():
    # No order goes wrong, and all give the same wrong values: alone catches that the values are not looked at.
    kernel, x, out_specs, reference = KERNELS["scatter"]
    kernel = partial(kernel, mistake="index off by one")
    check("scatter", mistake="index off by one")
    with pytest.raises(AssertionError, match=r"not the reference's.*tutorial\.py"):
        sk.testing.assert_equal_for_all_inputs(
            write_out(kernel), reference, mesh=MESH, in_specs=P("x"), out_specs=out_specs, args=(x,), check_vma=False,
            grad=False,
        )  # fmt: skip


def test_data_that_decides_is_refused():
    # Alone catches that an index, or a branch, which depends on data is taken as if it were known.
    def kernel(x_ref, o_ref):
        o_ref[pl.ds(x_ref[0, 0].astype(jnp.int32), 1)] = x_ref[...]

    def call(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((4, 2), x.dtype))(x[:1])

    with pytest.raises(ValueError, match="depends on data"):
        check_orders(call, mesh=MESH, in_specs=P("x"), out_specs=P("x"), args=(SMALL,))


def test_the_gather_that_jax_ships():
    # A kernel that we did not write, whose copies of two steps count on one semaphore: its left neighbour may be a step
    # ahead, and what it sent later may arrive first. Alone catches verdicts that hold for our own kernels only.
    def shipped(x):
        copies = (pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA)
        return pl.pallas_call(
            partial(ag_kernel, axis_name="x", mesh=MESH),
            out_shape=jax.ShapeDtypeStruct((4, *x.shape), x.dtype),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=[copies, copies],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x)

    with pytest.raises(OrdersError) as error:
        check_orders(shipped, mesh=MESH, in_specs=P("x"), out_specs=P("x"), args=(np.zeros((16, 2), np.float32),))
    assert {mistake.kind for mistake in error.value.mistakes} == {"read early"}


def loops_kernel(x_ref, o_ref, piece, send, recv):
    """Every device gets the sum of all, by a copy in each round of a loop, into memory of that round."""
    me, n, left, right = tutorial.neighbours()
    tutorial.double_barrier(left, right)
    o_ref[...] = jnp.zeros_like(o_ref)
    piece[0] = x_ref[...]

    def round_(step, carry):
        def send_on(kept, local):
            copy = pltpu.make_async_copy(piece.at[step], kept, local)
            copy.start()
            copy.wait()

            @pl.when(step < n - 1)
            def _():
                onward = pltpu.make_async_remote_copy(
                    piece.at[step], piece.at[step + 1], send, recv.at[step], device_id={"x": right}
                )
                onward.start()
                onward.wait()

            o_ref[...] += kept[...] * jnp.where(me >= 0, 1.0, 2.0)

        pl.run_scoped(send_on, pltpu.VMEM(x_ref.shape, x_ref.dtype), pltpu.SemaphoreType.DMA)
        return carry + 1

    lax.fori_loop(0, n, round_, 0)


def test_loops_branches_and_scratch_of_a_round():
    # Alone catches a loop, a branch, scratch memory or a sum into memory that is followed wrongly.
    def call(x):
        n = lax.axis_size("x")
        return pl.pallas_call(
            loops_kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=[
                pltpu.VMEM((n, *x.shape), x.dtype),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((n,)),
            ],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x * 2.0)

    proof = sk.testing.assert_equal_for_all_inputs(
        write_out(call), lambda x: 2 * jnp.tile(x.reshape(4, 2, 2).sum(0), (4, 1)), mesh=MESH, in_specs=P("x"),
        out_specs=P("x"), args=(SMALL,), check_vma=False, grad=False,
    )  # fmt: skip
    assert proof.chance < 1e-15


def test_a_pipeline_within_a_kernel():
    # `emit_pipeline` lowers to copies, semaphores and loops: alone catches one that the model does not have. It asks
    # for the chip, which a mesh without devices states.
    chip = AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,), abstract_device=chip)

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    def kernel(x_ref, o_ref):
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(double, grid=(2,), in_specs=[spec], out_specs=[spec])(x_ref, o_ref)

    def call(x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[tutorial.HBM],
            out_specs=tutorial.HBM,
        )(x)

    sk.testing.assert_equal_for_all_inputs(
        write_out(call), lambda x: 2 * x, mesh=mesh, in_specs=P("x"), out_specs=P("x"),
        args=(np.zeros((64, 128), np.float32),), check_vma=False, grad=False,
    )  # fmt: skip


def test_a_mesh_of_two_axes():
    # Alone catches devices that are numbered in another order than the mesh's: one axis is passed, the other named.
    mesh = sk.abstract_mesh(y=3, x=2)

    def kernel(x_ref, o_ref, send, recv):
        y, x = lax.axis_index("y"), lax.axis_index("x")
        down, up = lax.rem(y + 1, 3), lax.rem(y + 2, 3)
        semaphore = pltpu.get_barrier_semaphore()
        for _ in range(2):
            for device in (down, up):
                pl.semaphore_signal(semaphore, 1, device_id=(device, x))
            pl.semaphore_wait(semaphore, 2)
        copy = pltpu.make_async_remote_copy(x_ref, o_ref, send, recv, device_id={"y": down})
        copy.start()
        copy.wait()

    def call(x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[tutorial.HBM],
            out_specs=tutorial.HBM,
            scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x)

    sk.testing.assert_equal_for_all_inputs(
        write_out(call), lambda x: jnp.roll(x, 2, 0), mesh=mesh, in_specs=P("y", "x"), out_specs=P("y", "x"),
        args=(np.zeros((6, 4), np.float32),), check_vma=False, grad=False,
    )  # fmt: skip


def test_blocks_of_a_grid_and_gradients_around_a_kernel():
    # Alone catches a block that is read at the wrong place: no copy is in it.
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    def call(x):
        spec = pl.BlockSpec((1, 2), lambda i, j: (i, j))
        return pl.pallas_call(
            double, grid=(2, 2), out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), in_specs=[spec], out_specs=spec
        )(x)

    sk.testing.assert_equal_for_all_inputs(
        write_out(call), lambda x: 2 * x, mesh=MESH, in_specs=P("x"), out_specs=P("x"),
        args=(np.zeros((8, 4), np.float32),), check_vma=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_other_numbers_of_devices(name, devices):
    # Alone catches a device that is its own neighbour, or both.
    mesh = sk.abstract_mesh(x=devices)
    kernel, x, out_specs, _ = KERNELS[name]
    rows = 2 * devices * (devices if name == "scatter" else 1)
    x = np.zeros((rows, 2), jnp.bfloat16)
    assert check_orders(kernel, mesh=mesh, in_specs=P("x"), out_specs=out_specs, args=(x,)).devices == devices


# Alone catches a block that is followed as if it stood still: the compiler has two places for it, and copies ahead.
def test_a_copy_of_a_block_that_moves_is_refused():
    def kernel(x_ref, o_ref, send, recv):
        copy = pltpu.make_async_remote_copy(x_ref, o_ref, send, recv, device_id=(lax.axis_index("x"),))
        copy.start()
        copy.wait()

    def call(x):
        spec = pl.BlockSpec((1, 2), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            grid=(2,),
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[spec],
            out_specs=spec,
            scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
        )(x)

    with pytest.raises(UnknownOrdersError, match=r"a copy of .* of which each step of the grid sees a block"):
        check_orders(call, mesh=MESH, in_specs=P("x"), out_specs=P("x"), args=(np.zeros((8, 2), "f"),))


# Alone catches a copy that counts only when all of it is there: 2 of 3 bytes and a copy of 1 byte end a wait for 3.
def test_a_copy_that_is_there_in_part():
    semaphore = Semaphore(1, Buffer("semaphore", "semaphore", (), None), ())

    def make(wait):
        return Orders(
            [
                KernelEvent(0, 0, "large is read", "", -1, role="load"),
                KernelEvent(0, 0, "large arrives", "", 0, signals=[(semaphore, 3)], role="arrive"),
                KernelEvent(0, 0, "small is read", "", -1, role="load"),
                KernelEvent(0, 0, "small arrives", "", 2, signals=[(semaphore, 1)], role="arrive"),
                KernelEvent(1, 0, "waits", "", -1, wait=Wait(semaphore, wait), role="wait"),
            ]
        )

    assert make(3).can_precede(4, 1)
    assert not make(4).can_precede(4, 1)


# Alone catches memory that holds zeros before anything is written to it: here the result would be right.
@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.bool_])
def test_memory_that_nothing_was_written_to(dtype):
    x = np.zeros((8, 2), dtype)

    def call(x):
        def kernel(x_ref, o_ref):
            pass

        return pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), in_specs=[tutorial.HBM], out_specs=tutorial.HBM
        )(x)

    written = jax.shard_map(
        write_out(call),
        mesh=sk.make_mesh(x=4, devices=jax.devices()[:4]),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=False,
    )
    result = np.asarray(jax.jit(written)(x))
    assert result.dtype == dtype
    assert not (result == 0).any()


# proves N62: catches a face that proves the orders alone, or equality alone
def test_assert_kernel_proves_orders_and_equality():
    arguments = {"mesh": MESH, "in_specs": P("x"), "out_specs": P("x"), "args": (SMALL,)}
    proof = sk.testing.assert_kernel(tutorial.permute, lambda x: jnp.roll(x, 2, 0), **arguments)
    assert proof.chance < 1e-15
    assert "no race and no deadlock in any order" in str(proof)
    with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
        sk.testing.assert_kernel(tutorial.permute, lambda x: jnp.roll(x, -2, 0), **arguments)
    with pytest.raises(OrdersError, match="not entered"):
        sk.testing.assert_kernel(
            partial(tutorial.permute, enter=lambda left, right: None), lambda x: jnp.roll(x, 2, 0), **arguments
        )


# Catches a proof about no kernel at all.
def test_a_function_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match=r"a kernel must call pl\.pallas_call"):
        sk.testing.assert_kernel(lambda x: x, lambda x: x, mesh=MESH, in_specs=P("x"), out_specs=P("x"), args=(SMALL,))


def permute_in_rounds(x):
    return lax.scan(lambda y, _: (tutorial.permute(y), y.sum()), x, None, length=3)[0]


# Alone catches a kernel in a loop that is proved once and not written out, which no proof for all inputs can read.
def test_a_kernel_in_a_scan_is_written_out_in_each_round():
    arguments = {"mesh": MESH, "in_specs": P("x"), "out_specs": P("x"), "args": (SMALL,)}
    proof = sk.testing.assert_kernel(permute_in_rounds, lambda x: jnp.roll(x, 6, 0), **arguments)
    assert proof.chance < 1e-15
    with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
        sk.testing.assert_kernel(permute_in_rounds, lambda x: jnp.roll(x, 4, 0), **arguments)


# Alone catches a proof that all devices call a kernel which a device may not call: the others would wait for it.
def test_a_kernel_in_a_branch_is_refused():
    def permute_on_even_devices(x):
        return lax.cond(lax.axis_index("x") % 2 == 0, tutorial.permute, lambda y: y, x)

    with pytest.raises(UnknownOrdersError, match="because some devices may not call it"):
        check_orders(permute_on_even_devices, mesh=MESH, in_specs=P("x"), out_specs=P("x"), args=(SMALL,))
