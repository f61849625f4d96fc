"""The proof kit: references for the kernels, and tools that prove your own kernels and training steps.

The strategies import `hypothesis` on first use. pytest loads the plugin, `shardkit_pytest`, by its entry point.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any as _Any

from shardkit.testing import laws, reference
from shardkit.testing.assertions import assert_matches_reference
from shardkit.testing.certify import Certificate, certify_gradients
from shardkit.testing.chains import Chain, Op
from shardkit.testing.emulate import emulate
from shardkit.testing.laws import LAWS
from shardkit.testing.one_device import Reference, one_device
from shardkit.testing.program import Program, recording
from shardkit.testing.prove import Proof, prove
from shardkit.testing.rows import Row, covering
from shardkit.testing.training import assert_same_training

_STRATEGIES = ("ShardedArray", "meshes", "programs", "sharded_arrays", "specs")

__all__ = [
    "LAWS",
    "Certificate",
    "Chain",
    "Op",
    "Program",
    "Proof",
    "Reference",
    "Row",
    "assert_matches_reference",
    "assert_same_training",
    "certify_gradients",
    "covering",
    "emulate",
    "laws",
    "one_device",
    "prove",
    "recording",
    "reference",
    *_STRATEGIES,
]


def __getattr__(name: str) -> _Any:
    if name in _STRATEGIES:
        return getattr(_import_module("shardkit.testing.strategies"), name)
    raise AttributeError(f"module 'shardkit.testing' has no attribute {name!r}")
