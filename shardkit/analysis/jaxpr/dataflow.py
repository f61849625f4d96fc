"""Which values of a traced program differ between devices, followed from the arguments to the results.

jax's varying types say whether a value may be *used* as varying. They miss the results of a branch that only some
devices take, do not exist where check_vma is off, and type the result of all_gather as varying. Here a value varies
from where a shard_map splits it or a device reads its own index to where a collective makes it equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

from shardkit._jax import compat
from shardkit._jax.jaxprs import (
    find_called_jaxpr,
    find_fixed_point,
    flow,
    kind_of,
    mesh_axes,
    scan_operands,
    source_line,
    user_line,
    while_operands,
)
from shardkit._jax.primitives import ASSUMED, registered
from shardkit.meshes.layout import all_axes

_NONE: frozenset[Any] = frozenset()


class State(NamedTuple):
    """What is known about a value on the devices of the surrounding shard_maps."""

    varies: frozenset[str] = _NONE  # axes over which it may differ
    reduced: frozenset[str] = _NONE  # axes over which a collective made it equal at some point
    given: bool = False  # whether it depends on an argument; if not, it is a constant
    # axes over which it differs although its type says invariant, each with the line of the cause
    hidden: frozenset[tuple[str, str]] = _NONE
    moved: frozenset[str] = _NONE  # axes over which pieces were exchanged, so that it may be whole and equal again
    drawn: frozenset[str] = _NONE  # axes over which it is the same random draw, element by element
    graded: bool = False  # whether it depends on a gradient
    passed: bool = False  # whether it depends on an argument in another way than by a gradient


# What turns random bits into a draw, element by element.
_ELEMENTWISE = {
    *("shift_right_logical", "or", "and", "xor", "not", "bitcast_convert_type", "convert_element_type"),
    *("sub", "add", "mul", "div", "neg", "max", "min", "abs", "sign", "sqrt", "log", "log1p", "exp", "erf_inv"),
    *("lt", "le", "gt", "ge", "ne", "eq", "clamp", "select_n", "integer_pow", "reshape", "squeeze"),
}
CONSTANT = State()
ARGUMENT = State(given=True, passed=True)


def join(states: Iterable[State]) -> State:
    """The state of what is computed from values in these states: all that holds of any, but it is no draw."""

    def both(a: Iterable[Any], b: Iterable[Any]) -> State:
        return State._make(x | y for x, y in zip(a, b, strict=True))

    return reduce(both, states, CONSTANT)._replace(drawn=_NONE)


class Divergence(NamedTuple):
    """Control flow that devices take differently: the axes, the construct, its line."""

    axes: frozenset[str]
    what: str
    source: str


class Context(NamedTuple):
    """What surrounds an equation."""

    sizes: Mapping[str, int] = {}  # the axes bound here, with their sizes
    # the branches and loops around it that devices take differently, the innermost last
    divergences: tuple[Divergence, ...] = ()
    backward: bool = False  # whether it is in the backward pass
    mapped: bool = False  # whether it is inside jax.pmap
    source: str = ""  # the innermost of the user's lines that led here; "" if none is known


class Block(NamedTuple):
    """One jaxpr with the states of its variables, its context, and the shard_map equation that owns it, if one does."""

    jaxpr: Any
    states: Mapping[Any, State]
    context: Context
    owner: Any = None

    def state(self, value: Any) -> State:
        """The state of an operand; literals are constants."""
        return CONSTANT if hasattr(value, "val") else self.states[value]


Visit = Callable[[Block], None]


def follow(jaxpr: Any, visit: Visit) -> None:
    """Follows the states through a program and calls `visit` on every jaxpr in it, the inner ones first."""
    _run(jaxpr, [ARGUMENT] * len(jaxpr.invars), Context(), visit)


def inside(block: Block, equation: Any) -> Block | None:
    """The block of a function that an equation calls, or None where it is no plain call."""
    blocks: list[Block] = []
    inner = find_called_jaxpr(equation)
    if inner is None:
        return None
    context = block.context._replace(source=user_line(equation) or block.context.source)
    _run(inner, [block.state(v) for v in equation.invars], context, blocks.append)
    return blocks[-1]


def split_axes(equation: Any, context: Context) -> tuple[str, ...]:
    """The axes of a collective that have more than one device."""
    return tuple(a for a in mesh_axes(equation) if context.sizes.get(a, 1) > 1)


def short(variable: Any) -> str:
    """The type of a value as a user writes it: float32[4,8]."""
    aval = variable.aval
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]" if hasattr(aval, "shape") else str(aval)


def where(equation: Any, context: Context) -> str:
    """The user's line of an equation; where jax lost it, as in a loop body, that of the surrounding equation."""
    return user_line(equation) or context.source or source_line(equation)


def _run(jaxpr: Any, inputs: Sequence[State], context: Context, visit: Visit | None, owner: Any = None) -> list[State]:
    states: dict[Any, State] = {}

    def step(equation: Any, ins: list[State]) -> list[State]:
        results = _step(equation, ins, context, visit)
        graded = context.backward or compat.in_backward(equation)
        return [state._replace(graded=True, passed=False) for state in results] if graded else results

    results = flow(jaxpr, [*[CONSTANT] * len(jaxpr.constvars), *inputs], step, lambda _: CONSTANT, states)
    if visit is not None:
        visit(Block(jaxpr, states, context, owner))
    return results


def _step(equation: Any, ins: list[State], context: Context, visit: Visit | None) -> list[State]:
    name = equation.primitive.name
    if kind_of(equation) is not None:
        if len(ins) > len(equation.outvars):  # ragged_all_to_all takes offsets and sizes too
            ins = [join(ins)]
        return [_collective(equation, each, context.sizes) for each in ins]
    if name == ASSUMED:
        return [_equal(ins[0], _split(mesh_axes(equation), context.sizes))]
    if name == "axis_index":
        return [State(_split(mesh_axes(equation), context.sizes))]
    if name == "random_bits":
        return [ins[0]._replace(drawn=_split(context.sizes, context.sizes) - ins[0].varies)]
    if registered(name).same:
        return ins
    if name == "io_callback":  # the host may answer each device differently
        return [ARGUMENT._replace(varies=_split(context.sizes, context.sizes))] * len(equation.outvars)
    inner = [sub for _, sub in compat.inner_jaxprs(equation)]
    if inner:
        source = user_line(equation) or context.source
        context = context._replace(backward=context.backward or compat.in_backward(equation), source=source)
    if name == "shard_map":
        return _shard_map(equation, inner[0], ins, context, visit)
    if name == "scan":
        return _scan(equation, inner[0], ins, context, visit)
    if name == "while":
        return _while(equation, ins, context, visit)
    if name == "cond":
        return _cond(equation, inner, ins, context, visit)
    if not context.mapped:
        context = context._replace(mapped=compat.is_made_by_pmap(equation))
    if (sub := find_called_jaxpr(equation)) is not None:
        return _run(sub, ins, context, visit)
    every = join(ins)
    if name in _ELEMENTWISE and (drawn := [s.drawn for s in ins if s.drawn]):
        every = every._replace(drawn=frozenset.intersection(*drawn) - every.varies)
    for sub in inner:  # a higher-order primitive: its functions are applied to its operands
        every = join([every, *_run(sub, [every] * len(sub.invars), context, visit)])
    return [every] * len(equation.outvars)


def _split(axes: Iterable[str], sizes: Mapping[str, int]) -> frozenset[str]:
    return frozenset(a for a in axes if sizes.get(a, 1) > 1)


def _collective(equation: Any, state: State, sizes: Mapping[str, int]) -> State:
    axes = _split(mesh_axes(equation), sizes)
    if equation.params.get("axis_index_groups") is not None:
        return state._replace(varies=state.varies | axes, moved=state.moved | axes, drawn=_NONE)
    if kind_of(equation) == "ppermute":
        n = math.prod(sizes[a] for a in axes)
        everyone = len({target for _, target in equation.params["perm"]}) == n
        if everyone and not axes & state.varies:
            return state
    if registered(equation.primitive.name).differs:
        return state._replace(varies=state.varies | axes, moved=state.moved | axes, drawn=_NONE)
    return _equal(state._replace(drawn=_NONE), axes)


def _equal(state: State, axes: frozenset[str]) -> State:
    """A value that is the same on all devices of `axes`."""
    hidden = frozenset(h for h in state.hidden if h[0] not in axes)
    # A count, as psum(1), is a constant too.
    reduced = state.reduced | axes if state.given else state.reduced
    return state._replace(varies=state.varies - axes, reduced=reduced, hidden=hidden)


def _shard_map(equation: Any, sub: Any, ins: list[State], context: Context, visit: Visit | None) -> list[State]:
    params = equation.params
    manual = frozenset(compat.manual_axes(equation))
    sizes = {**context.sizes, **{axis: params["mesh"].shape[axis] for axis in manual}}
    entering = [
        state._replace(varies=state.varies | (_split(all_axes(spec), sizes) & manual))
        for state, spec in zip(ins, params["in_specs"], strict=True)
    ]
    leaving = _run(sub, entering, context._replace(sizes=sizes), visit, equation)
    return [_equal(s, manual)._replace(reduced=s.reduced - manual, moved=_NONE, drawn=_NONE) for s in leaving]


def _scan(equation: Any, sub: Any, ins: list[State], context: Context, visit: Visit | None) -> list[State]:
    fixed, carried, each = scan_operands(equation, ins)
    carried = _settled(carried, lambda held: _run(sub, [*fixed, *held, *each], context, None)[: len(carried)])
    return _run(sub, [*fixed, *carried, *each], context, visit)


def _while(equation: Any, ins: list[State], context: Context, visit: Visit | None) -> list[State]:
    inner = dict(compat.inner_jaxprs(equation))
    test, body = inner["cond_jaxpr"], inner["body_jaxpr"]
    for_test, for_body, carried = while_operands(equation, ins)
    carried = _settled(carried, lambda held: _run(body, [*for_body, *held], context, None))
    (goes_on,) = _run(test, [*for_test, *carried], context, None)
    inside = _diverge(equation, goes_on, context, "while loop whose condition")
    _run(test, [*for_test, *carried], inside, visit)
    _run(body, [*for_body, *carried], inside, visit)
    kept = [out is held for out, held in zip(body.outvars, body.invars[len(for_body) :], strict=True)]
    return [
        state if same else _chosen(state, goes_on, variable, equation, context)
        for state, same, variable in zip(carried, kept, equation.outvars, strict=True)
    ]


def _cond(equation: Any, inner: list[Any], ins: list[State], context: Context, visit: Visit | None) -> list[State]:
    chosen, operands = ins[0], ins[1:]
    inside = _diverge(equation, chosen, context, "cond whose predicate")
    branches = [_run(sub, operands, inside, visit) for sub in inner]
    return [
        _chosen(join(results), chosen, variable, equation, context)
        for results, variable in zip(zip(*branches, strict=True), equation.outvars, strict=True)
    ]


def _chosen(state: State, by: State, variable: Any, equation: Any, context: Context) -> State:
    """A result that depends on the branch taken: it varies as the predicate does, whatever its type says."""
    untold = by.varies - compat.varying_axes(variable.aval)
    hidden = frozenset((axis, where(equation, context)) for axis in untold)
    return join([state, State(by.varies, by.reduced, by.given, hidden, passed=by.passed)])


def _diverge(equation: Any, by: State, context: Context, what: str) -> Context:
    if not by.varies:
        return context
    return context._replace(divergences=(*context.divergences, Divergence(by.varies, what, where(equation, context))))


def _settled(carried: list[State], body: Callable[[list[State]], list[State]]) -> list[State]:
    """The states of a loop's carry that hold in every iteration."""
    return find_fixed_point(carried, lambda held: [join(pair) for pair in zip(held, body(held), strict=True)])
