"""The law that a training step is one device's for all parameters, batches and weights.

Both sides start from the same unknowns: parameters and the floats of batches. On the mesh they go through the programs
that a row of `prove` really runs, traced: `init`, then `step` as often as the law compares, then the parameters without
their padding. On one device they go through a plain loop of gradient and optimizer. For two steps:

    mesh    params -> init -> state -> step(batch 0) -> step(batch 1) -> params without padding
    alone   params -> loss, gradient, update(batch 0) -> loss, gradient, update(batch 1)

Compared are both losses, all metrics of both steps, and what the second step leaves: parameters and carried state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from shardkit._arguments.checks import quoted
from shardkit._jax.dependence import without_unused
from shardkit._jax.jaxprs import walk
from shardkit.meshes.layout import path_name
from shardkit.meshes.rng import example_keys, step_key
from shardkit.plans.axis_types import auto_mesh
from shardkit.plans.storage import unpadded
from shardkit.steps.init import Init
from shardkit.steps.optimizer import wrap_optimizer
from shardkit.steps.step import Step
from shardkit.testing._compare import UnequalError
from shardkit.testing.exact.coverage import ALONE, Coverage
from shardkit.testing.exact.draws import STEP, equal
from shardkit.testing.exact.equality import check_floats, make_input
from shardkit.testing.exact.interpreter import Interpreter, Seen
from shardkit.testing.exact.numbers.field import ROUNDING, Field
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.program_pair import UnprovableError
from shardkit.testing.exact.rules.known import to_known
from shardkit.testing.exact.rules.operands import Operand, join_operands
from shardkit.testing.exact.rules.primitive_rules import ORDERED
from shardkit.testing.exact.size import check_size
from shardkit.testing.one_device import Reference, Training, make_gradient, make_update
from shardkit.testing.program import Program

_STEPS = 2
_POINTS = 2
_RUNS = 4  # of a step that compares floats, about


def equal_for_all_inputs(program: Program, reference: Reference) -> str | None:
    """Losses, metrics and updated parameters of two steps equal one device's for all parameters and floats of a batch.

    So does carried state, from the one that it begins with. Integers of the batch, as tokens, and keys keep their
    values. There is no tolerance: floats are unknowns in a finite field, as in `assert_equal_for_all_inputs`. Rounding
    is not seen, and a constant that was computed in float32 may stand for what it was computed of. What is neither
    proved nor refuted, has no meaning in a field, or would take more than about a minute, is told in a note.

    Example:
        >>> laws = [sk.testing.laws.equal_for_all_inputs]  # for `prove(..., laws=laws)`
    """
    training = reference.training
    if training is None or not isinstance(program.step, Step):
        return "for all inputs: the step and the reference must be GradFns"
    try:
        _prove(program, training)
    except UnprovableError as error:
        return f"not for all inputs: {error}"
    except RoundsError as error:
        return f"not for all inputs: the step rounds, by {error}"
    return None


class RoundsError(Exception):
    """The program on the mesh rounds where one device's does not."""


def _prove(program: Program, training: Training) -> None:
    """Refuses a program that differs from one device's, or that cannot be proved equal to it."""
    # Two steps, because what the first one does to the optimizer's state shows in the second. With four steps per call
    # it is one call.
    steps_per_call = program.row.steps or 1
    calls = max(1, _STEPS // steps_per_call)
    steps = calls * steps_per_call
    if len(training.batches) < steps:
        calls = len(program.calls)
        steps = len(training.batches)
    check_floats("law", jax.eval_shape(lambda: (training.params, training.batches[0])))
    traced = TracedRow.of(program)
    check_size("law", [traced.program] * calls, _POINTS, _RUNS, longest=60.0)
    outputs = _trace_alone(training, steps).outputs
    _check_carry(training, outputs)
    metrics = outputs.metrics[0]
    missing = metrics.keys() - traced.step.out_info[1].keys()
    if missing:
        raise UnequalError(
            f"the metrics must be those of one device; the mesh returns no {quoted(sorted(missing))}. Return the "
            "same means from the loss and from the reference."
        )
    on_mesh = partial(_run_on_mesh, program, traced, calls, list(metrics))
    alone = partial(_run_alone, training, steps)
    equal("law", "", outputs.list_names(), (on_mesh, alone), _POINTS, STEP)


def _check_carry(training: Training, outputs: _Outputs) -> None:
    """Refuses a `carry=` that compares numbers, of which each branch would need runs of its own."""
    if training.carry is None:
        return
    # Shapes alone: the weight is a scalar, as the loss is.
    metrics = {"loss": outputs.losses[0], "weight": outputs.losses[0], **outputs.metrics[0]}
    traced = jax.make_jaxpr(training.carry)(outputs.carried, metrics, outputs.params)
    if any(site.name in ORDERED for site in walk(traced.jaxpr)):
        raise UnprovableError("carry= compares numbers")


class _Outputs(NamedTuple):
    """What the law compares, in this order; as shapes, or as numbers of a field.

    Attributes:
        losses: of each step.
        metrics: of each step, the auxiliary means by name.
        params: after the last step.
        carried: the carried state after the last step; None if there is none.
    """

    losses: list[Any]
    metrics: list[dict[str, Any]]
    params: Any
    carried: Any

    def list_names(self) -> list[str]:
        """A name of each leaf, for messages."""
        names = [f"loss of step {step}" for step in range(len(self.losses))]
        for step, metrics in enumerate(self.metrics):
            names += [f"metric{path} of step {step}" for path in _list_paths(metrics)]
        names += [f"updated parameter{path}" for path in _list_paths(self.params)]
        names += [f"carried state{path}" for path in _list_paths(self.carried)]
        return names


def _list_paths(tree: Any) -> list[str]:
    """The path of each leaf, after a space; nothing where the tree is one array."""
    paths = []
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        paths.append(f" {path_name(path)}" if path else "")
    return paths


def make_inputs(field: Field, name: str, tree: Any) -> list[Operand]:
    """The leaves of a tree in the field; leaves of the same name and number are the same unknowns on both sides."""
    return [make_input(field, f"{name} {number}", x) for number, x in enumerate(jax.tree.leaves(tree))]


# On one device


class _TracedTraining(NamedTuple):
    """The first steps on one device, as a program of the leaves of parameters and batches.

    Attributes:
        program: a ClosedJaxpr that returns the leaves of `outputs`.
        outputs: their shapes.
    """

    program: Any
    outputs: _Outputs


@lru_cache(maxsize=16)
def _trace_alone(training: Training, steps: int) -> _TracedTraining:
    optimizer = training.optimizer
    loss_and_gradient: Any = training.grad_fn
    compute_gradient = make_gradient(loss_and_gradient)

    def train(params: Any, batches: Any) -> _Outputs:
        opt_state = wrap_optimizer(optimizer).init(params)
        carried = training.init_carried(params)
        losses = []
        metrics_of_steps = []
        for index, batch in enumerate(batches):
            examples = next(np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x))
            keys = example_keys(step_key(training.key, index), examples)
            loss, metrics, grads = compute_gradient(params, batch, keys, **training.carried_arguments(carried))
            params, opt_state = make_update(optimizer)(grads, opt_state, params, loss)
            carried = training.update_carried(carried, loss, metrics, params)
            losses.append(loss)
            metrics.pop("weight")  # by which the loss is divided; one for a shard and microbatch if it is a scalar
            metrics_of_steps.append(metrics)
        return _Outputs(losses, metrics_of_steps, params, carried)

    batches = list(training.batches[:steps])
    closed, outputs = jax.make_jaxpr(train, return_shape=True)(training.params, batches)
    return _TracedTraining(without_unused(closed), outputs)


def _run_alone(training: Training, steps: int, field: Field, seen: Seen | None) -> list[Operand]:
    """The outputs of one device in the field.

    Many rows are compared with the same training, in fields of the same settings. It is run once for all of them, in
    another field of these settings, and what that field has noted is added to this one.
    """
    # A search for a line looks at each value. With the laws of roots a number says of which root of its field it is a
    # multiple, so both sides need the same roots.
    # What constants stand for is no setting either.
    if seen is not None or field.coverage is None or field.laws_of_roots or field.folded:
        return _evaluate_alone(training, steps, field, seen)
    field_and_coverage = (*field.settings, field.coverage.identifies, field.centres)
    results, other = _run_alone_once(training, steps, field_and_coverage)
    field.add_notes(other, [ALONE])
    field.coverage.merge(other.coverage)
    return results


@lru_cache(maxsize=16)
def _run_alone_once(training: Training, steps: int, settings: tuple[Any, ...]) -> tuple[list[Operand], Field]:
    """The outputs of one device, and the field of these settings that they are in."""
    *field_settings, identifies, centres = settings
    field = Field(*field_settings)
    field.centres = centres
    field.coverage = Coverage(side=ALONE, identifies=identifies)
    return _evaluate_alone(training, steps, field, None), field


def _evaluate_alone(training: Training, steps: int, field: Field, seen: Seen | None) -> list[Operand]:
    inputs = make_inputs(field, "params", training.params)
    for step in range(steps):
        inputs += make_inputs(field, f"batch {step}", training.batches[step])
    program = _trace_alone(training, steps).program
    return Interpreter(field, seen=seen).run(program, inputs)


# On the mesh


class TracedRow(NamedTuple):
    """The programs that a row runs, traced.

    Attributes:
        init: takes the leaves of the parameters and returns the leaves of the first state.
        state: the shapes of that state.
        step: the `jax.stages.Traced` of a call of the step.
        program: the ClosedJaxpr of the step, without what no result needs.
        remove_padding: takes the leaves of parameters and carried state and returns them in original shapes.
    """

    init: Any
    state: Any
    step: Any
    program: Any
    remove_padding: Any

    @classmethod
    def of(cls, program: Program) -> TracedRow:
        """The step is that of the other laws if they traced one; else it is traced of shapes, and nothing runs."""
        make_state: Any = program.init
        if isinstance(make_state, Init):  # no trace can change the types of its mesh's axes
            make_state = replace(make_state, mesh=auto_mesh(make_state.mesh))
        make_first_state = partial(make_state, key=program.key, **program.init_options)
        init, state = jax.make_jaxpr(make_first_state, return_shape=True)(program.params)
        if "traced" in vars(program) or not isinstance(program.init, Init):
            step = program.traced
        else:
            abstract_state = program.init.abstract(program.params, **program.init_options)
            step = program.step.trace(abstract_state._replace(key=program.key), program.calls[0])
        remove_padding = jax.make_jaxpr(unpadded)((state.params, state.carried))
        return cls(init, state, step, without_unused(step.jaxpr), remove_padding)


def _run_on_mesh(
    program: Program, traced: TracedRow, calls: int, metric_names: Sequence[str], field: Field, seen: Seen | None
) -> list[Operand]:
    """The outputs of the row's programs in the field, from the first state that `init` makes of the parameters."""
    run = Interpreter(field, seen=seen).run
    uninterpreted_alone = set(field.uninterpreted)
    state_structure = jax.tree.structure(traced.state)
    output_structure = jax.tree.structure(traced.step.out_info)
    state_leaves = run(traced.init, make_inputs(field, "params", program.params))
    state = jax.tree.unflatten(state_structure, state_leaves)
    key = to_known(program.key)
    losses: list[Operand] = []
    metrics_of_steps: list[Operand] = []
    for call in range(calls):
        batch = make_batch(program, call, field)
        # The traced step takes the leaves of the state without its key, then the key, then those of the batch.
        state_without_key = jax.tree.leaves(state._replace(key=None))
        results = run(traced.program, [*state_without_key, key, *batch])
        state, metrics = jax.tree.unflatten(output_structure, results)
        loss = metrics["loss"]
        means = jax.tree.leaves({name: metrics[name] for name in metric_names})
        if program.row.steps is None:
            losses.append(loss)
            metrics_of_steps += means
            continue
        for step in range(program.row.steps):
            losses.append(_select_step(loss, step))
            metrics_of_steps += [_select_step(x, step) for x in means]
    # A step that rounds, as to int8 on the way, differs from one device's by the rounding. That is what it is for, and
    # no mistake: a note says so.
    rounding = (field.uninterpreted - uninterpreted_alone) & ROUNDING
    if rounding:
        raise RoundsError(", ".join(sorted(rounding)))
    last = run(traced.remove_padding, jax.tree.leaves((state.params, state.carried)))
    return [*losses, *metrics_of_steps, *last]


def make_batch(program: Program, call: int, field: Field) -> Sequence[Operand]:
    """The batch of one call. For a call of several steps, their batches are stacked along a new dim 0."""
    steps = program.row.steps
    if not steps:
        return make_inputs(field, f"batch {call}", program.batches[call])
    batches = []
    for number in range(call * steps, (call + 1) * steps):
        batches.append(make_inputs(field, f"batch {number}", program.batches[number]))
    return [join_operands(field, leaves, 0, new=True) for leaves in zip(*batches, strict=True)]


def _select_step(x: Operand, step: int) -> Operand:
    """The metric of one step, where a call of several steps returns one for each along dim 0."""
    if isinstance(x, Exact):
        return x.row(0, step)
    return x[step]
