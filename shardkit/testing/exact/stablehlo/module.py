"""The optimized module of a compiler, parsed by jaxlib into typed operations of StableHLO."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jaxlib

from shardkit._jax import compat
from shardkit.testing.exact.stablehlo.attributes import UnreadableError
from shardkit.testing.exact.stablehlo.instructions import open_module
from shardkit.testing.exact.stablehlo.listed_groups import list_groups
from shardkit.testing.exact.stablehlo.source_lines import has_frames, make_caller
from shardkit.testing.exact.stablehlo.synchronous import wait_for_starts
from shardkit.testing.exact.stablehlo.tilings import drop_tilings
from shardkit.testing.exact.stablehlo.typed_alike import convert_floats, split_arrays


class ImportedModule:
    """A module, parsed.

    Attributes:
        mesh: names and sizes of the mesh axes of all devices, along which its function must be mapped.
    """

    def __init__(self, serialized: bytes, mesh: dict[str, int]):
        """Parses the serialized HloModuleProto of a module."""
        self.mesh = mesh
        try:
            self._ir = compat.parse_hlo(rewrite(serialized))
        except ValueError as error:
            raise UnreadableError(f"a part that jaxlib {jaxlib.__version__} cannot turn into StableHLO") from error
        self._callers: dict[str, Callable[..., Any]] = {}  # by location
        self._functions: dict[str, Any] = {}
        for operation in self._ir.body.operations:
            if operation.operation.name == "func.func":
                name = operation.attributes["sym_name"].value
                self._functions[name] = operation

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh axes."""
        return tuple(self.mesh)

    def call_at_line(self, operation: Any, rule: Callable[[], Any]) -> Any:
        """What a rule returns, called as from the lines of the source that an operation of the module came from."""
        location = _find_location(operation)
        if location not in self._callers:
            self._callers[location] = make_caller(location)
        caller = self._callers[location]
        return caller(rule)

    def find_function(self, name: str) -> Any:
        """The block of a function, by its name; "main" is the program of one device."""
        return self._functions[name].regions[0].blocks[0]


def rewrite(serialized: bytes) -> bytes:
    """A serialized HloModuleProto that computes the same, in operations that jaxlib turns into StableHLO."""
    module = open_module(serialized)
    drop_tilings(module)
    for computation in module.computations:
        wait_for_starts(computation)
        split_arrays(computation)
        convert_floats(computation)
        list_groups(computation)
    return module.write()


# How many operations around one without a line are asked for theirs.
_MOST_AROUND = 8


def _find_location(operation: Any) -> str:
    """The location of an operation in the source. Of one without a line, that of the nearest operation that reads it.

    A compiler makes operations without a line, as the zero with which it pads an operand.
    """
    # The operation, then those that read it, then those that read these: the nearest first.
    waiting = [operation.operation]
    for _ in range(_MOST_AROUND):
        if not waiting:
            break
        nearest = waiting.pop(0)
        location = str(nearest.location)
        if has_frames(location):
            return location
        for result in nearest.results:
            waiting += [use.owner.operation for use in result.uses]
    return str(operation.location)
