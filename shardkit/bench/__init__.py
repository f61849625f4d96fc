"""Measurements that a shared machine cannot easily spoil: what `shardkit bench` runs, for kernels of your own too.

Start with `measure.py`. Imports everything but `cli/`; only `cli/` and the files in `benchmarks/` import it.
"""

from shardkit.bench.compare import Change, Comparison, compare
from shardkit.bench.environment import calibration, environment
from shardkit.bench.fit import Fit, alpha_beta
from shardkit.bench.measure import MODES, Case, Sample, disagreement, interleaved, measure, summarise
from shardkit.bench.measured import Crossover, crossovers, links
from shardkit.bench.records import FORMAT, Record, read, report, table, write, write_csv
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
    "compare",
    "crossovers",
    "disagreement",
    "environment",
    "interleaved",
    "links",
    "measure",
    "read",
    "report",
    "summarise",
    "table",
    "throttled",
    "write",
    "write_csv",
]
