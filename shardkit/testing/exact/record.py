"""The record of a run: every value, the equation that made it, and the variables that the equation could have read.

Worked example: `y = psum(x @ w, "data"); z = tanh(y)` is recorded as

    number  call            operands  results     maker
    0       shard_map       x         x
    1       shard_map       w         w
    2       dot_general     x, w      x @ w       x @ w was made by event 2
    3       psum            x @ w     y           y was made by event 3
    4       tanh            y         z           z was made by event 4

`find_causes([z])` is {0, 1, 2, 3, 4}: all events from which z follows, those that cut the arguments into shards too.
Values are recognized by identity: a value that an equation hands on is the same object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardkit._jax import compat
from shardkit._jax.jaxprs import source_line, walk
from shardkit._jax.primitives import registered
from shardkit.testing.exact.repairs import Call
from shardkit.testing.exact.rules.operands import Operand

# Equations that only pass elements on, as from the result of a collective to the equation that reads it.
_PASS = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "slice", "transpose", "expand_dims")


class Event(NamedTuple):
    """An equation that ran.

    Attributes:
        number: its place in the order of the run.
        call: the equation, and the operands and results of its first run.
        operands: the values that it read in this run.
        results: the values that it gave in this run.
    """

    number: int
    call: Call
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]


class Record:
    """The values and equations of a run, in order. The interpreter calls it with each equation.

    Attributes:
        events: the equations that ran.
        maker: the number of the event that made a value, by the id of the value.
        values: the value that each variable had last.
        readable: the variables that an equation could read, by the id of the equation.
        unread: the variables of the kernel that no equation reads.
        definitions: the equation that gives a variable of the kernel.
        rounds: for a variable of the kernel all variables that the same line makes in the same way, as in the rounds of
            an unrolled loop.
        loops: the line of the innermost loop around an equation of the kernel, by the id of the equation.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.maker: dict[int, int] = {}
        self.values: dict[Any, Operand] = {}
        self.readable: dict[int, list[Any]] = {}
        self.unread: set[Any] = set()
        self.definitions: dict[Any, Any] = {}
        self.rounds: dict[Any, list[Any]] = {}
        self.loops: dict[int, str] = {}
        self._calls: dict[Any, Call] = {}
        self._inputs: dict[int, Iterator[Any]] = {}

    def __call__(
        self,
        equation: Any,
        operands: Sequence[Operand],
        results: Sequence[Operand],
        axes: Mapping[str, int],
        around: str,
    ) -> None:
        call = Call(equation, around, axes, operands, results)
        # Rounds of a loop are one call, with the operands of the first.
        call = self._calls.setdefault((*call.key, len(axes)), call)
        number = len(self.events)
        operand_ids = set(map(id, operands))
        for x in results:
            # A value that an equation hands on was made before.
            if id(x) not in operand_ids:
                self.maker.setdefault(id(x), number)
        self.events.append(Event(number, call, tuple(operands), tuple(results)))
        if call.primitive == "shard_map":
            self._note_entry(equation, results, bool(axes))
        else:
            assign_variables(self.values, equation, operands, results)

    def _note_entry(self, equation: Any, results: Sequence[Operand], inside: bool) -> None:
        """Notes the value of the kernel's next input: the interpreter tells of a shard_map's operands one by one."""
        if id(equation) not in self._inputs:
            body = equation.params["jaxpr"]
            body = getattr(body, "jaxpr", body)
            self._inputs[id(equation)] = iter(body.invars)
            self._note_variables(body)
        if not inside:
            return
        variable = next(self._inputs[id(equation)], None)
        if variable is not None:
            self.values[variable] = results[0]

    def _note_variables(self, body: Any) -> None:
        """Notes which variables the equations of a kernel could read, and which variables none of them reads."""
        jaxprs: dict[int, Any] = {}
        calls: dict[int, Any] = {}  # of a function that a kernel calls, the first call
        for site in walk(body):
            jaxprs.setdefault(id(site.jaxpr), site.jaxpr)
            if site.outer is not None and site.outer.name in compat.CALLS:
                calls.setdefault(id(site.jaxpr), site.outer.equation)
            loop = _find_loop(site)
            if loop is not None:
                self.loops[id(site.equation)] = source_line(loop.equation)
        for number, jaxpr in jaxprs.items():
            self._note_variables_of(jaxpr, calls.get(number))

    def _note_variables_of(self, jaxpr: Any, call: Any) -> None:
        """Notes the variables of one jaxpr: those of a kernel, or of a function, loop or branch in it.

        Worked example: `a = shift(x)` on line 1, `b = x * 2` on line 2, `return b`. The mul could read x and a, and
        nothing reads a.

        Args:
            jaxpr: the jaxpr.
            call: the equation that calls it as a function; None for a kernel, a loop or a branch. Of
                `jnp.cumsum(x) + a` without its `+ a` nothing reads `a`, and the cumsum stands in a function of its own.
        """
        readable_at_call = self.readable.get(id(call), ())
        readable = [variable for variable in readable_at_call if variable in self.unread]
        readable += jaxpr.invars
        used = set(filter(_is_variable, jaxpr.outvars))
        rounds: dict[Any, list[Any]] = {}  # of each line the variables that it makes in the same way
        for equation in jaxpr.eqns:
            self.readable[id(equation)] = list(readable)
            readable += equation.outvars
            used.update(filter(_is_variable, equation.invars))
            line = source_line(equation, "")
            for variable in equation.outvars:
                self.definitions[variable] = equation
                shape = getattr(variable.aval, "shape", ())
                dtype = getattr(variable.aval, "dtype", None)
                variables = rounds.setdefault((line, equation.primitive.name, shape, dtype), [])
                variables.append(variable)
                self.rounds[variable] = variables
        self.unread.update(variable for variable in readable if variable not in used)

    def find_causes(self, values: Iterable[Operand], up_to: Sequence[str] = ()) -> set[int]:
        """The numbers of the events from which values follow; equations named in `up_to` end the way backwards."""
        # Backwards from the values: the makers of their operands, then the makers of those.
        numbers: set[int] = set()
        waiting = self.find_makers(values)
        while waiting:
            number = waiting.pop()
            if number in numbers:
                continue
            numbers.add(number)
            event = self.events[number]
            if event.call.primitive not in up_to:
                waiting += self.find_makers(event.operands)
        return numbers

    def find_makers(self, values: Iterable[Operand]) -> list[int]:
        """The numbers of the events that made the values; nothing made an input of the program, or a literal."""
        numbers = []
        for x in values:
            number = self.maker.get(id(x))
            if number is not None:
                numbers.append(number)
        return numbers

    def find_device_readers(self) -> set[int]:
        """The numbers of the events that read the result of a collective, or the index of a device."""
        readers: set[int] = set()
        passing: set[int] = set()  # those whose result tells devices apart, in whatever shape
        for number, event in enumerate(self.events):
            name = event.call.primitive
            row = registered(name)
            reads = not passing.isdisjoint(self.find_makers(event.operands))
            if reads:
                readers.add(number)
            tells_devices_apart = bool(row.kind) or name == "axis_index"
            only_passes_on = row.cast or name in _PASS
            if tells_devices_apart or (reads and only_passes_on):
                passing.add(number)
        return readers

    def find_followers(self, name: str) -> set[int]:
        """The numbers of the events that follow from an equation of this name."""
        # Events are in order, so that the makers of operands have been looked at.
        numbers: set[int] = set()
        for number, event in enumerate(self.events):
            if event.call.name == name or not numbers.isdisjoint(self.find_makers(event.operands)):
                numbers.add(number)
        return numbers


def assign_variables(
    values: dict[Any, Operand], equation: Any, operands: Sequence[Operand], results: Sequence[Operand]
) -> None:
    """Notes the values of an equation's variables."""
    # The interpreter tells of a scan's rows, and of a shard_map's pieces, with the equation of the loop or call. These
    # operands are not those of its variables.
    if len(equation.invars) == len(operands):
        for variable, x in zip(equation.invars, operands, strict=True):
            if _is_variable(variable):
                values[variable] = x
    values.update(zip(equation.outvars, results, strict=False))


def _is_variable(atom: Any) -> bool:
    """Whether an atom of a jaxpr is no literal."""
    return not hasattr(atom, "val")


def _find_loop(site: Any) -> Any:
    """The innermost loop around an equation; None if there is none."""
    outer = site.outer
    while outer is not None and outer.name not in ("while", "scan"):
        outer = outer.outer
    return outer
