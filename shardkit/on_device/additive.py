"""Does a loss add over its examples? Read from its trace: where do values of different examples meet?

A step sums the totals and weights of all devices. That is the loss of the whole batch only if the total of some
examples is the sum of the totals of any parts of them. A loss that compares its examples with each other (negatives
within a batch, batch statistics, the root of a mean) is another number on each mesh.

The loss is traced twice, for n examples and for 2n. Both programs are followed together, equation by equation, and of
each value it is known what it is:

- `Whole`: the same whatever the examples are, as a parameter;
- `Rows`: one row (or several) for each example, along one dim, computed from that example alone;
- `Total`: a sum over the examples of what is computed from each alone;
- `Met`: anything else, with the line where it began.

For example, `jnp.mean((x @ w - y) ** 2)` of `x[n, D]` and `w[D]`: `x` is Rows along dim 0 and `w` Whole, so `x @ w` is
Rows along dim 0; so are its difference from `y` and the square; their sum is a Total, and so is its quotient by n. The
second trace divides by 2n where the first divides by n: that `scale` tells a mean from a sum. The square root of that
mean would be Met.

What is not understood is Met. So a loss without Met adds over its examples, and one with Met may or may not. Gradients
that a `custom_vjp` computes in a way of its own, as one that clips cotangents by the batch, are not looked at.

The states are in `example_states.py`, the rule of each primitive in `example_rules.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardkit._jax import compat
from shardkit._jax.jaxprs import (
    PLAN,
    find_called_jaxpr,
    find_fixed_point,
    kind_of,
    mesh_axes,
    scan_operands,
    source_line,
)
from shardkit._jax.primitives import registered
from shardkit.on_device.example_rules import RULES, gather, of_one_example, sent_along, whole_results
from shardkit.on_device.example_states import (
    EACH_TURN,
    UNKNOWN,
    Met,
    Pair,
    Rows,
    State,
    Total,
    Whole,
    any_whole,
    is_turn,
    join,
)


class Loss(NamedTuple):
    """What is known of a loss: where examples meet, None if they do not; and the axes over which it sends."""

    met: Met | None
    sends: frozenset[str]
    acts: bool = False  # whether it calls back into Python, as one that prints does


def read_loss(few: Any, many: Any, states: Sequence[State], examples: int, batch_axes: Sequence[str]) -> Loss:
    """Whether a loss adds over its examples.

    Args:
        few: the jaxpr of the loss of n examples, which returns total, weight, total, weight, ... of its means.
        many: the same of 2n examples.
        states: what the arguments of the jaxprs are.
        examples: 2n.
        batch_axes: the mesh axes whose devices have different examples.
    """
    reader = _Reader(examples, frozenset(batch_axes))
    constants = [_constant(a, b) for a, b in zip(few.consts, many.consts, strict=False)]
    if len(few.jaxpr.constvars) != len(many.jaxpr.constvars):
        return Loss(Met("another number of constants follows from another number of examples", ""), frozenset())
    outs = reader.run(few.jaxpr, many.jaxpr, [*constants, *states], "")
    for total, weight in zip(outs[::2], outs[1::2], strict=True):
        met = _not_additive(total, weight)
        if met is not None:
            return Loss(met, frozenset(reader.sends))
    return Loss(None, frozenset(reader.sends))


def _not_additive(total: State, weight: State) -> Met | None:
    """How the quotient of a total and a weight is no mean over examples; None if it is one."""
    for state in (total, weight):
        if isinstance(state, Met):
            return state
        if isinstance(state, Rows):  # a scalar has no rows but those of a loop's one example
            return Met("a value of one example is taken for that of all", "")
    if isinstance(total, Whole) and total.zero:
        return None
    if UNKNOWN in (_growth(total), _growth(weight)):
        return Met("the loss depends on the number of examples in another way than as a factor", "")
    if _growth(total) != _growth(weight):
        return Met("the total is a sum over the examples and the weight does not count them", "")
    return None


def _growth(state: Any) -> float:
    """By what factor a total or a weight grows with the number of examples, as 1 of a mean and 2 of a sum."""
    return 2 * state.scale if isinstance(state, Total) else state.scale


def _constant(few: Any, many: Any) -> Whole:
    shape = np.shape(many)
    differs = frozenset(dim for dim, size in enumerate(shape) if size > 1)
    same = few is many or (np.shape(few) == shape and not differs and bool(np.all(few == many)))
    return Whole(differs, scale=1.0 if same or differs else UNKNOWN)


def _literal(few: Any, many: Any) -> Whole:
    if np.shape(many):
        return _constant(few, many)
    if not np.issubdtype(np.result_type(many), np.number):
        return Whole(scale=1.0 if few == many else UNKNOWN, zero=not many)
    if few == many or (few != few and many != many):
        return Whole(zero=bool(many == 0))
    return Whole(scale=float(many) / float(few) if few else UNKNOWN)


class _Reader:
    """Follows both programs; `sends` collects the batch axes over which the loss itself communicates."""

    def __init__(self, examples: int, batch_axes: frozenset[str]):
        self.examples, self.batch_axes = examples, batch_axes
        self.sends: set[str] = set()

    def run(self, few: Any, many: Any, states: Sequence[State], around: str) -> list[State]:
        """What the results of a jaxpr are, of what its constants and arguments are."""
        known: dict[Any, State] = dict(zip((*many.constvars, *many.invars), states, strict=True))
        alike = len(few.eqns) == len(many.eqns)
        for number, equation in enumerate(many.eqns):
            other = few.eqns[number] if alike else equation
            pair = Pair(other, equation, self.examples, source_line(equation, around))
            operands = [self._operand(a, b, known) for a, b in zip(other.invars, equation.invars, strict=False)]
            if not alike or not _same_program(other, equation):
                results: Sequence[State] = [pair.met("another program runs for another number of examples")] * len(
                    equation.outvars
                )
                if not alike and all(isinstance(each, Whole) for each in operands):
                    results = [any_whole(v, UNKNOWN) for v in equation.outvars]
            else:
                results = self.step(pair, operands)
            known.update(zip(equation.outvars, results, strict=True))
        return [self._operand(a, b, known) for a, b in zip(few.outvars, many.outvars, strict=True)]

    def _operand(self, few: Any, many: Any, known: dict[Any, State]) -> State:
        if hasattr(many, "val"):
            return _literal(few.val, many.val) if hasattr(few, "val") else Whole(scale=UNKNOWN)
        return known[many]

    def step(self, pair: Pair, operands: list[State]) -> Sequence[State]:
        """What the results of an equation are."""
        equation, name = pair.many, pair.name
        if find_called_jaxpr(equation) is not None or name == "shard_map":
            return self._call(pair, operands)
        if name == "scan":
            return self._scan(pair, operands)
        if name == "while":
            return self._while(pair, operands)
        if name == "cond":
            return self._cond(pair, operands)
        if registered(name).same and len(operands) == len(equation.outvars):
            return operands
        over = self.batch_axes & frozenset(mesh_axes(equation))
        sent = kind_of(equation) is not None and not compat.in_scope(equation, PLAN)
        if over and (sent or name == "axis_index"):
            # What a loss sends over the batch is its own affair: devices share it, and it is taken for whole.
            self.sends.update(over)
            return [any_whole(v) for v in equation.outvars]
        met = next((state for state in operands if isinstance(state, Met)), None)
        if kind_of(equation) is not None and met is None:
            return [sent_along(pair, state, v) for state, v in zip(operands, equation.outvars, strict=False)]
        if name == "gather":
            return [gather(pair, operands)]
        if met is not None:
            return [met] * len(equation.outvars)
        if all(isinstance(state, Whole) for state in operands):
            return whole_results(pair, operands)
        if any(is_turn(state) for state in operands):
            return [of_one_example(pair, operands)] * len(equation.outvars)
        rule = RULES.get(name)
        if rule is None:
            return [pair.met(f"{name} is applied to several examples at once")] * len(equation.outvars)
        result = rule(pair, operands)
        return result if isinstance(result, list) else [result] * len(equation.outvars)

    def _inner(self, pair: Pair, number: int = 0) -> tuple[Any, Any, list[State]]:
        """An inner jaxpr in both programs, and what its constants are."""
        few = [sub for _, sub in compat.inner_jaxprs(pair.few)][number]
        many = [sub for _, sub in compat.inner_jaxprs(pair.many)][number]
        constants = zip(
            compat.inner_constants(pair.few)[number], compat.inner_constants(pair.many)[number], strict=False
        )
        return few, many, [_constant(a, b) for a, b in constants]

    def _call(self, pair: Pair, operands: list[State]) -> Sequence[State]:
        few, many, constants = self._inner(pair)
        return self.run(few, many, [*constants, *operands], pair.line)

    def _cond(self, pair: Pair, operands: list[State]) -> Sequence[State]:
        chosen = operands[0]
        if is_turn(chosen):
            return [of_one_example(pair, operands)] * len(pair.many.outvars)
        if not isinstance(chosen, Whole):
            met = chosen if isinstance(chosen, Met) else pair.met("a branch is chosen by the examples")
            return [met] * len(pair.many.outvars)
        branches = []
        for number in range(len(compat.inner_jaxprs(pair.many))):
            few, many, constants = self._inner(pair, number)
            branches.append(self.run(few, many, [*constants, *operands[1:]], pair.line))
        results = branches[0]
        for branch in branches[1:]:
            results = [join(pair, a, b) for a, b in zip(results, branch, strict=True)]
        return results

    def _while(self, pair: Pair, operands: list[State]) -> Sequence[State]:
        if any(is_turn(state) for state in operands):
            return [of_one_example(pair, operands)] * len(pair.many.outvars)
        if not all(isinstance(state, Whole) for state in operands):
            met = next((s for s in operands if isinstance(s, Met)), None)
            return [met or pair.met("the examples decide when a loop ends")] * len(pair.many.outvars)
        plain = all(state.scale == 1 for state in operands if isinstance(state, Whole))
        same = str(pair.few.params) == str(pair.many.params)  # as the bounds of the loop, which may be numbers in it
        return [any_whole(v, 1.0 if plain and same else UNKNOWN) for v in pair.many.outvars]

    def _scan(self, pair: Pair, operands: list[State]) -> Sequence[State]:
        few, many, constants = self._inner(pair)
        fixed, carry, stacked = scan_operands(pair.many, operands)
        rows = [_row_of(state) for state in stacked]
        over_examples = any(isinstance(state, Rows) and state.dim == 0 for state in stacked)
        if over_examples and any(is_turn(state) for state in operands):
            return [pair.met("a loop over the examples runs for every example")] * len(pair.many.outvars)

        def turn(carry: list[State]) -> list[State]:
            after = self.run(few, many, [*constants, *fixed, *carry, *rows], pair.line)[: len(carry)]
            return [join(pair, a, b) for a, b in zip(carry, after, strict=True)]

        settled_carry = find_fixed_point(carry, turn)
        if over_examples:  # a loop over the examples: what it carries from one to the next must not depend on them
            for position, state in enumerate(settled_carry):
                if not isinstance(state, Whole):
                    settled_carry[position] = pair.met("a loop over the examples carries one to the next")
        outs = self.run(few, many, [*constants, *fixed, *settled_carry, *rows], pair.line)
        if pair.few.params["length"] != pair.many.params["length"]:  # its turns are counted by what it carries
            settled_carry = [replace(s, scale=UNKNOWN) if isinstance(s, Whole) else s for s in settled_carry]
        stacked_outs = [_stacked(state, over_examples) for state in outs[len(carry) :]]
        return [*settled_carry, *stacked_outs]


def _same_program(few: Any, many: Any) -> bool:
    return few.primitive is many.primitive and len(few.invars) == len(many.invars)


def _row_of(state: State) -> State:
    """What one iteration of a scan gets of an array over whose dim 0 it goes."""
    if isinstance(state, Rows):
        if state.dim > 0:
            return replace(state, dim=state.dim - 1)
        if state.dim == EACH_TURN:
            return state
        return Rows(EACH_TURN, scale=state.scale)
    if isinstance(state, Whole):
        index = state.index - 1 if state.index else None
        return replace(state, differs=frozenset(dim - 1 for dim in state.differs if dim), index=index)
    return state


def _stacked(state: State, over_examples: bool) -> State:
    """What the results of all iterations of a scan are, stacked along dim 0."""
    if isinstance(state, Rows) and state.dim == EACH_TURN:
        return Rows(0, scale=state.scale) if over_examples else state
    if isinstance(state, Rows):
        return Rows(state.dim + 1, state.copies, state.scale)
    if isinstance(state, Whole):
        return Whole(frozenset([0, *(dim + 1 for dim in state.differs)]), state.scale)
    return state
