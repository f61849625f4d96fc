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

The states are in `example_states.py`; `example_rules.py` has the rule of each primitive, and `whole_rules.py` those of
values that do not depend on the examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from shardkit._jax import compat
from shardkit._jax.interpreter import find_called_program, find_fixed_point, scan_operands
from shardkit._jax.jaxprs import PLAN, kind_of, mesh_axes, source_line, user_line
from shardkit._jax.primitives import registered
from shardkit.on_device.elementwise_rules import combine_one_example
from shardkit.on_device.example_rules import RULES, send_along
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
    are_all,
    find_long_dims,
    is_turn,
    join,
    select,
    shift_dims,
)
from shardkit.on_device.indexing_rules import gather
from shardkit.on_device.whole_rules import whole_results

_ANOTHER_PROGRAM = "another program runs for another number of examples"


class Loss(NamedTuple):
    """What is known of a loss.

    Attributes:
        met: where examples meet; None if they do not.
        sends: the axes of the batch over which it sends, or along which it asks for the index of the device.
        lines: where it sends, in order.
        index_lines: where it asks for the index of the device, in order.
    """

    met: Met | None
    sends: frozenset[str]
    lines: tuple[str, ...] = ()
    index_lines: tuple[str, ...] = ()


def read_loss(few: Any, many: Any, states: Sequence[State], examples: int, batch_axes: Sequence[str]) -> Loss:
    """Whether a loss adds over its examples.

    Args:
        few: the jaxpr of the loss of n examples, which returns total, weight, total, weight, ... of its means.
        many: the same of 2n examples.
        states: what the arguments of the jaxprs are.
        examples: 2n.
        batch_axes: the mesh axes whose devices have different examples.
    """
    reader = _LossReader(examples, frozenset(batch_axes))
    constants = _read_constants(few.consts, many.consts)
    if len(few.jaxpr.constvars) != len(many.jaxpr.constvars):
        return Loss(Met("another number of constants follows from another number of examples", ""), frozenset())
    outs = reader.run(few.jaxpr, many.jaxpr, [*constants, *states], "", of_plan=False)
    loss = Loss(None, frozenset(reader.sends), tuple(reader.lines), tuple(reader.index_lines))
    totals = outs[::2]
    weights = outs[1::2]
    for total, weight in zip(totals, weights, strict=True):
        met = _find_how_examples_meet(total, weight)
        if met is not None:
            return loss._replace(met=met)
    return loss


def _find_how_examples_meet(total: State, weight: State) -> Met | None:
    """How the quotient of a total and a weight is no mean over examples; None if it is one."""
    for state in (total, weight):
        if isinstance(state, Met):
            return state
        if isinstance(state, Rows):  # a scalar has no rows but those of a loop's one example
            return Met("a value of one example is used for all examples", "")
    # A loss of zero is zero on every mesh, whatever its weight.
    if isinstance(total, Whole) and total.zero:
        return None
    total_growth = _find_growth(total)
    weight_growth = _find_growth(weight)
    if UNKNOWN in (total_growth, weight_growth):
        return Met("the loss depends on the number of examples in another way than as a factor", "")
    if total_growth != weight_growth:
        return Met("the total is a sum over the examples and the weight does not count them", "")
    return None


def _find_growth(state: Any) -> float:
    """By what factor a total or a weight grows with the number of examples, as 1 of a mean and 2 of a sum."""
    # For 2n examples a Total is `scale` times the sum of two halves, each about as large as the total of n.
    if isinstance(state, Total):
        return 2 * state.scale
    return state.scale


def _read_constant(few: Any, many: Any) -> Whole:
    """What a constant of both programs is."""
    shape = np.shape(many)
    differs = find_long_dims(shape)
    if differs or few is many:
        return Whole(differs)
    if np.shape(few) == shape and np.all(few == many):
        return Whole()
    return Whole(scale=UNKNOWN)


def _read_literal(few: Any, many: Any) -> Whole:
    """What a literal of both programs is: n in the one and 2n in the other has scale 2."""
    if np.shape(many):
        return _read_constant(few, many)
    if not np.issubdtype(np.result_type(many), np.number):
        scale = 1.0 if few == many else UNKNOWN
        return Whole(scale=scale, zero=not many)
    both_nan = np.isnan(few) and np.isnan(many)
    if few == many or both_nan:
        return Whole(zero=bool(many == 0))
    if not few:
        return Whole(scale=UNKNOWN)
    return Whole(scale=float(many) / float(few))


class _LossReader:
    """Follows both programs; `sends` collects the batch axes over which the loss itself communicates.

    `lines` collects where it does, `index_lines` where it asks for the index of the device.

    It is no `JaxprInterpreter`: the operands, loops and branches of two programs are read together.
    """

    def __init__(self, examples: int, batch_axes: frozenset[str]):
        self.examples = examples
        self.batch_axes = batch_axes
        self.sends: set[str] = set()
        self.lines: list[str] = []
        self.index_lines: list[str] = []

    def run(self, few: Any, many: Any, states: Sequence[State], line: str, *, of_plan: bool) -> list[State]:
        """What the results of a jaxpr are, of what its constants and arguments are.

        `line` is that of the call, and `of_plan` says whether a plan traced the call: the names of scopes in an inner
        program begin anew, as in the quantization of a compressed gather.
        """
        variables = (*many.constvars, *many.invars)
        states_by_variable: dict[Any, State] = dict(zip(variables, states, strict=True))
        # With another number of equations nothing says which of them belong together: each is then read alone.
        paired = len(few.eqns) == len(many.eqns)
        twins = few.eqns if paired else many.eqns
        for twin, equation in zip(twins, many.eqns, strict=True):
            in_plan = of_plan or compat.in_scope(equation, PLAN)
            pair = Pair(twin, equation, self.examples, _find_line(equation, line), in_plan)
            operands = _read_all(twin.invars, equation.invars, states_by_variable)
            results: Sequence[State]
            if not paired:
                results = self._step_alone(pair, operands)
            elif _is_same_operation(twin, equation):
                results = self.step(pair, operands)
            else:
                self._note_sends(equation, pair.line, pair.of_plan)
                results = [pair.met(_ANOTHER_PROGRAM)] * len(equation.outvars)
            states_by_variable.update(zip(equation.outvars, results, strict=True))
        return _read_all(few.outvars, many.outvars, states_by_variable)

    def _step_alone(self, pair: Pair, operands: list[State]) -> Sequence[State]:
        """The states of the results of an equation to which none of the program for n examples belongs."""
        self._note_sends(pair.many, pair.line, pair.of_plan)
        if are_all(operands, Whole):
            return [any_whole(variable, UNKNOWN) for variable in pair.many.outvars]
        return [pair.met(_ANOTHER_PROGRAM)] * len(pair.many.outvars)

    def _note_send(self, equation: Any, line: str, of_plan: bool) -> bool:
        """Notes an equation by which the loss sends over the batch axes, or asks for the index; whether it is one."""
        axes = self.batch_axes & frozenset(mesh_axes(equation))
        if not axes:
            return False
        if equation.primitive.name == "axis_index":
            lines = self.index_lines
        elif kind_of(equation) is not None and not of_plan:
            # What a plan sends of its own leaves, as a gather of a layer's weights, is right whatever the loss is.
            lines = self.lines
        else:
            return False
        self.sends.update(axes)
        lines.append(line)
        return True

    def _note_sends(self, equation: Any, line: str, of_plan: bool) -> None:
        """Notes where an equation, or a program that it calls, sends over the batch axes, or asks for the index."""
        self._note_send(equation, line, of_plan)
        for _, body in compat.inner_jaxprs(equation):
            for inner in body.eqns:
                in_plan = of_plan or compat.in_scope(inner, PLAN)
                self._note_sends(inner, _find_line(inner, line), in_plan)

    def step(self, pair: Pair, operands: list[State]) -> Sequence[State]:
        """The states of the results of an equation.

        The order is: inner programs, the collectives that the loss sends over the batch, results that depend on
        examples that met already, then the rule of the primitive.
        """
        equation = pair.many
        name = pair.name
        if find_called_program(equation) is not None or name == "shard_map":
            return self._run_inner(pair, operands)
        if name == "scan":
            return self._scan(pair, operands)
        if name == "while":
            return self._while(pair, operands)
        if name == "cond":
            return self._cond(pair, operands)
        if registered(name).same and len(operands) == len(equation.outvars):
            return operands
        if self._note_send(equation, pair.line, pair.of_plan):
            # The result is taken for Whole, also where devices differ, as after a ppermute: whether the loss is right
            # to send it is not decided here. Such a loss is compared with one device (steps/whole_batch.py).
            return [any_whole(variable) for variable in equation.outvars]
        met = _find_first_met(operands)
        if kind_of(equation) is not None and met is None:
            results = []
            for state, variable in zip(operands, equation.outvars, strict=False):
                results.append(send_along(pair, state, variable))
            return results
        if name == "gather":
            return [gather(pair, operands)]
        if met is not None:
            return [met] * len(equation.outvars)
        return _apply_rule(pair, operands)

    def _run_inner(self, pair: Pair, operands: Sequence[State], number: int = 0) -> list[State]:
        """What the results of an inner jaxpr are, such as the branch of this number."""
        _, few = compat.inner_jaxprs(pair.few)[number]
        _, many = compat.inner_jaxprs(pair.many)[number]
        constants_few = compat.inner_constants(pair.few)[number]
        constants_many = compat.inner_constants(pair.many)[number]
        constants = _read_constants(constants_few, constants_many)
        return self.run(few, many, [*constants, *operands], pair.line, of_plan=pair.of_plan)

    def _cond(self, pair: Pair, operands: list[State]) -> Sequence[State]:
        predicate, *arguments = operands
        count = len(pair.many.outvars)
        if not isinstance(predicate, Whole):
            self._note_sends(pair.many, pair.line, pair.of_plan)  # its branches are not read
            if is_turn(predicate):
                return [combine_one_example(pair, operands)] * count
            if isinstance(predicate, Met):
                return [predicate] * count
            return [pair.met("a branch is chosen by the examples")] * count
        results = self._run_inner(pair, arguments)
        for number in range(1, len(compat.inner_jaxprs(pair.many))):
            branch = self._run_inner(pair, arguments, number)
            results = _join_all(pair, results, branch)
        return results

    def _while(self, pair: Pair, operands: list[State]) -> Sequence[State]:
        outs = pair.many.outvars
        self._note_sends(pair.many, pair.line, pair.of_plan)  # its body is not read
        if any(map(is_turn, operands)):
            return [combine_one_example(pair, operands)] * len(outs)
        if not are_all(operands, Whole):
            met = _find_first_met(operands) or pair.met("the examples decide when a loop ends")
            return [met] * len(outs)
        same_operands = all(state.scale == 1 for state in select(operands, Whole))
        same_loop = str(pair.few.params) == str(pair.many.params)  # its bounds may be numbers in it
        scale = 1.0 if same_operands and same_loop else UNKNOWN
        return [any_whole(variable, scale) for variable in outs]

    def _scan(self, pair: Pair, operands: list[State]) -> Sequence[State]:
        constants, carry, stacks = scan_operands(pair.many, operands)
        slices = [_take_turn(state) for state in stacks]
        over_examples = any(state.dim == 0 for state in select(stacks, Rows))
        if over_examples and any(map(is_turn, operands)):
            return [pair.met("a loop over the examples runs for every example")] * len(pair.many.outvars)

        def run_turn(carry: list[State]) -> list[State]:
            results = self._run_inner(pair, [*constants, *carry, *slices])
            next_carry = results[: len(carry)]  # the results after the carry are stacked
            return _join_all(pair, carry, next_carry)

        # One turn may change what a carry is: zeros, to which each turn adds a row of examples, are whole before and a
        # sum after.
        settled_carry = find_fixed_point(carry, run_turn)
        if over_examples:  # what a loop over the examples carries from one to the next must not depend on them
            for number, state in enumerate(settled_carry):
                if not isinstance(state, Whole):
                    settled_carry[number] = pair.met("a loop over the examples carries one to the next")
        results = self._run_inner(pair, [*constants, *settled_carry, *slices])
        if pair.few.params["length"] != pair.many.params["length"]:  # its turns are counted by what it carries
            for number, state in enumerate(settled_carry):
                if isinstance(state, Whole):
                    settled_carry[number] = replace(state, scale=UNKNOWN)
        stacks_after = [_stack_turns(state, over_examples) for state in results[len(carry) :]]
        return [*settled_carry, *stacks_after]


def _find_line(equation: Any, around: str) -> str:
    """The user's line; within a function of shardkit with a derivative of its own that of its call, `around`."""
    return user_line(equation) or around or source_line(equation)


def _read_constants(constants_few: Sequence[Any], constants_many: Sequence[Any]) -> list[State]:
    """The states of the constants of two programs, as far as both have them."""
    states: list[State] = []
    for few, many in zip(constants_few, constants_many, strict=False):
        states.append(_read_constant(few, many))
    return states


def _read_all(atoms_few: Sequence[Any], atoms_many: Sequence[Any], states_by_variable: dict[Any, State]) -> list[State]:
    """What the operands of an equation are, or the results of a program: variables and literals."""
    states = []
    for few, many in zip(atoms_few, atoms_many, strict=False):
        if not hasattr(many, "val"):
            states.append(states_by_variable[many])
        elif hasattr(few, "val"):
            states.append(_read_literal(few.val, many.val))
        else:
            states.append(Whole(scale=UNKNOWN))
    return states


def _join_all(pair: Pair, states: Sequence[State], branch_states: Sequence[State]) -> list[State]:
    """What each value is if it may be either: of two branches, or of a loop before and after an iteration."""
    joined = []
    for state, branch_state in zip(states, branch_states, strict=True):
        joined.append(join(pair, state, branch_state))
    return joined


def _find_first_met(operands: Sequence[State]) -> Met | None:
    for state in operands:
        if isinstance(state, Met):
            return state
    return None


def _is_same_operation(few: Any, many: Any) -> bool:
    return few.primitive is many.primitive and len(few.invars) == len(many.invars)


def _apply_rule(pair: Pair, operands: list[State]) -> Sequence[State]:
    """What the results of a plain primitive are."""
    count = len(pair.many.outvars)
    if are_all(operands, Whole):
        return whole_results(pair, operands)
    if any(map(is_turn, operands)):
        return [combine_one_example(pair, operands)] * count
    rule = RULES.get(pair.name)
    if rule is None:
        return [pair.met(f"{pair.name} is applied to several examples at once")] * count
    result = rule(pair, operands)
    if isinstance(result, list):
        return result
    return [result] * count


def _take_turn(state: State) -> State:
    """What one iteration of a scan gets of an array over whose dim 0 it goes."""
    if isinstance(state, Rows):
        if state.dim > 0:
            return replace(state, dim=state.dim - 1)
        if state.dim == EACH_TURN:
            return state
        # The scan goes along the examples: in each turn it has one of them.
        return Rows(EACH_TURN, scale=state.scale)
    if isinstance(state, Whole):
        index = state.index - 1 if state.index else None
        return replace(state, differs=shift_dims(state.differs, (0,)), index=index)
    return state


def _stack_turns(state: State, over_examples: bool) -> State:
    """What the results of all iterations of a scan are, stacked along dim 0."""
    if isinstance(state, Rows):
        if state.dim != EACH_TURN:
            return replace(state, dim=state.dim + 1)
        if over_examples:
            return Rows(0, scale=state.scale)
        return state
    if isinstance(state, Whole):
        moved_dims = frozenset(dim + 1 for dim in state.differs)
        return Whole(moved_dims | {0}, state.scale)
    return state
