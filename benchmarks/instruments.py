"""How long the instruments take to read a program: the training step of a large transformer.

The step is that of `large_model.py` (FSDP layer by layer, tensor parallelism, remat, Adam). Nothing is compiled or run
and no device is needed; the time of the trace is listed by itself, since every instrument begins with one. `lint`
traces twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import large_model
from benchmarks.start import start
from shardkit import bench
from shardkit.analysis import census, explain, lint
from shardkit.analysis.jaxpr.census import traced

INSTRUMENTS: dict[str, Callable[..., Any]] = {
    "trace": lambda step, *args: traced(step, args, {}),
    "census": census,
    "lint": lint,
    "explain": explain,
}
# Model, FSDP devices, tensor-parallel devices.
ROWS = (("1.5b", 4, 2), ("8b", 64, 8), ("70b", 512, 8))


def seconds(read: Callable[..., Any], model: str, fsdp: int, tp: int) -> float:
    """One reading of a step that jax has not seen before."""
    step, args = large_model.abstract(large_model.MODELS[model], fsdp=fsdp, tp=tp, batch=1, tokens=4096)
    start = time.perf_counter()
    read(step, *args)
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the median of `--rounds` readings in seconds, and appends records to `--json`."""
    options = start(__doc__, argv, devices=1)
    rounds = 1 if options.smoke else options.rounds or 5
    print(f"{'step':<24}" + "".join(f"{name:>12}" for name in INSTRUMENTS))
    for model, fsdp, tp in ROWS[:1] if options.smoke else ROWS:
        taken = {name: [seconds(read, model, fsdp, tp) for _ in range(rounds)] for name, read in INSTRUMENTS.items()}
        medians = {name: float(np.median(values)) for name, values in taken.items()}
        row = f"{model}, {fsdp * tp} devices"
        print(f"{row:<24}" + "".join(f"{value:>10.3f} s" for value in medians.values()), flush=True)
        if options.json:
            record = {"benchmark": "instruments", "row": row, "seconds_median": medians, "rounds": rounds}
            with options.json.open("a") as out:
                out.write(json.dumps({**record, "environment": bench.environment()}) + "\n")


if __name__ == "__main__":
    main()
