"""Waits for all processes of a job, and checks that they and their devices work together."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardkit._arguments.checks import at_least_zero
from shardkit._arguments.typed import typed
from shardkit._jax import backends
from shardkit.collectives import all_reduce
from shardkit.meshes.mesh import make_mesh
from shardkit.runtime.channel.place import name_processes


@typed
def barrier(name: str, timeout: float = 60.0) -> None:
    """Waits for all processes. You may use each name once.

    Raises:
        RuntimeError: some processes did not arrive within `timeout` seconds; the message names them.

    Example:
        >>> sk.runtime.barrier("data prepared")  # alone, it returns at once
    """
    at_least_zero("barrier", timeout=timeout)
    if jax.process_count() > 1:
        missing = find_absent(name, timeout)
        if missing is not None:
            raise RuntimeError(
                f"barrier: all processes must reach {name!r} within {timeout:g} s; {missing} did not. Read their "
                "output, or raise timeout."
            )


def find_absent(name: str, timeout: float) -> str | None:
    """Waits for all processes; returns None, or those that did not arrive: `processes 1, 3`.

    jax says who is missing in the text of its error alone:

        ... reached the barrier: 2/4 ... timed out task names:
        /job:jax_worker/replica:0/task:1
        /job:jax_worker/replica:0/task:3
    """
    text = backends.wait_at_barrier(name, timeout)
    if text is None:
        return None
    tasks = re.search(r"timed out task names:\n((?:\S*\d\n)+)", text)
    counts = re.search(r"reached the barrier: (\d+)/(\d+)", text)
    if tasks is None or counts is None:
        return f"some ({' '.join(text.split())})"
    numbers = re.findall(r"(\d+)\n", tasks[1])
    ranks = sorted(map(int, numbers))
    arrived = int(counts[1])
    expected = int(counts[2])
    if len(ranks) < expected - arrived:  # of many, the text names only some
        return f"processes {', '.join(map(str, ranks))} and others"
    return name_processes(ranks)


@typed
def health_check(*, processes: int | None = None, devices: int | None = None) -> str:
    """Sums over all devices and checks the result. Call it in every process.

    Args:
        processes: the expected number of processes; by default more than one.
        devices: the expected number of devices; by default more than this process has.

    Returns:
        A line such as `process 1 of 4: 8 devices, 2 of them here; their sum is right`.

    Raises:
        RuntimeError: another number of processes or devices, or a wrong sum.

    Example:
        >>> sk.runtime.health_check(processes=1, devices=8)
        'process 0 of 1: 8 devices, 8 of them here; their sum is right'
    """
    process_count = jax.process_count()
    device_count = jax.device_count()
    local_count = jax.local_device_count()
    _check_processes(process_count, processes)
    _check_devices(device_count, local_count, devices)
    total = _sum_over_devices(device_count)
    # Numbers up to n, so that a device that is missing, or counted twice, changes the sum.
    expected = device_count * (device_count + 1) / 2
    if total != expected:
        raise RuntimeError(
            f"health_check: the sum over {device_count} devices must be {expected:g}; got {total:g}. Check the network "
            "and the devices of each host."
        )
    return (
        f"process {jax.process_index()} of {process_count}: {device_count} devices, {local_count} of them here; their "
        "sum is right"
    )


def _check_processes(process_count: int, expected: int | None) -> None:
    """Refuses another number of processes than expected, or one process if none is expected."""
    if expected is None:
        text = "more than 1"
        is_right = process_count > 1
    else:
        text = str(expected)
        is_right = process_count == expected
    if not is_right:
        raise RuntimeError(
            f"health_check: the number of processes must be {text}; got {process_count}. Start all of them, and call "
            "initialize() in each."
        )


def _check_devices(device_count: int, local_count: int, expected: int | None) -> None:
    """Refuses another number of devices than expected, or only those of this process if none is expected."""
    if expected is None:
        text = f"more than the {local_count} of this process"
        is_right = device_count > local_count
    else:
        text = str(expected)
        is_right = device_count == expected
    if not is_right:
        raise RuntimeError(
            f"health_check: the number of devices must be {text}; got {device_count}. Check the devices of each host."
        )


def _sum_over_devices(device_count: int) -> float:
    """1 + 2 + ... + device_count, where the k-th device has the number k, by an all_reduce over all of them."""
    mesh = make_mesh(all=-1)
    split = PartitionSpec("all")

    def make_numbers() -> jax.Array:
        return jnp.arange(1.0, device_count + 1)

    def sum_numbers(x: jax.Array) -> jax.Array:
        return all_reduce(x, "all")

    numbers = jax.jit(make_numbers, out_shardings=NamedSharding(mesh, split))()
    mapped = jax.shard_map(sum_numbers, mesh=mesh, in_specs=split, out_specs=PartitionSpec())
    total = jax.jit(mapped)(numbers)
    return float(total[0])
