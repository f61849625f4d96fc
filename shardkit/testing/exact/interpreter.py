"""Runs a traced program in the field: every device at once, its calls, loops, branches and collectives.

A value has a dim in front for each mesh axis that is bound at its equation, of size 1 where all devices along the axis
have the same value. So a collective is a sum over such a dim, a roll of it or its exchange with another dim.

Worked example: a shard_map over data=2 of `psum(x @ w, "data")`, where x [8, 3] is split by rows and w [3, 5] is whole.

    outside                 x is [8, 3], w is [3, 5]: no axis is bound, and there is no dim in front
    into the shard_map      x is [2] + [4, 3], the pieces of both devices; w is [1] + [3, 5]
    x @ w                   [2] + [4, 5]: each device has another product
    psum                    [1] + [4, 5]: all have the same
    out of it, as P()       [4, 5]; a result that differs along "data" is refused there
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from functools import cached_property, partial
from typing import Any

import numpy as np

from shardkit._jax import compat
from shardkit._jax.interpreter import JaxprInterpreter, scan_operands, solve_operands, while_operands
from shardkit._jax.jaxprs import mesh_axes, source_line, walk
from shardkit._jax.primitives import ASSUMED, registered
from shardkit.testing.exact.following import mark_chosen, mark_moved, mark_results, note_known
from shardkit.testing.exact.numbers.assembly import join_exact
from shardkit.testing.exact.numbers.errors import CollectiveError, UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.inputs import draw_input
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.pieces import cut_array, join_pieces, take_first
from shardkit.testing.exact.rules.exact_constants import move_constant, note_constants
from shardkit.testing.exact.rules.exchanges import Devices, apply_collective
from shardkit.testing.exact.rules.known import compute_known, to_known
from shardkit.testing.exact.rules.operands import Operand, is_key, join_operands, require_known
from shardkit.testing.exact.rules.primitive_rules import apply_rule
from shardkit.testing.exact.rules.scope import Scope
from shardkit.testing.exact.stablehlo.undefined import UNDEFINED

# A function that watches a run. It is called with each equation, its operands, its results, the bound axes and the line
# of the call around the equation, and returns other results for the equation, or None.
Seen = Callable[[Any, Sequence[Operand], Sequence[Operand], Mapping[str, int], str], Sequence[Operand] | None]
# Equations that change no number: the field models neither rounding nor the devices on which an array is.
_UNCHANGED = {
    "seal",
    "unseal",
    "stop_gradient",
    "reduce_precision",
    "device_put",
    "sharding_constraint",
    "reshard",
    "mesh_cast",
}
_PRINTS = ("debug_callback", "debug_print")
# The rounds of a loop that a float ends.
_MOST_ROUNDS = 1000
# Equations that hold others. Of these `seen` is told the values that go into them and come out of them, one by one.
CONTROL_FLOW = ("shard_map", "scan", "while", "cond")
# A search changes single equations, also within a call or loop: these are recalled one by one. Memory that nothing was
# written to is never recalled, because it is other memory in each round of a loop.
_NEVER_RECALLED = {*CONTROL_FLOW, *compat.CALLS, compat.HIGH_LEVEL, compat.SOLVE, UNDEFINED}


class HangsError(CollectiveError):
    """A collective that some of its devices do not reach, so that the others wait for ever."""

    def __init__(self, name: str, axis: str, line: str):
        super().__init__(f"the branch at {line} must be the same along {axis!r}: its {name} waits for all devices")


@dataclass(frozen=True, eq=False)
class Interpreter(JaxprInterpreter[Operand]):
    """Runs jaxprs in a field.

    Attributes:
        field: the arithmetic.
        axes: the bound mesh axes with their sizes, in the order of the dims in front.
        seen: watches the run; None if nothing does.
        around: the line of the call around the equations, which is named where an equation has no line.
        backward: whether differentiation made the program for the backward pass.
    """

    field: Field
    axes: Mapping[str, int] = attribute(default_factory=dict)
    seen: Seen | None = None
    around: str = ""
    backward: bool = False

    # Both are asked at every equation.
    @cached_property
    def rank(self) -> int:
        """The number of dims in front."""
        return len(self.axes)

    @cached_property
    def scope(self) -> Scope:
        """The argument of rules beside an equation and its operands."""
        return Scope(self.field, self.rank, self.around, self.backward)

    def constant(self, x: Any) -> Operand:
        """An array that a program closes over, as a known array with a dim of size 1 in front for each axis."""
        return self._recall(x, self.rank, (), partial(self._take_constant, x))

    def _take_constant(self, x: Any) -> Operand:
        if self.field.compiled and not is_key(x):
            self.field.notes.add_stored(np.asarray(x), self.field.side)
        x = to_known(x, as_stored=self.field.compiled)
        return x.reshape((1,) * self.rank + x.shape)

    def _recall(self, step: Any, place: Hashable, operands: Sequence[Operand], compute: Callable[[], Any]) -> Any:
        """The result of a step: from memory if the step read the same values in a run that is remembered.

        Args:
            step: the equation or literal.
            place: tells apart steps that share an equation, as the rows of a scan.
            operands: the values that the step reads.
            compute: computes the result.
        """
        if self.field.memory is None:
            return compute()
        return self.field.memory.recall(step, place, operands, compute)

    def literal(self, atom: Any) -> Operand:
        """A number that is written in the program, as a known array."""
        return self._recall(atom, self.rank, (), partial(self._take_constant, atom.val))

    def step(self, equation: Any, operands: list[Operand]) -> Sequence[Operand]:
        """The results of an equation."""
        name = equation.primitive.name
        if self.field.memory is None or name in _NEVER_RECALLED:
            results = self._compute(equation, operands)
        else:
            place = self.around, self.rank
            results = self._recall(equation, place, operands, partial(self._compute, equation, operands))
        if name in CONTROL_FLOW:
            return results
        changed_results = self._tell(equation, operands, results)
        return changed_results or results

    def _compute(self, equation: Any, operands: list[Operand]) -> Sequence[Operand]:
        """The results of an equation, of which those that follow from floats are marked."""
        try:
            results = super().step(equation, operands)
        except UnsupportedError as error:
            if error.line in ("", "unknown"):
                error.line = source_line(equation)
            raise
        if equation.primitive.name in CONTROL_FLOW:
            return results
        results = mark_results(self.field, equation, operands, results)
        note_constants(self.scope, self.axes, equation, operands, results)
        return results

    def _tell(self, equation: Any, operands: Sequence[Operand], results: Sequence[Operand]) -> Sequence[Operand] | None:
        """Tells `seen` of an equation: the results that it wants in place of these, or None."""
        if self.seen is None:
            return None
        return self.seen(equation, operands, results, self.axes, self.around)

    def equation(self, equation: Any, operands: list[Operand]) -> Sequence[Operand]:
        """The results of a primitive: its operands, or what a collective, a call or a rule makes of them."""
        name = equation.primitive.name
        # The table of primitives has the kind of each collective, and the casts of varying types.
        row = registered(name)
        if name == ASSUMED:
            return [self._check_replicated(equation, operands[0])]
        if row.cast or row.same or name in _UNCHANGED:
            return operands
        if name == UNDEFINED:
            return [self._allocate(equation)]
        if name == "axis_index":
            return [Devices(self.field, self.axes).number(mesh_axes(equation))]
        if row.kind is not None:
            return apply_collective(self.scope, self.axes, equation, operands)
        if name in _PRINTS:
            return []
        if name == compat.HIGH_LEVEL:
            return self.call(equation, compat.expand_equation(equation), operands)
        if name == compat.SOLVE:
            (solve,) = compat.inner_programs(equation)
            return self.call(equation, solve, solve_operands(equation, operands))
        if any(isinstance(x, Exact) for x in operands):
            return apply_rule(self.scope, equation, operands)
        results = compute_known(equation, operands, self.rank, self.field.settings.seed, self.field.compiled)
        note_known(self.scope, equation, operands, results)
        return results

    def _allocate(self, equation: Any) -> Operand:
        """Memory that nothing was written to: other unknowns on each device, and each time that the equation runs."""
        self.field.notes.allocations += 1
        shape = (*self.axes.values(), *equation.outvars[0].aval.shape)
        return draw_input(self.field, f"memory {self.field.notes.allocations}", shape)

    def call(self, equation: Any, body: Any, operands: list[Operand]) -> list[Operand]:
        """The results of a function that an equation calls."""
        # Equations without a line of their own are named by the line of the call.
        backward = self.backward or compat.in_backward(equation)
        inside = replace(self, around=source_line(equation, self.around), backward=backward)
        return inside.run(body, operands)

    # Devices

    def shard_map(self, equation: Any, body: Any, operands: list[Operand]) -> list[Operand]:
        """A shard_map: arrays are cut into the pieces of all devices, and the results are joined to arrays again."""
        params = equation.params
        sizes = {name: params["mesh"].shape[name] for name in compat.manual_axes(equation)}
        # The dims of this shard_map's axes come after the dims of axes that are bound around it.
        backward = self.backward or compat.in_backward(equation)
        inside = Interpreter(self.field, {**self.axes, **sizes}, self.seen, backward=backward)
        pieces = []
        for number, (x, spec) in enumerate(zip(operands, params["in_specs"], strict=True)):
            cut = partial(cut_array, self.field, self.rank, x, spec, sizes)
            piece = self._recall(equation, ("piece", number), [x], cut)
            pieces.append(mark_moved(self.field, [x], piece))
        for x, piece in zip(operands, pieces, strict=True):
            inside._tell(equation, [x], [piece])
        results = inside.run(body, pieces)
        arrays = []
        for x, spec in zip(results, params["out_specs"], strict=True):
            array = join_pieces(self.field, self.rank, x, spec, sizes)
            arrays.append(mark_moved(self.field, [x], array))
        for x, array in zip(results, arrays, strict=True):
            self._tell(equation, [x], [array])
        return arrays

    def _check_replicated(self, equation: Any, x: Operand) -> Operand:
        """The value of an assume_replicated: that it is the same on all devices is proved, and not believed."""
        for name in mesh_axes(equation):
            dim = list(self.axes).index(name)
            x = take_first(self.field, x, dim, f"an assume_replicated over {name!r}")
        return x

    # Control flow

    def scan(self, equation: Any, body: Any, operands: list[Operand]) -> list[Operand]:
        """A scan, round by round."""
        # Constants, values that are carried from round to round, and arrays from which each round gets a row.
        consts, carry, scanned = scan_operands(equation, operands)
        # Unrolled: the length is known, and each round has other numbers.
        rounds = range(equation.params["length"])
        if equation.params["reverse"]:
            rounds = rounds[::-1]
        outputs: dict[int, list[Operand]] = {}
        for i in rounds:
            rows = []
            for x in scanned:
                row = self._recall(equation, ("row", i), [x], partial(self._take_row, x, i))
                self._tell(equation, [x], [row])
                rows.append(row)
            results = self.run(body, [*consts, *carry, *rows])
            carry = results[: len(carry)]
            outputs[i] = results[len(carry) :]
        if outputs:
            return [*carry, *self._stack_outputs(equation, outputs)]
        empty = []
        for variable in equation.outvars[len(carry) :]:
            shape = (1,) * self.rank + variable.aval.shape
            empty.append(np.zeros(shape, variable.aval.dtype))
        return [*carry, *empty]

    def _stack_outputs(self, equation: Any, outputs: dict[int, list[Operand]]) -> list[Operand]:
        """The outputs of a scan's rounds, stacked along a new dim in the order of the rounds' numbers."""
        in_order = [outputs[i] for i in sorted(outputs)]
        stacks = []
        for rows in zip(*in_order, strict=True):
            join = partial(join_operands, self.field, rows, self.rank, new=True)
            stack = self._recall(equation, "stack", rows, join)
            self._note_stack(rows, stack)
            self._tell(equation, rows, [stack])
            stacks.append(mark_moved(self.field, rows, stack))
        return stacks

    def _note_stack(self, rows: Sequence[Operand], stack: Operand) -> None:
        """Notes that an array of known floats consists of constants that the rounds of a scan computed."""
        if isinstance(stack, Exact) or not any(x in self.field.computed for x in rows):
            return

        def stack_exact() -> Exact:
            return join_exact([self.field.lift(x) for x in rows], self.rank, new=True)

        self.field.computed.note(stack, rows, stack_exact)

    def _take_row(self, x: Operand, i: int) -> Operand:
        """Row i of an operand, which round i of a scan reads."""
        if isinstance(x, Exact):
            return x.row(self.rank, i)
        row = np.asarray(np.take(x, i, self.rank))
        mark_moved(self.field, [x], row)
        move_constant(self.field, x, row, lambda exact: exact.row(self.rank, i))
        return row

    def while_loop(self, equation: Any, test: Any, body: Any, operands: list[Operand]) -> list[Operand]:
        """A while loop, until no device goes on; devices that have ended keep their values."""
        consts_of_test, consts_of_body, carry = while_operands(equation, operands)
        rounds = 0
        ends_by_float = False
        while True:
            [goes_on] = self.run(test, [*consts_of_test, *carry])
            rounds += 1
            ends_by_float = ends_by_float or self.field.marks.follows_floats(goes_on)
            # In an order, which perhaps no input has, the loop may never end: it is refused at once.
            may_not_end = self.field.settings.order is not None or rounds > _MOST_ROUNDS
            if may_not_end and self.field.marks.follows_floats(goes_on):
                raise UnsupportedError(f"a while loop that a float ends, after more than {_MOST_ROUNDS} rounds,")
            if not goes_on.any():
                break
            # A device that has ended neither runs the body nor asks whether to go on again.
            self._refuse_waiting(equation, goes_on, [test, body])
            after = self.run(body, [*consts_of_body, *carry])
            if not goes_on.all():
                after = self._choose_on_devices(equation, goes_on, after, carry)
            carry = after
        if ends_by_float:
            return mark_chosen(self.field, equation, operands, carry)
        return carry

    def cond(self, equation: Any, branches: list[Any], operands: list[Operand]) -> list[Operand]:
        """A cond or switch: every branch that some device takes."""
        choice, *inputs = operands
        which = np.asarray(require_known(choice, "cond"), np.int64)
        # jax clamps the index of a branch.
        which = np.clip(which, 0, len(branches) - 1)
        # Only branches that some device takes are run. A proof draws again for the others.
        first, *further = sorted(set(which.reshape(-1).tolist()))
        if further:
            self._refuse_waiting(equation, which, branches)
        results = self.run(branches[first], inputs)
        # The results of the first branch are replaced on the devices that take another one, branch by branch.
        for number in further:
            results_of_branch = self.run(branches[number], inputs)
            results = self._choose_on_devices(equation, which == number, results_of_branch, results)
        if self.field.marks.follows_floats(choice):
            return mark_chosen(self.field, equation, operands, results)
        return results

    def _refuse_waiting(self, equation: Any, which: np.ndarray, bodies: Sequence[Any]) -> None:
        """Refuses a collective that some of its devices do not reach: the others would wait for them.

        Worked example: `cond(axis_index("data") == 0, lambda x: psum(x, "data"), ...)` on data=2, model=2. `which` is
        [[1, 1], [0, 0]], and differs along "data". A psum over "model" would be right: both of its devices take it.
        """
        if (which == which.flat[0]).all():
            return
        names = list(self.axes)
        for body in bodies:
            for primitive, axis in self._list_waits(body):
                # Devices along an axis of the collective must all take the branch with it, or none.
                first = np.take(which, [0], names.index(axis))
                if (which != first).any():
                    raise HangsError(primitive, axis, source_line(equation, self.around))

    def _list_waits(self, body: Any) -> Iterator[tuple[str, str]]:
        """The collectives of a branch, with each bound axis along which a device waits for others there."""
        for site in walk(body.jaxpr):
            row = registered(site.name)
            if row.kind is None or row.cast or row.same:
                continue
            for axis in mesh_axes(site.equation):
                if axis in self.axes:
                    yield site.name, axis

    def _choose_on_devices(
        self, equation: Any, mask: np.ndarray, xs: Sequence[Operand], ys: Sequence[Operand]
    ) -> list[Operand]:
        """The values xs on the devices where the mask holds, and ys on the others."""
        devices = Devices(self.field, self.axes)
        results = []
        for x, y in zip(xs, ys, strict=True):
            result = mark_moved(self.field, [x, y], devices.choose(mask, x, y))
            self._tell(equation, [x, y], [result])
            results.append(result)
        return results
