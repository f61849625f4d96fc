"""How many random programs of collectives are proved in a second through emulation, compilation included.

Each example draws a program (mesh, shapes, dtype, up to four collectives), runs it by `emulate` and over lists of
blocks, and compares every bit. Drawing, tracing and compiling are what it costs; the arithmetic is nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import hypothesis
import numpy as np

from benchmarks.functions import measure_functions
from benchmarks.start import start
from shardkit import bench
from shardkit.testing import emulate, programs
from shardkit.testing.chains import Chain


def prove(examples: int) -> int:
    """Proves so many programs, always the same ones; returns how many were run."""
    done = 0

    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs())
    def law(program: Chain) -> None:
        nonlocal done
        x = program.blocks()
        got = emulate(program.kernel, program.sizes, program.spec, program.spec)(x)
        np.testing.assert_array_equal(np.asarray(got), program.reference(x))
        done += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        law()
    return done


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the rate, and appends a record to `--json`; `--calls` is the number of examples."""
    options = start(__doc__, argv, devices=1)
    asked = 3 if options.smoke else options.calls or 300
    prove(1)  # what is paid once: imports, the first compilation
    row = f"{asked} random programs, emulated"
    records = measure_functions("proof_throughput", row, {"prove": lambda: prove(asked)}, rounds=options.rounds or 1)
    bench.report(records, options.json)
    [record] = records
    wall, cpu = (asked / record[f"{clock}_us_median"] * 1e6 for clock in ("wall", "cpu"))
    print(f"{wall:.1f} programs a second, {cpu:.1f} a second of CPU time")


if __name__ == "__main__":
    main()
