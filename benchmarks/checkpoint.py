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
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from benchmarks.start import start
from shardkit import bench
from shardkit.bench.records import Record
from shardkit.runtime.checkpoint.orbax_io import import_orbax, silence_orbax

GIB = 2**30
SHARES = {"up": 10, "down": 4, "attention": 3, "embed": 2, "head": 1}  # of 20 parts of the parameters
WIDTH = 1024
clock = time.perf_counter


def described(devices: int, nbytes: float) -> sk.TrainState:
    """A state of about so many bytes, in parts on all devices."""
    mesh = sk.make_mesh(data=devices)
    split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("data"), PartitionSpec()))
    rows = {name: max(1, int(nbytes * share / 60 / 4 / WIDTH / devices)) * devices for name, share in SHARES.items()}
    tree = {name: jax.ShapeDtypeStruct((size, WIDTH), jnp.float32, sharding=split) for name, size in rows.items()}
    return sk.TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=whole), tree, {"mu": tree, "nu": tree}, None)


def filled(state: sk.TrainState) -> sk.TrainState:
    """Arrays of noise, which compresses as parameters do."""
    rng = np.random.default_rng(0)

    def one(x: Any) -> jax.Array:
        draw = lambda index: rng.standard_normal(x.sharding.shard_shape(x.shape), np.float32).astype(x.dtype)  # noqa: E731
        return jax.make_array_from_callback(x.shape, x.sharding, draw)

    return jax.tree.map(one, state)


def by_name(state: Any) -> dict[str, Any]:
    """The leaves as orbax and numpy save them."""
    return {jax.tree_util.keystr(path, simple=True): x for path, x in jax.tree_util.tree_leaves_with_path(state)}


def orbax_async(path: Path, state: Any, compressed: bool) -> Callable[[], Any]:
    """Saves with orbax as it comes, and returns what waits for it."""
    v1 = import_orbax()
    saving = v1.options.ArrayOptions.Saving(use_compression=compressed)
    with v1.Context(array_options=v1.options.ArrayOptions(saving=saving)):
        response: Any = v1.save_async(path, by_name(state))
    return response.result


def numpy_save(path: Path, state: Any) -> Callable[[], Any]:
    """One file for each leaf."""
    path.mkdir()
    for name, x in by_name(state).items():
        np.save(path / f"{name}.npy", np.asarray(x))
    return lambda: None


def saves(directory: Path, devices: int, nbytes: float, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by case; leaves the last files for the restores."""
    sk.simulate_devices(devices)
    state = filled(described(devices, nbytes))
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + x.dtype.type(1), state), donate_argnums=0)
    checkpoints = sk.runtime.Checkpoints(directory / "shardkit", keep=1)
    fresh = lambda name: shutil.rmtree(directory / name, ignore_errors=True) or directory / name  # noqa: E731

    def ours(state: Any) -> Callable[[], Any]:
        checkpoints.save(state)
        return checkpoints.wait

    cases: dict[str, Callable[[Any], Callable[[], Any]]] = {
        "shardkit": ours,
        "orbax": lambda state: orbax_async(fresh("orbax"), state, True),
        "orbax, not compressed": lambda state: orbax_async(fresh("plain"), state, False),
        "numpy.save": lambda state: numpy_save(fresh("numpy"), state),
    }
    largest = max(jax.tree.leaves(state), key=lambda x: x.nbytes)
    into = np.ones(largest.shape, largest.dtype)
    found: dict[str, dict[str, list[float]]] = {
        name: {"blocks": [], "holds up": [], "in all": []} for name in [*cases, "one pass over memory"]
    }
    state = jax.block_until_ready(step(state))
    for number in range(rounds + 1):  # the first one compiles and touches memory
        first = number % len(cases)
        for name, save in [*cases.items()][first:] + [*cases.items()][:first]:
            times = []
            for saved in (False, True):
                begun = clock()
                wait = save(state) if saved else lambda: None
                called = clock()
                state = jax.block_until_ready(step(state))
                times.append((called - begun, clock() - begun))
                wait()
                ended = clock()
            if number:
                found[name]["blocks"].append(times[1][0])
                found[name]["holds up"].append(times[1][1] - times[0][1])
                found[name]["in all"].append(ended - begun)
        begun = clock()
        for x in jax.tree.leaves(state):
            for shard in x.addressable_shards:
                part = np.asarray(shard.data)
                np.copyto(into.reshape(-1)[: part.size].reshape(part.shape), part, casting="unsafe")
        if number:
            found["one pass over memory"]["blocks"].append(clock() - begun)
    return found


def resident(which: str) -> float:
    """Bytes of resident memory of this process: `VmRSS` now, `VmHWM` at most so far."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which)]
    return int(line.split()[1]) * 1024.0


def read(case: str, directory: Path, target: sk.TrainState) -> sk.TrainState:
    """The state that a case has saved."""
    if case == "shardkit":
        return sk.runtime.Checkpoints(directory / "shardkit", read_only=True).restore(target)[0]
    loaded = import_orbax().load(directory / {"orbax": "orbax"}.get(case, "plain"), by_name(target))
    return jax.tree.unflatten(jax.tree.structure(target), [loaded[name] for name in by_name(target)])


def restored(case: str, directory: Path, devices: int, nbytes: float) -> dict[str, float]:
    """Seconds and peaks of one restore, and the peak after the next step."""
    sk.simulate_devices(devices)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + x.dtype.type(1), state), donate_argnums=0)
    with tempfile.TemporaryDirectory() as small:  # imports and compiles
        state = filled(described(devices, 2**20))
        sk.runtime.Checkpoints(Path(small) / "shardkit").save(state)
        for name in ("orbax", "plain"):
            orbax_async(Path(small) / name, state, name == "orbax")()
        time.sleep(0.5)
        step(read(case, Path(small), described(devices, 2**20)))
    target = described(devices, nbytes)
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(target))
    before, begun = resident("VmRSS"), clock()
    state = jax.block_until_ready(read(case, directory, target))
    seconds, peak = clock() - begun, (resident("VmHWM") - before) / whole
    jax.block_until_ready(step(state))
    return {"seconds": seconds, "peak": peak, "peak with a step": (resident("VmHWM") - before) / whole}


def alone(call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, silence_orbax():
        return pool.submit(call, *arguments).result()


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one table of saves and one of restores."""
    flags = {"quick": "a few MiB, one round", "large": "also 4 GiB"}
    options = start(__doc__, argv, devices=1, **flags)
    quick = options.quick or options.smoke
    sizes = [1 / 256] if quick else [0.1, 1.0, 4.0] if options.large else [0.1, 1.0]
    rounds = 1 if quick else options.rounds or 5
    devices = options.simulate
    records: list[Record] = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="shardkit-benchmark-") as name:
            directory, nbytes = Path(name), size * GIB
            print(f"\n| {size:.3g} GiB, save | blocks | holds up | in all |\n|---|--:|--:|--:|")
            for case, times in alone(saves, directory, devices, nbytes, rounds).items():
                middle = {what: statistics.median(each) for what, each in times.items() if each}
                cells = [f"{middle[what]:.3f} s" if what in middle else "" for what in times]
                print(f"| {case} | {' | '.join(cells)} |", flush=True)
                records.append({"benchmark": "checkpoint", "row": f"{size:.3g} GiB, save", "case": case, **middle})
            print(f"\n| {size:.3g} GiB, restore | seconds | peak | peak with a step |\n|---|--:|--:|--:|")
            each: dict[str, list[Any]] = {case: [] for case in ("shardkit", "orbax", "orbax, not compressed")}
            for _ in range(rounds):
                for case in each:
                    each[case].append(alone(restored, case, directory, devices, nbytes))
            for case, found in each.items():
                middle = {what: statistics.median(one[what] for one in found) for what in found[0]}
                for what in ("peak", "peak with a step"):
                    middle[what] = max(one[what] for one in found)
                print(f"| {case} | {' | '.join(f'{value:.2f}' for value in middle.values())} |", flush=True)
                records.append({"benchmark": "checkpoint", "row": f"{size:.3g} GiB, restore", "case": case, **middle})
    if options.json:
        bench.report(records, options.json, lambda record: "")


if __name__ == "__main__":
    sys.exit(main())
