"""Functions for your training script, around its steps: join processes, save checkpoints, load weights and data, check.

Start with `cluster/join.py`; each of `channel/`, `cluster/`, `data/`, `checkpoint/`, `weights/` has a docstring.
Imports steps. The launcher and the guard are in `jobs/`; you can call `guard` from here too. It is imported at first
use, like the law that this folder adds to testing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardkit.runtime.checkpoint.checkpoints import Checkpoints
from shardkit.runtime.cluster.barrier import barrier, health_check
from shardkit.runtime.cluster.join import finish, initialize, is_main, leave, log
from shardkit.runtime.cluster.preemption import PREEMPTED, preempted, watch_preemption
from shardkit.runtime.data.arrays import from_full, from_process_local, from_single_device, local_rows
from shardkit.runtime.data.loader import loader
from shardkit.runtime.data.reading import fetch, local_shards, print_global, replicate
from shardkit.runtime.drift import assert_no_drift, replica_drift
from shardkit.runtime.triage import nonfinite, triage
from shardkit.runtime.weights.load import load_params

if TYPE_CHECKING:
    from shardkit.jobs.monitor.guard import Deadlines, guard
    from shardkit.runtime.checkpoint.laws import restores_elsewhere as restores_elsewhere

__all__ = [
    "PREEMPTED",
    "Checkpoints",
    "Deadlines",
    "assert_no_drift",
    "barrier",
    "fetch",
    "finish",
    "from_full",
    "from_process_local",
    "from_single_device",
    "guard",
    "health_check",
    "initialize",
    "is_main",
    "leave",
    "load_params",
    "loader",
    "local_rows",
    "local_shards",
    "log",
    "nonfinite",
    "preempted",
    "print_global",
    "replica_drift",
    "replicate",
    "triage",
    "watch_preemption",
]

_LATER = {
    **dict.fromkeys(("Deadlines", "guard"), "shardkit.jobs.monitor.guard"),
    "restores_elsewhere": "shardkit.runtime.checkpoint.laws",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
