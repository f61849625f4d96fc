"""One process of a run that saves, for tests that kill it or start several of them.

What it is to do comes as JSON. What it saw goes to a file, because processes print into each other's lines.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # what it says comes before jax
    import conftest  # noqa: F401

import jax
import numpy as np

import shardkit as sk
from shardkit.runtime.checkpoint import reading
from shardkit.runtime.checkpoint.checkpoints import Checkpoints
from shardkit.runtime.checkpoint.portable import flatten_state, to_portable
from shardkit.runtime.cluster.preemption import PREEMPTED, preempted, watch_preemption


def digests(state: Any) -> dict[str, str]:
    """A hash of every leaf in portable form."""
    from jax.experimental import multihost_utils

    def whole(x: jax.Array) -> np.ndarray:
        return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))

    arrays = to_portable(flatten_state("digests", state))
    return {path: hashlib.sha256(whole(x).tobytes()).hexdigest() for path, x in arrays.items()}


def main(
    row: str,
    directory: str,
    report: str,
    *,
    steps: int,
    every: int = 1,
    pause: float = 0.0,
    devices: int = 1,
    processes: int = 1,
    index: int = 0,
    port: int = 0,
    damaged: Any = "stop",
    unreadable: Any = (None, None),
) -> int:
    """Resumes or begins, saves every so many steps, and reports what it began with and how it ended."""
    sk.simulate_devices(devices)
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, index, initialization_timeout=120)
    watch_preemption()
    from support.checkpoint_rows import KEY, batch, make, params

    if index == unreadable[0]:  # this process cannot read its part of this step
        load = reading.load_arrays

        def failing(path: Path, wanted: Any) -> Any:
            found = load(path, wanted)
            if path.name == str(unreadable[1]):
                raise ValueError("damaged")
            return found

        reading.load_arrays = failing

    init, step = make(row)
    seen: dict[str, Any] = {"resumed": None, "losses": []}

    def tell(**more: Any) -> None:
        seen.update(more)
        unfinished = Path(f"{report}.new")
        unfinished.write_text(json.dumps(seen))
        unfinished.rename(report)

    with Checkpoints(directory) as checkpoints:
        if checkpoints.latest_step() is None:
            state, position = init(params(), KEY), 0
        else:
            state, run = checkpoints.restore(init.abstract(params()), damaged=damaged)
            position = run.position
            tell(resumed=run.step)
        tell(began=digests(state))
        while position < steps:
            state, metrics = step(state, batch(position))
            position += 1
            seen["losses"].append(float(metrics["loss"]))
            tell(step=position, at=time.time())
            last = preempted(position)
            if last or position % every == 0:
                checkpoints.save(state, position=position)
            if last:
                return PREEMPTED
            time.sleep(pause)
    tell(ended=digests(state))
    return 0


if __name__ == "__main__":
    code = main(**json.loads(sys.argv[1]))
    jax.distributed.shutdown()  # the last of them waits for all; what Python and jax do after it takes seconds
    os._exit(code)
