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

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.compiled import count_asynchronous, format_milliseconds
from benchmarks.start import choose_calls, choose_rounds, start
from shardkit import bench
from shardkit.bench.records import write
from shardkit.layers.attention import choose_scale, join_heads, split_heads
from shardkit.layers.documents import count_pairs
from shardkit.layers.scores import compute_scores, make_mask
from shardkit.meshes.layout import table

N = 8
SPEC = P(None, "c")
Arrays = tuple[jax.Array, ...]
Layer = Callable[..., jax.Array]


@jax.checkpoint
def attend_gathered(q_btHK: jax.Array, k_btGK: jax.Array, v_btGK: jax.Array) -> jax.Array:
    """All keys and values on every device; later ones are masked, after their scores are computed."""
    k_bTGK, v_bTGK = sk.all_gather((k_btGK, v_btGK), "c", dim=1)
    q, k, v, _ = split_heads(q_btHK, k_bTGK, v_bTGK, None)
    mask = make_mask(q, k, sk.axis_index("c") * q.shape[-2], None, None)
    scores = compute_scores(q, k, mask, choose_scale(q, None))
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return join_heads(jnp.einsum("bGRts,bGsK->bGRtK", weights, v))


class Form(NamedTuple):
    """One of the ways to compute attention over a split sequence."""

    name: str
    kernel: Layer
    pairs: int  # of the device that has most of them
    zigzag: bool = False  # whether the kernel has its tokens in zigzag order


def list_forms(tokens: int) -> list[Form]:
    """The forms that every machine runs; `tokens` is of one device.

    A ring skips blocks in which nothing is seen. Of 4 devices in contiguous order, in halves of a device's tokens, the
    first computes 3 pairs of its own, and the last 3 and all 3 x 4 before it: 4 x 4 - 1. In zigzag order each device
    has an early half and a late one, and computes 2 x 4 + 1.
    """
    # Blocks of half of a device's tokens are the pairs that are counted: what is skipped is whole blocks.
    half = tokens // 2
    ring = partial(sk.layers.ring_attention, axis="c", block=half)
    ulysses = partial(sk.layers.ulysses_attention, axis="c", block=half)
    return [
        Form("gathered, masked", attend_gathered, 4 * N),
        Form("ring, contiguous", partial(ring, order="contiguous"), 4 * N - 1),
        Form("ring, zigzag", partial(ring, order="zigzag"), 2 * N + 1, zigzag=True),
        Form("ulysses", ulysses, 2 * N + 1),
    ]


def list_chip_forms() -> list[Form]:
    """The forms with the attention kernels of chips, which CPUs do not have."""
    ring = partial(sk.layers.ring_attention, axis="c", order="zigzag", kernel=True)
    ulysses = partial(sk.layers.ulysses_attention, axis="c", kernel=True)
    return [
        Form("ring, zigzag, kernel", ring, 2 * N + 1, zigzag=True),
        Form("ulysses, kernel", ulysses, 2 * N + 1),
    ]


def differentiate(layer: Layer) -> Callable[[Arrays], Arrays]:
    """Forward and backward of a layer. The cotangent is its own result: a loss would be measured, too."""

    def compute_gradients(arrays: Arrays) -> Arrays:
        y, backward = jax.vjp(layer, *arrays)
        return backward(y)

    return compute_gradients


def map_sequence(kernel: Layer, mesh: Any) -> Layer:
    """A kernel over a mesh whose devices have parts of the sequence."""
    return jax.shard_map(kernel, mesh=mesh, in_specs=SPEC, out_specs=SPEC)


def make_step(layer: Layer) -> Callable[[Arrays], Arrays]:
    """A step: queries, keys and values against their gradients.

    The next call depends on the result, so that a loop around it computes everything.
    """
    compute_gradients = differentiate(layer)

    def step(arrays: Arrays) -> Arrays:
        # A small step: what rounding changes must not grow from call to call.
        return jax.tree.map(lambda x, dx: x - 1e-3 * dx, arrays, compute_gradients(arrays))

    return step


def run_on_one_device(layer: Layer, arrays: Arrays, calls: int) -> Arrays:
    """What so many steps must give."""
    step = jax.jit(make_step(layer))
    for _ in range(calls):
        arrays = step(arrays)
    return arrays


def order_zigzag(tokens: int) -> np.ndarray:
    """The order of tokens in which device i has chunk i and the i-th from the end.

    For example 8 tokens, if N were 2: chunks 01 23 45 67, of which device 0 has 01 67, and device 1 has 23 45.
    """
    chunks = np.arange(tokens).reshape(2 * N, -1)
    order = []
    for device in range(N):
        order.append(chunks[device])
        order.append(chunks[-1 - device])
    return np.concatenate(order)


def make_case(name: str, layer: Layer, mesh: Any, arrays: Arrays, order: np.ndarray, expected: Arrays) -> bench.Case:
    """A step with the tokens in an order; they are compared in the order in which they were."""
    step = make_step(layer)
    back = np.argsort(order)

    def call_step(carry: Arrays) -> tuple[Arrays, None]:
        return step(carry), None

    def put_in_order(carry: Arrays, _: None) -> Arrays:
        return tuple(x[:, back] for x in carry)

    carry = jax.device_put(tuple(x[:, order] for x in arrays), NamedSharding(mesh, SPEC))
    return bench.Case(name, call_step, carry, checked=put_in_order, expected=expected)


def draw_arrays(tokens: int, size: int) -> Arrays:
    """Queries, keys and values of one sequence, of eight heads."""
    arrays = []
    for key in jax.random.split(jax.random.key(0), 3):
        arrays.append(jax.random.normal(key, (1, tokens, 8, size)))
    return tuple(arrays)


def compile_forms(topology: str, tokens: int, file: Path | None) -> None:
    """Compiles every form for absent chips, bfloat16, 16 heads of 128 features, 8 of keys, and prints what it hides."""
    q = jax.ShapeDtypeStruct((1, N * tokens, 16, 128), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((1, N * tokens, 8, 128), jnp.bfloat16)
    print(f"| {topology} | pairs | on the wire | asynchronous | wire | exposed | compute | temp | compiled in |")
    print("|---|---|---|---|---|---|---|---|---|")
    for form in list_forms(tokens) + list_chip_forms():
        step = jax.jit(differentiate(map_sequence(form.kernel, sk.abstract_mesh(c=N))))
        report = sk.aot.compile(step, ((q, kv, kv),), topology=topology)
        temp = "too much"
        if report.memory is not None:
            temp = f"{report.memory.temp / 2**20:,.0f} MiB"
        cells = [
            form.name,
            str(form.pairs),
            f"{float(report.sent()) / 2**20:,.0f} MiB",
            f"{count_asynchronous(report)} of {report.count()}",
        ]
        for time in format_milliseconds(report.wire_seconds, report.exposed_seconds, report.compute.seconds):
            cells.append(f"{time} ms")
        cells += [temp, f"{report.compile_seconds:.0f} s"]
        print(f"| {' | '.join(cells)} |", flush=True)
        if file is not None:
            record = {"benchmark": "context", "row": form.name, "tokens": tokens}
            write([record | {"report": json.loads(report.to_json())}], file)


def draw_lengths(tokens: int) -> dict[str, np.ndarray]:
    """Lengths of packed documents, by their distribution; those that are drawn are more than fit."""
    rng = np.random.default_rng(0)
    short = np.full(128, tokens // 256)
    half = np.array([tokens // 2])
    return {
        "one": np.array([tokens]),
        "equal": np.full(32, tokens // 32),
        "half, then short": np.concatenate([half, short]),
        "short, then half": np.concatenate([short, half]),
        "lognormal": np.maximum(1, tokens * rng.lognormal(-4.4, 1.5, 4000)),
        "pareto": np.maximum(1, tokens * (rng.pareto(1.1, 4000) + 1) / 512),
    }


def number_documents(lengths: np.ndarray, tokens: int) -> np.ndarray:
    """The number of the document of each token; -1 after the last one.

    For example documents of 2 and 1 in 5 tokens: 0 0 1 -1 -1.
    """
    segments = np.repeat(np.arange(len(lengths)), lengths.astype(int))[:tokens]
    return np.pad(segments, (0, tokens - len(segments)), constant_values=-1)


def list_orders(segments: np.ndarray, block: int) -> dict[str, np.ndarray]:
    """The order of the tokens, device by device, in three ways."""
    tokens = len(segments)
    return {
        "in order": np.arange(tokens),
        "zigzag": order_zigzag(tokens),
        "dealt": sk.layers.deal(segments[None], N, block=block)[0],
    }


def print_balance(tokens: int) -> None:
    """Prints how evenly each order gives the pairs to the devices."""
    rows: list[tuple[str, ...]] = [("documents", "in order", "zigzag", "dealt")]
    for name, lengths in draw_lengths(tokens).items():
        segments = number_documents(lengths, tokens)
        pairs = count_pairs(segments)
        cells = [name]
        for order in list_orders(segments, 128).values():
            by_device = pairs[order].reshape(N, -1).sum(1)
            cells.append(f"{by_device.max() / by_device.mean():.2f}")
        rows.append(tuple(cells))
    print(f"pairs of the device that has most, over the mean of {N}\n{table(rows)}", flush=True)


def make_document_layer(name: str, segments: np.ndarray, order: np.ndarray, block: int, mesh: Any) -> Layer:
    """Ring attention over packed documents whose tokens are in an order."""
    layout = NamedSharding(mesh, SPEC)
    placed_segments = jax.device_put(jnp.asarray(segments[None, order], jnp.int32), layout)
    placed_positions = jax.device_put(jnp.asarray(order[None], jnp.int32), layout)

    def attend(q: Any, k: Any, v: Any, segments: Any, positions: Any) -> jax.Array:
        options: dict[str, Any] = {"block": block, "segments_bt": segments}
        if name == "in order":
            options["order"] = "contiguous"
        elif name == "zigzag":
            options["order"] = "zigzag"
        else:
            options["positions_bt"] = positions
        return sk.layers.ring_attention(q, k, v, "c", **options)

    mapped = map_sequence(attend, mesh)

    # Segments and positions are data of the layer, and no arrays that a step changes.
    def layer(q: Any, k: Any, v: Any) -> jax.Array:
        return mapped(q, k, v, placed_segments, placed_positions)

    return layer


def measure_documents(options: argparse.Namespace, calls: int, rounds: int) -> None:
    """How even the pairs are, and what a step takes where tiles in which nothing is seen are skipped."""
    print_balance(32_768)
    tokens = 2048
    block = 64
    if options.smoke:
        tokens = 64
        block = 4
    segments = number_documents(draw_lengths(tokens)["lognormal"], tokens)
    mesh = sk.make_mesh(jax.devices()[:N], c=N)
    arrays = draw_arrays(tokens, 64)
    on_one_device = partial(sk.layers.dot_attention, segments_bt=jnp.asarray(segments[None], jnp.int32))
    expected = run_on_one_device(on_one_device, arrays, calls)
    cases = []
    for name, order in list_orders(segments, block).items():
        layer = make_document_layer(name, segments, order, block, mesh)
        cases.append(make_case(name, layer, mesh, arrays, order, expected))
    row = f"{tokens} tokens of lognormal documents, forward and backward"
    records = bench.measure("context", row, cases, calls=calls, rounds=rounds, tolerance=1e-4)
    bench.report(records, options.json)


def measure_forms(options: argparse.Namespace, calls: int, rounds: int) -> None:
    """Times every form, and a ring that visits every block, over one sequence."""
    tokens = 256
    size = 64
    if options.smoke:
        tokens = 8
        size = 16
    mesh = sk.make_mesh(jax.devices()[:N], c=N)
    arrays = draw_arrays(N * tokens, size)
    contiguous = np.arange(N * tokens)
    causal_result = run_on_one_device(partial(sk.layers.dot_attention, causal=True), arrays, calls)
    full_result = run_on_one_device(partial(sk.layers.dot_attention, causal=False), arrays, calls)
    cases = []
    for form in list_forms(tokens):
        order = contiguous
        if form.zigzag:
            order = order_zigzag(N * tokens)
        layer = map_sequence(form.kernel, mesh)
        cases.append(make_case(form.name, layer, mesh, arrays, order, causal_result))
    # Not causal, so that it skips nothing: what a causal ring would take if its mask saved no work.
    full = map_sequence(partial(sk.layers.ring_attention, axis="c", block=tokens // 2, causal=False), mesh)
    cases.append(make_case("ring, every block", full, mesh, arrays, contiguous, full_result))
    for form in list_forms(tokens):
        print(f"{form.name}: {form.pairs} half-chunk pairs on the device that has most")
    row = f"forward and backward, {N} x {tokens} tokens"
    records = bench.measure("context", row, cases, calls=calls, rounds=rounds, tolerance=1e-4)
    bench.report(records, options.json)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    options = start(
        __doc__,
        argv,
        devices=N,
        tpu="compile for v5e:2x4 instead of running",
        gpu="compile for h100:1x1x8 instead of running",
        documents="packed documents in three orders",
    )
    tokens = 2048
    if options.smoke:
        tokens = 256
    calls = choose_calls(options, 2, smoke=1)
    rounds = choose_rounds(options, 10, smoke=1)
    if options.tpu:
        compile_forms("v5e:2x4", tokens, options.json)
    elif options.gpu:
        compile_forms("h100:1x1x8", tokens, options.json)
    elif options.documents:
        measure_documents(options, calls, rounds)
    else:
        measure_forms(options, calls, rounds)


if __name__ == "__main__":
    main()
