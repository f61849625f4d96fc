"""Measurements that a shared machine cannot easily spoil: what `shardkit bench` runs, for kernels of your own too.

Start with `measure.py`. Imports everything but `cli/`; only `cli/` and the files in `benchmarks/` import it.
"""

from shardkit.bench.comm import comm
from shardkit.bench.compare import Change, Comparison, compare
from shardkit.bench.environment import calibration, environment
from shardkit.bench.fit import Fit, alpha_beta
from shardkit.bench.measure import MODES, Case, disagreement, measure
from shardkit.bench.measured import Crossover, crossovers, links
from shardkit.bench.records import FORMAT, Record, read, report, table, write, write_csv
from shardkit.bench.rounds import Sample, interleaved, measure_functions, summarise
from shardkit.bench.throttle import throttled

__all__ = [
    "FORMAT",
    "MODES",
    "Case",
    "Change",
    "Comparison",
    "Crossover",
    "Fit",
    "Record",
    "Sample",
    "alpha_beta",
    "calibration",
    "comm",
    "compare",
    "crossovers",
    "disagreement",
    "environment",
    "interleaved",
    "links",
    "measure",
    "measure_functions",
    "read",
    "report",
    "summarise",
    "table",
    "throttled",
    "write",
    "write_csv",
]
