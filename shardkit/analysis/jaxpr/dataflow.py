"""Which values of a traced program differ between devices, followed from the arguments to the results.

jax's varying types say whether a value may be *used* as varying. They miss the results of a branch that only some
devices take, do not exist where check_vma is off, and type the result of all_gather as varying. Here a value varies
from where a shard_map splits it or a device reads its own index to where a collective makes it equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardkit._jax import compat
from shardkit._jax.interpreter import FactInterpreter, find_called_program, scan_operands, while_operands
from shardkit._jax.jaxprs import kind_of, mesh_axes, source_line, user_line
from shardkit._jax.primitives import ASSUMED, ELEMENTWISE, registered
from shardkit.meshes.layout import all_axes

_NONE: frozenset[Any] = frozenset()


class State(NamedTuple):
    """What is known about a value on the devices of the surrounding shard_maps.

    Attributes:
        varies: axes over which it may differ.
        reduced: axes over which a collective made it equal at some point.
        from_argument: whether it depends on an argument; if not, it is a constant.
        hidden: axes over which it differs although its type says invariant, each with the line of the cause.
        moved: axes over which pieces were exchanged, so that it may be whole and equal again.
        drawn: axes over which it is the same random draw, element by element.
        from_gradient: whether it depends on a gradient.
        by_forward: whether it depends on an argument in another way than by a gradient.
    """

    varies: frozenset[str] = _NONE
    reduced: frozenset[str] = _NONE
    from_argument: bool = False
    hidden: frozenset[tuple[str, str]] = _NONE
    moved: frozenset[str] = _NONE
    drawn: frozenset[str] = _NONE
    from_gradient: bool = False
    by_forward: bool = False


# Primitives that turn random bits into a draw, element by element.
_DRAW_KEEPING = {*ELEMENTWISE, "reshape", "squeeze"}
CONSTANT = State()
ARGUMENT = State(from_argument=True, by_forward=True)


def join(states: Iterable[State]) -> State:
    """The state of what is computed from values in these states: all that holds of any, but it is no draw."""
    joined = CONSTANT
    for state in states:
        joined = State(
            varies=joined.varies | state.varies,
            reduced=joined.reduced | state.reduced,
            from_argument=joined.from_argument or state.from_argument,
            hidden=joined.hidden | state.hidden,
            moved=joined.moved | state.moved,
            from_gradient=joined.from_gradient or state.from_gradient,
            by_forward=joined.by_forward or state.by_forward,
        )
    return joined


class Divergence(NamedTuple):
    """Control flow that devices take differently: the axes, the construct, its line."""

    axes: frozenset[str]
    construct: str
    source: str


class Context(NamedTuple):
    """What surrounds an equation."""

    sizes: Mapping[str, int] = {}  # the axes bound here, with their sizes
    # the branches and loops around it that devices take differently, the innermost last
    divergences: tuple[Divergence, ...] = ()
    backward: bool = False  # whether it is in the backward pass
    scopes: frozenset[str] = frozenset()  # the names of jax.named_scope under which the equations around it were traced
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
        is_literal = hasattr(value, "val")
        if is_literal:
            return CONSTANT
        return self.states[value]

    def is_within(self, equation: Any, scope: str) -> bool:
        """Whether an equation of the block, or one around it, was traced under a `jax.named_scope`."""
        return scope in self.context.scopes or compat.in_scope(equation, scope)


Visit = Callable[[Block], None]


def follow(jaxpr: Any, visit: Visit) -> None:
    """Follows the states through a program and calls `visit` on every jaxpr in it, the inner ones first."""
    _StateReader(Context(), visit).run(jaxpr, [ARGUMENT] * len(jaxpr.invars))


def enter_call(block: Block, equation: Any) -> Block | None:
    """The block of a function that an equation calls, or None where it is no plain call."""
    program = find_called_program(equation)
    if program is None:
        return None
    blocks: list[Block] = []
    operands = [block.state(operand) for operand in equation.invars]
    _StateReader(block.context, blocks.append).call(equation, program, operands)
    return blocks[-1]  # inner ones come first


def find_split_axes(equation: Any, context: Context) -> tuple[str, ...]:
    """The axes of a collective that have more than one device."""
    axes = []
    for axis in mesh_axes(equation):
        if context.sizes.get(axis, 1) > 1:
            axes.append(axis)
    return tuple(axes)


def format_type(variable: Any) -> str:
    """The type of a value as a user writes it: float32[4,8]."""
    aval = variable.aval
    if not hasattr(aval, "shape"):
        return str(aval)
    shape = ",".join(str(size) for size in aval.shape)
    return f"{aval.dtype}[{shape}]"


def find_line(equation: Any, context: Context) -> str:
    """The user's line of an equation; where jax lost it, as in a loop body, that of the surrounding equation."""
    return user_line(equation) or context.source or source_line(equation)


# Worked example: shard_map over data=2, in which x is split over "data" and w is whole.
#
#     x                        varies={"data"}, from an argument
#     w                        varies={}, from an argument
#     y = x @ w                varies={"data"}
#     s = psum(y, "data")      varies={}, reduced={"data"}: summing it again would be a mistake
#     i = axis_index("data")   varies={"data"}, from no argument
#     cond(i == 0, ...)        its branches have a divergence over "data"; its results vary over "data", hidden where
#                              their type says that they are invariant
@dataclass(frozen=True)
class _StateReader(FactInterpreter[State]):
    """Follows the states of values through jaxprs; `visit` is called on each when its equations have been read."""

    context: Context
    visit: Visit | None  # None while a loop is read only to find the states of its carry
    owner: Any = None  # the shard_map equation whose jaxpr is read next

    def constant(self, x: Any) -> State:
        return CONSTANT

    def literal(self, atom: Any) -> State:
        return CONSTANT

    def join(self, facts: Sequence[State], variable: Any) -> State:
        return join(facts)

    def finish(self, jaxpr: Any, values: Mapping[Any, State]) -> None:
        if self.visit is not None:
            self.visit(Block(jaxpr, values, self.context, self.owner))

    def step(self, equation: Any, operands: list[State]) -> Sequence[State]:
        results = super().step(equation, operands)
        if self.context.backward or compat.in_backward(equation):
            return [state._replace(from_gradient=True, by_forward=False) for state in results]
        return results

    def equation(self, equation: Any, operands: list[State]) -> Sequence[State]:
        name = equation.primitive.name
        sizes = self.context.sizes
        count = len(equation.outvars)
        everywhere = _find_split(sizes, sizes)
        if kind_of(equation) is not None:
            if len(operands) > count:  # ragged_all_to_all takes offsets and sizes too
                operands = [join(operands)]
            return [_send(equation, state, sizes) for state in operands]
        if name == ASSUMED:
            [state] = operands
            return [_make_equal(state, _find_split(mesh_axes(equation), sizes))]
        if name == "axis_index":
            return [State(_find_split(mesh_axes(equation), sizes))]
        if name == "random_bits":
            [key] = operands
            return [key._replace(drawn=everywhere - key.varies)]
        if registered(name).same:
            return operands
        if name == "io_callback":  # the host may answer each device differently
            return [ARGUMENT._replace(varies=everywhere)] * count
        state = join(operands)
        # A mask of random bits is a draw too, along the axes over which nothing else in it varies.
        drawn = [operand.drawn for operand in operands if operand.drawn]
        if drawn and name in _DRAW_KEEPING:
            state = state._replace(drawn=frozenset.intersection(*drawn) - state.varies)
        # A primitive that holds programs and is none of those below: they are applied to its operands.
        for program in compat.inner_programs(equation):
            jaxpr = getattr(program, "jaxpr", program)
            results = self._enter(equation).run(program, [state] * len(jaxpr.invars))
            state = join([state, *results])
        return [state] * count

    def call(self, equation: Any, body: Any, operands: list[State]) -> Sequence[State]:
        return self._enter(equation).run(body, operands)

    def shard_map(self, equation: Any, body: Any, operands: list[State]) -> Sequence[State]:
        manual = frozenset(compat.manual_axes(equation))
        mesh_shape = equation.params["mesh"].shape
        sizes = dict(self.context.sizes)
        for axis in manual:
            sizes[axis] = mesh_shape[axis]
        inner = self._enter(equation)
        inner = replace(inner, context=inner.context._replace(sizes=sizes), owner=equation)
        shards = []
        for state, spec in zip(operands, equation.params["in_specs"], strict=True):
            split_axes = _find_split(all_axes(spec), sizes) & manual
            shards.append(state._replace(varies=state.varies | split_axes))
        # Outside there are no devices: a result is one array again.
        arrays = []
        for state in inner.run(body, shards):
            state = _make_equal(state, manual)
            arrays.append(state._replace(reduced=state.reduced - manual, moved=_NONE, drawn=_NONE))
        return arrays

    def scan(self, equation: Any, body: Any, operands: list[State]) -> Sequence[State]:
        consts, carry, rows = scan_operands(equation, operands)
        inner = self._enter(equation)
        # The rules see a body once, with the states that hold in every iteration.
        silent = replace(inner, visit=None)

        def run_silently(carry: list[State]) -> list[State]:
            return silent.run(body, [*consts, *carry, *rows])

        carry = self.find_carry(equation, carry, run_silently)
        return inner.run(body, [*consts, *carry, *rows])

    def while_loop(self, equation: Any, test: Any, body: Any, operands: list[State]) -> Sequence[State]:
        consts_of_test, consts_of_body, carry = while_operands(equation, operands)
        inner = self._enter(equation)
        silent = replace(inner, visit=None)

        def run_silently(carry: list[State]) -> list[State]:
            return silent.run(body, [*consts_of_body, *carry])

        carry = self.find_carry(equation, carry, run_silently)
        [goes_on] = silent.run(test, [*consts_of_test, *carry])
        inner = inner._diverge(equation, goes_on, "while loop whose condition")
        inner.run(test, [*consts_of_test, *carry])
        inner.run(body, [*consts_of_body, *carry])
        arguments = body.jaxpr.invars[len(consts_of_body) :]
        results = []
        for state, out, argument, variable in zip(carry, body.jaxpr.outvars, arguments, equation.outvars, strict=True):
            # A value that the body returns unchanged is the same after any number of iterations.
            if out is not argument:
                state = inner._choose(state, goes_on, variable, equation)
            results.append(state)
        return results

    def cond(self, equation: Any, branches: list[Any], operands: list[State]) -> Sequence[State]:
        index, *arguments = operands
        inner = self._enter(equation)
        in_branches = inner._diverge(equation, index, "cond whose predicate")
        states = in_branches.join_branches(equation, branches, arguments)
        results = []
        for state, variable in zip(states, equation.outvars, strict=True):
            results.append(inner._choose(state, index, variable, equation))
        return results

    def _enter(self, equation: Any) -> _StateReader:
        """What reads the programs that an equation holds."""
        context = self.context._replace(
            backward=self.context.backward or compat.in_backward(equation),
            scopes=self.context.scopes | compat.scopes(equation),
            source=user_line(equation) or self.context.source,
            mapped=self.context.mapped or compat.is_made_by_pmap(equation),
        )
        return replace(self, context=context, owner=None)

    def _diverge(self, equation: Any, by: State, construct: str) -> _StateReader:
        """What reads a branch or a loop that devices take differently where `by`, which decides it, varies."""
        if not by.varies:
            return self
        divergence = Divergence(by.varies, construct, find_line(equation, self.context))
        context = self.context._replace(divergences=(*self.context.divergences, divergence))
        return replace(self, context=context)

    def _choose(self, state: State, by: State, variable: Any, equation: Any) -> State:
        """A result that depends on the branch taken: it varies as the predicate does, whatever its type says."""
        untyped_axes = by.varies - compat.varying_axes(variable.aval)
        line = find_line(equation, self.context)
        choice = State(
            varies=by.varies,
            reduced=by.reduced,
            from_argument=by.from_argument,
            hidden=frozenset((axis, line) for axis in untyped_axes),
            by_forward=by.by_forward,
        )
        return join([state, choice])


def _find_split(axes: Iterable[str], sizes: Mapping[str, int]) -> frozenset[str]:
    """The axes that have several devices here."""
    return frozenset(axis for axis in axes if sizes.get(axis, 1) > 1)


def _send(equation: Any, state: State, sizes: Mapping[str, int]) -> State:
    """The result of a collective."""
    axes = _find_split(mesh_axes(equation), sizes)
    if equation.params.get("axis_index_groups") is not None:
        return _exchange(state, axes)
    if kind_of(equation) == "ppermute":
        devices = math.prod(sizes[axis] for axis in axes)
        targets = {target for _, target in equation.params["perm"]}
        all_receive = len(targets) == devices  # a device that receives nothing gets zeros
        if all_receive and not axes & state.varies:
            return state
    if registered(equation.primitive.name).differs:
        return _exchange(state, axes)
    return _make_equal(state._replace(drawn=_NONE), axes)


def _exchange(state: State, axes: frozenset[str]) -> State:
    """Pieces of a value from other devices along `axes`."""
    return state._replace(varies=state.varies | axes, moved=state.moved | axes, drawn=_NONE)


def _make_equal(state: State, axes: frozenset[str]) -> State:
    """A value that is the same on all devices of `axes`."""
    hidden = set()
    for axis, line in state.hidden:
        if axis not in axes:
            hidden.add((axis, line))
    reduced = state.reduced
    if state.from_argument:  # not of a constant: psum(1) is a count
        reduced |= axes
    return state._replace(varies=state.varies - axes, reduced=reduced, hidden=frozenset(hidden))
