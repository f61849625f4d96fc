"""Ways to sum over eight devices: one psum, its two halves, rings, a fixed order, buckets of leaves, compressed.

The array is float32, of the size in the row on every device, and equal on all of them, with values that every small
dtype holds exactly: all variants must give the same numbers. Leaves are sixteen slices of it. The compressed forms
carry their residual from call to call. Rows are measured inside one jit, so that dispatch from Python does not count.
On simulated devices a byte costs a memory copy, so that quantising can only lose: what it saves is on the wire, and
that is what `--explain` prints, from the census.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from shardkit import bench
from shardkit.analysis import census
from shardkit.collectives import all_reduce_tree, compressed

KIB = 2**10
LEAVES = 16
SIZES = {"1 KiB": KIB, "16 KiB": 16 * KIB, "256 KiB": 256 * KIB, "4 MiB": 4096 * KIB, "16 MiB": 16384 * KIB}
CALLS = {"1 KiB": 200, "16 KiB": 200, "256 KiB": 50, "4 MiB": 10, "16 MiB": 3}
Kernel = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def kernels() -> dict[str, Kernel]:
    """By name: x and residual on one device to the sum over all of them and the new residual."""

    def whole(reduce: Callable[[Any], Any]) -> Kernel:
        return lambda x, residual: (reduce(x), residual)

    def leaves(reduce: Callable[[Any], Any]) -> Kernel:
        return lambda x, residual: (jnp.concatenate(reduce(jnp.split(x, LEAVES))), residual)

    def small(dtype: Any, compress_result: bool = False) -> Kernel:
        options = {"dtype": dtype, "compress_result": compress_result}
        return lambda x, residual: compressed.all_reduce(x, "data", residual, **options)

    def pair(x: jax.Array) -> jax.Array:
        return sk.all_gather(sk.reduce_scatter(x, "data"), "data", replicated=True)

    return {
        "psum": whole(lambda x: sk.all_reduce(x, "data")),
        "reduce_scatter + all_gather": whole(pair),
        "ring": whole(lambda x: sk.ring.all_reduce(x, "data")),
        "ring both ways": whole(lambda x: sk.ring.all_reduce(x, "data", bidirectional=True)),
        "deterministic": whole(lambda x: sk.all_reduce(x[None], "data", deterministic=True)),
        f"psum of {LEAVES} leaves": leaves(lambda tree: sk.all_reduce(tree, "data")),
        f"bucket of {LEAVES} leaves": leaves(lambda tree: all_reduce_tree(tree, "data")),
        "bfloat16": small(jnp.bfloat16),
        "float8": small(jnp.float8_e4m3fn),
        "int8": small(jnp.int8),
        "int8 twice": small(jnp.int8, compress_result=True),
    }


def variant(name: str, kernel: Kernel, mesh: Mesh, size: int) -> bench.Case:
    """The mean over the devices, again and again: it stays what it is."""

    def device(x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, residual = kernel(x[0], residual[0])
        return sk.vary(total / mesh.size, "data")[None], residual[None]

    on_mesh = jax.shard_map(device, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    x = jnp.broadcast_to(jnp.arange(size // 4, dtype=jnp.float32) % 15 - 7, (mesh.size, size // 4))
    carry = jax.device_put((x, jnp.zeros_like(x)), NamedSharding(mesh, P("data")))
    return bench.Case(name, lambda carry: (on_mesh(*carry), None), carry)


def explain(each: bench.Case) -> str:
    """The collectives of one call and the bytes that each device sends."""
    found = census(each.step, each.carry)
    return f"{each.name}: {found.count()} collectives, {float(found.sent()) / KIB:,.1f} KiB sent by each device"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a row for each size."""
    options = start(__doc__, argv, devices=8, explain="count collectives and bytes instead of timing")
    mesh = sk.make_mesh(data=-1)
    for label, size in SIZES.items():
        if options.smoke and size > KIB:
            break
        row = f"{label}, data={mesh.size}"
        variants = [variant(name, kernel, mesh, size) for name, kernel in kernels().items()]
        if options.explain:
            print("\n".join(["", row, *map(explain, variants)]), flush=True)
            continue
        calls = options.calls or (2 if options.smoke else CALLS[label])
        rounds = options.rounds or (2 if options.smoke else 20)
        records = bench.measure("collectives", row, variants, calls=calls, rounds=rounds)
        bench.report(records, options.json)


if __name__ == "__main__":
    main()
