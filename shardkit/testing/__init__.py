"""The proof kit: references for kernels, and tools to prove your kernels and training steps.

Start with `prove.py`. Imports everything up to analysis. `hypothesis` is imported on first use of the strategies; the
pytest plugin is `shardkit_pytest`, which pytest loads automatically.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from shardkit._arguments.extras import install as _install
from shardkit.testing import laws, reference
from shardkit.testing.assertions import assert_matches_reference
from shardkit.testing.associative import assert_associative
from shardkit.testing.certify import certify_gradients
from shardkit.testing.emulate import emulate
from shardkit.testing.exact import assert_compiled_equal, assert_equal_for_all_inputs, small
from shardkit.testing.kernels.assertion import assert_kernel
from shardkit.testing.laws import LAWS
from shardkit.testing.one_device import one_device
from shardkit.testing.prove import assert_same_training, prove
from shardkit.testing.rows import Row, covering
from shardkit.testing.wire import wire

_STRATEGIES = ("meshes", "programs", "sharded_arrays")

__all__ = [
    "LAWS",
    "Row",
    "assert_associative",
    "assert_compiled_equal",
    "assert_equal_for_all_inputs",
    "assert_kernel",
    "assert_matches_reference",
    "assert_same_training",
    "certify_gradients",
    "covering",
    "emulate",
    "laws",
    "meshes",
    "one_device",
    "programs",
    "prove",
    "reference",
    "sharded_arrays",
    "small",
    "wire",
]


if TYPE_CHECKING:
    from shardkit.testing.strategies import meshes, programs, sharded_arrays
else:  # a checker that sees __getattr__ accepts every name

    def __getattr__(name: str) -> _Any:
        if name not in _STRATEGIES:
            raise AttributeError(f"module 'shardkit.testing' has no attribute {name!r}")
        try:
            return getattr(_import_module("shardkit.testing.strategies"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] != "hypothesis":
                raise
            raise ImportError(
                f"testing.{name}: hypothesis must be installed; it is not. Run {_install('pytest')}."
            ) from None
