"""Attention over a sequence that is split over devices: zigzag ring, contiguous ring, Ulysses, gathered and masked.

    python -m benchmarks.context            on simulated devices: what skipping saves
    python -m benchmarks.context --tpu      compiled for v5e:2x4: what the ring hides behind compute
    python -m benchmarks.context --gpu      compiled for h100:1x1x8
    python -m benchmarks.context --documents    packed documents: in order, zigzag, and dealt by their lengths

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
from shardkit.layers.attention import choose_scale, join_heads, split_heads
from shardkit.layers.documents import count_pairs
from shardkit.layers.scores import compute_scores, make_mask
from shardkit.meshes.layout import table

N = 8
SPEC = P(None, "c")
Arrays = tuple[jax.Array, jax.Array, jax.Array]
Kernel = Callable[..., jax.Array]


@jax.checkpoint
def gathered(q_btHK: jax.Array, k_btGK: jax.Array, v_btGK: jax.Array) -> jax.Array:
    """All keys and values on every device; later ones are masked, after their scores are computed."""
    k_bTGK, v_bTGK = sk.all_gather((k_btGK, v_btGK), "c", dim=1)
    q, k, v, _ = split_heads(q_btHK, k_bTGK, v_bTGK, None)
    mask = make_mask(q, k, sk.axis_index("c") * q.shape[-2], None, None)
    weights = jax.nn.softmax(compute_scores(q, k, mask, choose_scale(q, None)), axis=-1).astype(v.dtype)
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


def compiled_rows(topology: str, tokens: int, json_file: Any) -> None:
    """Compiles every form for absent chips, bfloat16, 16 heads of 128 features, 8 of keys, and prints what it hides."""
    shapes = tuple(jax.ShapeDtypeStruct((1, N * tokens, heads, 128), jnp.bfloat16) for heads in (16, 8, 8))
    print(f"| {topology} | pairs | on the wire | asynchronous | wire | exposed | compute | temp | compiled in |")
    print("|---|---|---|---|---|---|---|---|---|")
    by_kernel = {
        "ring, zigzag, kernel": (partial(sk.layers.ring_attention, axis="c", order="zigzag", kernel=True), 2 * N + 1),
        "ulysses, kernel": (partial(sk.layers.ulysses_attention, axis="c", kernel=True), 2 * N + 1),
    }
    for name, (kernel, most) in (forms(tokens) | by_kernel).items():
        step = jax.jit(gradients(kernel, sk.abstract_mesh(c=N)))
        made = sk.aot.compile(step, (shapes,), topology=topology)
        beside = sum(row.times for row in made.rows if row.asynchronous)
        times = (made.wire_seconds, made.exposed_seconds, made.compute.seconds)
        wire, exposed, compute = (f"{1e3 * seconds:.2f} ms" for seconds in times)
        temp = f"{made.memory.temp / 2**20:,.0f} MiB" if made.memory else "too much"
        sent = f"{float(made.sent()) / 2**20:,.0f} MiB"
        count = f"{beside} of {made.count()}"
        row = f"| {name} | {most} | {sent} | {count} | {wire} | {exposed} | {compute} | {temp} "
        print(f"{row}| {made.compile_seconds:.0f} s |", flush=True)
        if json_file is not None:
            record = {"benchmark": "context", "row": name, "tokens": tokens, "report": json.loads(made.to_json())}
            with json_file.open("a") as out:
                out.write(json.dumps(record) + "\n")


def documents(tokens: int) -> dict[str, np.ndarray]:
    """Numbers of the documents of each token, by the distribution of their lengths."""
    rng = np.random.default_rng(0)
    lengths: dict[str, Any] = {
        "one": [tokens],
        "equal": [tokens // 32] * 32,
        "half, then short": [tokens // 2] + [tokens // 256] * 128,
        "short, then half": [tokens // 256] * 128 + [tokens // 2],
        "lognormal": np.maximum(1, tokens * rng.lognormal(-4.4, 1.5, 4000)),
        "pareto": np.maximum(1, tokens * (rng.pareto(1.1, 4000) + 1) / 512),
    }
    found = {name: np.repeat(np.arange(len(each)), np.asarray(each, int))[:tokens] for name, each in lengths.items()}
    return {name: np.pad(each, (0, tokens - len(each)), constant_values=-1) for name, each in found.items()}


def placed(segments: np.ndarray, block: int) -> dict[str, np.ndarray]:
    """The order of the tokens, device by device, in three ways."""
    places = np.arange(len(segments))
    chunks = places.reshape(2 * N, -1)
    zigzag = np.concatenate([[chunks[i], chunks[-1 - i]] for i in range(N)]).reshape(-1)
    return {"in order": places, "zigzag": zigzag, "dealt": sk.layers.deal(segments[None], N, block=block)[0]}


def dealt_rows(smoke: bool, calls: int, rounds: int, json_file: Any) -> None:
    """How even the pairs are, and what a step takes where tiles in which nothing is seen are skipped."""
    lines = [("documents", "in order", "zigzag", "dealt")]
    for name, segments in documents(32_768).items():
        seen = count_pairs(segments)
        most = [seen[order].reshape(N, -1).sum(1).max() / seen.sum() * N for order in placed(segments, 128).values()]
        lines.append((name, *(f"{each:.2f}" for each in most)))
    print(f"pairs of the device that has most, over the mean of {N}\n{table(lines)}", flush=True)
    tokens, block = (64, 4) if smoke else (2048, 64)
    segments = documents(tokens)["lognormal"]
    arrays, mesh = drawn(tokens, 8, 8, 64), sk.make_mesh(jax.devices()[:N], c=N)

    def alone(arrays: Arrays) -> Arrays:
        kernel = partial(sk.layers.dot_attention, segments_bt=jnp.asarray(segments[None], jnp.int32))
        y, backward = jax.vjp(kernel, *arrays)
        return backward(y)

    expected, step = arrays, jax.jit(partial(moved, alone))
    for _ in range(calls):
        expected = step(expected)
    cases = []
    for name, order in placed(segments, block).items():
        held = [
            jax.device_put(jnp.asarray(x[None], jnp.int32), NamedSharding(mesh, SPEC)) for x in (segments[order], order)
        ]

        def kernel(q: Any, k: Any, v: Any, segments: Any, positions: Any, name: str = name) -> jax.Array:
            own = {"positions_bt": positions} if name == "dealt" else {"order": name.replace("in order", "contiguous")}
            return sk.layers.ring_attention(q, k, v, "c", block=block, segments_bt=segments, **own)

        def both(arrays: Arrays, kernel: Any = kernel, held: Any = held) -> Arrays:
            mapped = jax.shard_map(kernel, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
            y, backward = jax.vjp(lambda *qkv: mapped(*qkv, *held), *arrays)
            return backward(y)

        start_from = jax.device_put(tuple(x[:, order] for x in arrays), NamedSharding(mesh, SPEC))
        back = np.argsort(order)
        checked = lambda carry, _, back=back: tuple(x[:, back] for x in carry)  # noqa: E731
        step_of = lambda carry, both=both: (moved(both, carry), None)  # noqa: E731
        cases.append(bench.Case(name, step_of, start_from, (), checked, expected))
    row = f"{tokens} tokens of lognormal documents, forward and backward"
    bench.report(bench.measure("context", row, cases, calls=calls, rounds=rounds, tolerance=1e-4), json_file)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    flags = {
        "tpu": "compile for v5e:2x4 instead of running",
        "gpu": "compile for h100:1x1x8 instead of running",
        "documents": "packed documents in three orders",
    }
    options = start(__doc__, argv, devices=N, **flags)
    if options.tpu or options.gpu:
        topology = "v5e:2x4" if options.tpu else "h100:1x1x8"
        compiled_rows(topology, 256 if options.smoke else 2048, options.json)
        return
    tokens = 8 if options.smoke else 256
    calls, rounds = (1, 1) if options.smoke else (options.calls or 2, options.rounds or 10)
    if options.documents:
        dealt_rows(options.smoke, calls, rounds, options.json)
        return
    mesh = sk.make_mesh(jax.devices()[:N], c=N)
    arrays = drawn(N * tokens, 8, 8, 16) if options.smoke else drawn(N * tokens, 8, 8, 64)
    causal, full = (on_one_device(arrays, calls, causal=causal) for causal in (True, False))
    cases = [case(name, kernel, mesh, arrays, causal) for name, (kernel, _) in forms(tokens).items()]
    everything = partial(sk.layers.ring_attention, axis="c", block=tokens // 2, causal=False)
    cases.append(case("ring, every block", everything, mesh, arrays, full))
    for name, (_, most) in forms(tokens).items():
        print(f"{name}: {most} half-chunk pairs on the device that has most")
    row = f"forward and backward, {N} x {tokens} tokens"
    records = bench.measure("context", row, cases, calls=calls, rounds=rounds, tolerance=1e-4)
    bench.report(records, options.json)


if __name__ == "__main__":
    main()
