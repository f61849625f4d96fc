"""One key in two draws: which keys of a traced program are equal, and how often each is drawn from.

Two keys are equal where the same operations made them from the same values: `fold_in(key, 1)` in two places is one
key. A draw that the backward pass repeats counts once; of a cond's branches one runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._jax import compat
from shardkit._jax.interpreter import JaxprInterpreter, scan_operands, while_operands
from shardkit._jax.jaxprs import walk
from shardkit._jax.primitives import registered
from shardkit.analysis.jaxpr.dataflow import Context, find_line
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding
from shardkit.meshes.layout import all_axes

_DRAWS = {"random_bits", "random_gamma"}
# Primitives that return their operand. Without random_clone: its caller intends another draw.
_SAME_KEY = {"random_wrap", "random_unwrap"}
_REMEDY = (
    "Split the key, or fold a number into it for each draw, as fold_keys does; jax.random.clone(key) declares equal "
    "numbers intended."
)


def reused_keys(program: TracedProgram) -> Iterator[Finding]:
    """Second draws from one key, and draws that the iterations of a loop repeat."""
    jaxpr = program.step.jaxpr
    reader = _KeyReader(_Names(), Context())
    reader.run(jaxpr, [reader.names.new() for _ in jaxpr.invars])
    yield from reader.findings


class NamedValue(NamedTuple):
    """A value by its name: values of one name are equal. It may be another one in each iteration of `loops`."""

    name: int
    loops: frozenset[int] = frozenset()


class _Names:
    """Gives values their names: a number for all that are made in one way from the same values.

    Worked example: `a = fold_in(key, 1)` and, elsewhere, `b = fold_in(key, 1)`.

        key     an argument                   0
        1       (uint32, 1)                   1
        a       (fold_in, 0, 1)               2
        b       (fold_in, 0, 1)               2, as a
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def new(self, operands: Sequence[NamedValue] = ()) -> NamedValue:
        """A value that is equal to no other."""
        return self.make(object(), operands)

    def make(self, operation: Any, operands: Sequence[NamedValue] = ()) -> NamedValue:
        """The value that an operation makes of these operands."""
        loops: frozenset[int] = frozenset()
        names = []
        for value in operands:
            loops |= value.loops
            names.append(value.name)
        number = self._numbers.setdefault((operation, *names), len(self._numbers))
        return NamedValue(number, loops)


# Worked example: a dropout mask and noise, both drawn in a scan over layers, from a key that enters it as a constant.
#
#     bits of the mask at model.py:12     the key is the same in each iteration: a finding
#                                         drawn = {0: "model.py:12"}, in which 0 is the name of the key
#     bits of the noise at model.py:20    0 was drawn from at model.py:12: a finding
#
# With `key = fold_in(key, layer)` in the body the key differs in each iteration, and only the second finding is left.
@dataclass(frozen=True)
class _KeyReader(JaxprInterpreter[NamedValue]):
    """Follows the names of values through a program, and finds keys that are drawn from twice."""

    names: _Names
    context: Context
    loops: tuple[tuple[int, str], ...] = ()  # the loops around it, each with its number and its description
    line: str = ""  # the line that calls the function of jax that it is in, such as jax.random.normal; "" outside one
    drawn: dict[int, str] = field(default_factory=dict)  # for each key drawn from so far, the line
    findings: list[Finding] = field(default_factory=list)
    drawing: dict[int, bool] = field(default_factory=dict)  # whether numbers are drawn in a jaxpr, by its identity

    def constant(self, x: Any) -> NamedValue:
        if x is None:
            return self.names.new()
        return self.names.make(("constant", id(x)))

    def literal(self, atom: Any) -> NamedValue:
        return self.names.make((str(atom.aval.dtype), str(atom.val)))

    def step(self, equation: Any, operands: list[NamedValue]) -> Sequence[NamedValue]:
        jaxprs = [jaxpr for _, jaxpr in compat.inner_jaxprs(equation)]
        # Most of a model neither draws nor makes keys, and need not be read: lint of a large step stays fast.
        if jaxprs and not self._may_use_keys(equation, jaxprs):
            return self._make_new(equation, operands)
        return super().step(equation, operands)

    def equation(self, equation: Any, operands: list[NamedValue]) -> Sequence[NamedValue]:
        name = equation.primitive.name
        if name in _DRAWS:
            self._check_draw(equation, operands[0])
        keeps_value = name in _SAME_KEY or registered(name).same
        if keeps_value and len(operands) == len(equation.outvars):
            return operands
        programs = compat.inner_programs(equation)
        for program in programs:
            jaxpr = getattr(program, "jaxpr", program)
            arguments = [self.names.new(operands) for _ in jaxpr.invars]
            self._enter(equation).run(program, arguments)
        if programs or not _is_repeatable(equation):
            return self._make_new(equation, operands)
        # The same operation on the same values, wherever it stands, makes the same values: fold_in(key, 1) is one key.
        params = str(sorted(equation.params.items()))  # by name: no two have the same
        results = []
        for number in range(len(equation.outvars)):
            results.append(self.names.make((name, params, number), operands))
        return results

    def call(self, equation: Any, body: Any, operands: list[NamedValue]) -> Sequence[NamedValue]:
        inner = self._enter(equation)
        # jax traces its own functions once and records the line of the first call for all.
        if not self.line and compat.is_function_of_jax(getattr(body, "jaxpr", body)):
            inner = replace(inner, line=inner.context.source)
        return inner.run(body, operands)

    def cond(self, equation: Any, branches: list[Any], operands: list[NamedValue]) -> Sequence[NamedValue]:
        _, *arguments = operands
        inner = self._enter(equation)
        # Only one branch runs: a draw in one branch does not repeat a draw in another.
        drawn_in_branches: dict[int, str] = {}
        results = []
        for branch in branches:
            reader = replace(inner, drawn=dict(self.drawn))
            results.append(reader.run(branch, arguments))
            drawn_in_branches |= reader.drawn
        self.drawn.update(drawn_in_branches)
        values = []
        for alternatives in zip(*results, strict=True):
            value = alternatives[0]
            if len(set(alternatives)) > 1:
                value = self.names.new(operands)
            values.append(value)
        return values

    def shard_map(self, equation: Any, body: Any, operands: list[NamedValue]) -> Sequence[NamedValue]:
        shards = []
        for value, spec in zip(operands, equation.params["in_specs"], strict=True):
            if all_axes(spec):  # another part of it on each device: equal to other arrays that are split alike
                value = self.names.make(str(spec), [value])
            shards.append(value)
        self._enter(equation).run(body, shards)
        return self._make_new(equation, operands)

    def scan(self, equation: Any, body: Any, operands: list[NamedValue]) -> Sequence[NamedValue]:
        consts, carry, arrays = scan_operands(equation, operands)
        loop = self.names.new().name  # a number of its own
        if equation.params["length"] > 1:
            inner = self._enter_loop(equation, loop, "scan")
        else:  # one iteration repeats nothing
            inner = self._enter(equation)
        carry = self._carry_on(body, consts, carry, loop)
        rows = [self._vary(value, loop) for value in arrays]
        inner.run(body, [*consts, *carry, *rows])
        return self._make_new(equation, operands)

    def while_loop(self, equation: Any, test: Any, body: Any, operands: list[NamedValue]) -> Sequence[NamedValue]:
        consts_of_test, consts_of_body, carry = while_operands(equation, operands)
        loop = self.names.new().name
        inner = self._enter_loop(equation, loop, "while loop")
        tested = [self._vary(value, loop) for value in carry]
        inner.run(test, [*consts_of_test, *tested])
        carry = self._carry_on(body, consts_of_body, carry, loop)
        inner.run(body, [*consts_of_body, *carry])
        return self._make_new(equation, operands)

    def _enter(self, equation: Any) -> _KeyReader:
        """A reader for the programs inside an equation."""
        backward = self.context.backward or _repeats_forward(equation)
        context = self.context._replace(backward=backward, source=find_line(equation, self.context))
        return replace(self, context=context)

    def _enter_loop(self, equation: Any, loop: int, construct: str) -> _KeyReader:
        inner = self._enter(equation)
        description = f"{construct} at {find_line(equation, inner.context)}"
        return replace(inner, loops=(*inner.loops, (loop, description)))

    def _carry_on(self, body: Any, consts: list[NamedValue], carry: list[NamedValue], loop: int) -> list[NamedValue]:
        """The carry in any iteration: what the body returns as it was passed stays, all else is another value."""
        # Behind the carry, the body of a scan has the rows that it reads, and returns those that it writes.
        arguments = body.jaxpr.invars[len(consts) : len(consts) + len(carry)]
        outs = body.jaxpr.outvars[: len(carry)]
        values = []
        for value, argument, out in zip(carry, arguments, outs, strict=True):
            if out is not argument:
                value = self._vary(value, loop)
            values.append(value)
        return values

    def _vary(self, value: NamedValue, loop: int) -> NamedValue:
        """Another value in each iteration of a loop."""
        varying = self.names.new([value])
        return varying._replace(loops=varying.loops | {loop})

    def _make_new(self, equation: Any, operands: list[NamedValue]) -> list[NamedValue]:
        return [self.names.new(operands) for _ in equation.outvars]

    def _may_use_keys(self, equation: Any, jaxprs: list[Any]) -> bool:
        """Whether an equation may return a key, or draws numbers in one of the jaxprs that it holds."""
        may_return_key = any(_may_make_a_key(out.aval) for out in equation.outvars)
        return may_return_key or any(map(self._draws, jaxprs))

    def _draws(self, jaxpr: Any) -> bool:
        """Whether numbers are drawn anywhere in a jaxpr."""
        if id(jaxpr) not in self.drawing:
            self.drawing[id(jaxpr)] = any(site.name in _DRAWS for site in walk(jaxpr))
        return self.drawing[id(jaxpr)]

    def _check_draw(self, equation: Any, key: NamedValue) -> None:
        """Remembers a draw, and finds that its key was drawn from before, or is in each iteration of a loop."""
        if self.context.backward or _repeats_forward(equation):
            return
        line = self.line or find_line(equation, self.context)
        before = self.drawn.get(key.name)
        self.drawn[key.name] = line
        repeating = ""  # the innermost loop in which the key is the same each time
        for loop, description in self.loops:
            if loop not in key.loops:
                repeating = description
        message = f"random numbers of shape {equation.outvars[0].aval.shape} come from the same bits"
        if before is not None:
            message = f"{message} as those drawn at {before}: both draws use one key."
        elif repeating:
            message = f"{message} in every iteration of the {repeating}: each uses the same key."
        else:
            return
        self.findings.append(Finding("reused-key", message, line, _REMEDY))


def _is_repeatable(equation: Any) -> bool:
    """Whether the same operands give the same results again. A clone is another key, and no key is made from floats."""
    if equation.primitive.name == "random_clone" or compat.acts(equation):
        return False
    return all(_may_make_a_key(out.aval) for out in equation.outvars)


def _repeats_forward(equation: Any) -> bool:
    """Whether an equation may repeat one of the forward pass: in the backward pass, or recomputed for it."""
    return compat.in_backward(equation) or compat.is_recomputed(equation)


def _may_make_a_key(aval: Any) -> bool:
    """Whether a value may be a key, or made into one: a seed, a counter, a choice."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return False
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return is_key or dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)
