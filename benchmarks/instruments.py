"""How long the instruments take to read a program: the training step of a large transformer.

The step is that of `large_model.py` (FSDP layer by layer, tensor parallelism, remat, Adam). Nothing is compiled or run
and no device is needed; the time of the trace is listed by itself, since every instrument begins with one. `lint`
traces twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks import large_model
from benchmarks.functions import measure_functions
from benchmarks.start import choose_rounds, start
from shardkit import bench
from shardkit.analysis import census, explain, lint
from shardkit.analysis.jaxpr.step import trace_step


def trace(step: Any, *args: Any) -> Any:
    """The step's program, which every instrument reads."""
    return trace_step(step, args)


INSTRUMENTS: dict[str, Callable[..., Any]] = {"trace": trace, "census": census, "lint": lint, "explain": explain}
# Model, FSDP devices, tensor-parallel devices.
ROWS = [("1.5b", 4, 2), ("8b", 64, 8), ("70b", 512, 8)]


def read_afresh(read: Callable[..., Any], model: str, fsdp: int, tp: int) -> None:
    """One reading of a step that jax has not seen before: a new step has no trace that jax could remember."""
    step, args = large_model.describe_step(large_model.MODELS[model], fsdp=fsdp, tp=tp, batch=1, tokens=4096)
    read(step, *args)


def main(argv: Sequence[str] | None = None) -> None:
    """Times `--rounds` readings."""
    options = start(__doc__, argv, devices=1)
    rows = ROWS
    if options.smoke:
        rows = ROWS[:1]
    for model, fsdp, tp in rows:
        readings = {}
        for name, read in INSTRUMENTS.items():
            readings[name] = partial(read_afresh, read, model, fsdp, tp)
        row = f"{model}, {fsdp * tp} devices"
        records = measure_functions("instruments", row, readings, rounds=choose_rounds(options, 5, smoke=1))
        bench.report(records, options.json)


if __name__ == "__main__":
    main()
