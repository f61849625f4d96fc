"""Kernels as those of jax's tutorial of distributed Pallas, in our words, with places for planted mistakes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

HBM = pl.BlockSpec(memory_space=pl.ANY)


def neighbours(axis="x"):
    me, n = lax.axis_index(axis), lax.axis_size(axis)
    return me, n, lax.rem(me + n - 1, n), lax.rem(me + 1, n)


def barrier(*devices, count=None):
    semaphore = pltpu.get_barrier_semaphore()
    for device in devices:
        pl.semaphore_signal(semaphore, 1, device_id=(device,))
    pl.semaphore_wait(semaphore, len(devices) if count is None else count)


def double_barrier(left, right):
    """The neighbours have entered, and know it of each other: no one is a call ahead."""
    barrier(left, right)

    def again(second):
        for device in (left, right):
            pl.semaphore_signal(second, 1, device_id=(device,))
        pl.semaphore_wait(second, 2)

    pl.run_scoped(again, pltpu.SemaphoreType.REGULAR)


def permute_kernel(x_ref, o_ref, send, recv, *, enter=double_barrier, mistake=""):
    _, _, left, right = neighbours()
    enter(left, right)
    copy = pltpu.make_async_remote_copy(x_ref, o_ref, send, recv, device_id=(right,))
    copy.start()
    if mistake not in ("send not awaited", "never awaited"):
        copy.wait_send()
    if mistake not in ("receive not awaited", "never awaited"):
        copy.wait_recv()


def permute(x, **options):
    return pl.pallas_call(
        partial(permute_kernel, **options),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[HBM],
        out_specs=HBM,
        scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
        compiler_params=pltpu.CompilerParams(collective_id=0),
    )(x)


def ring_gather_kernel(x_ref, o_ref, local, send, recv, *, enter=double_barrier, mistake=""):
    """In each step the newest piece goes to the right neighbour."""
    me, n, left, right = neighbours()
    if mistake != "no barrier":
        enter(left, right)
    copy = pltpu.make_async_copy(x_ref, o_ref.at[me], local)
    copy.start()
    if mistake != "own piece sent before it is there":
        copy.wait()
    for step in range(n - 1):
        slot = lax.rem(me - step + n, n)
        if mistake == "index off by one":
            slot = lax.rem(slot + 1, n)
        target = left if mistake == "wrong side" else right
        number = 0 if mistake == "shared semaphore" else step
        copy = pltpu.make_async_remote_copy(
            o_ref.at[slot], o_ref.at[slot], send.at[number], recv.at[number], device_id=(target,)
        )
        copy.start()
        if mistake == "receive not awaited" and step == n - 2:
            copy.wait_send()
        elif mistake == "send not awaited" and step == 0:
            copy.wait_recv()
        elif mistake == "awaited late" and step == 0:
            early = copy
        else:
            copy.wait()
    if mistake == "awaited late":
        early.wait()
    if mistake == "own piece sent before it is there":
        pltpu.make_async_copy(x_ref, o_ref.at[me], local).wait()


def ring_gather(x, **options):
    n = lax.axis_size("x")
    return pl.pallas_call(
        partial(ring_gather_kernel, **options),
        out_shape=jax.ShapeDtypeStruct((n, *x.shape), x.dtype),
        in_specs=[HBM],
        out_specs=HBM,
        scratch_shapes=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA((n,)), pltpu.SemaphoreType.DMA((n,))],
        compiler_params=pltpu.CompilerParams(collective_id=1),
    )(x)


def ring_sum_kernel(x_ref, o_ref, buffers, local, send, recv, capacity, *, enter=double_barrier, mistake=""):
    """All shards go around the ring, through two buffers. A neighbour says when a buffer of its is free again."""
    _, n, left, right = neighbours()
    step = pl.program_id(0)
    slot, other = lax.rem(step, 2), lax.rem(step + 1, 2)

    @pl.when(step == 0)
    def _():
        if mistake != "no barrier":
            enter(left, right)
        o_ref[...] = jnp.zeros_like(o_ref)
        copy = pltpu.make_async_copy(x_ref, buffers.at[slot], local)
        copy.start()
        if mistake != "local not awaited":
            copy.wait()

    if mistake not in ("no capacity", "free buffer a step early"):

        @pl.when(step > 0)
        def _():
            pl.semaphore_wait(capacity, 1)

    used = slot if mistake == "same buffer" else other
    to = left if mistake == "wrong side" else right
    copy = pltpu.make_async_remote_copy(
        buffers.at[slot],
        buffers.at[used],
        send.at[slot],
        recv.at[other],
        device_id=(to,),
    )
    copy.start()
    if mistake == "added before the copy":
        o_ref[...] += buffers[other]
    else:
        o_ref[...] += buffers[slot]
    copy.wait_send()
    if mistake != "receive not awaited":
        copy.wait_recv()

    # The left neighbour may write to the buffer of this step once its content is sent on.
    if mistake not in ("no capacity", "signal left out"):
        last = n if mistake == "one signal too many" else n - 1
        side = right if mistake == "signal to the wrong side" else left

        @pl.when(step < last - (1 if mistake == "one signal too few" else 0))
        def _():
            pl.semaphore_signal(capacity, 1, device_id=(side,))


def ring_sum(x, **options):
    n = lax.axis_size("x")
    return pl.pallas_call(
        partial(ring_sum_kernel, **options),
        grid=(n,),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[HBM],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[
            pltpu.VMEM((2, *x.shape), x.dtype),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.REGULAR,
        ],
        compiler_params=pltpu.CompilerParams(collective_id=2),
    )(x)


def ring_scatter_kernel(x_ref, o_ref, buffers, send, recv, capacity, *, enter=double_barrier, mistake=""):
    """A sum of each piece goes around the ring and ends where it belongs, through two buffers."""
    me, n, left, right = neighbours()
    if mistake != "no barrier":
        enter(left, right)
    first = me if mistake == "index off by one" else lax.rem(me + n - 1, n)
    buffers[0] = x_ref[first]
    for step in range(n - 1):
        slot, other = step % 2, (step + 1) % 2
        if mistake == "same buffer":
            other = slot
        if step > 0 and mistake != "no capacity":
            pl.semaphore_wait(capacity, 1)
        copy = pltpu.make_async_remote_copy(
            buffers.at[slot], buffers.at[other], send.at[slot], recv.at[other], device_id=(right,)
        )
        copy.start()
        if mistake != "send not awaited":
            copy.wait_send()
        signals = step < n - 2 and mistake not in ("no capacity", "signal left out")
        if signals and mistake != "signal after the next":
            side = right if mistake == "signal to the wrong side" else left
            pl.semaphore_signal(capacity, 1, device_id=(side,))
        if mistake != "receive not awaited":
            copy.wait_recv()
        piece = lax.rem(me - step - 2 + 2 * n, n)
        buffers[other] = buffers[other] + x_ref[piece]
        if mistake == "send not awaited":
            copy.wait_send()
    o_ref[...] = buffers[(n - 1) % 2]


def ring_scatter(x, **options):
    n = lax.axis_size("x")
    x = x.reshape(n, -1, *x.shape[1:])
    return pl.pallas_call(
        partial(ring_scatter_kernel, **options),
        out_shape=jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
        out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
        scratch_shapes=[
            pltpu.VMEM((2, *x.shape[1:]), x.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.REGULAR,
        ],
        compiler_params=pltpu.CompilerParams(collective_id=3),
    )(x)
