"""One key in two draws: which keys of a traced program are equal, and how often each is drawn from.

Two keys are equal where the same operations made them from the same values: `fold_in(key, 1)` in two places is one
key. A draw that the backward pass repeats counts once; of a cond's branches one runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._jax import compat
from shardkit._jax.jaxprs import find_called_jaxpr, flow, scan_operands, walk, while_operands
from shardkit._jax.primitives import registered
from shardkit.analysis.jaxpr.dataflow import Context, where
from shardkit.analysis.rules.program import TracedProgram
from shardkit.analysis.rules.rule import Finding
from shardkit.meshes.layout import all_axes

_DRAWS = {"random_bits", "random_gamma"}
# Their result is their operand. Not random_clone, whose caller intends another draw each time.
_SAME_KEY = {"random_wrap", "random_unwrap"}
_REMEDY = (
    "Split the key, or fold a number into it for each draw, as fold_keys does; jax.random.clone(key) declares equal "
    "numbers intended."
)


class NamedValue(NamedTuple):
    """Values of one name are equal; `loops` are those whose iterations may differ in it."""

    name: int
    loops: frozenset[int] = frozenset()


class _Surroundings(NamedTuple):
    """What surrounds an equation."""

    context: Context
    loops: tuple[tuple[int, str], ...]  # the loops around it, each with its number and its description
    drawn: dict[int, str]  # for each key drawn from so far, the line
    line: str = ""  # the line of the jax.random call that it is in; "" outside one


def reused_keys(program: TracedProgram) -> Iterator[Finding]:
    """Second draws from one key, and draws that the iterations of a loop repeat."""
    jaxpr, names = program.step.jaxpr, _Names()
    names.run(jaxpr, [names.new() for _ in (*jaxpr.constvars, *jaxpr.invars)], _Surroundings(Context(), (), {}))
    yield from names.found


class _Names:
    """The names of values so far, and the findings."""

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self._known: dict[Any, int] = {}
        self._drawing: dict[int, bool] = {}

    def new(self, of: Sequence[NamedValue] = ()) -> NamedValue:
        """A new value, equal to no other, made from these."""
        return self._named(object(), of)

    def _named(self, made: Any, of: Sequence[NamedValue] = ()) -> NamedValue:
        key = (made, *(value.name for value in of))
        name = self._known.setdefault(key, len(self._known))
        return NamedValue(name, frozenset[int]().union(*(value.loops for value in of)))

    def run(self, jaxpr: Any, given: Sequence[NamedValue], place: _Surroundings) -> list[NamedValue]:
        """The values of a jaxpr's results, for those of its constants and arguments."""

        def literal(atom: Any) -> NamedValue:
            return self._named((str(atom.aval.dtype), str(atom.val)))

        return flow(jaxpr, given, lambda equation, ins: self._step(equation, ins, place), literal)

    def _step(self, equation: Any, ins: list[NamedValue], place: _Surroundings) -> list[NamedValue]:
        name, outs = equation.primitive.name, equation.outvars
        if name in _DRAWS:
            self._draw(equation, ins[0], place)
        if (name in _SAME_KEY or registered(name).same) and len(ins) == len(outs):
            return ins
        inner = [
            (sub, [self._named(("constant", id(c))) for c in constants] or [self.new() for _ in sub.constvars])
            for (_, sub), constants in zip(compat.inner_jaxprs(equation), compat.inner_constants(equation), strict=True)
        ]
        if not inner:
            return self._computed(equation, ins)
        if not any(_may_make_a_key(out.aval) for out in outs) and not any(self._draws(sub) for sub, _ in inner):
            return [self.new(ins) for _ in outs]
        context = place.context._replace(
            backward=place.context.backward or _again(equation), source=where(equation, place.context)
        )
        place = place._replace(context=context)
        sub, constants = inner[0]
        if name in ("scan", "while"):
            return self._loop(equation, ins, place)
        if name == "cond":
            branches = [place._replace(drawn=dict(place.drawn)) for _ in inner]
            ways = [self.run(sub, [*c, *ins[1:]], each) for (sub, c), each in zip(inner, branches, strict=True)]
            for each in branches:
                place.drawn.update(each.drawn)
            return [same[0] if len(set(same)) == 1 else self.new(ins) for same in zip(*ways, strict=True)]
        if find_called_jaxpr(equation) is not None:
            # jax traces its own functions once and records the line of the first call for all.
            if not place.line and hasattr(jax.random, str(equation.params.get("name", "")).lstrip("_")):
                place = place._replace(line=context.source)
            return self.run(sub, [*constants, *ins], place)
        if name == "shard_map":
            specs = [str(spec) if all_axes(spec) else "" for spec in equation.params["in_specs"]]
            pieces = [self._named(spec, [v]) if spec else v for spec, v in zip(specs, ins, strict=True)]
            self.run(sub, [*constants, *pieces], place)
        else:
            for sub, constants in inner:
                self.run(sub, [*constants, *(self.new(ins) for _ in sub.invars)], place)
        return [self.new(ins) for _ in outs]

    def _draws(self, jaxpr: Any) -> bool:
        """Whether numbers are drawn anywhere in a jaxpr."""
        if id(jaxpr) not in self._drawing:
            self._drawing[id(jaxpr)] = any(site.name in _DRAWS for site in walk(jaxpr))
        return self._drawing[id(jaxpr)]

    def _computed(self, equation: Any, ins: list[NamedValue]) -> list[NamedValue]:
        """Keys and integers are named by what made them, clones never; no key is made from floats."""
        clones = equation.primitive.name == "random_clone"
        if clones or compat.acts(equation) or not all(_may_make_a_key(out.aval) for out in equation.outvars):
            return [self.new(ins) for _ in equation.outvars]
        made = (equation.primitive.name, str(sorted(equation.params.items(), key=lambda item: item[0])))
        return [self._named((*made, i), ins) for i in range(len(equation.outvars))]

    def _loop(self, equation: Any, ins: list[NamedValue], place: _Surroundings) -> list[NamedValue]:
        params = equation.params
        if equation.primitive.name == "scan":
            fixed, held, each = scan_operands(equation, ins)
            bodies = [(params["jaxpr"], fixed, held, each)]
            what = "scan" if params["length"] > 1 else ""
        else:
            for_test, for_body, held = while_operands(equation, ins)
            bodies = [(params["cond_jaxpr"], for_test, held, []), (params["body_jaxpr"], for_body, held, [])]
            what = "while loop"
        number = self.new().name
        if what:
            words = f"{what} at {where(equation, place.context)}"
            place = place._replace(loops=(*place.loops, (number, words)))
        for closed, fixed, held, each in bodies:
            sub, turning = closed.jaxpr, []
            after = sub.outvars[: len(held)] if closed is not params.get("cond_jaxpr") else sub.outvars[:0]
            for i, value in enumerate([*held, *each]):
                variable = sub.invars[len(fixed) + i]
                kept = i < len(after) and after[i] is variable
                turned = self.new([value])
                turning.append(value if kept else turned._replace(loops=turned.loops | {number}))
            constants = [self._named(("constant", id(c))) for c in closed.consts]
            self.run(sub, [*constants, *fixed, *turning], place)
        return [self.new(ins) for _ in equation.outvars]

    def _draw(self, equation: Any, key: NamedValue, place: _Surroundings) -> None:
        if place.context.backward or _again(equation):
            return
        line = place.line or where(equation, place.context)
        still = [words for number, words in place.loops if number not in key.loops]
        before = place.drawn.get(key.name)
        place.drawn[key.name] = line
        these = f"random numbers of shape {equation.outvars[0].aval.shape} come from the same bits"
        if before is not None:
            message = f"{these} as those drawn at {before}: both draws use one key."
        elif still:
            message = f"{these} in every iteration of the {still[-1]}: each uses the same key."
        else:
            return
        self.found.append(Finding("reused-key", message, line, _REMEDY))


def _again(equation: Any) -> bool:
    """Whether an equation may repeat one of the forward pass: in the backward pass, or recomputed for it."""
    return compat.in_backward(equation) or compat.is_recomputed(equation)


def _may_make_a_key(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    kinds = (jax.dtypes.prng_key, jnp.integer, np.bool_)
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)
