"""Measurements that a shared machine cannot easily spoil: what `shardkit bench` runs, for kernels of your own too.

Start with `measure.py`. Imports everything but `cli/`, which imports it.
"""

from shardkit.bench.comm import Sweep, comm, sweeps
from shardkit.bench.compare import Change, Comparison, compare
from shardkit.bench.environment import calibration, environment
from shardkit.bench.fit import Crossover, Fit, alpha_beta, crossovers, links
from shardkit.bench.measure import MODES, Case, Sample, interleaved, measure, summarise
from shardkit.bench.records import FORMAT, Record, read, report, table, write, write_csv
from shardkit.bench.strategies import Workload, reference, strategies

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
    "Sweep",
    "Workload",
    "alpha_beta",
    "calibration",
    "comm",
    "compare",
    "crossovers",
    "environment",
    "interleaved",
    "links",
    "measure",
    "read",
    "reference",
    "report",
    "strategies",
    "summarise",
    "sweeps",
    "table",
    "write",
    "write_csv",
]
