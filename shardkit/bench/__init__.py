"""Measurements that a shared machine cannot easily spoil, for your kernels too. `shardkit bench` runs them.

Start with `measure.py`. Imports everything but `cli/`, which imports it.
"""

from shardkit.bench.comm import comm, sweeps
from shardkit.bench.compare import compare
from shardkit.bench.environment import calibration, environment
from shardkit.bench.fit import alpha_beta, crossovers, links
from shardkit.bench.measure import Case, Sample, interleaved, measure, summarise
from shardkit.bench.records import read, report, table, write, write_csv
from shardkit.bench.strategies import Workload, reference, strategies

__all__ = [
    "Case",
    "Sample",
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
