"""A backward pass cut into two halves: the input gradient, for which a stage waits, and the weight gradients.

Dead-code elimination cannot cut it: a program of the weight gradients alone would compute the whole chain of cotangents
again. So the first half hands the values of the chain that the second half uses to it. In this file only these values
are called residuals. A loop over layers becomes two loops: the first stacks the residuals, the second scans over the
stacks.

Worked example: a stage of one layer `h = x @ w, y = tanh(h)`. The forward pass has saved x and h. The backward pass is
a function of w, x, h and dy. Both halves are passed w: it is a *lasting* argument. x, h and dy are passed to the first
half alone. A label says which half has a value, 1 the first, 2 the second:

    equation             label of the result    run by
    s = 1 - tanh(h)**2   1                      the first half
    dh = dy * s          1, 2                   the first half, which hands dh to the second
    t = transpose(w)     1                      the first half
    dx = dh @ t          1                      the first half, which returns dx
    u = transpose(x)     2                      the second half: a view costs nothing
    dw = u @ dh          2                      the second half, which returns dw

The second half reads dh and x, which it neither computes nor is passed: they are the residuals. In a scan over L layers
both are stacked, [L, ...]. The first scan goes from the last layer to the first and carries dx; the second carries
nothing.

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
from shardkit._jax.interpreter import inline_jaxpr
from shardkit._jax.primitives import VIEWS, registered

# Labels are sets of halves, as bits.
FIRST = 1
SECOND = 2
# Views of a value, and casts like these. The second half computes them again, unless their operands are larger.
_VIEWS = VIEWS | {"rev", "name"}


class TwoHalves:
    """A function cut into two halves: one computes its first results, the other the rest, with values of the first.

    Every equation is in one half. Only views of a value, such as a broadcast, and equations that follow from lasting
    arguments alone may be in both. Loops (`lax.scan`) are cut inside; branches and `while` are not.

    Args:
        fn: takes arrays and returns a list of arrays. Arrays that it closes over count as lasting.
        args: the arrays, or their ShapeDtypeStructs.
        first: for each result, whether the first half returns it.
        lasting: for each argument, whether the second half is passed it too, such as weights and keys.

    Attributes:
        residuals: the ShapeDtypeStructs of the values that the first half hands to the second, the stacks of loops
            included. They have only values that the second half uses and cannot compute from lasting arguments.
        uncut: whether the second half would compute nothing: run `fn` unsplit.
        why: if `uncut`, one sentence that names what could not be cut; else "".
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], first: Sequence[bool], lasting: Sequence[bool]):
        closed = jax.make_jaxpr(fn)(*args)
        self._program = _inline_program(closed.jaxpr, closed.consts)
        self._lasting = list(lasting)
        results = []
        for is_first in first:
            results.append(FIRST if is_first else SECOND)
        steady = _find_steady(self._program, lasting)
        self._labels = _label_program(self._program, steady, results, at_hand=lasting)
        self.residuals: list[Any] = compat.eval_shape(lambda *args: self.first(*args)[1], *args)
        self.uncut = _only_views(self._program, self._labels)
        self.why = ""
        if self.uncut:
            self.why = _explain_uncut(self._program, self._labels)

    def first(self, *args: Any) -> tuple[list[Any], list[Any]]:
        """The first results and the residuals, given all arguments."""
        results, residuals = _run_half(self._program, self._labels, FIRST, args)
        return self._select_results(FIRST, results), residuals

    def second(self, *lasting: Any, residuals: Sequence[Any]) -> list[Any]:
        """The other results, given the lasting arguments and the residuals."""
        next_lasting = iter(lasting)
        args = []
        for is_lasting in self._lasting:
            args.append(next(next_lasting) if is_lasting else None)
        results, _ = _run_half(self._program, self._labels, SECOND, args, residuals)
        return self._select_results(SECOND, results)

    def _select_results(self, half: int, results: Sequence[Any]) -> list[Any]:
        return [results[k] for k in _find_members(half, self._labels.results)]


class _Program(NamedTuple):
    """A jaxpr without calls to other jaxprs, and the bodies of its loops by the number of their equation."""

    jaxpr: Any
    constants: Sequence[Any]
    loops: dict[int, _Program]


class _Labels(NamedTuple):
    """The halves that use each part of a program, as bits: none (0), FIRST, SECOND, or both (3)."""

    # the halves that have the variable: the second half computes it, is passed it, or reads it from the residuals
    variables: dict[Any, int]
    arguments: list[int]  # the halves that are passed the argument
    equations: list[int]  # the halves that run the equation
    results: list[int]  # the halves that return the result
    loops: dict[int, _Labels]  # the labels of loops' bodies, by the number of the equation
    # the values that the first half hands to the second: variables, and `(number, variable)` for stacks of a loop
    residuals: list[Any]


def _inline_program(jaxpr: Any, constants: Sequence[Any]) -> _Program:
    """The program of a jaxpr, with the equations of the functions that it calls in place of the calls."""
    avals = [v.aval for v in jaxpr.invars]
    closed = jax.make_jaxpr(partial(inline_jaxpr, jaxpr, constants))(*avals)
    loops = {}
    for number, equation in enumerate(closed.jaxpr.eqns):
        if equation.primitive.name == "scan":
            _, body = compat.inner_jaxprs(equation)[0]
            loops[number] = _inline_program(body, compat.inner_constants(equation)[0])
    return _Program(closed.jaxpr, closed.consts, loops)


# ---- steady variables follow from lasting arguments alone: the second half may compute them again


def _find_steady(program: _Program, lasting: Sequence[bool]) -> set[Any]:
    """The steady variables of a program and of its loops."""
    steady = {*program.jaxpr.constvars, *compress(program.jaxpr.invars, lasting)}
    for number, equation in enumerate(program.jaxpr.eqns):
        operands = _are_steady(equation.invars, steady)
        if number in program.loops:
            body_steady, results = _find_steady_in_loop(equation, program.loops[number], operands)
            steady |= body_steady
        else:
            is_steady = all(operands) and not compat.acts(equation)
            results = [is_steady] * len(equation.outvars)
        steady.update(compress(equation.outvars, results))
    return steady


def _find_steady_in_loop(equation: Any, body: _Program, operands: list[bool]) -> tuple[set[Any], list[bool]]:
    """The steady variables of a loop's body, and for each of its results whether it is steady.

    A carry is steady if it is so in every round: each pass drops carries that a round makes from others, until no pass
    drops one.
    """
    carry = _find_carry(equation)
    while True:
        steady = _find_steady(body, operands)
        results = _are_steady(body.jaxpr.outvars, steady)
        carries = operands[carry]
        steady_carries = []
        for was_steady, is_steady in zip(carries, results, strict=False):  # the stacked results come after the carries
            steady_carries.append(was_steady and is_steady)
        if steady_carries == carries:
            return steady, results
        operands = [*operands]
        operands[carry] = steady_carries


def _are_steady(atoms: Iterable[Any], steady: set[Any]) -> list[bool]:
    return [_is_literal(v) or v in steady for v in atoms]


# ---- which half has what


def _label_program(program: _Program, steady: set[Any], results: Sequence[int], at_hand: Sequence[bool]) -> _Labels:
    """The labels of a program, from the labels of its results: from the last equation back to the first.

    The second half may compute the `steady` variables again. `at_hand` says of each argument whether the second half is
    passed it; any other argument that it reads is a residual.

    Worked example: the last three equations of the module's example, where dw is labelled SECOND and dx FIRST.

        dw = u @ dh          only the second half uses dw, and nothing else needs u @ dh: SECOND, and so are u and dh
        u = transpose(x)     a view: the second half runs it, so that it uses x
        dx = dh @ t          FIRST, and so are dh and t: dh is now used by both halves
    """
    variables = defaultdict[Any, int](int)
    equations = [0] * len(program.jaxpr.eqns)
    loops: dict[int, _Labels] = {}
    residuals: list[Any] = []
    _add_labels(variables, program.jaxpr.outvars, results)
    # Backwards, so that all equations that read a result are labelled before the one that computes it.
    for number, equation in reversed([*enumerate(program.jaxpr.eqns)]):
        uses = [variables[v] for v in equation.outvars]
        first = _label_first(equation, uses)
        if number in program.loops:
            loop = _label_loop(equation, program.loops[number], steady, uses)
            loops[number] = loop
            computes = loop.results
            equations[number] = first | reduce(or_, computes, 0)
            operands = loop.arguments
        else:
            computes = _label_results(equation, uses, first, steady)
            equations[number] = first | reduce(or_, computes, 0)
            operands = [equations[number]] * len(equation.invars)
        # What the second half uses and does not compute, the first half hands to it.
        for v, users, makers in zip(equation.outvars, uses, computes, strict=True):
            if users & SECOND and not makers & SECOND:
                residuals.append(v)
        if number in program.loops:
            residuals += _list_stacks(number, loops[number])
        _add_labels(variables, equation.outvars, [makers & FIRST for makers in computes])
        _add_labels(variables, equation.invars, operands)

    arguments = []
    for v, is_at_hand in zip(program.jaxpr.invars, at_hand, strict=True):
        label = variables[v]
        if label & SECOND and not is_at_hand:
            residuals.append(v)
        arguments.append(label if is_at_hand else label & FIRST)
    return _Labels(variables, arguments, equations, list(results), loops, residuals)


def _add_labels(variables: dict[Any, int], atoms: Iterable[Any], labels: Iterable[int]) -> None:
    """Adds halves to those that use variables already; literals have no labels."""
    for v, label in zip(atoms, labels, strict=True):
        if not _is_literal(v):
            variables[v] |= label


def _label_first(equation: Any, uses: Sequence[int]) -> int:
    """FIRST if the first half must run an equation, from the halves that use its results; else 0."""
    # An equation that acts, as a print does, runs once, whether or not its results are used.
    if compat.acts(equation) or any(use & FIRST for use in uses):
        return FIRST
    return 0


def _label_results(equation: Any, labels: Sequence[int], first: int, steady: set[Any]) -> list[int]:
    """For each result of an equation, which is no loop, the halves that compute it, from the halves that use it."""
    is_view = _is_view(equation, _are_steady(equation.invars, steady))
    can_repeat = is_view or not first
    halves = []
    for v, label in zip(equation.outvars, labels, strict=True):
        halves.append(first | _label_repeated(v, label, can_repeat, steady))
    return halves


def _label_repeated(v: Any, label: int, can_repeat: bool, steady: set[Any]) -> int:
    """SECOND where the second half uses a variable and computes it, instead of reading it from the residuals."""
    if can_repeat or v in steady:
        return label & SECOND
    return 0


def _list_stacks(number: int, loop: _Labels) -> list[tuple[int, Any]]:
    """The keys of a loop's residuals in the program that has the loop as equation `number`: they are stacks there."""
    return [(number, key) for key in loop.residuals]


def _label_loop(equation: Any, body: _Program, steady: set[Any], result_labels: Sequence[int]) -> _Labels:
    """The labels of a loop's body, the same in every round; its results and arguments have the loop's labels.

    Worked example: the module's example for L layers is a loop that carries dx, scans over w, x and h, and stacks dw.
    The first half returns dx and the second half dw.

        the first half     carries dx. It returns no dw, and leaves the matmul of dw out of its rounds.
        the second half    computes dw from x and dh. It does not carry dx, which the first half has and which does not
                           follow from lasting arguments. It reads dh from a stack of the first half, a residual, and
                           scans over x, an argument of the loop.
    """
    carry = _find_carry(equation)
    carries = carry.stop - carry.start
    outs = equation.outvars
    # The first half returns its results, and carries what its other rounds need.
    results = [label & FIRST for label in result_labels]
    at_hand = [True] * len(equation.invars)
    labels = _label_with_carries(body, steady, results, at_hand, carry, FIRST)
    results = list(labels.results)
    # A stacked result that the first half computes in every round anyway is returned by the first half.
    for number, v in enumerate(body.jaxpr.outvars[carries:], carries):
        if not _is_literal(v) and v not in steady:
            results[number] |= labels.variables[v] & FIRST
    # The second half carries what it can compute itself: steady carries, and carries that the first half does not have.
    for number in range(carries):
        at_hand[carry.start + number] = outs[number] in steady or not results[number]
    results_of_both = []
    for v, result_label, label in zip(outs, result_labels, results, strict=True):
        results_of_both.append(label | _label_repeated(v, result_label, not label, steady))
    labels = _label_with_carries(body, steady, results_of_both, at_hand, carry, SECOND)
    # What a loop is passed as its first carry, the halves use that compute the carry in the rounds.
    arguments = list(labels.arguments)
    arguments[carry] = labels.results[:carries]
    return labels._replace(arguments=arguments)


def _label_with_carries(
    body: _Program, steady: set[Any], result_labels: Sequence[int], at_hand: Sequence[bool], carry: slice, half: int
) -> _Labels:
    """The labels of a loop's body in which a half computes every carry that it reads.

    What a round reads of a carry, the round before has computed. To compute it the half may read further carries, which
    the round before must compute too: the body is labelled again until no carry is missing.

    Worked example: a body has the carries a, b, c, and the half returns a alone.

        a, b, c = a + b, b * c, c       the half computes    and reads
        first labels                    a                    a, b: b is missing
        second labels                   a, b                 a, b, c: c is missing
        third labels                    a, b, c              a, b, c
    """
    result_labels = list(result_labels)
    while True:
        labels = _label_program(body, steady, result_labels, at_hand)
        missing = []
        for number, label in enumerate(labels.arguments[carry]):
            reads = label & half
            computes = result_labels[number] & half  # carry number k is result number k of the body
            if reads and not computes:
                missing.append(number)
        if not missing:
            return labels
        for number in missing:
            result_labels[number] |= half


# ---- running a half


def _run_half(
    program: _Program, labels: _Labels, half: int, args: Sequence[Any], residuals: Sequence[Any] = ()
) -> tuple[list[Any], list[Any]]:
    """Runs one half: its results, with None for results of the other half, and the residuals if it is the first.

    Arguments that the half does not use may be None.
    """
    values: dict[Any, Any] = {}
    values.update(zip(program.jaxpr.constvars, program.constants, strict=True))
    values.update(zip(program.jaxpr.invars, args, strict=True))
    if half == SECOND:
        values.update(zip(labels.residuals, residuals, strict=True))
    for number in _find_members(half, labels.equations):
        equation = program.jaxpr.eqns[number]
        operands = [compat.value_of(v, values) for v in equation.invars]
        if number in program.loops:
            loop = labels.loops[number]
            keys = _list_stacks(number, loop)
            stacks = []
            if half == SECOND:
                stacks = [values[key] for key in keys]
            outs, stacks = _run_loop(equation, program.loops[number], loop, half, operands, stacks)
            if half == FIRST:
                values.update(zip(keys, stacks, strict=True))
        else:
            outs = compat.bind(equation, operands)
        for v, out in zip(equation.outvars, outs, strict=True):
            if out is not None:
                values[v] = out
    results = []
    for v, label in zip(program.jaxpr.outvars, labels.results, strict=True):
        results.append(compat.value_of(v, values) if label & half else None)
    if half == SECOND:
        return results, []
    return results, [values[key] for key in labels.residuals]


def _run_loop(
    equation: Any, body: _Program, labels: _Labels, half: int, operands: Sequence[Any], stacks: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Runs one half of a loop: its results, with None for the other half's, and its stacked residuals if the first."""
    carry = _find_carry(equation)
    # None stands for what this half does not use; scan takes it as a tree without leaves.
    half_operands = []
    for x, label in zip(operands, labels.arguments, strict=True):
        half_operands.append(x if label & half else None)
    constants = half_operands[: carry.start]

    first_carries = half_operands[carry]
    scanned = half_operands[carry.stop :]

    def run_round(carries: list[Any], slices: Any) -> Any:
        scanned, residuals = slices
        outs, residuals = _run_half(body, labels, half, [*constants, *carries, *scanned], residuals)
        count = len(carries)
        return outs[:count], (outs[count:], residuals)

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    with compat.trace_as_equation(equation):
        carries, (outs, stacks) = jax.lax.scan(run_round, first_carries, (scanned, stacks), **options)
    return [*carries, *outs], stacks


# ---- a function that cannot be cut


def _only_views(program: _Program, labels: _Labels) -> bool:
    """Whether the second half computes nothing but views of its residuals."""
    for number in _find_members(SECOND, labels.equations):
        if number not in program.loops and not _is_view_primitive(program.jaxpr.eqns[number].primitive.name):
            return False
    for number, body in program.loops.items():
        if not _only_views(body, labels.loops[number]):
            return False
    return True


def _explain_uncut(program: _Program, labels: _Labels) -> str:
    """The sentence of `why`: names an equation of the first half that computes results of the second."""
    rule = "TwoHalves: the second results must have equations of their own, which the first results do not need; got "
    makers = []
    for key in labels.residuals:
        maker = _find_maker(program, key)
        if maker is not None:
            makers.append(maker)
    if not makers:
        return f"{rule}none that compute anything. Run the function unsplit."
    maker = max(makers, key=lambda equation: len(compat.inner_jaxprs(equation)))
    frames = compat.user_frames(maker)
    line = ""
    if frames:
        file, number, function = frames[0]
        line = f" at {Path(file).name}:{number} ({function})"
    return f"{rule}`{maker.primitive.name}`{line}, which both need. Split it, or run the function unsplit."


def _find_maker(program: _Program, key: Any) -> Any:
    """The equation, in the innermost loop, that computes a residual; None for an argument.

    Worked example: the residual (3, h) is a stack of the values that h has in the rounds of the loop at equation 3. The
    equation of that loop's body that has the result h computes it.
    """
    if isinstance(key, tuple):
        number, variable_of_body = key
        return _find_maker(program.loops[number], variable_of_body)
    for number, equation in enumerate(program.jaxpr.eqns):
        if key not in equation.outvars:
            continue
        if number not in program.loops:
            return equation
        # The body of a loop returns the loop's results, in the same order.
        body = program.loops[number]
        position = equation.outvars.index(key)
        return _find_maker(body, body.jaxpr.outvars[position])
    return None


def _is_view_primitive(name: str) -> bool:
    return name in _VIEWS or registered(name).cast


def _is_view(equation: Any, steady: Sequence[bool]) -> bool:
    """Whether an equation gives another view of operands that are no larger than its result."""
    if not _is_view_primitive(equation.primitive.name):
        return False
    size = 0
    for v, is_steady in zip(equation.invars, steady, strict=True):
        if not is_steady:
            size += _count_bytes(v)
    return size <= _count_bytes(equation.outvars[0])


def _count_bytes(v: Any) -> int:
    return int(prod(v.aval.shape) * v.aval.dtype.itemsize)


def _find_carry(equation: Any) -> slice:
    """The operands of a scan that are its carry."""
    constants, carries = compat.scan_parts(equation)
    return slice(constants, constants + carries)


def _is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def _find_members(half: int, labels: Iterable[int]) -> list[int]:
    """The places of the labels that include a half."""
    return [number for number, label in enumerate(labels) if label & half]
