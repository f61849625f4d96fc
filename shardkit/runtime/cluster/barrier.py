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
from shardkit.runtime.channel.place import processes as processes_named


@typed
def barrier(name: str, timeout: float = 60.0) -> None:
    """Waits for all processes; each name may be used once.

    Raises:
        RuntimeError: some processes did not arrive within `timeout` seconds; names them.

    Example:
        >>> sk.runtime.barrier("data prepared")  # alone, it returns at once
    """
    at_least_zero("barrier", timeout=timeout)
    if jax.process_count() > 1:
        missing = absent(name, timeout)
        if missing is not None:
            raise RuntimeError(
                f"barrier: all processes must reach {name!r} within {timeout:g} s; {missing} did not. Read their "
                "output, or raise timeout."
            )


def absent(name: str, timeout: float) -> str | None:
    """Waits for all processes; returns None, or those that did not arrive: `processes 1, 3`."""
    text = backends.wait_at_barrier(name, timeout)
    if text is None:
        return None
    found = re.search(r"timed out task names:\n((?:\S*\d\n)+)", text)
    counts = re.search(r"reached the barrier: (\d+)/(\d+)", text)
    if found is None or counts is None:
        return f"some ({' '.join(text.split())})"
    ranks = sorted(int(each) for each in re.findall(r"(\d+)\n", found[1]))
    if len(ranks) < int(counts[2]) - int(counts[1]):
        return f"processes {', '.join(map(str, ranks))} and others"
    return processes_named(ranks)


@typed
def health_check(*, processes: int | None = None, devices: int | None = None) -> str:
    """Sums over all devices and checks the result; call it on every process.

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
    there, all_devices, here = jax.process_count(), jax.device_count(), jax.local_device_count()
    if there != processes if processes is not None else there < 2:
        wanted = processes if processes is not None else "more than 1"
        raise RuntimeError(
            f"health_check: the number of processes must be {wanted}; got {there}. Start all of them, and call "
            "initialize() in each."
        )
    if all_devices != devices if devices is not None else all_devices <= here:
        wanted = devices if devices is not None else f"more than the {here} of this process"
        raise RuntimeError(
            f"health_check: the number of devices must be {wanted}; got {all_devices}. Check the devices of each host."
        )
    mesh = make_mesh(all=-1)
    sharded, replicated = PartitionSpec("all"), PartitionSpec()
    numbers = jax.jit(lambda: jnp.arange(1.0, all_devices + 1), out_shardings=NamedSharding(mesh, sharded))()
    total = jax.jit(jax.shard_map(lambda x: all_reduce(x, "all"), mesh=mesh, in_specs=sharded, out_specs=replicated))(
        numbers
    )
    got, right = float(total[0]), all_devices * (all_devices + 1) / 2
    if got != right:
        raise RuntimeError(
            f"health_check: the sum over {all_devices} devices must be {right:g}; got {got:g}. Check the network and "
            "the devices of each host."
        )
    return f"process {jax.process_index()} of {there}: {all_devices} devices, {here} of them here; their sum is right"
