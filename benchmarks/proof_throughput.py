"""How many random programs of collectives are proved in a second through emulation, compilation included.

Each example draws a program (mesh, shapes, dtype, up to four collectives), runs it by `emulate` and over lists of
blocks, and compares every bit. Drawing, tracing and compiling are what it costs; the arithmetic is nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import hypothesis
import numpy as np

from benchmarks.functions import measure_functions
from benchmarks.start import start
from shardkit import bench
from shardkit.testing import emulate, programs
from shardkit.testing.chains import Chain


def prove(examples: int) -> int:
    """Proves so many programs, always the same ones; returns how many were run."""
    count = 0

    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,  # the same programs in every run, so that two runs compare
        database=None,
        deadline=None,  # the first example of a shape compiles
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs())
    def check_program(program: Chain) -> None:
        nonlocal count
        x = program.blocks()
        emulated = emulate(program.kernel, program.sizes, program.spec, program.spec)(x)
        np.testing.assert_array_equal(np.asarray(emulated), program.reference(x))
        count += 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        check_program()
    return count


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the rate, and appends a record to `--json`; `--calls` is the number of examples."""
    options = start(__doc__, argv, devices=1)
    examples = options.calls or 300
    if options.smoke:
        examples = 3
    prove(1)  # what is paid once: imports, the first compilation
    row = f"{examples} random programs, emulated"
    proof = {"prove": partial(prove, examples)}
    [record] = measure_functions("proof_throughput", row, proof, rounds=options.rounds or 1)
    bench.report([record], options.json)
    wall_rate = examples / record["wall_us_median"] * 1e6
    cpu_rate = examples / record["cpu_us_median"] * 1e6
    print(f"{wall_rate:.1f} programs a second, {cpu_rate:.1f} a second of CPU time")


if __name__ == "__main__":
    main()
