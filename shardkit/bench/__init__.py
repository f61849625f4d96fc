"""Measurements that a shared machine cannot easily spoil: what `shardkit bench` runs, for kernels of your own too.

Start with `measure.py`. Imports everything but `cli/`; only `cli/` and the files in `benchmarks/` import it.
"""

from shardkit.bench.chakra import ExecutionTrace
from shardkit.bench.comm import comm
from shardkit.bench.compare import Change, Comparison, compare
from shardkit.bench.environment import calibration, environment
from shardkit.bench.fit import Fit, alpha_beta
from shardkit.bench.growth import exponent
from shardkit.bench.measure import MODES, Case, disagreement, measure
from shardkit.bench.measured import Crossover, crossovers, links
from shardkit.bench.overlap import overlap, share_hidden, written
from shardkit.bench.overlap_cases import Size
from shardkit.bench.plan_cases import Workload, reference
from shardkit.bench.records import FORMAT, Record, read, report, table, write, write_csv
from shardkit.bench.rounds import Sample, interleaved, measure_functions, summarise
from shardkit.bench.scale import scale
from shardkit.bench.schedules import Sizes, schedules
from shardkit.bench.strategies import strategies
from shardkit.bench.throttle import throttled
from shardkit.bench.trace import execution_trace

__all__ = [
    "FORMAT",
    "MODES",
    "Case",
    "Change",
    "Comparison",
    "Crossover",
    "ExecutionTrace",
    "Fit",
    "Record",
    "Sample",
    "Size",
    "Sizes",
    "Workload",
    "alpha_beta",
    "calibration",
    "comm",
    "compare",
    "crossovers",
    "disagreement",
    "environment",
    "execution_trace",
    "exponent",
    "interleaved",
    "links",
    "measure",
    "measure_functions",
    "overlap",
    "read",
    "reference",
    "report",
    "scale",
    "schedules",
    "share_hidden",
    "strategies",
    "summarise",
    "table",
    "throttled",
    "write",
    "write_csv",
    "written",
]
