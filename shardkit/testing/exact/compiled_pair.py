"""A compiled program beside the traced one, both as programs of a field that return the pieces of all devices.

Worked example: `jit(lambda x: x.sum(0))` of x [8, 2] over four devices.

    compiled    a shard_map over the four devices, each of which runs the module on its piece [2, 2]: [4] + [2]
    traced      x.sum(0), [2], cut into the pieces that the compiled program returns: [4] + [2], four times the same
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax

from shardkit._jax.dependence import without_unused
from shardkit.analysis.hlo.report import Built
from shardkit.testing._compare import UnequalError
from shardkit.testing.exact.draws import Effort, equal
from shardkit.testing.exact.evidence import Evidence, UnprovableError
from shardkit.testing.exact.imported import ImportedProgram
from shardkit.testing.exact.interpreter import Interpreter, Seen
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.pieces import DiffersError
from shardkit.testing.exact.rules.operands import Operand
from shardkit.testing.exact.stablehlo.attributes import UnreadableError


class ReplicationError(UnequalError):
    """The traced program itself has other values on other devices for a result that is one array."""


class CompiledPair(NamedTuple):
    """A compiled program, and the traced one that it must equal.

    Attributes:
        imported: the compiled program.
        on_devices: the compiled program as a ClosedJaxpr of the arguments' leaves, which returns the pieces of all
            devices.
        traced: the ClosedJaxpr from which the program was compiled, or that of a plain function.
        cut: a ClosedJaxpr that cuts the results of `traced` into the pieces of all devices.
        names: the path of each result.
    """

    imported: ImportedProgram
    on_devices: Any
    traced: Any
    cut: Any
    names: tuple[str, ...]

    @classmethod
    def of(cls, where: str, compiled: Any, traced: Any) -> CompiledPair:
        """A `jax.stages.Compiled` beside a ClosedJaxpr of the same arguments."""
        return cls.make(where, partial(ImportedProgram.of, compiled), compiled.out_info, traced)

    @classmethod
    def of_absent(cls, where: str, built: Built, topology: str, traced: Any) -> CompiledPair:
        """A program compiled for absent chips beside a ClosedJaxpr of the same arguments."""
        return cls.make(where, partial(ImportedProgram.of_absent, built, topology), built.traced.out_info, traced)

    @classmethod
    def make(cls, where: str, read: Callable[[], ImportedProgram], out_info: Any, traced: Any) -> CompiledPair:
        """A compiled program, which `read` returns, beside a ClosedJaxpr; `out_info` has the shapes of the results."""
        names = []
        results = []
        for path, result in jax.tree_util.tree_leaves_with_path(out_info):
            names.append(jax.tree_util.keystr(path))
            results.append(jax.ShapeDtypeStruct(result.shape, result.dtype))
        # The sharding and the axes of the arguments stay behind: the pair takes whole arrays.
        arguments = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in traced.in_avals]
        try:
            imported = read()
            on_devices = imported.trace(arguments)
        except UnreadableError as error:
            raise UnprovableError(
                f"{where}: each operation of the compiled program must have a meaning as a function of arrays; "
                f"{error.operation} has none. Compare floats, or compile for another platform."
            ) from error
        # The compiled program returns [devices, ...] for each result, and so must the traced one.
        cut = jax.make_jaxpr(imported.cut_results)(results)
        return cls(imported, on_devices, without_unused(traced), cut, tuple(names))

    @property
    def programs(self) -> tuple[Any, Any]:
        """Both programs, to count their sizes."""
        return self.on_devices, self.traced

    def prove(
        self, where: str, subject: str, noun: str, make_inputs: Callable[[Field], Any], points: int, effort: Effort
    ) -> Evidence:
        """Refuses the compiled program if it differs from the traced one, or if it is neither proved nor refuted.

        Args:
            where: the name of the function that users called, which begins messages.
            subject: the beginning of a message that says that a result differs.
            noun: the word for a result, as "output".
            make_inputs: makes the arguments in a field.
            points: the number of random points.
            effort: how many runs there are.
        """
        names = [f"{noun}{name} of each device" for name in self.names]
        run_compiled = partial(self._run_compiled, make_inputs)
        run_traced = partial(self._run_traced, make_inputs)
        try:
            return equal(where, subject, names, (run_compiled, run_traced), points, effort)
        except DiffersError as error:
            raise ReplicationError(
                f"{where}: each result of the traced program must be one array; {error} differs between devices, so "
                "that out_specs name an axis too few. Sum or gather it, or pass reference=."
            ) from error

    def _run_compiled(self, make_inputs: Callable[[Field], Any], field: Field, seen: Seen | None) -> list[Operand]:
        """The pieces of all devices, computed by the module."""
        field.compiled = True
        inputs = make_inputs(field)
        # A module counts places in 64 bits, as those of random numbers.
        with jax.enable_x64(True):
            return Interpreter(field, seen=seen).run(self.on_devices, inputs)

    def _run_traced(self, make_inputs: Callable[[Field], Any], field: Field, seen: Seen | None) -> list[Operand]:
        """The pieces of all devices, cut out of the results of the traced program."""
        # The compiled program holds jax's own random numbers, so the traced one must draw the same.
        field.compiled = True
        interpreter = Interpreter(field, seen=seen)
        results = interpreter.run(self.traced, make_inputs(field))
        return interpreter.run(self.cut, results)
