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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import choose_rounds, start
from shardkit import bench
from shardkit.bench.measure import Sample, summarise
from shardkit.bench.records import Record, write
from shardkit.meshes.layout import table

ROOT = Path(__file__).parents[1]
LABEL = "throttled link between network namespaces"
AXES = ("host", "local")
PORT = 29519
COUNTED_CALLS = 3  # over which the bytes of the interface are counted
# Gloo binds the address of the name of its machine: each process has a name of its own, with its end of the link.
RUN_AS_HOST = 'mount --bind "$0/hosts" /etc/hosts && hostname "$1" && shift && exec "$@"'


class Host(NamedTuple):
    """A network namespace that stands for a machine."""

    name: str
    space: str
    end: str  # of the link, its interface
    address: str


HOSTS = (
    Host("host0", "shardkit-a", "shardkit0", "10.77.0.1"),
    Host("host1", "shardkit-b", "shardkit1", "10.77.0.2"),
)


def sum_in_two_levels(x: jax.Array, dtype: Any) -> jax.Array:
    """Compressed across hosts alone."""
    part = sk.reduce_scatter(x, "local")
    total, _ = sk.compressed.all_reduce(part, "host", dtype=dtype, compress_result=True)
    return sk.all_gather(total, "local", replicated=True)


def sum_in_one_level(x: jax.Array, dtype: Any) -> jax.Array:
    """Compressed over all devices."""
    total, _ = sk.compressed.all_reduce(x, AXES, dtype=dtype, compress_result=True)
    return total


KERNELS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "plain": partial(sk.all_reduce, axis=AXES),
    "hierarchical": partial(sk.hierarchical.all_reduce, inner="local", outer="host"),
    "bfloat16": partial(sum_in_one_level, dtype=jnp.bfloat16),
    "int8": partial(sum_in_one_level, dtype=jnp.int8),
    "hierarchical, bfloat16": partial(sum_in_two_levels, dtype=jnp.bfloat16),
    "hierarchical, int8": partial(sum_in_two_levels, dtype=jnp.int8),
}


def map_kernel(kernel: Callable[[jax.Array], jax.Array], mesh: Any) -> Callable[[jax.Array], jax.Array]:
    """The kernel over the mesh: a row of the operand on each device, the sum on all."""

    def sum_rows(x: jax.Array) -> jax.Array:
        return kernel(x[0])

    return jax.shard_map(sum_rows, mesh=mesh, in_specs=P(AXES), out_specs=P())


# ---- two hosts


def choose_burst(mbit: int) -> int:
    """The bytes that leave at once after a pause, before the queue slows what follows down to the rate."""
    return max(16384, mbit * 125)  # little beside a message, and a millisecond for a processor that comes late


def list_commands(mbit: int) -> list[str]:
    """What makes two namespaces, and between them a link that sends `mbit` Mbit/s each way."""
    first, second = HOSTS
    commands = [f"ip netns add {host.space}" for host in HOSTS]
    commands.append(
        f"ip link add {first.end} netns {first.space} type veth peer name {second.end} netns {second.space}"
    )
    shape = f"tbf rate {mbit}mbit burst {choose_burst(mbit)}b limit 4mb"
    for host in HOSTS:
        commands.append(f"ip -n {host.space} addr add {host.address}/24 dev {host.end}")
        commands.append(f"ip -n {host.space} link set {host.end} up")
        commands.append(f"ip -n {host.space} link set lo up")
        commands.append(f"tc -n {host.space} qdisc add dev {host.end} root {shape}")
    return commands


@contextlib.contextmanager
def open_link(mbit: int) -> Iterator[None]:
    """Two namespaces whose link sends `mbit` Mbit/s each way, until the end of the block."""
    # A signal to end is an exception here, so that the namespaces are removed then, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for command in list_commands(mbit):
            subprocess.run(command.split(), check=True)
        yield
    finally:
        for host in HOSTS:  # the link ends with them
            subprocess.run(["ip", "netns", "delete", host.space], check=False, capture_output=True)


def run_on_hosts(module: str, mbit: int, devices: int, request: Mapping[str, Any]) -> list[Any]:
    """What `python -m benchmarks.MODULE --child` writes in each of two namespaces, as `run_child` does."""
    with open_link(mbit), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = ["127.0.0.1 localhost"]
        for host in HOSTS:
            lines.append(f"{host.address} {host.name}")
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        children = []
        for rank in range(len(HOSTS)):
            children.append(_start_child(module, rank, devices, folder, request))
        try:
            _wait_for_all(children)
        finally:
            for child in children:
                child.terminate()  # one without the other would wait for ever
                child.wait()
        codes = [child.returncode for child in children]
        if any(codes):
            raise SystemExit(f"{module}: the processes ended with {codes}.")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(HOSTS))]


def _start_child(
    module: str, rank: int, devices: int, folder: Path, request: Mapping[str, Any]
) -> subprocess.Popen[bytes]:
    host = HOSTS[rank]
    environ = {
        **os.environ,
        "JAX_COORDINATOR_ADDRESS": f"{HOSTS[0].address}:{PORT}",
        "JAX_NUM_PROCESSES": str(len(HOSTS)),
        "JAX_PROCESS_ID": str(rank),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    in_space = ["ip", "netns", "exec", host.space]
    as_host = ["unshare", "--uts", "--mount", "sh", "-c", RUN_AS_HOST, str(folder), host.name]
    python = [sys.executable, "-m", f"benchmarks.{module}", "--child", str(folder), json.dumps(request)]
    return subprocess.Popen([*in_space, *as_host, *python], env=environ, stdout=subprocess.DEVNULL)


def _wait_for_all(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended, or one has failed."""
    while True:
        codes = [child.poll() for child in children]
        if all(code is not None for code in codes) or any(codes):
            return
        time.sleep(0.2)


def run_child(measure: Callable[[Mapping[str, Any], Callable[[], int]], Any], argv: Sequence[str]) -> None:
    """What each process does: joins the job, measures what is asked, and writes what it found.

    `measure` gets what was asked, and a function that returns how many bytes this host has sent over the link.
    """
    folder = Path(argv[0])
    request = json.loads(argv[1])
    place = sk.runtime.initialize(timeout=60)
    # The interface counts what crosses, with TCP's headers and answers.
    counter = Path(f"/sys/class/net/{HOSTS[place.rank].end}/statistics/tx_bytes")

    def read_sent() -> int:
        return int(counter.read_text())

    results = measure(request, read_sent)
    (folder / f"{place.rank}.json").write_text(json.dumps(results))


# ---- what is expected


def count_bytes_across(kind: str, axes: Sequence[str], sent: Fraction | float, local: int) -> Fraction:
    """The bytes that one of two hosts sends to the other in a collective in which each device sends `sent` bytes.

    Over the host axis alone, each of the `local` devices of a host sends to its partner. Over both axes the ring passes
    from host to host once in each direction; an all_to_all sends n/2 of the n-1 messages of each device across.

    For example 2 devices on each host, of which each sends 12 bytes: over the hosts alone 24 bytes cross. Over both
    axes a ring sends the 12 of one device, and an all_to_all 2 of 3 messages of 4 bytes of both devices: 16.
    """
    if "host" not in axes:
        return Fraction(0)
    device_bytes = Fraction(sent)
    if "local" not in axes:
        return local * device_bytes
    if kind != "all_to_all":
        return device_bytes
    devices = 2 * local
    return local * device_bytes * Fraction(local, devices - 1)


def predict_seconds(across: float, hops: int, mbit: int, *, call: float, message: float) -> float:
    """The alpha-beta model of the link: the call, its messages one after the other, and the bytes at the rate.

    What the queue lets through at once after the pause before the call takes no time.
    """
    throttled = max(0.0, across - choose_burst(mbit))
    return call + hops * message + 8 * throttled / (mbit * 1e6)


# ---- what one of the processes measures


def make_operand(mesh: Any, elements: int) -> tuple[jax.Array, np.ndarray]:
    """Rows of whole numbers, one for each device, and their sum: exact in bfloat16 and int8, block by block.

    Device 0 and 1 have the same numbers, each further one twice as large ones, so that the sum is a power of two times
    as large; every block of 128 contains the largest, which gives int8 its scale. Four devices: x + x + 2x + 4x = 8x.
    """
    numbers = np.random.default_rng(0).integers(-127, 128, elements).astype(np.float32)
    numbers[::128] = 127
    rows = []
    for device in range(mesh.size):
        rows.append(numbers * 2 ** max(0, device - 1))
    operand = np.stack(rows)
    layout = NamedSharding(mesh, P(AXES))
    x = jax.make_array_from_callback(operand.shape, layout, lambda index: operand[index])
    return x, numbers * 2 ** (mesh.size - 1)


def get_local_shards(value: jax.Array) -> list[np.ndarray]:
    """What the devices of this process hold."""
    return [np.asarray(shard.data) for shard in value.addressable_shards]


def measure_latency(mesh: Any) -> tuple[float, float]:
    """Seconds of a call from Python that sends nothing, and of each message of 4 bytes from host to host in it.

    The fastest of twenty: what the link takes, and not a processor that has other work.
    """
    x, _ = make_operand(mesh, 1)

    def time_messages(count: int) -> float:
        def send_messages(x: jax.Array) -> jax.Array:
            for _ in range(count):
                x = sk.shift(x, "host")
            return x

        run = jax.jit(jax.shard_map(send_messages, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES)))
        jax.block_until_ready(run(x))  # compiles
        times = []
        for _ in range(20):
            start_time = time.perf_counter()
            jax.block_until_ready(run(x))
            times.append(time.perf_counter() - start_time)
        return min(times)

    # A call of n messages takes c + n m: eight messages more take 8 m.
    one = time_messages(1)
    nine = time_messages(9)
    message = max(0.0, (nine - one) / 8)
    return max(0.0, one - message), message


class Link(NamedTuple):
    """A rate, and what its link takes without bytes."""

    mbit: int
    call: float  # seconds
    message: float  # seconds


def make_case(name: str, mesh: Any, size: int, link: Link) -> bench.Case:
    """A kernel on `size` bytes of each device, with what is expected of it in its fields."""
    x, expected = make_operand(mesh, size // 4)
    kernel = map_kernel(KERNELS[name], mesh)
    local = mesh.shape["local"]
    across = Fraction(0)
    hops = 0
    for row in sk.census(kernel, x).rows:
        if "host" in row.axes:
            across += count_bytes_across(row.kind, row.axes, row.total, local)
            hops += row.times * sk.cost.wire(row.kind, 1, row.n).hops
    seconds = predict_seconds(float(across), hops, link.mbit, call=link.call, message=link.message)
    fields = {
        "rate": f"{link.mbit}mbit",
        "bytes": size,
        "local": local,
        "label": LABEL,
        "hops_across": hops,
        "call_us": round(link.call * 1e6, 1),
        "message_us": round(link.message * 1e6, 1),
        "link_bytes_expected": float(across),
        "expected_us": round(seconds * 1e6, 1),
    }

    @partial(jax.jit, donate_argnums=0)
    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, kernel(x)

    def get_sums(x: jax.Array, sums: jax.Array) -> list[np.ndarray]:
        return get_local_shards(sums)

    return bench.Case(name, step, x, checked=get_sums, expected=[expected] * local, fields=fields)


def count_link_bytes(case: bench.Case, read_sent: Callable[[], int]) -> float:
    """The bytes per call that leave this host."""
    carry = jax.jit(jnp.copy)(case.carry)  # the step donates it
    bytes_before = read_sent()
    for _ in range(COUNTED_CALLS):
        carry, value = case.step(carry)
        jax.block_until_ready(value)
    time.sleep(0.3)  # for what is still in the queue
    return (read_sent() - bytes_before) / COUNTED_CALLS


def measure_sizes(request: Mapping[str, Any], read_sent: Callable[[], int]) -> list[list[Record]]:
    """What one of the processes measures, size by size; both call it at the same time."""
    mesh = sk.make_mesh(host=2, local=-1)
    link = Link(request["mbit"], *measure_latency(mesh))
    records_by_size = []
    for size in request["sizes"]:
        cases = [make_case(name, mesh, size, link) for name in KERNELS]
        records = bench.measure(
            "links",
            f"all_reduce of {size:,} bytes, {link.mbit} Mbit/s, 2 hosts x {mesh.shape['local']} devices",
            cases,
            mode="dispatched",
            calls=1,  # with a pause before each, in which the queue of the link runs empty
            rounds=request["rounds"],
            refuse=False,  # one process that raised would leave the other waiting
        )
        for case, record in zip(cases, records, strict=True):
            record["link_bytes"] = count_link_bytes(case, read_sent)
        records_by_size.append(records)
    return records_by_size


# ---- both together


def merge_hosts(first: Sequence[Record], second: Sequence[Record]) -> list[Record]:
    """Both hosts' records as one: a call begins when the later host calls, and its time is that host's, the shorter."""
    samples: dict[str, dict[str, list[float]]] = {}
    for record, other_record in zip(first, second, strict=True):
        times = record["samples"]
        other_times = other_record["samples"]
        samples[record["case"]] = {
            "wall_us": np.minimum(times["wall_us"], other_times["wall_us"]).tolist(),
            "cpu_us": np.add(times["cpu_us"], other_times["cpu_us"]).tolist(),
        }
    statistics = summarise(_list_rounds(samples, first[0]["rounds"]), first[0]["baseline"])
    merged = []
    for record, other_record in zip(first, second, strict=True):
        name = record["case"]
        result = record | statistics[name]
        result["samples"] = record["samples"] | samples[name]
        result["wrong"] = record["wrong"] + other_record["wrong"]
        result["link_bytes"] = round((record["link_bytes"] + other_record["link_bytes"]) / 2)
        result["achieved"] = round(result["expected_us"] / result["wall_us_median"], 4)
        merged.append(result)
    return merged


def _list_rounds(samples: Mapping[str, Mapping[str, Sequence[float]]], count: int) -> list[dict[str, Sample]]:
    """The samples by case of each round, from the lists of each case."""
    rounds = []
    for number in range(count):
        round_samples = {}
        for name, times in samples.items():
            round_samples[name] = Sample(times["wall_us"][number], times["cpu_us"][number])
        rounds.append(round_samples)
    return rounds


def measure_over_link(mbit: int, devices: int, sizes: Sequence[int], rounds: int) -> list[Record]:
    """The records of all kernels and sizes, measured by one process in each namespace."""
    request = {"mbit": mbit, "sizes": list(sizes), "rounds": rounds}
    first, second = run_on_hosts("links", mbit, devices, request)
    records = []
    for first_records, second_records in zip(first, second, strict=True):
        records += merge_hosts(first_records, second_records)
    return records


def format_table(records: Sequence[Record]) -> str:
    """The records as a table: milliseconds a call, megabytes from one host to the other, and what was expected."""
    rows = [("link", "bytes", "way", "ms [p10, p90]", "to plain", "MB sent", "by census", "expected ms", "achieved")]
    for record in records:
        median, low, high = (record[f"wall_us_{name}"] / 1e3 for name in ("median", "p10", "p90"))
        row = (
            record["rate"],
            f"{record['bytes']:,}",
            record["case"],
            f"{median:.1f} [{low:.1f}, {high:.1f}]",
            f"{record['wall_ratio_median']:.2f}",
            f"{record['link_bytes'] / 1e6:.2f}",
            f"{record['link_bytes_expected'] / 1e6:.2f}",
            f"{record['expected_us'] / 1e3:.1f}",
            f"{record['achieved']:.0%}",
        )
        rows.append(row)
    return f"{LABEL}\n{table(rows)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures at 100 Mbit/s and 1 Gbit/s; `--simulate` is the devices of each host."""
    options = start(__doc__, argv, devices=2)
    rates = [100, 1000]
    sizes = [2**18, 2**20, 2**22]
    if options.smoke:
        rates = [100]
        sizes = [2**18]
    records: list[Record] = []
    for mbit in rates:
        rate_records = measure_over_link(mbit, options.simulate, sizes, choose_rounds(options, 7))
        print(format_table(rate_records), flush=True)
        records += rate_records
    if options.json:
        write(records, options.json)
    return int(any(record["wrong"] for record in records))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_child(measure_sizes, sys.argv[2:])
    else:
        raise SystemExit(main())
