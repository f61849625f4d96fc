"""A linear recurrence over a sequence that is split over eight devices, beside ring attention: bytes and time.

    python -m benchmarks.recurrence          on simulated devices: bytes, and CPU time of forward and backward
    python -m benchmarks.recurrence --tpu    compiled for v5e:2x4: wire, compute and memory

One layer of 4 heads, K = V = 64, one sequence. Ring attention is in zigzag order, in float32 as all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import shardkit as sk
from benchmarks.compiled import format_milliseconds, get_memory
from benchmarks.context import SPEC, Arrays, Layer, N, differentiate, map_sequence
from benchmarks.start import choose_rounds, start
from shardkit import bench
from shardkit.meshes.layout import table

HEADS = 4
WIDTH = 64  # of keys and of values


def apply_gated_deltanet(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
    """The recurrence with a matrix as the change of a device."""
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    erase = (jnp.exp(decay)[..., None] * k, k)
    return sk.layers.linear_recurrence(q, k, v, "c", log_decay=decay, erase=erase)


def apply_mamba_2(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
    """One decay for each token and head."""
    return sk.layers.linear_recurrence(q, k, v, "c", log_decay=decay)


def apply_gated_linear_attention(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array) -> jax.Array:
    """One decay for each row of the state."""
    rows = decay[..., None] * jnp.linspace(0.5, 1.0, WIDTH)
    return sk.layers.linear_recurrence(q, k, v, "c", log_decay=rows, chunk=16)


def attend_in_ring(q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, *, block: int) -> jax.Array:
    """Softmax attention."""
    return sk.layers.ring_attention(q, k, v, "c", order="zigzag", block=block)


def list_layers(tokens: int) -> dict[str, Layer]:
    """The layers by name, for sequences of so many tokens."""
    return {
        "ring attention": partial(attend_in_ring, block=min(1024, tokens // N // 2)),
        "mamba-2": apply_mamba_2,
        "gated linear attention": apply_gated_linear_attention,
        "gated deltanet": apply_gated_deltanet,
    }


def describe_arrays(tokens: int) -> tuple[Any, ...]:
    """The shapes of queries, keys, values and decays."""
    features = jax.ShapeDtypeStruct((1, tokens, HEADS, WIDTH), jnp.float32)
    decays = jax.ShapeDtypeStruct((1, tokens, HEADS), jnp.float32)
    return features, features, features, decays


def draw_arrays(tokens: int, mesh: Any) -> Arrays:
    """Such arrays, with decays below 0."""
    arrays = []
    keys = jax.random.split(jax.random.key(0), 4)
    for key, shape in zip(keys, describe_arrays(tokens), strict=True):
        arrays.append(jax.random.normal(key, shape.shape))
    # A decay above 0 would let the state grow without end.
    arrays[3] = -jnp.abs(arrays[3]) / 10
    return jax.device_put(tuple(arrays), NamedSharding(mesh, SPEC))


def time_layer(layer: Layer, tokens: int, rounds: int) -> float:
    """CPU milliseconds of forward and backward. A row of its own: no other layer has its results."""
    mesh = sk.make_mesh(c=N)
    compute_gradients = differentiate(map_sequence(layer, mesh))

    def step(arrays: Arrays) -> tuple[Arrays, None]:
        return jax.tree.map(lambda x, dx: x - 1e-4 * dx, arrays, compute_gradients(arrays)), None

    def get_carry(carry: Arrays, _: None) -> Arrays:
        return carry

    case = bench.Case("layer", step, draw_arrays(tokens, mesh), checked=get_carry)
    # CPU time: simulated devices share the cores, and the clock would show what else runs on them.
    [record] = bench.measure("recurrence", f"{tokens} tokens", [case], mode="dispatched", calls=1, rounds=rounds)
    return record["cpu_us_median"] / 1e3


def count_sent(layer: Layer, tokens: int) -> tuple[float, int]:
    """The bytes that a device sends forward and backward, and how often it sends."""
    compute_gradients = differentiate(map_sequence(layer, sk.abstract_mesh(c=N)))
    census = sk.census(compute_gradients, describe_arrays(tokens))
    return float(census.sent()), census.count()


def compile_layer(layer: Layer, tokens: int) -> tuple[str, ...]:
    """Milliseconds of wire, exposed wire and compute, and MiB of temporary memory, by the TPU's compiler."""
    compute_gradients = differentiate(map_sequence(layer, sk.abstract_mesh(c=N)))
    report = sk.aot.compile(jax.jit(compute_gradients), (describe_arrays(tokens),), topology="v5e:2x4")
    times = format_milliseconds(report.wire_seconds, report.exposed_seconds, report.compute.seconds)
    return *times, f"{get_memory(report).temp / 2**20:,.0f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the bytes, and the CPU time or what the compiler for v5e says."""
    options = start(__doc__, argv, devices=N, tpu="compile for v5e:2x4")
    rounds = choose_rounds(options, 3, smoke=3)
    rows: list[tuple[str, ...]]
    if options.tpu:
        lengths = [4096, 16384, 65536]
        rows = [("tokens", "layer", "MB sent by a device", "wire ms", "exposed ms", "compute ms", "temp MiB")]
    else:
        lengths = [4096, 16384]
        rows = [("tokens", "layer", "MB sent by a device", "hops", "CPU ms")]
    if options.smoke:
        lengths = [256]
    for tokens in lengths:
        for name, layer in list_layers(tokens).items():
            sent, hops = count_sent(layer, tokens)
            row: tuple[str, ...] = (f"{tokens:,}", name, f"{sent / 1e6:.2f}")
            if options.tpu:
                row += compile_layer(layer, tokens)
            else:
                row += (str(hops), f"{time_layer(layer, tokens, rounds):.0f}")
            rows.append(row)
            print("  ".join(row), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
