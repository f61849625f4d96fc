"""Attention over a sequence that is split over devices: zigzag ring, contiguous ring, Ulysses, gathered and masked.

    python -m benchmarks.context            on simulated devices: what skipping saves
    python -m benchmarks.context --tpu      compiled for v5e:2x4: what the ring hides behind compute

Forward and backward of one causal layer. Pairs are half of a device's queries with half of a device's keys, on the
device that has most of them, which sets the pace where every device has a chip of its own. Simulated devices share the
CPU's cores: there the times follow the pairs of all devices together, and the ratio to a ring that visits every block
(it is not causal, so that its numbers are others) shows that what is masked is really skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start
from shardkit import bench
from shardkit.layers.attention import allowed, join_heads, scale_of, scores_of, split_heads

N = 8
SPEC = P(None, "c")
Arrays = tuple[jax.Array, jax.Array, jax.Array]
Kernel = Callable[..., jax.Array]


@jax.checkpoint
def gathered(q_btHK: jax.Array, k_btGK: jax.Array, v_btGK: jax.Array) -> jax.Array:
    """All keys and values on every device; later ones are masked, after their scores are computed."""
    k_bTGK, v_bTGK = sk.all_gather((k_btGK, v_btGK), "c", dim=1)
    q, k, v, _ = split_heads(q_btHK, k_bTGK, v_bTGK, None)
    mask = allowed(q, k, sk.axis_index("c") * q.shape[-2], None, None)
    weights = jax.nn.softmax(scores_of(q, k, mask, scale_of(q, None)), axis=-1).astype(v.dtype)
    return join_heads(jnp.einsum("bGRts,bGsK->bGRtK", weights, v))


def forms(tokens: int) -> dict[str, tuple[Kernel, int]]:
    """By name: the kernel, and the pairs of the device that has most of them; `tokens` is of one device."""
    half = tokens // 2
    ring = partial(sk.layers.ring_attention, axis="c", block=half)
    return {
        "gathered, masked": (gathered, 4 * N),
        "ring, contiguous": (partial(ring, order="contiguous"), 4 * N - 1),
        "ring, zigzag": (partial(ring, order="zigzag"), 2 * N + 1),
        "ulysses": (partial(sk.layers.ulysses_attention, axis="c", block=half), 2 * N + 1),
    }


def gradients(kernel: Kernel, mesh: Any) -> Callable[[Arrays], Arrays]:
    """Forward and backward of a kernel; the cotangent is its own result."""
    mapped = jax.shard_map(kernel, mesh=mesh, in_specs=SPEC, out_specs=SPEC)

    def both(arrays: Arrays) -> Arrays:
        y, backward = jax.vjp(mapped, *arrays)
        return backward(y)

    return both


def moved(both: Callable[[Arrays], Arrays], arrays: Arrays) -> Arrays:
    """One step: queries, keys and values against their gradients."""
    return jax.tree.map(lambda x, dx: x - 1e-3 * dx, arrays, both(arrays))


def on_one_device(arrays: Arrays, calls: int, *, causal: bool) -> Arrays:
    """What so many steps must give."""

    def both(arrays: Arrays) -> Arrays:
        y, backward = jax.vjp(partial(sk.layers.dot_attention, causal=causal), *arrays)
        return backward(y)

    step = jax.jit(partial(moved, both))
    for _ in range(calls):
        arrays = step(arrays)
    return arrays


def case(name: str, kernel: Kernel, mesh: Any, arrays: Arrays, expected: Arrays) -> bench.Case:
    """A step, the tokens in the order of the kernel."""
    tokens = arrays[0].shape[1]
    order = np.arange(tokens)
    if "zigzag" in name:
        chunks = order.reshape(2 * N, -1)
        order = np.concatenate([[chunks[i], chunks[-1 - i]] for i in range(N)]).reshape(-1)
    both = gradients(kernel, mesh)
    placed = jax.device_put(tuple(x[:, order] for x in arrays), NamedSharding(mesh, SPEC))
    back = np.argsort(order)
    checked = lambda carry, _: tuple(x[:, back] for x in carry)  # noqa: E731
    return bench.Case(name, lambda carry: (moved(both, carry), None), placed, (), checked, expected)


def drawn(tokens: int, heads: int, kv_heads: int, size: int) -> Arrays:
    """Queries, keys and values of one sequence."""
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (1, tokens, h, size)) for key, h in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    )
    return q, k, v


def compiled_rows(tokens: int, json_file: Any) -> None:
    """Compiles every form for v5e:2x4, bfloat16, 16 heads of 128 features, 8 of keys, and prints what it hides."""
    shapes = tuple(jax.ShapeDtypeStruct((1, N * tokens, heads, 128), jnp.bfloat16) for heads in (16, 8, 8))
    print("| v5e:2x4 | pairs | on the wire | asynchronous | wire | exposed | compute | temp | compiled in |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, (kernel, pairs) in forms(tokens).items():
        step = jax.jit(gradients(kernel, sk.abstract_mesh(c=N)))
        made = sk.aot.compile(step, (shapes,), topology="v5e:2x4")
        beside = sum(row.times for row in made.rows if row.asynchronous)
        times = (made.wire_seconds, made.exposed_seconds, made.compute.seconds)
        wire, exposed, compute = (f"{1e3 * seconds:.2f} ms" for seconds in times)
        temp = f"{made.memory.temp / 2**20:,.0f} MiB" if made.memory else "too much"
        sent = f"{float(made.sent()) / 2**20:,.0f} MiB"
        count = f"{beside} of {made.count()}"
        row = f"| {name} | {pairs} | {sent} | {count} | {wire} | {exposed} | {compute} | {temp} "
        print(f"{row}| {made.compile_seconds:.0f} s |", flush=True)
        if json_file is not None:
            record = {"benchmark": "context", "row": name, "tokens": tokens, "report": json.loads(made.to_json())}
            with json_file.open("a") as out:
                out.write(json.dumps(record) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    options = start(__doc__, argv, devices=N, tpu="compile for v5e:2x4 instead of running")
    if options.tpu:
        compiled_rows(256 if options.smoke else 2048, options.json)
        return
    tokens = 8 if options.smoke else 256
    mesh = sk.make_mesh(jax.devices()[:N], c=N)
    arrays = drawn(N * tokens, 8, 8, 16) if options.smoke else drawn(N * tokens, 8, 8, 64)
    calls, rounds = (1, 1) if options.smoke else (options.calls or 2, options.rounds or 10)
    causal, full = (on_one_device(arrays, calls, causal=causal) for causal in (True, False))
    cases = [case(name, kernel, mesh, arrays, causal) for name, (kernel, _) in forms(tokens).items()]
    everything = partial(sk.layers.ring_attention, axis="c", block=tokens // 2, causal=False)
    cases.append(case("ring, every block", everything, mesh, arrays, full))
    for name, (_, pairs) in forms(tokens).items():
        print(f"{name}: {pairs} half-chunk pairs on the device that has most")
    row = f"forward and backward, {N} x {tokens} tokens"
    records = bench.measure("context", row, cases, calls=calls, rounds=rounds, tolerance=1e-4)
    bench.report(records, options.json)


if __name__ == "__main__":
    main()
