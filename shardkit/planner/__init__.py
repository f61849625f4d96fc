"""The planner: the layouts of a transformer that fit a machine, the fastest first, and what runs them.

Start with `search.py`; `estimate.py` states the model of memory and time. Imports cost, strategies and models.
"""

from __future__ import annotations

from shardkit.planner.advice import Advice, advise
from shardkit.planner.candidates import Candidate, Layout, table
from shardkit.planner.estimate import estimate
from shardkit.planner.model import Model
from shardkit.planner.search import search

__all__ = ["Advice", "Candidate", "Layout", "Model", "advise", "estimate", "search", "table"]
