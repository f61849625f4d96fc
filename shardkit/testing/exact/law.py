"""The law that a training step computes one device's numbers, for all parameters, batches and weights.

Both sides start from the same unknowns: the parameters, and the floats of batches. The side on the mesh is the traced
programs of a row of `prove`: `init`, then `step` as often as the law compares, then `unpadded`, which takes the padding
off parameters. The side on one device is a plain loop of gradient and optimizer. For two steps:

    mesh    params -> init -> state -> step(batch 0) -> step(batch 1) -> params without padding
    alone   params -> loss, gradient, update(batch 0) -> loss, gradient, update(batch 1)

The law compares both losses, all metrics of both steps, and the parameters and the carried state after the second step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from shardkit._arguments.checks import quote
from shardkit._jax.dependence import without_unused
from shardkit._jax.jaxprs import walk
from shardkit._jax.pallas import writing_kernels_out
from shardkit.meshes.layout import path_name
from shardkit.meshes.rng import example_keys, step_key
from shardkit.plans.axis_types import auto_mesh
from shardkit.plans.storage import unpadded
from shardkit.steps.init import Init
from shardkit.steps.optimizer import wrap_optimizer
from shardkit.steps.step import Step
from shardkit.testing._compare import UnequalError
from shardkit.testing.exact.arguments import check_floats, check_values, make_input
from shardkit.testing.exact.certificate import describe_folded_constants, make_note
from shardkit.testing.exact.coverage import ALONE, Coverage
from shardkit.testing.exact.draws import STEP, equal
from shardkit.testing.exact.evidence import Evidence, UnprovableError
from shardkit.testing.exact.interpreter import Interpreter, Seen
from shardkit.testing.exact.numbers.field import Field, Settings
from shardkit.testing.exact.numbers.notes import ROUNDING
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.known import to_known
from shardkit.testing.exact.rules.operands import Operand, join_operands
from shardkit.testing.exact.rules.primitive_rules import ORDERED
from shardkit.testing.exact.size import check_size
from shardkit.testing.one_device import Reference, Training, make_gradient, make_update
from shardkit.testing.program import Program

# Two steps, because a mistake of the first one in the optimizer's state shows in the second.
_STEPS = 2
_POINTS = 2
# About how many runs a step that compares floats needs: for the estimate of the time.
_RUNS = 4


def equal_for_all_inputs(program: Program, reference: Reference) -> str | None:
    """Losses, metrics and updated parameters of two steps equal one device's for all parameters and floats of a batch.

    So does carried state, from its initial value. Integers of the batch, as tokens, and keys keep their values. There
    is no tolerance: floats are unknowns in a finite field, as in `assert_equal_for_all_inputs`. Rounding is not seen. A
    note tells of a step that is neither proved nor refuted, has no meaning in a field, or would take more than about a
    minute; and of constants that a proof had to take for the numbers from which they were computed.

    A run of a step takes a second, so that there are few: one draw, and some random orders. Ties, and comparisons that
    no result shows, are looked for by `assert_equal_for_all_inputs`, and not here.

    Example:
        >>> laws = [sk.testing.laws.equal_for_all_inputs]  # for `prove(..., laws=laws)`
    """
    training = reference.training
    if training is None or not isinstance(program.step, Step):
        return "for all inputs: the step and the reference must be GradFns"
    try:
        evidence = _prove(program, training)
    except UnprovableError as error:
        return f"not for all inputs: {error}"
    except RoundsError as error:
        return f"not for all inputs: the step rounds, by {error}"
    return make_note(describe_folded_constants(evidence))


class RoundsError(Exception):
    """The program on the mesh rounds where one device's does not."""


def _prove(program: Program, training: Training) -> Evidence:
    """Refuses a program that differs from one device's, or that cannot be proved equal to it."""
    # A call of a step may be several steps. Of calls of one step two are compared, of a call of four steps that one.
    steps_per_call = program.row.steps or 1
    calls = max(1, _STEPS // steps_per_call)
    steps = calls * steps_per_call
    if len(training.batches) < steps:
        calls = len(program.calls)
        steps = len(training.batches)
    # What cannot be proved is refused before anything is traced or run.
    check_floats("law", jax.eval_shape(lambda: (training.params, training.batches[0])))
    check_values("law", (program.params, program.batches, training.params, training.batches))
    traced = TracedRow.of(program)
    check_size("law", [traced.program] * calls, _POINTS, _RUNS, longest=60.0)
    outputs = _trace_alone(training, steps).outputs
    _check_carry(training, outputs)
    metrics = outputs.metrics[0]
    _, metrics_on_mesh = traced.step.out_info
    missing = metrics.keys() - metrics_on_mesh.keys()
    if missing:
        raise UnequalError(
            f"the metrics must be those of one device; the mesh returns no {quote(sorted(missing))}. Return the "
            "same means from the loss and from the reference."
        )
    on_mesh = partial(_run_on_mesh, program, traced, calls, list(metrics))
    alone = partial(_run_alone, training, steps)
    return equal("law", "", outputs.list_names(), (on_mesh, alone), _POINTS, STEP)


def _check_carry(training: Training, outputs: _Outputs) -> None:
    """Refuses a `carry=` that compares numbers, because each branch of it would need runs of its own."""
    if training.carry is None:
        return
    # Only shapes matter here: the weight is a scalar, as the loss is.
    metrics = {"loss": outputs.losses[0], "weight": outputs.losses[0], **outputs.metrics[0]}
    traced = jax.make_jaxpr(training.carry)(outputs.carried, metrics, outputs.params)
    for site in walk(traced.jaxpr):
        if site.name in ORDERED:
            raise UnprovableError("carry= compares numbers")


class _Outputs(NamedTuple):
    """The values that the law compares, in this order; as shapes, or as numbers of a field.

    Attributes:
        losses: the loss of each step.
        metrics: the auxiliary means of each step, by name.
        params: the parameters after the last step.
        carried: the carried state after the last step; None if there is none.
    """

    losses: list[Any]
    metrics: list[dict[str, Any]]
    params: Any
    carried: Any

    def list_names(self) -> list[str]:
        """The name of each leaf, for messages."""
        names = []
        for step in range(len(self.losses)):
            names.append(f"loss of step {step}")
        for step, metrics in enumerate(self.metrics):
            for path in _list_paths(metrics):
                names.append(f"metric{path} of step {step}")
        for path in _list_paths(self.params):
            names.append(f"updated parameter{path}")
        for path in _list_paths(self.carried):
            names.append(f"carried state{path}")
        return names


def _list_paths(tree: Any) -> list[str]:
    """The path of each leaf, after a space; "" if the tree is one array."""
    paths = []
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        paths.append(f" {path_name(path)}" if path else "")
    return paths


def make_inputs(field: Field, name: str, tree: Any) -> list[Operand]:
    """The leaves of a tree in the field. On both sides a leaf of the same name and number is the same unknown."""
    inputs = []
    for number, x in enumerate(jax.tree.leaves(tree)):
        inputs.append(make_input(field, f"{name} {number}", x))
    return inputs


# On one device


class _TracedTraining(NamedTuple):
    """The first steps on one device, as a program of the leaves of parameters and batches.

    Attributes:
        program: a ClosedJaxpr that returns the leaves of `outputs`.
        outputs: the shapes of the results.
    """

    program: Any
    outputs: _Outputs


@lru_cache(maxsize=16)
def _trace_alone(training: Training, steps: int) -> _TracedTraining:
    """Traces a plain loop of gradient and optimizer, without what no result needs."""
    optimizer = training.optimizer
    loss_and_gradient: Any = training.grad_fn
    compute_gradient = make_gradient(loss_and_gradient)

    def train(params: Any, batches: Any) -> _Outputs:
        opt_state = wrap_optimizer(optimizer).init(params)
        carried = training.init_carried(params)
        losses = []
        metrics_of_steps = []
        # The loop of a training script, with the keys that a step on a mesh makes for its examples.
        for index, batch in enumerate(batches):
            keys = example_keys(step_key(training.key, index), _find_batch_size(batch))
            loss, metrics, grads = compute_gradient(params, batch, keys, **training.carried_arguments(carried))
            params, opt_state = make_update(optimizer)(grads, opt_state, params, loss)
            carried = training.update_carried(carried, loss, metrics, params)
            losses.append(loss)
            # A loss without weights has the weight 1 for each shard and microbatch: their sum depends on the mesh.
            metrics.pop("weight")
            metrics_of_steps.append(metrics)
        return _Outputs(losses, metrics_of_steps, params, carried)

    batches = list(training.batches[:steps])
    with writing_kernels_out():
        closed, outputs = jax.make_jaxpr(train, return_shape=True)(training.params, batches)
    return _TracedTraining(without_unused(closed), outputs)


def _find_batch_size(batch: Any) -> int:
    """The size of dim 0 of a batch's arrays. A step has found it to be the same in all of them; scalars have none."""
    arrays = [x for x in jax.tree.leaves(batch) if np.ndim(x)]
    return int(np.shape(arrays[0])[0])


def _run_alone(training: Training, steps: int, field: Field, seen: Seen | None) -> list[Operand]:
    """The outputs of one device in the field.

    Many rows are compared with the same training, in fields of the same settings. So the training is run once for all
    of them, in another field of these settings, and the notes of that field are added to this one.

    Worked example: 40 rows, each of which needs a draw of seed 0. The first row runs the training in Field(2, seed=0),
    and takes a second; the other rows read its outputs.
    """
    # Some fields need a run of their own: one whose values a search looks at; one with the laws of roots, where a
    # number says of which root of its own field it is a multiple; one whose constants stand for others, or are computed
    # in the field; and one in which equal numbers share a key.
    choices = field.choices
    has_choices = bool(choices.folded) or choices.exact_functions or choices.same_keys
    if seen is not None or field.coverage is None or field.settings.laws_of_roots or has_choices:
        return _evaluate_alone(training, steps, field, seen)
    identifies = field.coverage.identifies
    results, field_of_run = _run_alone_once(training, steps, field.settings, identifies, choices.centres)
    field.add_notes(field_of_run, [ALONE])
    field.coverage.merge(field_of_run.coverage)
    return results


@lru_cache(maxsize=16)
def _run_alone_once(
    training: Training, steps: int, settings: Settings, identifies: bool, centres: tuple[float, ...]
) -> tuple[list[Operand], Field]:
    """The outputs of one device in a field of some settings, and that field."""
    field = Field(settings)
    field.choices.centres = centres
    field.coverage = Coverage(side=ALONE, identifies=identifies)
    return _evaluate_alone(training, steps, field, None), field


def _evaluate_alone(training: Training, steps: int, field: Field, seen: Seen | None) -> list[Operand]:
    """Runs the traced training in the field."""
    # The names are those of the side on the mesh, which draws the same unknowns for them.
    inputs = make_inputs(field, "params", training.params)
    for step in range(steps):
        inputs += make_inputs(field, f"batch {step}", training.batches[step])
    program = _trace_alone(training, steps).program
    return Interpreter(field, seen=seen).run(program, inputs)


# On the mesh


class TracedRow(NamedTuple):
    """The traced programs of a row.

    Attributes:
        init: takes the leaves of the parameters and returns the leaves of the first state.
        state: the shapes of the first state.
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
        """Traces the programs of a row. A step that another law has traced is taken as it is; nothing runs here."""
        make_state: Any = program.init
        if isinstance(make_state, Init):  # no trace can change the types of its mesh's axes
            make_state = replace(make_state, mesh=auto_mesh(make_state.mesh))
        make_first_state = partial(make_state, key=program.key, **program.init_options)
        init, state = jax.make_jaxpr(make_first_state, return_shape=True)(program.params)
        if "traced" in vars(program) or not isinstance(program.init, Init):
            step = program.traced
        else:
            abstract_state = program.init.abstract(program.params, **program.init_options)
            abstract_state = abstract_state._replace(key=program.key)
            step = program.step.trace(abstract_state, program.calls[0])
        remove_padding = jax.make_jaxpr(unpadded)((state.params, state.carried))
        return cls(init, state, step, without_unused(step.jaxpr), remove_padding)


def _run_on_mesh(
    program: Program, traced: TracedRow, calls: int, metric_names: Sequence[str], field: Field, seen: Seen | None
) -> list[Operand]:
    """The outputs of the row's programs in the field, from the first state that `init` makes of the parameters."""
    interpreter = Interpreter(field, seen=seen)
    uninterpreted_before = set(field.notes.uninterpreted)
    state_structure = jax.tree.structure(traced.state)
    output_structure = jax.tree.structure(traced.step.out_info)
    params = make_inputs(field, "params", program.params)
    state_leaves = interpreter.run(traced.init, params)
    state = jax.tree.unflatten(state_structure, state_leaves)
    key = to_known(program.key)  # no unknown: its random numbers are those that users get
    losses: list[Operand] = []
    metrics_of_steps: list[Operand] = []
    for call in range(calls):
        batch = make_batch(program, call, field)
        # The traced step takes the leaves of the state without its key, then the key, then those of the batch.
        state_without_key = jax.tree.leaves(state._replace(key=None))
        results = interpreter.run(traced.program, [*state_without_key, key, *batch])
        state, metrics = jax.tree.unflatten(output_structure, results)
        # On one device there is a loss and a metric for each step: so those of a call of several steps are cut.
        loss = metrics["loss"]
        means = {name: metrics[name] for name in metric_names}
        mean_leaves = jax.tree.leaves(means)
        if program.row.steps is None:
            losses.append(loss)
            metrics_of_steps += mean_leaves
            continue
        for step in range(program.row.steps):
            losses.append(_select_step(loss, step))
            for x in mean_leaves:
                metrics_of_steps.append(_select_step(x, step))
    # A step that sends int8, say, differs from one device's by rounding. That is intended, and no mistake: the law says
    # so in a note.
    rounding = (field.notes.uninterpreted - uninterpreted_before) & ROUNDING
    if rounding:
        raise RoundsError(", ".join(sorted(rounding)))
    last_leaves = jax.tree.leaves((state.params, state.carried))
    unpadded_leaves = interpreter.run(traced.remove_padding, last_leaves)
    return [*losses, *metrics_of_steps, *unpadded_leaves]


def make_batch(program: Program, call: int, field: Field) -> Sequence[Operand]:
    """The batch of one call. If a call has several steps, it is the batches of all its steps, along a new dim 0."""
    steps = program.row.steps
    if not steps:
        return make_inputs(field, f"batch {call}", program.batches[call])
    batches = []
    for number in range(call * steps, (call + 1) * steps):
        batches.append(make_inputs(field, f"batch {number}", program.batches[number]))
    stacked = []
    for leaves in zip(*batches, strict=True):
        stacked.append(join_operands(field, leaves, 0, new=True))
    return stacked


def _select_step(x: Operand, step: int) -> Operand:
    """The metric of one step, of an array with the metric of each step of a call along dim 0."""
    if isinstance(x, Exact):
        return x.row(0, step)
    return x[step]
