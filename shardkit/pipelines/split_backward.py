"""A backward pass cut into two: what the previous stage waits for, and weight gradients, which can wait.

Dead-code elimination is not enough: weight gradients alone would compute the whole chain of cotangents again. So the
first half hands over the values inside the chain that the second half uses, and a loop over layers becomes two loops:
the first stacks these values, the second scans over the stacks.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from itertools import compress
from math import prod
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple

import jax

from shardkit._jax import compat
from shardkit._jax.primitives import registered

# Labels are sets of halves, as bits.
FIRST, SECOND = 1, 2
BOTH = FIRST | SECOND
# Views of a value, as casts are. The second half computes them again, unless their operands are larger.
_VIEWS = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "convert_element_type", "rev", "copy", "name"}


class TwoHalves:
    """A function cut into two halves: what its first results need, and the rest, which uses values of the first half.

    Every equation is in one half, except those that follow from lasting arguments alone, and views of a value such as a
    broadcast, which may be in both. Loops (`lax.scan`) are cut inside; branches and `while` are not.

    Args:
        fn: takes arrays and returns a list of arrays. What it closes over counts as lasting.
        args: the arrays, or their ShapeDtypeStructs.
        first: for each result whether the first half returns it.
        lasting: for each argument whether the second half is passed it too, such as weights and keys.

    Attributes:
        residuals: the ShapeDtypeStructs of what the first half hands to the second, the stacks of loops included: only
            what the second half uses, and nothing that follows from lasting arguments alone.
        whole: whether the second half would compute nothing: run `fn` unsplit.
        why: where `whole`, one sentence that names what could not be cut; else "".
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], first: Sequence[bool], lasting: Sequence[bool]):
        closed = jax.make_jaxpr(fn)(*args)
        self._program, self._lasting = _program(closed.jaxpr, closed.consts), list(lasting)
        results = [FIRST if flag else SECOND for flag in first]
        self._labels = _label(self._program, _steady(self._program, lasting), results, at_hand=lasting)
        self.residuals: list[Any] = compat.eval_shape(lambda *args: self.first(*args)[1], *args)
        self.whole = _only_views(self._program, self._labels)
        self.why = _why(self._program, self._labels) if self.whole else ""

    def first(self, *args: Any) -> tuple[list[Any], list[Any]]:
        """The first results and the residuals, given all arguments."""
        results, residuals = _run(self._program, self._labels, FIRST, args)
        return self._of(FIRST, results), residuals

    def second(self, *lasting: Any, residuals: Sequence[Any]) -> list[Any]:
        """The other results, given the lasting arguments and the residuals."""
        given = iter(lasting)
        args = [next(given) if flag else None for flag in self._lasting]
        return self._of(SECOND, _run(self._program, self._labels, SECOND, args, residuals)[0])

    def _of(self, half: int, results: Sequence[Any]) -> list[Any]:
        return [results[k] for k in _places(half, self._labels.results)]


class _Program(NamedTuple):
    """A jaxpr without calls to other jaxprs, and the bodies of its loops by the number of their equation."""

    jaxpr: Any
    constants: Sequence[Any]
    loops: dict[int, _Program]


class _Labels(NamedTuple):
    """Which half computes, reads or returns what of a program: none (0), FIRST, SECOND or BOTH."""

    # which half has it. The second half has it as a residual unless it computes or is passed it.
    variables: dict[Any, int]
    arguments: list[int]  # which half is passed it
    equations: list[int]  # which half runs it
    results: list[int]  # which half returns it
    loops: dict[int, _Labels]  # the labels of loops' bodies, by the number of the equation
    # what the first half hands to the second: variables, and `(number, variable)` for stacks of a loop
    residuals: list[Any]


def _program(jaxpr: Any, constants: Sequence[Any]) -> _Program:
    closed = jax.make_jaxpr(partial(compat.inlined, jaxpr, constants))(*(v.aval for v in jaxpr.invars))
    loops = {
        number: _program(compat.inner_jaxprs(equation)[0][1], compat.inner_constants(equation)[0])
        for number, equation in enumerate(closed.jaxpr.eqns)
        if equation.primitive.name == "scan"
    }
    return _Program(closed.jaxpr, closed.consts, loops)


def _steady(program: _Program, lasting: Sequence[bool]) -> set[Any]:
    """The variables that follow from lasting arguments alone, those in loops included."""
    steady = {*program.jaxpr.constvars, *compress(program.jaxpr.invars, lasting)}
    for number, equation in enumerate(program.jaxpr.eqns):
        operands = _are_steady(equation.invars, steady)
        results = [all(operands) and not compat.acts(equation)] * len(equation.outvars)
        if number in program.loops:
            body, carry = program.loops[number], _carry(equation)
            carried: list[bool] | None = None
            while carried != operands[carry]:  # a carry is steady if it is so in every round
                carried = operands[carry]
                inside = _steady(body, operands)
                results = _are_steady(body.jaxpr.outvars, inside)
                operands[carry] = [a and b for a, b in zip(carried, results, strict=False)]
            steady |= inside
        steady.update(compress(equation.outvars, results))
    return steady


def _label(program: _Program, steady: set[Any], results: Sequence[int], at_hand: Sequence[bool]) -> _Labels:
    """The labels that follow from those of the results, from the last equation to the first.

    The second half may compute the `steady` variables again, and is passed the arguments that are `at_hand`.
    """
    variables, equations = defaultdict[Any, int](int), [0] * len(program.jaxpr.eqns)
    loops, residuals = dict[int, _Labels](), list[Any]()

    def mark(atoms: Iterable[Any], labels: Iterable[int]) -> None:
        for v, label in zip(atoms, labels, strict=True):
            if not hasattr(v, "val"):
                variables[v] |= label

    mark(program.jaxpr.outvars, results)
    for number, equation in reversed([*enumerate(program.jaxpr.eqns)]):
        wanted = [variables[v] for v in equation.outvars]
        first = FIRST if any(label & FIRST for label in wanted) or compat.acts(equation) else 0
        if number in program.loops:
            loops[number] = loop = _label_loop(equation, program.loops[number], steady, wanted)
            made, read, stacks = loop.results, loop.arguments, [(number, key) for key in loop.residuals]
        else:
            again = _is_view(equation, _are_steady(equation.invars, steady)) or not first
            made = [first | _again(v, label, again, steady) for v, label in zip(equation.outvars, wanted, strict=True)]
            read, stacks = [first | reduce(or_, made, 0)] * len(equation.invars), []
        equations[number] = first | reduce(or_, made, 0)
        pairs = zip(equation.outvars, wanted, made, strict=True)
        residuals += [v for v, want, made_in in pairs if want & ~made_in & SECOND] + stacks
        mark(equation.outvars, [label & FIRST for label in made])
        mark(equation.invars, read)
    arguments = [variables[v] for v in program.jaxpr.invars]
    pairs = zip(program.jaxpr.invars, arguments, at_hand, strict=True)
    residuals += [v for v, label, here in pairs if label & SECOND and not here]
    passed = [label & (BOTH if here else FIRST) for label, here in zip(arguments, at_hand, strict=True)]
    return _Labels(variables, passed, equations, list(results), loops, residuals)


def _label_loop(equation: Any, body: _Program, steady: set[Any], wanted: Sequence[int]) -> _Labels:
    """The labels of a loop's body, the same in every round; its results and arguments are those of the loop."""
    carry = _carry(equation)
    carries, outs = carry.stop - carry.start, equation.outvars
    results, at_hand = [label & FIRST for label in wanted], [True] * len(equation.invars)
    results, labels = _settled(body, steady, results, at_hand, carry, FIRST)
    # What the first half has in every round anyway, it also returns.
    for k, v in enumerate(body.jaxpr.outvars[carries:], carries):
        if not hasattr(v, "val") and v not in steady:
            results[k] |= labels.variables[v] & FIRST
    at_hand[carry] = [v in steady or not label for v, label in zip(outs, results[:carries], strict=False)]
    pairs = zip(outs, wanted, results, strict=True)
    results = [had | _again(v, label, not had, steady) for v, label, had in pairs]
    results, labels = _settled(body, steady, results, at_hand, carry, SECOND)
    arguments = [*labels.arguments[: carry.start], *results[:carries], *labels.arguments[carry.stop :]]
    return labels._replace(results=results, arguments=arguments)


def _settled(
    body: _Program, steady: set[Any], results: list[int], at_hand: Sequence[bool], carry: slice, half: int
) -> tuple[list[int], _Labels]:
    """The results of a loop's body with every carry that other rounds of this half need, and the labels."""
    before: list[int] | None = None
    while results != before:
        before, labels = results, _label(body, steady, results, at_hand)
        read = [label & half for label in labels.arguments[carry]]
        results = [a | b for a, b in zip(results, read, strict=False)] + results[len(read) :]
    return results, labels


def _again(v: Any, wanted: int, again: bool, steady: set[Any]) -> int:
    """SECOND where the second half wants a variable and computes it, instead of finding it among the residuals."""
    return wanted & SECOND if again or v in steady else 0


def _run(
    program: _Program, labels: _Labels, half: int, args: Sequence[Any], residuals: Sequence[Any] = ()
) -> tuple[list[Any], list[Any]]:
    """One half: its results, None for others, and of the first the residuals; unused arguments may be None."""
    values: dict[Any, Any] = dict(zip(program.jaxpr.constvars, program.constants, strict=True))
    values |= zip(program.jaxpr.invars, args, strict=True)
    values |= zip(labels.residuals if half == SECOND else (), residuals, strict=True)
    for number in _places(half, labels.equations):
        equation = program.jaxpr.eqns[number]
        operands = [compat.value_of(v, values) for v in equation.invars]
        if number in program.loops:
            loop = labels.loops[number]
            stacks = [(number, key) for key in loop.residuals]
            handed = [values[key] for key in stacks] if half == SECOND else []
            outs, stacked = _run_loop(equation, program.loops[number], loop, half, operands, handed)
            values |= zip(stacks if half == FIRST else (), stacked, strict=True)
        else:
            outs = compat.bind(equation, operands)
        values |= {v: out for v, out in zip(equation.outvars, outs, strict=True) if out is not None}
    asked = [v if label & half else None for v, label in zip(program.jaxpr.outvars, labels.results, strict=True)]
    results = [compat.value_of(v, values) for v in asked]
    return results, [values[key] for key in labels.residuals] if half == FIRST else []


def _run_loop(
    equation: Any, body: _Program, labels: _Labels, half: int, operands: Sequence[Any], stacks: list[Any]
) -> tuple[list[Any], list[Any]]:
    """One half of a loop: its results, None for others, and of the first the stacked residuals."""
    carry = _carry(equation)
    # To scan, None is a tree without leaves.
    operands = [x if label & half else None for x, label in zip(operands, labels.arguments, strict=True)]

    def one(carried: list[Any], each: Any) -> Any:
        outs, residuals = _run(body, labels, half, [*operands[: carry.start], *carried, *each[0]], each[1])
        return outs[: len(carried)], (outs[len(carried) :], residuals)

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    with compat.made_by(equation):
        carried, (outs, stacked) = jax.lax.scan(one, operands[carry], (operands[carry.stop :], stacks), **options)
    return [*carried, *outs], stacked


def _only_views(program: _Program, labels: _Labels) -> bool:
    """Whether the second half only looks at what it is handed."""
    numbers = set(_places(SECOND, labels.equations)) - program.loops.keys()
    names = {program.jaxpr.eqns[number].primitive.name for number in numbers}
    return all(map(_views, names)) and all(_only_views(body, labels.loops[n]) for n, body in program.loops.items())


def _why(program: _Program, labels: _Labels) -> str:
    """Names an equation of the first half that computes the second results."""
    rule = "TwoHalves: the second results must have equations of their own, which the first results do not need; got "
    makers = [maker for key in labels.residuals if (maker := _maker(program, key)) is not None]
    if not makers:
        return f"{rule}none that compute anything. Run the function unsplit."
    maker = max(makers, key=lambda equation: len(compat.inner_jaxprs(equation)))
    frames = compat.user_frames(maker)
    line = " at {}:{} ({})".format(Path(frames[0][0]).name, *frames[0][1:]) if frames else ""
    return f"{rule}`{maker.primitive.name}`{line}, which both need. Split it, or run the function unsplit."


def _maker(program: _Program, key: Any) -> Any:
    """The equation, in the innermost loop, that computes a residual; None for an argument."""
    number, variable = key if isinstance(key, tuple) else (None, key)
    for n, equation in enumerate(program.jaxpr.eqns):
        if n in program.loops and variable in equation.outvars:
            number, variable = n, program.loops[n].jaxpr.outvars[equation.outvars.index(variable)]
        elif variable in equation.outvars:
            return equation
    return None if number is None else _maker(program.loops[number], variable)


def _views(name: str) -> bool:
    return name in _VIEWS or registered(name).cast


def _is_view(equation: Any, steady: Sequence[bool]) -> bool:
    """Whether an equation gives another view of operands that are no larger than its result."""
    if not _views(equation.primitive.name):
        return False
    sizes = [prod(v.aval.shape) * v.aval.dtype.itemsize for v in (*equation.invars, equation.outvars[0])]
    return sum(size for size, flag in zip(sizes, steady, strict=False) if not flag) <= sizes[-1]


def _carry(equation: Any) -> slice:
    """The operands of a scan that are its carry."""
    consts, carries = compat.scan_parts(equation)
    return slice(consts, consts + carries)


def _are_steady(atoms: Iterable[Any], steady: set[Any]) -> list[bool]:
    return [hasattr(v, "val") or v in steady for v in atoms]


def _places(half: int, labels: Iterable[int]) -> list[int]:
    return [k for k, label in enumerate(labels) if label & half]
