"""How long the proof of a kernel's orders takes: by devices, steps and buffers.

    python -m benchmarks.kernel_orders

A ring in which every device passes a piece on for some steps through some buffers, called twice.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing.kernels import check_orders


def make_ring(steps: int, buffers: int) -> Any:
    """A function that passes a piece around for some steps through some buffers."""

    def kernel(x_ref: Any, o_ref: Any, pieces: Any, send: Any, recv: Any, free: Any) -> None:
        me, n = lax.axis_index("x"), lax.axis_size("x")
        left, right = lax.rem(me + n - 1, n), lax.rem(me + 1, n)
        barrier = pltpu.get_barrier_semaphore()
        for _ in range(2):  # in the second round of it all have seen the first
            for device in range(n):
                pl.semaphore_signal(barrier, 1, device_id=(device,))
            pl.semaphore_wait(barrier, n)
        pieces[0] = x_ref[...]
        for step in range(steps):
            slot, other = step % buffers, (step + 1) % buffers
            if step >= buffers - 1:
                pl.semaphore_wait(free, 1)
            copy = pltpu.make_async_remote_copy(
                pieces.at[slot], pieces.at[other], send.at[slot], recv.at[other], device_id=(right,)
            )
            copy.start()
            copy.wait()
            if step + buffers - 1 < steps:
                pl.semaphore_signal(free, 1, device_id=(left,))
        o_ref[...] = pieces[steps % buffers]

    def call(x: jax.Array) -> Any:
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=[
                pltpu.VMEM((buffers, *x.shape), x.dtype),
                pltpu.SemaphoreType.DMA((buffers,)),
                pltpu.SemaphoreType.DMA((buffers,)),
                pltpu.SemaphoreType.REGULAR,
            ],
            compiler_params=pltpu.CompilerParams(collective_id=0),
        )(x)

    return call


def main() -> None:
    """Prints the table."""
    print(f"{'devices':>8}{'steps':>7}{'buffers':>9}{'events':>8}{'CPU s':>8}")
    for devices, steps, buffers in ((2, 4, 2), (4, 3, 2), (4, 8, 2), (4, 8, 4), (4, 16, 2), (8, 8, 2), (16, 8, 2)):
        x = np.zeros((devices, 8), np.float32)
        start = time.process_time()
        proof = check_orders(
            make_ring(steps, buffers), mesh=sk.abstract_mesh(x=devices), in_specs=P("x"), out_specs=P("x"), args=(x,)
        )
        print(f"{devices:>8}{steps:>7}{buffers:>9}{proof.events:>8}{time.process_time() - start:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
