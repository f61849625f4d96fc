"""Measurements that a shared machine cannot easily spoil: what `shardkit bench` runs, for kernels of your own too.

Start with `measure.py`. Imports everything but `cli/`; only `cli/` and the files in `benchmarks/` import it.
"""

from shardkit.bench.chakra import ExecutionTrace
from shardkit.bench.compare import Change, Comparison, compare
from shardkit.bench.environment import calibration, environment
from shardkit.bench.growth import exponent
from shardkit.bench.measure import MODES, Case, Sample, disagreement, interleaved, measure, summarise
from shardkit.bench.records import FORMAT, Record, read, report, table, write, write_csv
from shardkit.bench.scale import scale
from shardkit.bench.schedules import Sizes, schedules
from shardkit.bench.trace import execution_trace

__all__ = [
    "FORMAT",
    "MODES",
    "Case",
    "Change",
    "Comparison",
    "ExecutionTrace",
    "Record",
    "Sample",
    "Sizes",
    "calibration",
    "compare",
    "disagreement",
    "environment",
    "execution_trace",
    "exponent",
    "interleaved",
    "measure",
    "read",
    "report",
    "scale",
    "schedules",
    "summarise",
    "table",
    "write",
    "write_csv",
]
