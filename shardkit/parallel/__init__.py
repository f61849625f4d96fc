"""Plans: how mesh axes are used, one strategy a file."""

from shardkit.parallel.data import dp
from shardkit.parallel.gradient import GradFn, Mean, value_and_grad
from shardkit.parallel.plan import Layout, Plan, chain

__all__ = ["GradFn", "Layout", "Mean", "Plan", "chain", "dp", "value_and_grad"]
