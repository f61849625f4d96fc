"""All_reduce over a throttled link between network namespaces: plain, hierarchical, compressed, and both.

Here a clock is honest although all devices are simulated: the link takes most of the time. Two processes in two network
namespaces, whose link `tc` throttles, hold some CPU devices each, and jax's gloo collectives send between them through
TCP. It needs Linux, root, and the commands ip, tc and unshare; what it makes is removed again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from benchmarks.start import start
from shardkit import bench
from shardkit.bench.measure import Sample, summarise
from shardkit.bench.records import Record, write
from shardkit.meshes.layout import table

ROOT = Path(__file__).parents[1]
LABEL = "throttled link between network namespaces"
SPACES, ENDS, ADDRESSES = ("shardkit-a", "shardkit-b"), ("shardkit0", "shardkit1"), ("10.77.0.1", "10.77.0.2")
COORDINATOR = f"{ADDRESSES[0]}:29519"
BOTH = ("host", "local")
COUNTED = 3  # calls over which the bytes of the interface are counted
# A process with a name of its own, by which gloo finds the address that it binds.
OWN_HOST = 'mount --bind "$0/hosts" /etc/hosts && hostname "$1" && shift && exec "$@"'


def two_levels(x: jax.Array, dtype: Any) -> jax.Array:
    """Compressed across hosts alone."""
    part = sk.reduce_scatter(x, "local")
    total, _ = sk.compressed.all_reduce(part, "host", dtype=dtype, compress_result=True)
    return sk.all_gather(total, "local", replicated=True)


def one_level(x: jax.Array, dtype: Any) -> jax.Array:
    """Compressed over all devices."""
    return sk.compressed.all_reduce(x, BOTH, dtype=dtype, compress_result=True)[0]


WAYS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "plain": lambda x: sk.all_reduce(x, BOTH),
    "hierarchical": lambda x: sk.hierarchical.all_reduce(x, "local", "host"),
    "bfloat16": partial(one_level, dtype=jnp.bfloat16),
    "int8": partial(one_level, dtype=jnp.int8),
    "hierarchical, bfloat16": partial(two_levels, dtype=jnp.bfloat16),
    "hierarchical, int8": partial(two_levels, dtype=jnp.int8),
}


def kernel_of(way: Callable[[jax.Array], jax.Array], mesh: Any) -> Callable[[jax.Array], jax.Array]:
    """The way over the mesh: a row of the operand on each device, the sum on all."""
    return jax.shard_map(lambda x: way(x[0]), mesh=mesh, in_specs=P(BOTH), out_specs=P())


def burst(mbit: int) -> int:
    """The bytes that leave at once after a pause, before the queue slows what follows down to the rate."""
    return max(16384, mbit * 125)  # little beside a message, and a millisecond for a processor that comes late


@contextlib.contextmanager
def two_hosts(mbit: int) -> Iterator[None]:
    """Two namespaces whose link sends `mbit` Mbit/s each way, until the end of the block."""
    (a, b), ends = SPACES, ENDS
    commands = [f"ip netns add {a}", f"ip netns add {b}"]
    commands += [f"ip link add {ends[0]} netns {a} type veth peer name {ends[1]} netns {b}"]
    for space, end, address in zip(SPACES, ENDS, ADDRESSES, strict=True):
        commands += [f"ip -n {space} addr add {address}/24 dev {end}"]
        commands += [f"ip -n {space} link set {each} up" for each in (end, "lo")]
        commands += [f"tc -n {space} qdisc add dev {end} root tbf rate {mbit}mbit burst {burst(mbit)}b limit 4mb"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was made is removed then too
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield
    finally:
        for space in SPACES:  # the link ends with them
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def over_link(mbit: int, devices: int, sizes: Sequence[int], rounds: int) -> list[Record]:
    """The records of all ways and sizes, measured by one process in each namespace."""
    asked = {"mbit": mbit, "sizes": list(sizes), "rounds": rounds}
    return [record for rows in zip(*on_both("links", mbit, devices, asked), strict=True) for record in merged(*rows)]


def on_both(module: str, mbit: int, devices: int, asked: Mapping[str, Any]) -> list[Any]:
    """What `python -m benchmarks.MODULE --child` writes in each of two namespaces, as `child` does."""
    with two_hosts(mbit), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hosts = [f"{address} host{i}" for i, address in enumerate(ADDRESSES)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts]) + "\n")
        children = []
        for i, space in enumerate(SPACES):
            own = ["unshare", "--uts", "--mount", "sh", "-c", OWN_HOST, name, f"host{i}"]
            python = [sys.executable, "-m", f"benchmarks.{module}", "--child", name, json.dumps(asked)]
            told = {"JAX_COORDINATOR_ADDRESS": COORDINATOR, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(i)}
            told["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
            environ = os.environ | told | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
            command = ["ip", "netns", "exec", space, *own, *python]
            children.append(subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL))
        try:
            while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
                time.sleep(0.2)
        finally:
            for child in children:
                child.terminate()  # one without the other would wait for ever
                child.wait()
        if any(child.returncode for child in children):
            raise SystemExit(f"{module}: the processes ended with {[child.returncode for child in children]}.")
        return [json.loads((folder / f"{i}.json").read_text()) for i in range(2)]


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
    return local * each * Fraction(local, 2 * local - 1) if kind == "all_to_all" else each


def expected_seconds(across: float, hops: int, mbit: int, *, call: float, message: float) -> float:
    """The alpha-beta model of the link: the call, its messages one after the other, and the bytes at the rate.

    What the queue lets through at once after the pause before the call takes no time.
    """
    return call + hops * message + 8 * max(0.0, across - burst(mbit)) / (mbit * 1e6)


def measured(asked: Mapping[str, Any], tx_bytes: Callable[[], int]) -> list[list[Record]]:
    """What one of the processes measures, size by size; both call it at the same time."""
    mesh = sk.make_mesh(host=2, local=-1)
    local, out = mesh.shape["local"], []
    call, message = latency(mesh)
    for size in asked["sizes"]:
        x, expected = operand(mesh, size // 4)
        cases = []
        for name, way in WAYS.items():
            kernel = kernel_of(way, mesh)
            step = jax.jit(lambda x, kernel=kernel: (x, kernel(x)), donate_argnums=0)
            rows = [row for row in sk.census(kernel, x).rows if "host" in row.axes]
            across = float(sum(crossing(row.kind, row.axes, row.total, local) for row in rows))
            hops = sum(row.times * sk.cost.wire(row.kind, 1, row.n).hops for row in rows)
            seconds = expected_seconds(across, hops, asked["mbit"], call=call, message=message)
            fields = {
                "rate": f"{asked['mbit']}mbit",
                "bytes": size,
                "local": local,
                "label": LABEL,
                "hops_across": hops,
                "call_us": round(call * 1e6, 1),
                "message_us": round(message * 1e6, 1),
                "link_bytes_expected": across,
                "expected_us": round(seconds * 1e6, 1),
            }
            case = bench.Case(name, step, x, (), lambda _, value: here(value), [expected] * local, fields=fields)
            cases.append(case)
        row = f"all_reduce of {size:,} bytes, {asked['mbit']} Mbit/s, 2 hosts x {local} devices"
        how: Any = {"mode": "dispatched", "calls": 1, "rounds": asked["rounds"], "refuse": False}
        records = bench.measure("links", row, cases, **how)
        for case, record in zip(cases, records, strict=True):
            record["link_bytes"] = counted(case, tx_bytes)
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
    x = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P(BOTH)), lambda index: rows[index])
    return x, numbers * 2 ** (n - 1)


def here(value: jax.Array) -> list[np.ndarray]:
    """What the devices of this process hold."""
    return [np.asarray(shard.data) for shard in value.addressable_shards]


def latency(mesh: Any) -> tuple[float, float]:
    """Seconds of a call from Python that sends nothing, and of each message of 4 bytes from host to host in it.

    The fastest of twenty: what the link takes, and not a processor that has other work.
    """
    x, _ = operand(mesh, 1)

    def seconds(messages: int) -> float:
        def shifted(x: jax.Array) -> jax.Array:
            for _ in range(messages):
                x = sk.shift(x, "host")
            return x

        run = jax.jit(jax.shard_map(shifted, mesh=mesh, in_specs=P(BOTH), out_specs=P(BOTH)))
        times = []
        for _ in range(21):
            begun = time.perf_counter()
            jax.block_until_ready(run(x))
            times.append(time.perf_counter() - begun)
        return min(times[1:])

    one, nine = seconds(1), seconds(9)
    message = max(0.0, (nine - one) / 8)
    return max(0.0, one - message), message


def counted(case: bench.Case, tx_bytes: Callable[[], int]) -> float:
    """The bytes per call that leave this host."""
    carry = jax.jit(jnp.copy)(case.carry)
    before = tx_bytes()
    for _ in range(COUNTED):
        carry, value = case.step(carry)
        jax.block_until_ready(value)
    time.sleep(0.3)  # for what is still in the queue
    return (tx_bytes() - before) / COUNTED


def merged(first: Sequence[Record], second: Sequence[Record]) -> list[Record]:
    """Both hosts' records as one: a call begins when the later host calls, and its time is that host's, the shorter."""
    keys, out = Sample._fields, []
    pairs = {a["case"]: (a["samples"], b["samples"]) for a, b in zip(first, second, strict=True)}
    samples = {
        case: {
            "wall_us": list(map(min, a["wall_us"], b["wall_us"])),
            "cpu_us": np.add(a["cpu_us"], b["cpu_us"]).tolist(),
        }
        for case, (a, b) in pairs.items()
    }
    rounds = [
        {case: Sample(*(own[key][i] for key in keys)) for case, own in samples.items()}
        for i in range(first[0]["rounds"])
    ]
    numbers = summarise(rounds, first[0]["baseline"])
    for a, b in zip(first, second, strict=True):
        own = a | numbers[a["case"]] | {"samples": a["samples"] | samples[a["case"]], "wrong": a["wrong"] + b["wrong"]}
        own["link_bytes"] = round((a["link_bytes"] + b["link_bytes"]) / 2)
        out.append(own | {"achieved": round(a["expected_us"] / own["wall_us_median"], 4)})
    return out


def lines(records: Sequence[Record]) -> str:
    """The records as a table: milliseconds a call, megabytes from one host to the other, and what was expected."""
    rows = [("link", "bytes", "way", "ms [p10, p90]", "to plain", "MB sent", "by census", "expected ms", "achieved")]
    for r in records:
        spread = ", ".join(f"{r[f'wall_us_{q}'] / 1e3:.1f}" for q in ("p10", "p90"))
        times = (f"{r['wall_us_median'] / 1e3:.1f} [{spread}]", f"{r['wall_ratio_median']:.2f}")
        sent = (f"{r['link_bytes'] / 1e6:.2f}", f"{r['link_bytes_expected'] / 1e6:.2f}")
        expected = (f"{r['expected_us'] / 1e3:.1f}", f"{r['achieved']:.0%}")
        rows.append((r["rate"], f"{r['bytes']:,}", r["case"], *times, *sent, *expected))
    return f"{LABEL}\n{table(rows)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures at 100 Mbit/s and 1 Gbit/s; `--simulate` is the devices of each host."""
    options = start(__doc__, argv, devices=2)
    sizes, rounds = ((2**18,), 2) if options.smoke else ((2**18, 2**20, 2**22), 7)
    records: list[Record] = []
    for mbit in (100,) if options.smoke else (100, 1000):
        found = over_link(mbit, options.simulate, sizes, options.rounds or rounds)
        print(lines(found), flush=True)
        records += found
    if options.json:
        write(records, options.json)
    return int(any(record["wrong"] for record in records))


def child(measure: Callable[[Mapping[str, Any], Callable[[], int]], Any], argv: Sequence[str]) -> None:
    """What each process does: joins the job, measures what is asked, and writes what it found.

    `measure` gets what was asked, and a function that returns how many bytes this host has sent over the link.
    """
    folder, asked = Path(argv[0]), json.loads(argv[1])
    place = sk.runtime.initialize(timeout=60)
    counter = Path(f"/sys/class/net/{ENDS[place.rank]}/statistics/tx_bytes")
    found = measure(asked, lambda: int(counter.read_text()))
    (folder / f"{place.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(measured, sys.argv[2:])
    else:
        raise SystemExit(main())
