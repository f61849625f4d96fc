"""Measurements that a shared machine cannot easily spoil, for your kernels too. `shardkit bench` runs them.

Start with `measure.py`. Imports everything but `cli/`, which imports it.
"""

from shardkit.bench.comm import comm
from shardkit.bench.compare import compare
from shardkit.bench.fit import links
from shardkit.bench.measure import Case, measure
from shardkit.bench.records import read, report
from shardkit.bench.strategies import strategies
from shardkit.bench.sweep import sweeps
from shardkit.bench.workload import Workload

__all__ = [
    "Case",
    "Workload",
    "comm",
    "compare",
    "links",
    "measure",
    "read",
    "report",
    "strategies",
    "sweeps",
]
