"""What a snapshot in memory costs, and how soon a state is back from it, beside a checkpoint on disk.

Two processes of one device each count as two hosts. The state is split over both (fsdp), so that each keeps its half
and sends it to the other. Saves: how long the training loop is blocked, how long the rest takes in the background
(copies to the host, checksums, files), and what is sent. Restores: in new processes as two hosts; as two hosts of which
one is new, with nothing in its memory; and from the checkpoint, which orbax has just written and the machine still has
in its cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from benchmarks.start import BANNER
from shardkit import bench, runtime
from shardkit.runtime.snapshots.folder import HOST

GIB = 2**30
LEAVES = 16


def child(what: dict[str, Any]) -> None:
    """One process: saves or restores, and writes its times."""
    rank = int(os.environ["RANK"])
    os.environ[HOST] = what["hosts"][rank]
    runtime.initialize()
    mesh, plan = sk.make_mesh(data=-1), sk.fsdp("data", min_size=1)
    grad_fn = sk.value_and_grad(lambda params, batch, keys: sk.Mean.of(params[0][0]))
    init, _ = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
    size = max(2, int(what["gib"] * GIB) // 4 // LEAVES // 2 * 2)
    params = [jax.ShapeDtypeStruct((size,), jnp.float32)] * LEAVES
    times: dict[str, float] = {}
    snapshots = runtime.Snapshots(every=1, name="benchmark", directory=what["memory"])
    checkpoints = runtime.Checkpoints(what["disk"])
    if what["save"]:
        zeros = jax.jit(lambda: [jnp.zeros((size,), jnp.float32)] * LEAVES)()
        state = init(zeros, jax.random.key(0))
        del zeros
        rows: list[tuple[float, float]] = []
        for step in range(what["saves"] + 1):  # the first compiles
            snapshots.clear()  # so that a small machine has room
            state = state._replace(step=runtime.from_full(np.int32(step + 1), mesh))
            jax.block_until_ready(state)
            runtime.barrier(f"save {step}")
            begun = time.perf_counter()
            snapshots.save(state)
            blocked = time.perf_counter() - begun
            snapshots.wait()
            rows.append((blocked, time.perf_counter() - begun - blocked))
        times["blocked"], times["background"] = (statistics.median(each) for each in zip(*rows[1:], strict=True))
        begun = time.perf_counter()
        checkpoints.save(state)
        times["checkpoint blocked"] = time.perf_counter() - begun
        checkpoints.wait()
        times["checkpoint background"] = time.perf_counter() - begun - times["checkpoint blocked"]
    else:
        source: Any = checkpoints if what["from_disk"] else snapshots
        runtime.barrier("restore")
        begun = time.perf_counter()
        state, _ = source.restore(init.abstract(params))  # type: ignore[attr-defined]
        jax.block_until_ready(state)
        times["restore"] = time.perf_counter() - begun
    Path(what["out"], f"{rank}.json").write_text(json.dumps(times))


def run(folder: Path, gib: float, hosts: Sequence[str] = ("a", "b"), **what: Any) -> dict[str, float]:
    """The longest of both processes' times."""
    out = folder / "out"
    out.mkdir(exist_ok=True)
    common = {"gib": gib, "hosts": hosts, "out": str(out), "save": False, "from_disk": False}
    words = ["-m", "benchmarks.snapshots", "--child", json.dumps(common | what)]
    code = runtime.launch(words, processes=2, devices=1)
    if code:
        sys.exit(code)
    each = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: max(times[name] for times in each) for name in each[0]}


def line(record: bench.Record) -> str:
    """A record as a row of the table."""
    return f"| {record['row']} | {record['case']} | {record['seconds']:.3f} | {record['sent_bytes'] / GIB:.3f} |"


def records_of(gib: float, saves: int, memory: str) -> list[bench.Record]:
    """Saves once, then restores in three ways."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=memory) as inside:
        where = {"memory": inside, "disk": str(Path(folder, "disk"))}
        saved = run(Path(folder), gib, save=True, saves=saves, **where)
        on_disk = run(Path(folder), gib, from_disk=True, **where)["restore"]
        in_memory = run(Path(folder), gib, **where)["restore"]
        replaced = run(Path(folder), gib, ["a", "new"], **where)["restore"]
    share = gib * GIB / 2
    rows = [
        ("snapshot, blocked", saved["blocked"], share),
        ("snapshot, background", saved["background"], 0.0),
        ("checkpoint, blocked", saved["checkpoint blocked"], 0.0),
        ("checkpoint, background", saved["checkpoint background"], 0.0),
        ("restore from memory", in_memory, 0.0),
        ("restore with a new host", replaced, share),  # an all_reduce over two sends each byte once
        ("restore from the checkpoint", on_disk, 0.0),
    ]
    common = {"benchmark": "snapshots", "row": f"{gib:g} GiB"}
    return [common | {"case": case, "seconds": seconds, "sent_bytes": sent} for case, seconds, sent in rows]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, nargs="+", default=[0.1, 0.5], help="sizes of the state")
    parser.add_argument("--memory", default="/dev/shm", help="a directory in memory (default /dev/shm)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append one JSON line per case and row")
    parser.add_argument("--smoke", action="store_true", help="the smallest run that exercises everything; no numbers")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child is not None:
        child(options.child)
        return
    print(f"{BANNER}\n\n| state | what | seconds | sent by a device, GiB |\n|---|---|---|---|")
    for gib in [1e-5] if options.smoke else options.gib:
        bench.report(records_of(gib, 1 if options.smoke else 5, options.memory), options.json, line)


if __name__ == "__main__":
    main()
