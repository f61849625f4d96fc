"""The lint's rules on collectives: what hangs, what gives wrong numbers without an error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardkit import _compat
from shardkit._check import named, quoted
from shardkit.analysis.jaxpr.census import KINDS
from shardkit.analysis.jaxpr.dataflow import Block, Context, inside, short, spec_axes, split_axes, where

RULES = {
    "divergent-collective": "a collective that only some devices of its axis reach",
    "ppermute-in-divergent-branch": "a ppermute that some devices do not reach, whatever its axis",
    "unequal-output": "a result typed as equal on all devices that is not",
    "incomplete-permutation": "a ppermute from which some device gets nothing but zeros",
    "non-bijective-permutation": "a ppermute with a device named twice, or one that there is not",
    "identity-permutation": "a ppermute in which every device sends to itself",
    "repeated-reduction": "a sum over devices that hold the same value",
    "repeated-draw": "the same random numbers for different elements on different devices",
    "reused-key": "two draws of random numbers from one key",
    "gather-one-shard-used": "an all_gather of which each device uses one piece",
    "all-reduce-then-slice": "an all_reduce of which each device keeps its piece",
    "large-replicated": "a large array that every device holds whole",
    "tiny-shards": "a leaf split into pieces too small to be worth a message",
    "check-vma-off": "a shard_map whose types are not checked",
    "pmap": "jax.pmap in new code",
    "process-dependent-communication": "collectives that depend on jax.process_index()",
    "process-dependent-program": "a program that is not the same on all processes",
}


class Finding(NamedTuple):
    """One place of a program that breaks a rule.

    Attributes:
        rule: one of `shardkit.analysis.RULES`.
        message: what is wrong there, with the values; one sentence.
        source: the user's line, "file.py:12 (function)".
        remedy: what to do instead; one sentence.
    """

    rule: str
    message: str
    source: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.source}: {self.rule}: {self.message} {self.remedy}"


def place(equation: Any, context: Context) -> str:
    """The line of an equation, or where it has none, as a differentiated shard_map, the first line inside."""
    known = where(equation, context)
    for _, sub in _compat.inner_jaxprs(equation) if known == "unknown" else ():
        lines = [line for each in sub.eqns if (line := place(each, context)) != "unknown"]
        known = lines[0] if lines else known
    return known


def divergence(block: Block) -> Iterator[Finding]:
    """Collectives inside branches and loops that not all devices take alike."""
    for equation in block.jaxpr.eqns:
        kind, axes = KINDS.get(equation.primitive.name), split_axes(equation, block.context)
        if kind is None or not axes:
            continue
        for what in block.context.divergences:
            shared = sorted(what.axes & set(axes))
            around = f"{kind} over {quoted(axes)} stands in a {what.what}, at {what.source}, differs along"
            if shared:
                yield Finding(
                    "divergent-collective",
                    f"{around} {quoted(shared)}, so that devices which must meet do not, and it hangs.",
                    where(equation, block.context),
                    "Call it on every device and choose the result with jnp.where, or make the predicate equal first, "
                    f"with all_reduce over {quoted(shared)}.",
                )
                break
            if kind == "ppermute":
                yield Finding(
                    "ppermute-in-divergent-branch",
                    f"{around} {quoted(sorted(what.axes))}; a ppermute waits for every device of the mesh, and hangs "
                    "or gives wrong values.",
                    where(equation, block.context),
                    "Call it on every device and choose the result with jnp.where.",
                )
                break


def permutations(block: Block) -> Iterator[Finding]:
    """Permutations that are none. A shift without wrap, and zeros that a `where` replaces, are meant."""
    for equation in block.jaxpr.eqns:
        axes = split_axes(equation, block.context)
        if equation.primitive.name != "ppermute" or not axes:
            continue
        shape = [block.context.sizes[a] for a in axes]
        n, pairs = math.prod(shape), [(int(s), int(t)) for s, t in equation.params["perm"]]
        over = f"ppermute over {quoted(axes)} of {n} devices"
        ends = [(what, [pair[i] for pair in pairs]) for i, what in enumerate(("source", "target"))]
        outside = [(what, x) for what, devices in ends for x in devices if not 0 <= x < n]
        twice = [(what, x) for what, devices in ends for x in devices if devices.count(x) > 1] if not outside else []
        silent = sorted(set(range(n)) - {target for _, target in pairs})
        rule = None
        if outside or twice:
            rule, (what, x) = "non-bijective-permutation", (outside or twice)[0]
            message = f"{over} names {what} {x}" + (", and there is no such device." if outside else " more than once.")
            remedy = "Name each device at most once as source and once as target, as shift does."
        elif pairs == [(i, i) for i in range(n)] or (pairs and all(s == t for s, t in pairs)):
            rule, message = "identity-permutation", f"{over} sends every device's value to itself."
            remedy = "Leave it out, or name other targets."
        elif silent and not _open_shift(pairs, shape) and not _masked(block, equation):
            rule = "incomplete-permutation"
            some = quoted(silent[:3]).replace("'", "") + (" and others" if len(silent) > 3 else "")
            message = f"{over} names no source for {some}, which get zeros."
            remedy = "Name a source for every device, or replace the zeros with jnp.where; shift(wrap=False) is exempt."
        if rule is not None:
            yield Finding(rule, message, where(equation, block.context), remedy)


def _open_shift(pairs: Sequence[tuple[int, int]], shape: Sequence[int]) -> bool:
    """Whether all move by the same number of places, and only those that would fall off the end do not."""
    n = math.prod(shape)
    for order in itertools.permutations(range(len(shape))):
        joint = np.arange(n).reshape(shape).transpose(order).ravel()  # the device at each joint index in this order
        where = np.argsort(joint)
        steps = {int(where[t] - where[s]) for s, t in pairs}
        if len(steps) == 1 and len(pairs) == n - abs(steps.pop()):
            return True
    return False


def _masked(block: Block, equation: Any) -> bool:
    """Whether every use of the result is a choice (jnp.where)."""
    found = list(uses(block, equation.outvars[0]))
    return bool(found) and all(u is not None and u.name == "select_n" and u.position > 0 for u in found)


class Use(NamedTuple):
    """One place where a value is used: the equation, which operand it is, and the block around it."""

    equation: Any
    position: int
    block: Block

    @property
    def name(self) -> str:
        """The primitive's name."""
        return str(self.equation.primitive.name)


# What leaves a value's elements as they are.
_SAME = {"pvary", "pcast", "convert_element_type", "copy", "copy_p", "name", "optimization_barrier"}


def uses(block: Block, variable: Any) -> Iterator[Use | None]:
    """Every place where a value is used, through casts and into called functions; None where it leaves the block."""
    if any(out is variable for out in block.jaxpr.outvars):
        yield None
    for equation in block.jaxpr.eqns:
        for position, each in enumerate(equation.invars):
            if each is not variable:
                continue
            if equation.primitive.name in _SAME:
                yield from uses(block, equation.outvars[position if len(equation.outvars) > 1 else 0])
                continue
            called = inside(block, equation)
            if called is None:
                yield Use(equation, position, block)
            else:
                yield from uses(called, called.jaxpr.invars[position])


def reductions(block: Block) -> Iterator[Finding]:
    """Sums, maxima and minima over devices that already agree. Constants are counts, and are meant."""
    for equation in block.jaxpr.eqns:
        if equation.primitive.name not in ("psum", "psum_invariant", "pmax", "pmin"):
            continue
        # Transposing makes such sums, and they are right: a value used as n copies has n times the gradient.
        if block.context.backward or _compat.in_backward(equation) or equation.params.get("axis_index_groups"):
            continue
        axes = split_axes(equation, block.context)
        for operand in equation.invars:
            state = block.state(operand)
            equal = [a for a in axes if a not in state.varies]
            reduced = bool(state.reduced & set(equal))
            # A tangent of an argument is summed rightly too, and cannot be told from the argument.
            if not equal or not (reduced or (state.given and not _compat.in_jvp(equation))):
                continue
            n = math.prod(block.context.sizes[a] for a in equal)
            why = "was reduced or gathered over it before" if reduced else "comes from replicated arguments"
            what = {"pmax": "a maximum", "pmin": "a minimum"}.get(equation.primitive.name, "a sum")
            does = "changes nothing" if what != "a sum" else f"multiplies it by {n}, and a mean changes nothing"
            yield Finding(
                "repeated-reduction",
                f"all_reduce over {quoted(axes)} of a {short(operand)} that is equal along {named(equal)} "
                f"already, because it {why}; {what} {does}.",
                where(equation, block.context),
                "Leave it out, or gather with replicated=True where only the type must become equal."
                if reduced
                else "Leave it out, or split the argument over the axis.",
            )
            break


def draws(block: Block) -> Iterator[Finding]:
    """Random numbers that are the same on devices whose elements differ: one dropout mask for all, for example."""
    for equation in block.jaxpr.eqns:
        if equation.primitive.name not in ("mul", "add", "sub", "div", "select_n", "and", "or"):
            continue
        operands = [(each, block.state(each)) for each in equation.invars if hasattr(each, "aval")]
        for draw, alike in operands:
            others = [(each, s) for each, s in operands if s.given and s.varies & alike.drawn and _like(each, draw)]
            if others:
                axes = sorted(others[0][1].varies & alike.drawn)
                yield Finding(
                    "repeated-draw",
                    f"{short(others[0][0])}, which differs along {quoted(axes)}, meets random numbers that are the "
                    "same there: their key does not differ.",
                    where(equation, block.context),
                    f"Fold the device's place into the key first, with fold_axis(key, {axes[0]!r}), or draw a key "
                    "for each example with fold_keys.",
                )
                break


def _like(one: Any, other: Any) -> bool:
    return math.prod(one.aval.shape) > 1 and one.aval.shape == other.aval.shape


def types(block: Block) -> Iterator[Finding]:
    """Types that are not checked, and pmap."""
    for equation in block.jaxpr.eqns:
        name = equation.primitive.name
        if name in ("jit", "pjit", "xla_pmap") and not block.context.mapped and _compat.made_by_pmap(equation):
            yield Finding(
                "pmap",
                "jax.pmap knows one axis only, wants a leading dimension for it, and checks no types.",
                place(equation, block.context),
                "Write jax.shard_map over a mesh from make_mesh.",
            )
        if name == "shard_map" and not equation.params["check_vma"] and not block.context.mapped:
            yield Finding(
                "check-vma-off",
                f"shard_map over {quoted(_compat.manual_axes(equation))} has check_vma off: a wrong out_specs and a "
                "missing reduction pass unnoticed, and gradients inside it are not summed.",
                place(equation, block.context),
                "Leave check_vma=True, and cast with vary where a type must match.",
            )


def outputs(block: Block) -> Iterator[Finding]:
    """What leaves a shard_map as equal on all devices, and is not.

    Where types are checked jax does not see that a predicate varies. Where they are not, whatever differs is reported
    along axes over which no pieces were exchanged: those that were may have been put together to the same whole.
    """
    if block.owner is None:
        return
    if not block.owner.params["check_vma"]:
        yield from _unchecked(block)
        return
    for number, (out, spec) in enumerate(zip(block.jaxpr.outvars, block.owner.params["out_specs"], strict=True)):
        wrong = [(a, line) for a, line in sorted(block.state(out).hidden) if a not in spec_axes(spec)]
        for line in dict.fromkeys(line for _, line in wrong):
            axes = [a for a, other in wrong if other == line]
            yield Finding(
                "unequal-output",
                f"a predicate that differs along {quoted(axes)} decides output {number} of the shard_map, which "
                f"out_specs {spec} takes for equal there, so that each device holds another value.",
                line,
                f"Cast the operands with vary over {quoted(axes)}, so that the type tells, and reduce the result.",
            )


def _unchecked(block: Block) -> Iterator[Finding]:
    made = {out: equation for equation in block.jaxpr.eqns for out in equation.outvars}
    for number, (out, spec) in enumerate(zip(block.jaxpr.outvars, block.owner.params["out_specs"], strict=True)):
        state = block.state(out)
        axes = sorted(state.varies - state.moved - spec_axes(spec))
        if axes and not block.context.mapped:
            yield Finding(
                "unequal-output",
                f"output {number} of the shard_map differs along {quoted(axes)}, and nothing reduces it; out_specs "
                f"{spec} takes it for equal there, and check_vma=False lets that pass.",
                where(made[out], block.context) if out in made else place(block.owner, block.context),
                f"Reduce it over {quoted(axes)}, or name the axis in out_specs; check_vma=True finds this by type.",
            )
