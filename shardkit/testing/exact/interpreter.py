"""Runs a traced program in the field: every device at once, its calls, loops, branches and collectives.

A value has one dim in front for each mesh axis that is bound where it stands, of size 1 where all devices along the
axis have the same. So a collective is a sum over a dim, a roll of it or its exchange with another.

Worked example: a shard_map over data=2 of `psum(x @ w, "data")`, where x [8, 3] is split by rows and w [3, 5] is whole.

    outside                 x is [8, 3], w is [3, 5]: no axis is bound, and there is no dim in front
    into the shard_map      x is [2] + [4, 3], the pieces of both devices; w is [1] + [3, 5]
    x @ w                   [2] + [4, 5]: each device has another product
    psum                    [1] + [4, 5]: all have the same
    out of it, as P()       [4, 5]; a result that differs along "data" is refused there
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as attribute
from functools import cached_property, partial
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from shardkit._jax import compat
from shardkit._jax.interpreter import JaxprInterpreter, scan_operands, solve_operands, while_operands
from shardkit._jax.jaxprs import mesh_axes, source_line, walk
from shardkit._jax.primitives import ASSUMED, registered
from shardkit.meshes.layout import all_axes
from shardkit.testing._interpreter import join_shards, split_shards
from shardkit.testing.exact.numbers.assembly import join_exact
from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.numbers.field import Field
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.exact_constants import move_constant, note_constants
from shardkit.testing.exact.rules.exchanges import Devices, apply_collective
from shardkit.testing.exact.rules.known import compute_known, to_known
from shardkit.testing.exact.rules.operands import Operand, join_operands, move_operand, require_known
from shardkit.testing.exact.rules.primitive_rules import apply_rule
from shardkit.testing.exact.rules.scope import Scope

# Called with each equation, its operands, its results, the bound axes and the line of the call around it; returns other
# results for it, or None.
Seen = Callable[[Any, Sequence[Operand], Sequence[Operand], Mapping[str, int], str], Sequence[Operand] | None]
# Neither rounding nor places on devices are modelled.
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
_CALLING = (compat.HIGH_LEVEL, compat.SOLVE)
_PRINTS = ("debug_callback", "debug_print")
_MOST_ROUNDS = 1000  # of a loop that a float ends
# Of integers that are not negative these give integers that are not negative either.
_NATURAL = {
    "add",
    "mul",
    "max",
    "min",
    "rem",
    "reduce_sum",
    "reduce_max",
    "cumsum",
    "convert_element_type",
    "select_n",
    "reshape",
    "broadcast_in_dim",
    "squeeze",
    "transpose",
    "concatenate",
    "slice",
    "dynamic_slice",
    "sort",
    "lu_pivots_to_permutation",
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# Functions that jax computes of constants in floats, rounded: log(2) is no rational number.
_ROUNDED = {
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "log2",
    "logistic",
    "sqrt",
    "rsqrt",
    "cbrt",
    "pow",
    "sin",
    "cos",
    "tan",
    "sinh",
    "cosh",
    "tanh",
    "asin",
    "acos",
    "atan",
    "atan2",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "erf_inv",
    "lgamma",
    "digamma",
}
# `seen` is called with the values that go into these and come out of them, one by one.
_CONTROL_FLOW = ("shard_map", "scan", "while", "cond")


class HangsError(Exception):
    """A collective that not all of its devices come to."""

    def __init__(self, name: str, axis: str, line: str):
        super().__init__(f"the branch at {line} must be the same along {axis!r}: its {name} waits for all devices")


class DiffersError(Exception):
    """A value that must be equal on all devices is not."""

    def __init__(self, what: str, value: Operand):
        super().__init__(what)
        self.value = value


@dataclass(frozen=True, eq=False)
class Interpreter(JaxprInterpreter[Operand]):
    """Runs jaxprs in a field.

    Attributes:
        field: the arithmetic.
        axes: the bound mesh axes with their sizes, in the order of the dims in front.
        seen: what watches.
        around: the line of the call around the equations, which stands for an equation without a line.
    """

    field: Field
    axes: Mapping[str, int] = attribute(default_factory=dict)
    seen: Seen | None = None
    around: str = ""

    # Asked at every equation.
    @cached_property
    def rank(self) -> int:
        """The number of dims in front."""
        return len(self.axes)

    @cached_property
    def scope(self) -> Scope:
        """What rules are given beside equations here."""
        return Scope(self.field, self.rank, self.around)

    def constant(self, x: Any) -> Operand:
        """An array that a program closes over, with a dim of size 1 in front for each axis."""
        return self._recall(x, self.rank, (), partial(self._take_constant, x))

    def _take_constant(self, x: Any) -> Operand:
        x = to_known(x, as_stored=self.field.compiled)
        return x.reshape((1,) * self.rank + x.shape)

    def _recall(self, step: Any, place: Hashable, operands: Sequence[Operand], compute: Callable[[], Any]) -> Any:
        """What a step gives, or gave in a run that is remembered."""
        if self.field.memory is None:
            return compute()
        return self.field.memory.recall(step, place, operands, compute)

    def literal(self, atom: Any) -> Operand:
        """The same of a number in the program."""
        return self._recall(atom, self.rank, (), partial(self._take_constant, atom.val))

    def step(self, equation: Any, operands: list[Operand]) -> Sequence[Operand]:
        """The results of an equation."""
        name = equation.primitive.name
        # Within what an equation calls, equations may be changed: they are recalled one by one.
        if self.field.memory is None or name in _CONTROL_FLOW or name in compat.CALLS or name in _CALLING:
            results = self._compute(equation, operands)
        else:
            place = self.around, self.rank
            results = self._recall(equation, place, operands, partial(self._compute, equation, operands))
        if name in _CONTROL_FLOW:
            return results
        return self._tell(equation, operands, results) or results

    def _compute(self, equation: Any, operands: list[Operand]) -> Sequence[Operand]:
        """The results of an equation, of which those that follow from floats are marked."""
        try:
            results = super().step(equation, operands)
        except UnsupportedError as error:
            if error.line in ("", "unknown"):
                error.line = source_line(equation)
            raise
        if equation.primitive.name in _CONTROL_FLOW:
            return results
        results = self._mark_results(equation, operands, results)
        note_constants(self.scope, self.axes, equation, operands, results)
        return results

    def _tell(self, equation: Any, operands: Sequence[Operand], results: Sequence[Operand]) -> Sequence[Operand] | None:
        if self.seen is None:
            return None
        return self.seen(equation, operands, results, self.axes, self.around)

    def equation(self, equation: Any, operands: list[Operand]) -> Sequence[Operand]:
        """What a primitive does: nothing, a collective, or arithmetic."""
        name = equation.primitive.name
        # Casts of varying types change no number; collectives are registered by their kind.
        row = registered(name)
        if name == ASSUMED:
            return [self._check_replicated(equation, operands[0])]
        if row.cast or row.same or name in _UNCHANGED:
            return operands
        if name == "axis_index":
            return [Devices(self.field, self.axes).number(mesh_axes(equation))]
        if row.kind is not None:
            return apply_collective(self.field, self.axes, equation, operands)
        if name in _PRINTS:
            return []
        if name == compat.HIGH_LEVEL:
            return self.call(equation, compat.expand_equation(equation), operands)
        if name == compat.SOLVE:
            (solve,) = compat.inner_programs(equation)
            return self.call(equation, solve, solve_operands(equation, operands))
        if any(isinstance(x, Exact) for x in operands):
            return apply_rule(self.scope, equation, operands)
        return self._compute_known(equation, operands)

    def call(self, equation: Any, body: Any, operands: list[Operand]) -> list[Operand]:
        """The results of a function that an equation calls."""
        return self._within(equation).run(body, operands)

    def _within(self, equation: Any) -> Interpreter:
        """What runs the equations of a call: those that know no line stand at the call's."""
        return replace(self, around=source_line(equation, self.around))

    # What follows from floats

    def _compute_known(self, equation: Any, operands: list[Operand]) -> Sequence[Operand]:
        """The results of an equation with known operands; comparisons of what follows from floats are noted."""
        results = compute_known(equation, operands, self.rank, self.field.seed, self.field.compiled)
        if equation.primitive.name == "random_bits":
            self.field.chances = True
        if equation.primitive.name in _ROUNDED:
            numbers = results[0][~np.isnan(results[0])]
            rounded = numbers[numbers != np.rint(numbers)]
            if rounded.size:
                self.field.note_rounded(f"{equation.primitive.name} of a constant", rounded)
        coverage = self.field.coverage
        if coverage is None or not self._follows_floats(equation, operands):
            return results
        name = equation.primitive.name
        # `counts < capacity`, where counts are of tokens that a router sent here.
        if name in _COMPARISONS:
            line = source_line(equation, self.around)
            coverage.note_integers(self.field, equation, line, results[0], operands)
        if name in ("and", "or") and all(self.field.marks.is_decision(x) for x in operands):
            coverage.note_joined(self.field, equation, source_line(equation, self.around), results[0])
        return results

    def _follows_floats(self, equation: Any, operands: Sequence[Operand]) -> bool:
        """Whether a known result follows from floats, because an operand does."""
        if not self.field.marks.any_follows_floats(operands):
            return False
        return not self._is_forced(equation, operands)

    def _is_forced(self, equation: Any, operands: Sequence[Operand]) -> bool:
        """Whether a comparison has one answer, because it asks whether a natural number is less than zero.

        jax asks it of every index, because a negative one counts from the end.
        """
        if equation.primitive.name not in ("lt", "ge") or any(isinstance(x, Exact) for x in operands):
            return False
        x, y = operands
        marks = self.field.marks
        is_at_most_zero = bool((np.asarray(y) <= 0).all())
        if marks.follows_floats(y) or not is_at_most_zero:
            return False
        return marks.is_natural(x)

    def _mark_results(
        self, equation: Any, operands: Sequence[Operand], results: Sequence[Operand]
    ) -> Sequence[Operand]:
        """The results, of which the known ones are marked if they follow from floats."""
        if not self._follows_floats(equation, operands):
            return results
        marks = self.field.marks
        following = [x for x in operands if marks.follows_floats(x)]
        natural = equation.primitive.name in _NATURAL and self._are_natural(operands)
        # `(x > 0) & (y > 0)` is a decision too; `count < 3` is none, but a comparison of integers.
        joins_decisions = equation.primitive.name not in _COMPARISONS and all(marks.is_decision(x) for x in following)
        marked: list[Operand] = []
        for x in results:
            # Numbers of the field need no mark: they are compared by their keys.
            if not isinstance(x, Exact) and not marks.follows_floats(x):
                x = np.asarray(x)
                marks.add(x, decision=joins_decisions and x.dtype == bool, natural=natural)
            marked.append(x)
        return marked

    def _are_natural(self, operands: Sequence[Operand]) -> bool:
        """Whether no operand may be negative, whatever floats are."""
        if any(isinstance(x, Exact) for x in operands):
            return False
        return all(self.field.marks.is_natural(np.asarray(x)) for x in operands)

    # Devices

    def shard_map(self, equation: Any, body: Any, operands: list[Operand]) -> list[Operand]:
        """A shard_map: arrays are cut into the pieces of all devices, and results put together again."""
        sizes = {name: equation.params["mesh"].shape[name] for name in compat.manual_axes(equation)}
        # The dims of this shard_map's axes come after the dims of axes that are bound around it.
        inside = Interpreter(self.field, {**self.axes, **sizes}, self.seen)
        pieces = []
        for number, (x, spec) in enumerate(zip(operands, equation.params["in_specs"], strict=True)):
            pieces.append(self._recall(equation, ("piece", number), [x], partial(self._cut, x, spec, sizes)))
        for x, piece in zip(operands, pieces, strict=True):
            inside._tell(equation, [x], [piece])
        results = inside.run(body, pieces)
        arrays = []
        for x, spec in zip(results, equation.params["out_specs"], strict=True):
            arrays.append(self._join(x, spec, sizes))
        for x, array in zip(results, arrays, strict=True):
            self._tell(equation, [x], [array])
        return arrays

    def _cut(self, x: Operand, spec: PartitionSpec, sizes: dict[str, int]) -> Operand:
        """An array as the pieces of all devices: with a dim in front for each axis, of size 1 where all have it."""
        # x [8, 3] under P("data") on data=2, model=2 becomes [2, 1] + [4, 3].
        split_axes = all_axes(spec)
        front = [n if name in split_axes else 1 for name, n in sizes.items()]

        def move(part: Any, lead: int) -> Any:
            # split_shards reads a global array after `lead` dims: the components, and the axes around.
            part = split_shards(part, _shift_spec(spec, lead), sizes)
            # The dims of the axes that split it come first; they belong after the dims that were there before.
            count = len(split_axes)
            part = np.moveaxis(part, range(count), range(lead, lead + count))
            return part.reshape(*part.shape[:lead], *front, *part.shape[lead + count :])

        piece = move_operand(x, self.rank, move)
        move_constant(self.field, x, piece, lambda exact: move_operand(exact, self.rank, move))
        return piece

    def _join(self, x: Operand, spec: PartitionSpec, sizes: dict[str, int]) -> Operand:
        """The pieces of all devices as an array; along axes that do not split it, they must be equal."""
        split_axes = all_axes(spec)
        for number, name in enumerate(sizes):
            if name not in split_axes:
                # Here a missing psum is found: a result that P() calls replicated and that differs.
                x = self._take_first(x, self.rank + number, f"a result that is replicated along {name!r}")
        front = [n if name in split_axes else 1 for name, n in sizes.items()]

        def move(part: Any, lead: int) -> Any:
            count = len(sizes)
            part = np.moveaxis(part, range(lead, lead + count), range(count))
            part = np.broadcast_to(part, (*front, *part.shape[count:]))
            return join_shards(part, _shift_spec(spec, lead), sizes)

        array = move_operand(x, self.rank, move)
        move_constant(self.field, x, array, lambda exact: move_operand(exact, self.rank, move))
        return array

    def _take_first(self, x: Operand, dim: int, what: str) -> Operand:
        """Of values that are equal along a dim in front, one."""
        # Nothing ever differed along this axis.
        if x.shape[dim] == 1:
            return x
        first = move_operand(x, 0, lambda part, lead: np.take(part, [0], lead + dim))
        move_constant(self.field, x, first, lambda exact: exact.move(lambda part: np.take(part, [0], 1 + dim)))
        if isinstance(x, Exact):
            equal = find_equal(self.field, x, first)
        else:
            both_are_nan = (x != x) & (first != first)
            equal = (x == first) | both_are_nan
        if not equal.all():
            raise DiffersError(what, x)
        return first

    def _check_replicated(self, equation: Any, x: Operand) -> Operand:
        """An assume_replicated is proved, and not believed."""
        for name in mesh_axes(equation):
            x = self._take_first(x, list(self.axes).index(name), f"an assume_replicated over {name!r}")
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
            rows = [self._recall(equation, ("row", i), [x], partial(self._take_row, x, i)) for x in scanned]
            for x, row in zip(scanned, rows, strict=True):
                self._tell(equation, [x], [row])
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
        """What a scan gave in each round, along a new dim, in the order of the numbers of the rounds."""
        in_order = [outputs[i] for i in sorted(outputs)]
        stacks = []
        for rows in zip(*in_order, strict=True):
            join = partial(join_operands, self.field, rows, self.rank, new=True)
            stack = self._recall(equation, "stack", rows, join)
            self._note_stack(rows, stack)
            self._tell(equation, rows, [stack])
            if any(self.field.marks.follows_floats(x) for x in rows):
                self.field.marks.add(stack)
            stacks.append(stack)
        return stacks

    def _note_stack(self, rows: Sequence[Operand], stack: Operand) -> None:
        """Notes of which constants that rounds computed an array consists."""
        if isinstance(stack, Exact) or not any(x in self.field.computed for x in rows):
            return
        self.field.computed.note(
            stack, rows, lambda: join_exact([self.field.lift(x) for x in rows], self.rank, new=True)
        )

    def _take_row(self, x: Operand, i: int) -> Operand:
        """The piece of an operand that one round of a scan gets."""
        if isinstance(x, Exact):
            return x.row(self.rank, i)
        row = np.asarray(np.take(x, i, self.rank))
        if self.field.marks.follows_floats(x):
            self.field.marks.add(row)
        move_constant(self.field, x, row, lambda exact: exact.row(self.rank, i))
        return row

    def while_loop(self, equation: Any, test: Any, body: Any, operands: list[Operand]) -> list[Operand]:
        """A while loop, until no device goes on; those that have ended keep their values."""
        consts_of_test, consts_of_body, carry = while_operands(equation, operands)
        rounds = 0
        while True:
            [goes_on] = self.run(test, [*consts_of_test, *carry])
            rounds += 1
            # Perhaps no input has the order of this run: then the loop may never end.
            may_not_end = self.field.order is not None or rounds > _MOST_ROUNDS
            if may_not_end and self.field.marks.follows_floats(goes_on):
                raise UnsupportedError(f"a while loop that a float ends, after more than {_MOST_ROUNDS} rounds,")
            if not goes_on.any():
                return carry
            self._refuse_waiting(equation, goes_on, [body])
            after = self.run(body, [*consts_of_body, *carry])
            # Devices end after different numbers of rounds: those that are done keep what they have.
            if not goes_on.all():
                after = self._choose_on_devices(equation, goes_on, after, carry)
            carry = after

    def cond(self, equation: Any, branches: list[Any], operands: list[Operand]) -> list[Operand]:
        """A cond or switch: every branch that some device takes."""
        which, *inputs = operands
        which = np.asarray(require_known(which, "cond"), np.int64)
        # jax clamps the index of a branch.
        which = np.clip(which, 0, len(branches) - 1)
        # Only branches that some device takes are run: a proof says nothing of others, and draws again.
        taken = sorted(set(which.reshape(-1).tolist()))
        if len(taken) > 1:
            self._refuse_waiting(equation, which, branches)
        results = self.run(branches[taken[0]], inputs)
        # Devices that take other branches get their results, one branch after the other.
        for number in taken[1:]:
            others = self.run(branches[number], inputs)
            results = self._choose_on_devices(equation, which == number, others, results)
        return results

    def _refuse_waiting(self, equation: Any, which: np.ndarray, bodies: Sequence[Any]) -> None:
        """Refuses a collective that some of its devices do not come to: the others would wait for them."""
        if (which == which.flat[0]).all():
            return
        for body in bodies:
            for site in walk(body.jaxpr):
                row = registered(site.name)
                if row.kind is None or row.cast or row.same:
                    continue
                for name in set(mesh_axes(site.equation)) & set(self.axes):
                    # Devices along an axis of the collective must agree on whether they come to it.
                    first = np.take(which, [0], list(self.axes).index(name))
                    if (which != first).any():
                        raise HangsError(site.name, name, source_line(equation, self.around))

    def _choose_on_devices(
        self, equation: Any, mask: np.ndarray, xs: Sequence[Operand], ys: Sequence[Operand]
    ) -> list[Operand]:
        """xs on the devices where the mask holds, else ys."""
        devices = Devices(self.field, self.axes)
        chosen = [devices.choose(mask, x, y) for x, y in zip(xs, ys, strict=True)]
        for x, y, either in zip(xs, ys, chosen, strict=True):
            self._tell(equation, [x, y], [either])
        return chosen


def _shift_spec(spec: PartitionSpec, lead: int) -> PartitionSpec:
    """The same spec after `lead` dims that nothing splits."""
    return PartitionSpec(*[None] * lead, *spec)
