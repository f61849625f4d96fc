"""Checkpoints beside orbax alone and numpy.save: what a save holds up, what a restore takes, and its memory.

    python -m benchmarks.checkpoint             # 0.1 and 1 GiB
    python -m benchmarks.checkpoint --large     # also 4 GiB, for which it takes 12 GiB of memory

The state has the leaves of Adam: parameters of five sizes, the largest a sixth of the state, and two averages of each.
In each round every case saves the state once, and then a step that takes its memory runs: "blocks" is the call itself,
"holds up" that and what the step takes longer than without a save, "in all" ends when the files are complete. Restores
run in a process each; peaks are of resident memory, above what the process had before, over the bytes of the state: of
the restore, and of that and the next step. Seconds are medians over the rounds, peaks the highest.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from benchmarks.processes import read_peak_resident_bytes, read_resident_bytes
from benchmarks.start import start
from shardkit.bench.records import Record, write
from shardkit.runtime.checkpoint.orbax_io import import_orbax, silence_orbax

GIB = 2**30
SHARES = {"up": 10, "down": 4, "attention": 3, "embed": 2, "head": 1}  # of 20 parts of the parameters
WIDTH = 1024
# The cases that restore, and where their files are.
FOLDERS = {"shardkit": "shardkit", "orbax": "orbax", "orbax, not compressed": "plain"}

Wait = Callable[[], Any]  # for the files of a save to be complete
Save = Callable[[Any], Wait]


def describe_state(devices: int, nbytes: float) -> sk.TrainState:
    """A state of about so many bytes, in parts on all devices."""
    mesh = sk.make_mesh(data=devices)
    split_rows = NamedSharding(mesh, PartitionSpec("data"))
    replicated = NamedSharding(mesh, PartitionSpec())
    params = {}
    for name, share in SHARES.items():
        # Of 60 parts of the state: parameters and two averages, each of 20.
        values = nbytes * share / 60 / 4
        rows = max(1, int(values / WIDTH / devices)) * devices
        params[name] = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32, sharding=split_rows)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    return sk.TrainState(step, params, {"mu": params, "nu": params}, None)


def fill_state(state: sk.TrainState) -> sk.TrainState:
    """Arrays of noise, which compresses as parameters do."""
    rng = np.random.default_rng(0)

    def fill(x: Any) -> jax.Array:
        def draw_shard(index: Any) -> np.ndarray:
            return rng.standard_normal(x.sharding.shard_shape(x.shape), np.float32).astype(x.dtype)

        return jax.make_array_from_callback(x.shape, x.sharding, draw_shard)

    return jax.tree.map(fill, state)


def name_leaves(state: Any) -> dict[str, Any]:
    """The leaves as orbax and numpy save them."""
    leaves = {}
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        leaves[jax.tree_util.keystr(path, simple=True)] = x
    return leaves


@partial(jax.jit, donate_argnums=0)
def take_step(state: Any) -> Any:
    """A step that takes the memory of its state, as a training step does: what a save still reads must be a copy."""
    return jax.tree.map(lambda x: x + x.dtype.type(1), state)


def wait_for_nothing() -> None:
    """Where there is no save, or where it was complete when its call returned."""


def save_with_shardkit(checkpoints: sk.runtime.Checkpoints, state: Any) -> Wait:
    """Saves as users do, and returns what waits for it."""
    checkpoints.save(state)
    return checkpoints.wait


def save_with_orbax(path: Path, compressed: bool, state: Any) -> Wait:
    """Saves with orbax as it comes, and returns what waits for it."""
    shutil.rmtree(path, ignore_errors=True)
    v1 = import_orbax()
    saving = v1.options.ArrayOptions.Saving(use_compression=compressed)
    with v1.Context(array_options=v1.options.ArrayOptions(saving=saving)):
        response: Any = v1.save_async(path, name_leaves(state))
    return response.result


def save_with_numpy(path: Path, state: Any) -> Wait:
    """One file for each leaf."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for name, x in name_leaves(state).items():
        np.save(path / f"{name}.npy", np.asarray(x))
    return wait_for_nothing


def list_saves(directory: Path) -> dict[str, Save]:
    """The cases of the table of saves."""
    checkpoints = sk.runtime.Checkpoints(directory / FOLDERS["shardkit"], keep=1)
    return {
        "shardkit": partial(save_with_shardkit, checkpoints),
        "orbax": partial(save_with_orbax, directory / FOLDERS["orbax"], True),
        "orbax, not compressed": partial(save_with_orbax, directory / FOLDERS["orbax, not compressed"], False),
        "numpy.save": partial(save_with_numpy, directory / "numpy"),
    }


class SaveTimes(NamedTuple):
    """Seconds of a save and a step; the state after the step."""

    state: Any
    blocks: float  # until the call returns
    steps: float  # until the step after it has ended
    in_all: float  # until the files are complete


def time_save(save: Save | None, state: Any) -> SaveTimes:
    """Saves, or does not, takes a step, and waits for the files."""
    start_time = time.perf_counter()
    wait: Wait = wait_for_nothing
    if save is not None:
        wait = save(state)
    returned = time.perf_counter()
    state = jax.block_until_ready(take_step(state))
    stepped = time.perf_counter()
    wait()
    complete = time.perf_counter()
    return SaveTimes(state, returned - start_time, stepped - start_time, complete - start_time)


def copy_state(state: Any, buffer: np.ndarray) -> None:
    """Reads and writes every byte of the state once: what any copy of it takes at least."""
    for x in jax.tree.leaves(state):
        for shard in x.addressable_shards:
            values = np.asarray(shard.data)
            target = buffer.reshape(-1)[: values.size].reshape(values.shape)
            np.copyto(target, values, casting="unsafe")


def time_saves(directory: Path, devices: int, nbytes: float, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by case; leaves the last files for the restores."""
    sk.simulate_devices(devices)
    state = fill_state(describe_state(devices, nbytes))
    saves = list_saves(directory)
    largest = max(jax.tree.leaves(state), key=lambda x: x.nbytes)
    buffer = np.ones(largest.shape, largest.dtype)
    times: dict[str, dict[str, list[float]]] = {}
    for name in [*saves, "one pass over memory"]:
        times[name] = {"blocks": [], "holds up": [], "in all": []}
    state = jax.block_until_ready(take_step(state))
    names = list(saves)
    for number in range(rounds + 1):
        # Each round begins with another case: the first one of a round may find files still on their way to the disk.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            alone = time_save(None, state)
            saved = time_save(saves[name], alone.state)
            state = saved.state
            if number > 0:  # the first round compiles and touches memory
                times[name]["blocks"].append(saved.blocks)
                times[name]["holds up"].append(saved.steps - alone.steps)
                times[name]["in all"].append(saved.in_all)
        start_time = time.perf_counter()
        copy_state(state, buffer)
        if number > 0:
            times["one pass over memory"]["blocks"].append(time.perf_counter() - start_time)
    return times


def restore(case: str, directory: Path, target: sk.TrainState) -> sk.TrainState:
    """The state that a case has saved."""
    folder = directory / FOLDERS[case]
    if case == "shardkit":
        state, _ = sk.runtime.Checkpoints(folder, read_only=True).restore(target)
        return state
    described = name_leaves(target)
    loaded = import_orbax().load(folder, described)
    return jax.tree.unflatten(jax.tree.structure(target), [loaded[name] for name in described])


def prepare_restore(case: str, devices: int) -> None:
    """Restores a small state and takes a step: what is imported, compiled and started once is no part of a restore."""
    description = describe_state(devices, 2**20)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        state = fill_state(description)
        saves = list_saves(directory)
        for name in FOLDERS:
            wait = saves[name](state)
            wait()
        take_step(restore(case, directory, description))


def time_restore(case: str, directory: Path, devices: int, nbytes: float) -> dict[str, float]:
    """Seconds and peaks of one restore, and the peak after the next step."""
    sk.simulate_devices(devices)
    prepare_restore(case, devices)
    target = describe_state(devices, nbytes)
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(target))
    resident = read_resident_bytes()
    start_time = time.perf_counter()
    state = jax.block_until_ready(restore(case, directory, target))
    seconds = time.perf_counter() - start_time
    peak = read_peak_resident_bytes()
    jax.block_until_ready(take_step(state))
    peak_with_step = read_peak_resident_bytes()
    return {
        "seconds": seconds,
        "peak": (peak - resident) / state_bytes,
        "peak with a step": (peak_with_step - resident) / state_bytes,
    }


def run_in_fresh_process(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a process of its own: peaks are those of a process, and cannot be reset."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, silence_orbax():
        return pool.submit(call, *arguments).result()


def measure_saves(directory: Path, devices: int, size: float, rounds: int) -> list[Record]:
    """Prints the table of saves, and returns its records."""
    row = f"{size:.3g} GiB, save"
    print(f"\n| {row} | blocks | holds up | in all |\n|---|--:|--:|--:|")
    records = []
    times = run_in_fresh_process(time_saves, directory, devices, size * GIB, rounds)
    for case, case_times in times.items():
        medians = {}
        cells = []
        for column, seconds in case_times.items():
            cell = ""
            if seconds:
                medians[column] = statistics.median(seconds)
                cell = f"{medians[column]:.3f} s"
            cells.append(cell)
        print(f"| {case} | {' | '.join(cells)} |", flush=True)
        records.append({"benchmark": "checkpoint", "row": row, "case": case, **medians})
    return records


def measure_restores(directory: Path, devices: int, size: float, rounds: int) -> list[Record]:
    """Prints the table of restores, and returns its records."""
    row = f"{size:.3g} GiB, restore"
    print(f"\n| {row} | seconds | peak | peak with a step |\n|---|--:|--:|--:|")
    restores: dict[str, list[dict[str, float]]] = {case: [] for case in FOLDERS}
    for _ in range(rounds):
        for case in FOLDERS:
            restores[case].append(run_in_fresh_process(time_restore, case, directory, devices, size * GIB))
    records = []
    for case, results in restores.items():
        figures = {
            "seconds": statistics.median(result["seconds"] for result in results),
            "peak": max(result["peak"] for result in results),
            "peak with a step": max(result["peak with a step"] for result in results),
        }
        print(f"| {case} | {' | '.join(f'{value:.2f}' for value in figures.values())} |", flush=True)
        records.append({"benchmark": "checkpoint", "row": row, "case": case, **figures})
    return records


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one table of saves and one of restores for each size."""
    flags = {"quick": "a few MiB, one round", "large": "also 4 GiB"}
    options = start(__doc__, argv, devices=1, **flags)
    sizes = [0.1, 1.0]  # GiB
    rounds = options.rounds or 5
    if options.large:
        sizes.append(4.0)
    if options.quick or options.smoke:
        sizes = [1 / 256]
        rounds = 1
    records: list[Record] = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="shardkit-benchmark-") as name:
            records += measure_saves(Path(name), options.simulate, size, rounds)
            records += measure_restores(Path(name), options.simulate, size, rounds)
    if options.json:
        write(records, options.json)


if __name__ == "__main__":
    main()
