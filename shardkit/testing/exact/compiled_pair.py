"""A compiled program beside the traced one, both as programs of a field that return the pieces of all devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from shardkit._jax.dependence import without_unused
from shardkit.testing._compare import UnequalError
from shardkit.testing.exact.draws import Effort, equal
from shardkit.testing.exact.imported import ImportedProgram
from shardkit.testing.exact.interpreter import DiffersError, Interpreter, Seen
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.program_pair import Evidence, UnprovableError
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.stablehlo.attributes import UnreadableError


class CompiledPair(NamedTuple):
    """A compiled program, and the traced one that it must equal.

    Attributes:
        imported: the compiled program.
        on_devices: its ClosedJaxpr of the leaves of the arguments, which returns the pieces of all devices.
        traced: the ClosedJaxpr of what it was compiled from, or of a plain function.
        cut: a ClosedJaxpr that cuts what `traced` returns into the pieces of all devices.
        names: the path of each result.
    """

    imported: ImportedProgram
    on_devices: Any
    traced: Any
    cut: Any
    names: tuple[str, ...]

    @classmethod
    def of(cls, where: str, compiled: Any, traced: Any) -> CompiledPair:
        """That of a `jax.stages.Compiled` and a ClosedJaxpr of the same arguments."""
        results = jax.tree_util.tree_leaves_with_path(compiled.out_info)
        names = tuple(jax.tree_util.keystr(path) for path, _ in results)
        try:
            imported = ImportedProgram.of(compiled)
            on_devices = imported.trace([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in traced.in_avals])
        except UnreadableError as error:
            raise UnprovableError(
                f"{where}: each operation of the compiled program must have a meaning as a function of arrays; "
                f"{error.operation} has none. Compare floats, or compile for another platform."
            ) from error
        cut = jax.make_jaxpr(imported.cut_results)([jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in results])
        return cls(imported, on_devices, without_unused(traced), cut, names)

    @property
    def programs(self) -> tuple[Any, Any]:
        """Both programs, to count their sizes."""
        return self.on_devices, self.traced

    def prove(
        self, where: str, subject: str, noun: str, make_inputs: Callable[[Field], Any], points: int, effort: Effort
    ) -> Evidence:
        """Refuses the compiled program if it differs from the other, or if it is neither proved nor refuted."""
        names = [f"{noun}{name} of each device" for name in self.names]
        sides = partial(self._run_compiled, make_inputs), partial(self._run_traced, make_inputs)
        try:
            return equal(where, subject, names, sides, points, effort)
        except DiffersError as error:
            raise UnequalError(
                f"{where}: each result of the traced program must be one array; {error} differs between devices, so "
                "that out_specs name an axis too few. Sum or gather it, or pass reference=."
            ) from error

    def _run_compiled(self, make_inputs: Callable[[Field], Any], field: Field, seen: Seen | None) -> list[Operand]:
        """The pieces of all devices, as the module computes them."""
        field.compiled = True
        inputs = make_inputs(field)
        # A module counts places in 64 bits, as those of random numbers.
        with jax.enable_x64(True):
            return Interpreter(field, seen=seen).run(self.on_devices, inputs)

    def _run_traced(self, make_inputs: Callable[[Field], Any], field: Field, seen: Seen | None) -> list[Operand]:
        """The pieces of all devices, of what the traced program computes."""
        # The compiled program holds jax's own random numbers, so the traced one must draw the same.
        field.compiled = True
        run = Interpreter(field, seen=seen).run
        return run(self.cut, run(self.traced, make_inputs(field)))
