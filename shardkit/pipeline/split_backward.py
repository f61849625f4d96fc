"""A backward pass cut into two: what the stage before waits for, and the gradients of weights, which can wait.

Leaving out what a result does not need is not enough: the gradients of weights alone would walk the whole chain of
cotangents once more. So the first half hands on the values inside the chain that the second half uses, and a loop over
layers becomes two loops: the first stacks these values up, the second goes over the stacks.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from math import prod
from pathlib import Path
from typing import Any

import jax

from shardkit import _compat

FIRST, SECOND = 0, 1
# Another look at a value. The second half takes it anew, unless what is looked at is larger.
_LOOKS = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "convert_element_type", "rev", "copy", "pvary", "name"}


class Split:
    """A function cut into two: what its first results need, and the rest, which uses what the first half computed.

    An equation is in one of the halves. In both are only those that follow from lasting arguments alone, and mere looks
    at a value, such as a broadcast. Loops (`lax.scan`) are cut inside; branches and `while` are not.

    Args:
        fn: takes arrays and returns a list of arrays. What it closes over counts as lasting.
        args: the arrays, or their ShapeDtypeStructs.
        first: for each result whether the first half returns it.
        lasting: for each argument whether it is at hand in the second half too and need not be kept: weights, keys.

    Attributes:
        kept: the ShapeDtypeStructs of what the first half hands to the second, the stacks of loops included: only what
            the second half uses, and nothing that follows from lasting arguments alone.
        whole: whether the second half has nothing left to compute: better run `fn` unsplit.
        why: where `whole`, one sentence that names what could not be cut; else "".
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], first: Sequence[bool], lasting: Sequence[bool]):
        closed = jax.make_jaxpr(fn)(*args)
        self._lasting, self._first, self._second = list(lasting), list(first), [not flag for flag in first]
        self._cut = _Cut(closed.jaxpr, closed.consts, lasting)
        self._cut.need(self._first)
        self._cut.remain(self._second, at_hand=self._lasting)
        self.kept: list[Any] = jax.eval_shape(lambda *args: self.first(*args)[1], *args)
        self.whole = self._cut.idle
        self.why = self._cut.why() if self.whole else ""

    def first(self, *args: Any) -> tuple[list[Any], list[Any]]:
        """The first results, and what is kept, given all arguments."""
        results, kept = self._cut.run(FIRST, self._first, args)
        return list(compress(results, self._first)), kept

    def second(self, *lasting: Any, kept: Sequence[Any]) -> list[Any]:
        """The other results, given the lasting arguments and what was kept."""
        given = iter(lasting)
        args = [next(given) if flag else None for flag in self._lasting]
        return list(compress(self._cut.run(SECOND, self._second, args, kept)[0], self._second))


class _Cut:
    """A jaxpr, of a function or of a loop's body, whose equations are dealt to two halves.

    Attributes:
        steady: variables that follow from lasting arguments alone.
        done: variables that the first half has.
        runs: for each half the numbers of its equations.
        kept: what the second half is handed: variables, and `(number, variable)` for what a loop stacks up.
    """

    def __init__(self, jaxpr: Any, constants: Sequence[Any], lasting: Sequence[bool]):
        closed = jax.make_jaxpr(partial(_compat.inlined, jaxpr, constants))(*(v.aval for v in jaxpr.invars))
        self.jaxpr, self.constants = closed.jaxpr, closed.consts
        self.loops: dict[int, _Loop] = {}  # by number of the equation
        self.steady = {*self.jaxpr.constvars, *_marked(self.jaxpr.invars, lasting)}
        for number, equation in enumerate(self.jaxpr.eqns):
            ins = self.are_steady(equation.invars)
            if equation.primitive.name == "scan":
                self.loops[number] = _Loop(equation, ins)
            outs = [all(ins) and not _compat.acts(equation)] * len(equation.outvars)
            self.steady.update(_marked(equation.outvars, self.loops[number].steady if number in self.loops else outs))

    def are_steady(self, atoms: Iterable[Any]) -> list[bool]:
        return [hasattr(v, "val") or v in self.steady for v in atoms]

    def need(self, results: Sequence[bool]) -> list[bool]:
        """Deals to the first half what these results need; returns which arguments they need."""
        self.done = _marked(self.jaxpr.outvars, results)
        self.runs: tuple[set[int], set[int]] = (set(), set())
        for number, equation in reversed([*enumerate(self.jaxpr.eqns)]):
            outs = [v in self.done for v in equation.outvars]
            runs = any(outs) or _compat.acts(equation)
            ins = [runs] * len(equation.invars)
            outs, ins = self.loops[number].need(outs) if number in self.loops else ([runs] * len(outs), ins)
            self.done.update(_marked(equation.outvars, outs), _marked(equation.invars, ins))
            if runs:
                self.runs[FIRST].add(number)
        return [v in self.done for v in self.jaxpr.invars]

    def remain(self, results: Sequence[bool], at_hand: Sequence[bool]) -> list[bool]:
        """Deals to the second half what these results need besides; returns which arguments at hand they need."""
        live = _marked(self.jaxpr.outvars, results)
        self.kept: list[Any] = []
        self.runs[SECOND].clear()
        for number, equation in reversed([*enumerate(self.jaxpr.eqns)]):
            look = _is_look(equation, self.are_steady(equation.invars))
            outs = [v in live and (look or v in self.steady or v not in self.done) for v in equation.outvars]
            self.kept += [v for v, runs in zip(equation.outvars, outs, strict=True) if v in live and not runs]
            ins = [any(outs)] * len(equation.invars)
            if number in self.loops:
                ins = self.loops[number].remain(outs)
                self.kept += self._stacks(number)
            live.update(_marked(equation.invars, ins))
            if any(outs):
                self.runs[SECOND].add(number)
        self.kept += [v for v, here in zip(self.jaxpr.invars, at_hand, strict=True) if v in live and not here]
        return [v in live and here for v, here in zip(self.jaxpr.invars, at_hand, strict=True)]

    def run(self, half: int, results: Sequence[bool], args: Sequence[Any], kept: Sequence[Any] = ()) -> Any:
        """A half's results, None for others, and in the first half what is kept; unused arguments may be None."""
        values: dict[Any, Any] = dict(zip(self.jaxpr.constvars, self.constants, strict=True))
        values |= zip(self.jaxpr.invars, args, strict=True)
        values |= zip(self.kept if half == SECOND else (), kept, strict=True)
        for number in sorted(self.runs[half]):
            equation = self.jaxpr.eqns[number]
            operands = [_compat.value_of(v, values) for v in equation.invars]
            if number in self.loops:
                stacks = self._stacks(number) if half == SECOND else []
                outs, stacked = self.loops[number].run(half, operands, [values[key] for key in stacks])
                values |= zip(self._stacks(number) if half == FIRST else (), stacked, strict=True)
            else:
                outs = _compat.bind(equation, operands)
            values |= {v: out for v, out in zip(equation.outvars, outs, strict=True) if out is not None}
        asked = [v if flag else None for v, flag in zip(self.jaxpr.outvars, results, strict=True)]
        return [_compat.value_of(v, values) for v in asked], [values[key] for key in self.kept] if half == FIRST else []

    def _stacks(self, number: int) -> list[Any]:
        return [(number, key) for key in self.loops[number].body.kept]

    @property
    def idle(self) -> bool:
        """Whether the second half only looks at what it is handed."""
        names = {self.jaxpr.eqns[number].primitive.name for number in self.runs[SECOND] - self.loops.keys()}
        return names <= _LOOKS and all(loop.body.idle for loop in self.loops.values())

    def why(self) -> str:
        """Names an equation of the first half that makes the second results."""
        rule = "Split: the second results must have equations of their own, which the first results do not need; got "
        makers = [maker for key in self.kept if (maker := self._maker(key)) is not None]
        if not makers:
            return f"{rule}none that compute anything. Run the function unsplit."
        maker = max(makers, key=lambda equation: len(_compat.inner_jaxprs(equation)))
        frames = _compat.user_frames(maker)
        line = " at {}:{} ({})".format(Path(frames[0][0]).name, *frames[0][1:]) if frames else ""
        return f"{rule}`{maker.primitive.name}`{line}, which both need. Take it apart, or run the function unsplit."

    def _maker(self, key: Any) -> Any:
        """The equation, in the innermost loop, that makes what is kept; None for an argument."""
        number, variable = key if isinstance(key, tuple) else (None, key)
        for n, equation in enumerate(self.jaxpr.eqns):
            if n in self.loops and variable in equation.outvars:
                number, variable = n, self.loops[n].body.jaxpr.outvars[equation.outvars.index(variable)]
            elif variable in equation.outvars:
                return equation
        return None if number is None else self.loops[number].body._maker(variable)


class _Loop:
    """A scan equation, which becomes a loop in each half; `steady` results follow from lasting arguments alone."""

    def __init__(self, equation: Any, lasting: Sequence[bool]):
        self._equation = equation
        consts, self._carries = _compat.scan_parts(equation)
        self._carried = slice(consts, consts + self._carries)
        self._results: list[list[bool]] = [[], []]
        self._used: list[list[bool]] = [[], []]
        ((_, jaxpr),), (constants,) = _compat.inner_jaxprs(equation), _compat.inner_constants(equation)
        before, carried = None, list(lasting[self._carried])
        while carried != before:
            self.body = _Cut(jaxpr, constants, self._with_carry(lasting, carried))
            outs = self.body.are_steady(self.body.jaxpr.outvars)
            before, carried = carried, [a and b for a, b in zip(carried, outs, strict=False)]
        self.steady = [*carried, *outs[self._carries :]]

    def need(self, results: list[bool]) -> tuple[list[bool], list[bool]]:
        """As of the body, in every round; returns also which results the first half has then."""
        self._deal(FIRST, results, self.body.need)
        # What the first half has in every round anyway, it may as well return.
        had, stacked = self.body.done - self.body.steady, self.body.jaxpr.outvars[self._carries :]
        more = [False] * self._carries + [not hasattr(v, "val") and v in had for v in stacked]
        self._results[FIRST] = [a or b for a, b in zip(self._results[FIRST], more, strict=True)]
        return self._results[FIRST], self._used[FIRST]

    def remain(self, results: list[bool]) -> list[bool]:
        """As of the body, in every round."""
        carried = [a or not b for a, b in zip(self.steady, self._results[FIRST], strict=True)][: self._carries]
        at_hand = self._with_carry([True] * len(self._equation.invars), carried)
        self._deal(SECOND, results, partial(self.body.remain, at_hand=at_hand))
        return self._used[SECOND]

    def _deal(self, half: int, results: list[bool], deal: Callable[[list[bool]], list[bool]]) -> None:
        """Deals the body's equations to a half, with every carry that its own rounds need."""
        before = None
        while results != before:
            used = deal(results)
            carried = [a or b for a, b in zip(results, used[self._carried], strict=False)]
            before, results = results, [*carried, *results[self._carries :]]
        self._results[half], self._used[half] = results, self._with_carry(used, carried)

    def _with_carry(self, flags: Sequence[bool], carried: Sequence[bool]) -> list[bool]:
        return [*flags[: self._carried.start], *carried, *flags[self._carried.stop :]]

    def run(self, half: int, operands: Sequence[Any], stacks: list[Any]) -> tuple[list[Any], list[Any]]:
        """The results of a half, None for the other's, and in the first half what is stacked up."""
        # To scan, None is a tree without leaves.
        operands = [x if used else None for x, used in zip(operands, self._used[half], strict=True)]

        def body(carry: list[Any], each: Any) -> Any:
            args = [*operands[: self._carried.start], *carry, *each[0]]
            outs, kept = self.body.run(half, self._results[half], args, each[1])
            return outs[: self._carries], (outs[self._carries :], kept)

        over = (operands[self._carried.stop :], stacks)
        options = {name: self._equation.params[name] for name in ("length", "reverse", "unroll")}
        with _compat.made_by(self._equation):
            carry, (outs, stacked) = jax.lax.scan(body, operands[self._carried], over, **options)
        return [*carry, *outs], stacked


def _is_look(equation: Any, steady: Sequence[bool]) -> bool:
    """Whether an equation shows in another form what is no larger than its result."""
    if equation.primitive.name not in _LOOKS:
        return False
    sizes = [prod(v.aval.shape) * v.aval.dtype.itemsize for v in (*equation.invars, equation.outvars[0])]
    return sum(size for size, flag in zip(sizes, steady, strict=False) if not flag) <= sizes[-1]


def _marked(atoms: Iterable[Any], flags: Iterable[bool]) -> set[Any]:
    return {v for v in compress(atoms, flags) if not hasattr(v, "val")}
