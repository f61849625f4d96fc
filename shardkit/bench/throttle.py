"""All_reduce over a throttled link between network namespaces: plain, hierarchical, compressed, and both.

Here a clock is honest although all devices are simulated: the link takes most of the time. Two processes on two hosts
(`namespaces.py`) hold some CPU devices each, and jax's gloo collectives send between them through TCP.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._check import whole
from shardkit.bench import namespaces
from shardkit.bench.measure import Case, measure
from shardkit.bench.records import Record
from shardkit.bench.rounds import Sample, summarise
from shardkit.layout import table

LABEL = "throttled link between network namespaces"
_BOTH = ("host", "local")
_COUNTED = 3  # calls over which the bytes of the interface are counted


def _two_levels(x: jax.Array, dtype: Any) -> jax.Array:
    part = sk.reduce_scatter(x, "local")
    total, _ = sk.compressed.all_reduce(part, "host", dtype=dtype, compress_result=True)
    return sk.all_gather(total, "local", replicated=True)


def _one_level(x: jax.Array, dtype: Any) -> jax.Array:
    return sk.compressed.all_reduce(x, _BOTH, dtype=dtype, compress_result=True)[0]


WAYS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "plain": lambda x: sk.all_reduce(x, _BOTH),
    "hierarchical": lambda x: sk.hierarchical.all_reduce(x, "local", "host"),
    "bfloat16": partial(_one_level, dtype=jnp.bfloat16),
    "int8": partial(_one_level, dtype=jnp.int8),
    "hierarchical, bfloat16": partial(_two_levels, dtype=jnp.bfloat16),
    "hierarchical, int8": partial(_two_levels, dtype=jnp.int8),
}


def throttled(
    *, rate: str = "100mbit", devices: int = 2, sizes: Sequence[int] = (2**18, 2**20, 2**22), rounds: int = 7
) -> list[Record]:
    """Measures all_reduce over two hosts made on this machine, with a throttled link between them.

    Args:
        rate: of the link each way, as "100mbit".
        devices: simulated devices of each host.
        sizes: bytes of the operand on each device, of float32.
        rounds: timed rounds.

    Returns:
        Records, one per size and way: those of `measure` of whole calls from Python, in which a round took as long as
        on the host that came last; "link_bytes", what one host's interface sent per call, beside
        "link_bytes_expected", by the census; "expected_us", by the rate (`expected_seconds`); and "achieved":
        expected over measured.

    Raises:
        RuntimeError: without root, `ip`, `tc` and `unshare`, or where the system does not allow namespaces.
        ValueError: a rate that is none, or a number below 1.

    Example:
        shardkit.bench.report(shardkit.bench.throttled(rate="1gbit", sizes=[2**20]), line=str)
    """
    namespaces.bits(rate)
    devices, rounds, *sizes = whole(
        "throttled", devices=devices, rounds=rounds, **{f"sizes[{i}]": s for i, s in enumerate(sizes)}
    )
    with namespaces.made(rate) as pair, namespaces.scratch() as folder:
        asked = {"rate": rate, "sizes": sizes, "rounds": rounds, "ends": pair.ends}
        (folder / "asked.json").write_text(json.dumps(asked))
        namespaces.run(pair, "shardkit.bench.throttle_child", folder, devices=devices)
        hosts = [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]
    return [record for rows in zip(*hosts, strict=True) for record in _merged(*rows)]


def in_words(records: Sequence[Record]) -> str:
    """The records as a table: milliseconds a call, megabytes from one host to the other, and what was expected."""
    head = ("link", "bytes", "way", "ms [p10, p90]", "to plain", "MB sent", "by census", "expected ms", "achieved")
    rows = [head]
    for r in records:
        spread = ", ".join(f"{r[f'wall_us_{q}'] / 1e3:.1f}" for q in ("p10", "p90"))
        rows.append(
            (
                r["rate"],
                f"{r['bytes']:,}",
                r["case"],
                f"{r['wall_us_median'] / 1e3:.1f} [{spread}]",
                f"{r['wall_ratio_median']:.2f}",
                f"{r['link_bytes'] / 1e6:.2f}",
                f"{r['link_bytes_expected'] / 1e6:.2f}",
                f"{r['expected_us'] / 1e3:.1f}",
                f"{r['achieved']:.0%}",
            )
        )
    return f"{LABEL}\n{table(rows)}"


def crossing(kind: str, axes: Sequence[str], sent: Fraction | float, local: int) -> Fraction:
    """The bytes that one of two hosts sends to the other in a collective in which each device sends `sent` bytes.

    Over the host axis alone, each of the `local` devices of a host sends to its partner. Over both axes the ring passes
    from host to host once in each direction; an all_to_all sends n/2 of the n-1 messages of each device across.
    """
    if "host" not in axes:
        return Fraction(0)
    each = Fraction(sent)
    if "local" not in axes:
        return local * each
    n = 2 * local
    return local * each * Fraction(local, n - 1) if kind == "all_to_all" else each


def expected_seconds(across: float, hops: int, rate: str, *, call: float, message: float) -> float:
    """The alpha-beta model of the link: the call, its messages one after the other, and the bytes at the rate.

    Args:
        across: bytes from one host to the other.
        hops: messages one after the other.
        rate: of the link. What the queue lets through at once after the pause before the call takes no time.
        call: seconds of a call that sends nothing.
        message: seconds of a small message.
    """
    return call + hops * message + 8 * max(0.0, across - namespaces.burst(rate)) / namespaces.bits(rate)


def measured(asked: Mapping[str, Any], tx_bytes: Callable[[], int]) -> list[list[Record]]:
    """What one of the processes measures, size by size; both must call it at the same time.

    Args:
        asked: "rate", "sizes" and "rounds".
        tx_bytes: the bytes that this host's interface has sent.
    """
    mesh = sk.make_mesh(host=2, local=-1)
    local, out = mesh.shape["local"], []
    call, message = _latency(mesh)
    for size in asked["sizes"]:
        elements = max(1, size // 4)
        x, expected = operand(mesh, elements)
        cases, fields = [], {}
        for name, way in WAYS.items():
            kernel = jax.shard_map(lambda x, way=way: way(x[0]), mesh=mesh, in_specs=P(_BOTH), out_specs=P())
            step = jax.jit(lambda x, kernel=kernel: (x, kernel(x)), donate_argnums=0)
            cases.append(Case(name, step, x, (), lambda _, value: _here(value), [expected] * local))
            rows = [row for row in sk.census(kernel, x).rows if "host" in row.axes]
            across = float(sum(crossing(row.kind, row.axes, row.total, local) for row in rows))
            hops = sum(row.times * sk.cost.wire(row.kind, 1, row.n).hops for row in rows)
            seconds = expected_seconds(across, hops, asked["rate"], call=call, message=message)
            fields[name] = {"rate": asked["rate"], "bytes": 4 * elements, "local": local, "hops_across": hops}
            fields[name] |= {"call_us": round(call * 1e6, 1), "link_bytes_expected": across}
            fields[name] |= {
                "message_us": round(message * 1e6, 1),
                "expected_us": round(seconds * 1e6, 1),
                "label": LABEL,
            }
        row = f"all_reduce of {4 * elements:,} bytes, {asked['rate']}, 2 hosts x {local} devices"
        records = measure(
            "links", row, cases, mode="dispatched", calls=1, rounds=asked["rounds"], fields=fields, refuse=False
        )
        for case, record in zip(cases, records, strict=True):
            record["link_bytes"] = _counted(case, tx_bytes)
        out.append(records)
    return out


def operand(mesh: Any, elements: int) -> tuple[jax.Array, np.ndarray]:
    """Rows of whole numbers, one for each device, and their sum: exact in bfloat16 and int8, block by block.

    Device 0 and 1 have the same numbers, each further one twice as large ones, so that the sum is a power of two times
    as large; every block of 128 contains the largest, which gives int8 its scale.
    """
    n = mesh.size
    numbers = np.random.default_rng(0).integers(-127, 128, elements).astype(np.float32)
    numbers[::128] = 127
    rows = np.stack([numbers * 2 ** max(0, device - 1) for device in range(n)])
    x = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P(_BOTH)), lambda index: rows[index])
    return x, numbers * 2 ** (n - 1)


def _here(value: jax.Array) -> list[np.ndarray]:
    return [np.asarray(shard.data) for shard in value.addressable_shards]


def _latency(mesh: Any) -> tuple[float, float]:
    """Seconds of a call from Python that sends nothing, and of each message of 4 bytes from host to host in it.

    The fastest of twenty: what the link takes, and not a processor that has other work.
    """
    x, _ = operand(mesh, 1)

    def seconds(messages: int) -> float:
        def shifted(x: jax.Array) -> jax.Array:
            for _ in range(messages):
                x = sk.shift(x, "host")
            return x

        run = jax.jit(jax.shard_map(shifted, mesh=mesh, in_specs=P(_BOTH), out_specs=P(_BOTH)))
        times = []
        for _ in range(21):
            begun = time.perf_counter()
            jax.block_until_ready(run(x))
            times.append(time.perf_counter() - begun)
        return min(times[1:])

    one, nine = seconds(1), seconds(9)
    message = max(0.0, (nine - one) / 8)
    return max(0.0, one - message), message


def _counted(case: Case, tx_bytes: Callable[[], int]) -> float:
    """The bytes per call that leave this host."""
    carry = jax.jit(jnp.copy)(case.carry)
    before = tx_bytes()
    for _ in range(_COUNTED):
        carry, value = case.step(carry)
        jax.block_until_ready(value)
    time.sleep(0.3)  # for what is still in the queue
    return (tx_bytes() - before) / _COUNTED


def _merged(first: Sequence[Record], second: Sequence[Record]) -> list[Record]:
    """Both hosts' records as one: a call begins when the later host calls, and its time is that host's, the shorter."""

    def sample(pair: Sequence[Record], i: int) -> Sample:
        wall, cpu = ([each["samples"][key][i] for each in pair] for key in Sample._fields)
        return Sample(min(wall), sum(cpu))

    pairs = list(zip(first, second, strict=True))
    rounds = [{a["case"]: sample((a, b), i) for a, b in pairs} for i in range(first[0]["rounds"])]
    numbers, out = summarise(rounds, first[0]["baseline"]), []
    for a, b in pairs:
        samples = a["samples"] | {key: [getattr(each[a["case"]], key) for each in rounds] for key in Sample._fields}
        wall = numbers[a["case"]]["wall_us_median"]
        merged = {**a, **numbers[a["case"]], "samples": samples, "wrong": a["wrong"] + b["wrong"]}
        merged["link_bytes"] = round((a["link_bytes"] + b["link_bytes"]) / 2)
        out.append(merged | {"achieved": round(a["expected_us"] / wall, 4)})
    return out


def work(folder: Path) -> None:
    """What each process does: joins the job, measures what is asked, and writes its records."""
    asked = json.loads((folder / "asked.json").read_text())
    place = sk.runtime.initialize(timeout=60)
    counter = Path(f"/sys/class/net/{asked['ends'][place.rank]}/statistics/tx_bytes")
    records = measured(asked, lambda: int(counter.read_text()))
    (folder / f"{place.rank}.json").write_text(json.dumps(records))
