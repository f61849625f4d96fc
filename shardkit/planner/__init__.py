"""The planner finds the layouts of a model that fit a machine, the fastest first, and writes the code to run them.

Start with `search.py`; `estimate.py` states the model of memory and time. `share.py` has one device's part of a step,
`traffic.py` the bytes that it sends, `habits.py` the little that is known of compilers. Imports all up to models.
"""

from __future__ import annotations

from shardkit.planner.advice import advise
from shardkit.planner.counted import counted
from shardkit.planner.estimate import estimate
from shardkit.planner.layout import Layout
from shardkit.planner.model import Model
from shardkit.planner.reasons import explain
from shardkit.planner.search import kinds, search
from shardkit.planner.tables import table

__all__ = [
    "Layout",
    "Model",
    "advise",
    "counted",
    "estimate",
    "explain",
    "kinds",
    "search",
    "table",
]
