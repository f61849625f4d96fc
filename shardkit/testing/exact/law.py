"""The law that a training step is one device's for all parameters, batches and weights."""

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
from shardkit.testing.exact.equality import check_floats, check_size, symbol
from shardkit.testing.exact.interpreter import Interpreter, Seen
from shardkit.testing.exact.numbers.field import ROUNDING, Field
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.program_pair import UnprovableError
from shardkit.testing.exact.rules.known import to_known
from shardkit.testing.exact.rules.operands import Operand, join_operands
from shardkit.testing.exact.rules.primitive_rules import ORDERED
from shardkit.testing.one_device import Reference, Training, gradient_of, update_of
from shardkit.testing.program import Program

_STEPS = 2
_POINTS = 2
_RUNS = 4  # of a step that compares floats, about


def equal_for_all_inputs(program: Program, reference: Reference) -> str | None:
    """Losses, metrics and updated parameters of two steps equal one device's for all parameters and floats of a batch.

    So does carried state, from the one that it begins with. Integers of the batch, as tokens, and keys keep their
    values. There is no tolerance: floats are unknowns in a finite field, as in `assert_equal_for_all_inputs`. Rounding
    is not seen. What is neither proved nor refuted, has no meaning in a field, or would take more than about a minute,
    is told in a note.

    Example:
        >>> laws = [sk.testing.laws.equal_for_all_inputs]  # for `prove(..., laws=laws)`
    """
    given = reference.training
    if given is None or not isinstance(program.step, Step):
        return "for all inputs: the step and the reference must be GradFns"
    calls = max(1, _STEPS // (program.row.steps or 1))
    steps = calls * (program.row.steps or 1)
    if len(given.batches) < steps:
        calls, steps = len(program.calls), len(given.batches)
    try:
        check_floats("law", jax.eval_shape(lambda: (given.params, given.batches[0])))
        traced = _Traced.of(program)
        check_size("law", [traced.program] * calls, _POINTS, _RUNS, longest=60.0)
        losses, means, params, carried = _traced_alone(given, steps)[1]
        if given.carry:
            told = {"loss": losses[0], "weight": losses[0], **means[0]}
            jaxpr = jax.make_jaxpr(given.carry)(carried, told, params)
            if any(site.name in ORDERED for site in walk(jaxpr.jaxpr)):
                return "not for all inputs: carry= compares numbers"
        names = [f"loss of step {i}" for i in range(steps)]
        for i, each in enumerate(means):
            names += [f"metric{name} of step {i}" for name in _names(each)]
        names += [f"updated parameter{name}" for name in _names(params)]
        names += [f"carried state{name}" for name in _names(carried)]
        if missing := means[0].keys() - traced.step.out_info[1].keys():
            raise UnequalError(
                f"the metrics must be those of one device; the mesh returns no {quoted(sorted(missing))}. Return the "
                "same means from the loss and from the reference."
            )
        on_mesh = partial(_on_mesh, program, traced, calls, list(means[0]))
        equal("law", "", names, (on_mesh, partial(_alone, given, steps)), _POINTS, STEP)
    except UnprovableError as error:
        return f"not for all inputs: {error}"
    except RoundsError as error:
        return f"not for all inputs: the step rounds, by {error}"
    return None


class RoundsError(Exception):
    """The program on the mesh rounds where one device's does not."""


class _Traced(NamedTuple):
    """The programs of a row: its first state, with its shapes, a step with what it runs, and parameters of a state."""

    init: Any
    shapes: Any
    step: Any
    program: Any
    original: Any

    @classmethod
    def of(cls, program: Program) -> _Traced:
        """The traced step is that of the other laws if there is one, else one of shapes, for which nothing runs."""
        make: Any = program.init
        if isinstance(make, Init):  # whose types of axes no trace can change
            make = replace(make, mesh=auto_mesh(make.mesh))
        first = partial(make, key=program.key, **program.init_options)
        init, shapes = jax.make_jaxpr(first, return_shape=True)(program.params)
        if "traced" in vars(program) or not isinstance(program.init, Init):
            step = program.traced
        else:
            state = program.init.abstract(program.params, **program.init_options)._replace(key=program.key)
            step = program.step.trace(state, program.calls[0])
        return cls(
            init, shapes, step, without_unused(step.jaxpr), jax.make_jaxpr(unpadded)((shapes.params, shapes.carried))
        )


def _names(tree: Any) -> list[str]:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [f" {path_name(path)}" if path else "" for path in paths]


def _symbols(field: Field, name: str, tree: Any) -> list[Operand]:
    return [symbol(field, f"{name} {i}", x) for i, x in enumerate(jax.tree.leaves(tree))]


@lru_cache(maxsize=16)
def _traced_alone(given: Training, steps: int) -> Any:
    """The first steps on one device, from parameters and batches to what the law compares; and the shapes of that."""
    optimizer = given.optimizer
    loss_and_gradient: Any = given.grad_fn
    gradient = gradient_of(loss_and_gradient)

    def train(params: Any, batches: Any) -> Any:
        opt_state = wrap_optimizer(optimizer).init(params)
        carried = given.init_carried(params)
        losses, means = [], []
        for index, batch in enumerate(batches):
            rows = next(np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x))
            keys = example_keys(step_key(given.key, index), rows)
            loss, metrics, grads = gradient(params, batch, keys, **given.carried_arguments(carried))
            params, opt_state = update_of(optimizer)(grads, opt_state, params, loss)
            carried = given.update_carried(carried, loss, metrics, params)
            losses.append(loss)
            metrics.pop("weight")  # by which the loss is divided; one for a shard and microbatch if it is a scalar
            means.append(metrics)
        return losses, means, params, carried

    closed, shapes = jax.make_jaxpr(train, return_shape=True)(given.params, list(given.batches[:steps]))
    return without_unused(closed), shapes


@lru_cache(maxsize=16)
def _run_alone(given: Training, steps: int, settings: tuple[Any, ...]) -> tuple[list[Operand], Field]:
    """The results of one device in a field of these settings, which many rows are compared with."""
    *of_field, identifies, centres = settings
    field = Field(*of_field)
    field.centres = centres
    field.coverage = Coverage(side=ALONE, identifies=identifies)
    return _evaluated_alone(given, steps, field, None), field


def _alone(given: Training, steps: int, field: Field, seen: Seen | None) -> list[Operand]:
    if seen is not None or field.coverage is None:
        return _evaluated_alone(given, steps, field, seen)
    results, other = _run_alone(given, steps, (*field.settings, field.coverage.identifies, field.centres))
    field.uninterpreted |= other.uninterpreted
    field.rounded |= other.rounded
    field.rounded_values[ALONE] = set(other.rounded_values.get(ALONE, ()))  # the other field is used again
    field.domains |= other.domains
    field.chances |= other.chances
    field.compared += other.compared
    field.deepest = max(field.deepest, other.deepest)
    field.logs |= other.logs
    field.outside = field.outside or other.outside
    field.coverage.merge(other.coverage)
    return results


def _evaluated_alone(given: Training, steps: int, field: Field, seen: Seen | None) -> list[Operand]:
    batches = [symbol for i in range(steps) for symbol in _symbols(field, f"batch {i}", given.batches[i])]
    return Interpreter(field, seen=seen).run(
        _traced_alone(given, steps)[0], [*_symbols(field, "params", given.params), *batches]
    )


def _on_mesh(
    program: Program, traced: _Traced, calls: int, means: Sequence[str], field: Field, seen: Seen | None
) -> list[Operand]:
    """The first steps of the row's program, from the first state that `init` makes of the parameters."""
    run = Interpreter(field, seen=seen).run
    without = set(field.uninterpreted)
    first = run(traced.init, _symbols(field, "params", program.params))
    state = jax.tree.unflatten(jax.tree.structure(traced.shapes), first)
    key = [to_known(program.key)]
    per_call = program.row.steps or 1
    losses: list[Operand] = []
    metrics_of_steps: list[Operand] = []
    for call in range(calls):
        batches = [
            _symbols(field, f"batch {call * per_call + i}", program.batches[call * per_call + i])
            for i in range(per_call)
        ]
        batch = batches[0]
        if program.row.steps:
            batch = [join_operands(field, leaves, 0, new=True) for leaves in zip(*batches, strict=True)]
        results = run(traced.program, [*jax.tree.leaves(state._replace(key=None)), *key, *batch])
        state, metrics = jax.tree.unflatten(jax.tree.structure(traced.step.out_info), results)
        found = [metrics["loss"], *jax.tree.leaves({name: metrics[name] for name in means})]
        for i in range(per_call):
            now = [_of_step(x, i) for x in found] if program.row.steps else found
            losses.append(now[0])
            metrics_of_steps += now[1:]
    rounds = (field.uninterpreted - without) & ROUNDING
    if rounds:
        raise RoundsError(", ".join(sorted(rounds)))
    return [*losses, *metrics_of_steps, *run(traced.original, jax.tree.leaves((state.params, state.carried)))]


def _of_step(x: Operand, step: int) -> Operand:
    return x.row(0, step) if isinstance(x, Exact) else x[step]
