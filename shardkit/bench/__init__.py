"""Measurements that a shared machine cannot easily spoil: what `shardkit bench` runs, for kernels of your own too.

Start with `measure.py`. Imports everything but `cli/`; only `cli/` and the files in `benchmarks/` import it.
"""

from shardkit.bench.compare import Change, Comparison, compare
from shardkit.bench.environment import calibration, environment
from shardkit.bench.measure import MODES, Case, disagreement, measure
from shardkit.bench.overlap import overlap, share_hidden, written
from shardkit.bench.overlap_cases import Size
from shardkit.bench.plan_cases import Workload, reference
from shardkit.bench.records import FORMAT, Record, read, report, table, write, write_csv
from shardkit.bench.rounds import Sample, interleaved, measure_functions, summarise
from shardkit.bench.strategies import strategies

__all__ = [
    "FORMAT",
    "MODES",
    "Case",
    "Change",
    "Comparison",
    "Record",
    "Sample",
    "Size",
    "Workload",
    "calibration",
    "compare",
    "disagreement",
    "environment",
    "interleaved",
    "measure",
    "measure_functions",
    "overlap",
    "read",
    "reference",
    "report",
    "share_hidden",
    "strategies",
    "summarise",
    "table",
    "write",
    "write_csv",
    "written",
]
