"""Plans: how mesh axes are used, one strategy a file."""

from shardkit.parallel.data import dp
from shardkit.parallel.gradient import GradFn, Mean, value_and_grad
from shardkit.parallel.handles import gathered
from shardkit.parallel.layers import scan_layers
from shardkit.parallel.plan import Layout, Plan, chain
from shardkit.parallel.zero import fsdp, zero1, zero2

__all__ = [
    "GradFn",
    "Layout",
    "Mean",
    "Plan",
    "chain",
    "dp",
    "fsdp",
    "gathered",
    "scan_layers",
    "value_and_grad",
    "zero1",
    "zero2",
]
