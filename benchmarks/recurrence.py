"""A linear recurrence over a sequence that is split over eight devices, beside ring attention: bytes and time.

    python -m benchmarks.recurrence          on simulated devices: bytes, and CPU time of forward and backward
    python -m benchmarks.recurrence --tpu    compiled for v5e:2x4: wire, compute and memory

One layer of 4 heads, K = V = 64, one sequence. Ring attention is in zigzag order, in float32 as all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from shardkit import bench
from shardkit.meshes.layout import table

N, HEADS, WIDTH = 8, 4, 64
SPEC = P(None, "c")
Kernel = Callable[..., jax.Array]


def gated_deltanet(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
    """The recurrence with a matrix as the change of a device."""
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    erase = (jnp.exp(decay)[..., None] * k, k)
    return sk.layers.linear_recurrence(q, k, v, "c", log_decay=decay, erase=erase)


def mamba_2(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
    """One decay for each token and head."""
    return sk.layers.linear_recurrence(q, k, v, "c", log_decay=decay)


def gated_linear_attention(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
    """One decay for each row of the state."""
    rows = decay[..., None] * jnp.linspace(0.5, 1.0, WIDTH)
    return sk.layers.linear_recurrence(q, k, v, "c", log_decay=rows, chunk=16)


def ring(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, *, block: int) -> jax.Array:
    """Softmax attention."""
    return sk.layers.ring_attention(q, k, v, "c", order="zigzag", block=block)


def kernels(tokens: int) -> dict[str, Kernel]:
    """The layers by name, for sequences of so many tokens."""
    return {
        "ring attention": partial(ring, block=min(1024, tokens // N // 2)),
        "mamba-2": mamba_2,
        "gated linear attention": gated_linear_attention,
        "gated deltanet": gated_deltanet,
    }


def step_over(kernel: Kernel, mesh: Any) -> Callable[..., Any]:
    """Forward and backward; the cotangent is the result."""
    mapped = jax.shard_map(kernel, mesh=mesh, in_specs=SPEC, out_specs=SPEC)

    def step(arrays: Any) -> Any:
        y, backward = jax.vjp(mapped, *arrays)
        return backward(y)

    return step


def shapes(tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of queries, keys, values and decays."""
    dims = (1, tokens, HEADS, WIDTH)
    return (*(jax.ShapeDtypeStruct(dims, jnp.float32) for _ in range(3)), jax.ShapeDtypeStruct(dims[:3], jnp.float32))


def draw(tokens: int, mesh: Any) -> tuple[jax.Array, ...]:
    """Such arrays, with decays below 0."""
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, x.shape) for key, x in zip(keys, shapes(tokens), strict=True)]
    arrays[3] = -jnp.abs(arrays[3]) / 10
    return jax.device_put(tuple(arrays), NamedSharding(mesh, SPEC))


def time_all(tokens: int, rounds: int) -> dict[str, float]:
    """CPU milliseconds of each layer."""
    mesh = sk.make_mesh(c=N)
    arrays = draw(tokens, mesh)
    times = {}
    for name, kernel in kernels(tokens).items():  # a row for each: their results differ
        step = step_over(kernel, mesh)

        def move(arrays: Any, step: Any = step) -> Any:
            return jax.tree.map(lambda x, dx: x - 1e-4 * dx, arrays, step(arrays)), None

        cases = [bench.Case(name, move, arrays, (), lambda carry, _: carry)]
        [record] = bench.measure("recurrence", f"{tokens} tokens", cases, mode="dispatched", calls=1, rounds=rounds)
        times[name] = record["cpu_us_median"] / 1e3
    return times


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the bytes, and the CPU time or what the compiler for v5e says."""
    options = start(__doc__, argv, devices=N, tpu="compile for v5e:2x4")
    lengths: tuple[int, ...] = (4096, 16384)
    if options.tpu:
        lengths = (4096, 16384, 65536)
    if options.smoke:
        lengths = (256,)
    rows = [("tokens", "layer", "MB sent by a device", "hops", "CPU ms")]
    if options.tpu:
        rows = [("tokens", "layer", "MB sent by a device", "wire ms", "exposed ms", "compute ms", "temp MiB")]
    for tokens in lengths:
        times = {} if options.tpu else time_all(tokens, options.rounds or 3)
        for name, kernel in kernels(tokens).items():
            step = step_over(kernel, sk.abstract_mesh(c=N))
            census = sk.census(step, shapes(tokens))
            row: tuple[str, ...] = (f"{tokens:,}", name, f"{float(census.sent()) / 1e6:.2f}")
            if options.tpu:
                report = sk.aot.compile(jax.jit(step), (shapes(tokens),), topology="v5e:2x4")
                seconds = (report.wire_seconds, report.exposed_seconds, report.compute.seconds)
                row += (*(f"{1e3 * second:.2f}" for second in seconds), f"{report.memory.temp / 2**20:,.0f}")
            else:
                row += (str(census.count()), f"{times[name]:.0f}")
            rows.append(row)
            print("  ".join(row), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
