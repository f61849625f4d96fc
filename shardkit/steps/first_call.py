"""The checks of a step's first call, before anything runs: programs that give other numbers than one device fail."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from shardkit._jax import compat
from shardkit.meshes.rng import step_key
from shardkit.on_device.advice import Unintended, warn_of
from shardkit.on_device.local_step import local_terms
from shardkit.on_device.pipelines import Staged
from shardkit.on_device.seam import enter
from shardkit.plans.axis_types import change_axis_types, set_auto_mesh
from shardkit.plans.manual import record_automatic_splits
from shardkit.plans.storage import unpadded
from shardkit.steps.carry import Carried, make_carried
from shardkit.steps.examples import Examples, Readings, WrongProgramError, read_traces
from shardkit.steps.mixed_examples import Mixed, find_mixed
from shardkit.steps.state import TrainState
from shardkit.steps.train import TrainProgram
from shardkit.steps.whole_batch import (
    MOST_BYTES,
    LossOfWholeBatch,
    can_be_whole,
    compute_in_sequence,
    compute_whole_batch,
    count_bytes,
    find_sent,
    make_mesh_of_one,
    move,
)

Arguments = tuple[TrainState, jax.Array, Any]


@dataclass(frozen=True)
class FirstCall:
    """Checks a step once, with the trace and the arguments of its first call."""

    program: TrainProgram
    mesh: Mesh  # the caller's mesh, perhaps with Explicit axes
    steps: int | None  # the number of steps in one call; None if the batch has no dim for steps
    mixed: bool  # whether examples of one device may meet

    def __call__(self, traced: jax.stages.Traced, args: Arguments) -> LossOfWholeBatch | None:
        """Refuses a program that breaks a rule, or whose loss mixes examples; warns of what is unintended.

        Returns:
            If the loss sends over an axis of the batch, the loss that the step must give; else None.

        Raises:
            WrongProgramError: either; names the line of the loss.
        """
        # The rules first: they read the trace alone, and compile nothing.
        check_rules(traced, args)
        expected = None
        if not self.mixed and not compat.is_tracing():
            with set_auto_mesh(self.mesh):
                expected = self._check_examples(args)
        warn_of(traced.jaxpr.jaxpr, stacklevel=3)
        return expected

    def _check_examples(self, args: Arguments) -> LossOfWholeBatch | None:
        """Refuses a loss in which examples or tokens meet, and warns of such metrics.

        If the loss sends over an axis of the batch, it is computed on one device too, and returned. So is that of a
        pipeline that asks for the index of a stage's device.
        """
        program, state, key, batch = self._take_first_step(args)
        if isinstance(program.grad_fn, Staged):
            return self._check_pipeline(program.grad_fn, program, state, key, batch)
        splits, metrics = _read_splits(program, state, key, batch)
        warn_of_metrics("step", metrics, stacklevel=5)
        splits_that_send: list[tuple[Examples, Readings]] = []
        for examples, readings in splits:
            if can_be_whole(examples, readings, state, batch):
                splits_that_send.append((examples, readings))
        if not splits_that_send:
            return None
        try:
            return self._compute_whole_batch(program, splits_that_send, state, key, batch)
        except Exception:
            # Only a warning could follow. A loss that is written for a fixed number of devices, or of examples on each,
            # cannot be traced for one device, or one device may have too little memory for the whole batch.
            return None

    def _check_pipeline(
        self, pipeline: Staged, program: TrainProgram, state: TrainState, key: jax.Array, batch: Any
    ) -> LossOfWholeBatch | None:
        """The same of a pipeline, of whose microbatches every device runs all stages in sequence here.

        A loss that asks for the index of a device along the pipeline's axis is computed so too, and returned.
        """
        # One device holds all layers here, and a pipeline may be for layers that no device can hold.
        if pipeline.schedule is None or count_bytes((state.params, batch)) > MOST_BYTES:
            return None
        splits, metrics = _read_splits(program, state, key, batch)
        warn_of_metrics("step", metrics, stacklevel=6)
        if not splits:
            return None
        examples, readings = splits[0]
        return compute_in_sequence(pipeline, examples, readings, state, batch, step_key(key, state.step))

    def _compute_whole_batch(
        self,
        program: TrainProgram,
        splits: Sequence[tuple[Examples, Readings]],
        state: TrainState,
        key: jax.Array,
        batch: Any,
    ) -> LossOfWholeBatch | None:
        """The loss that the step must give, computed on one device along the axes over which the loss sends."""
        sent = find_sent(splits)
        mesh = make_mesh_of_one(program.mesh, sent.split_axes)
        params, carried = unpadded((state.params, state.carried))
        key = step_key(key, state.step)
        with jax.set_mesh(mesh):
            params = move(params, program.plan.placement(params, mesh).at_rest, mesh)
            if carried is not None:
                carried = make_carried(carried, params, mesh, program.plan)
            on_one = state._replace(params=params, carried=carried)
            examples = _split_examples(replace(program, mesh=mesh), on_one, batch)
            return compute_whole_batch(examples, sent, params, batch, key)

    def _take_first_step(self, args: Arguments) -> tuple[TrainProgram, TrainState, jax.Array, Any]:
        """The program, and the arguments of its first step, on the mesh with Auto axes."""
        program = self.program
        if program.mesh is not self.mesh:
            args = change_axis_types(args, program.mesh)
        state, key, batch = args
        if set(program.manual) != set(program.mesh.axis_names):
            program = replace(program, plan=record_automatic_splits(program.plan, state.params, program.manual))
        if self.steps is not None:
            # The batches of all steps are stacked along dim 0: this is the first one.
            batch = jax.tree.map(lambda x: x[0], batch)
        return program, state, key, batch


def _read_splits(
    program: TrainProgram, state: TrainState, key: jax.Array, batch: Any
) -> tuple[list[tuple[Examples, Readings]], list[Mixed]]:
    """What the traces of a loss show for each dim of the batch that is split, and the metrics that mix along it.

    Raises:
        WrongProgramError: the loss mixes examples or tokens.
    """
    splits: list[tuple[Examples, Readings]] = []
    metrics: list[Mixed] = []
    for examples in _split_examples(program, state, batch).split_along_dims():
        readings = read_traces(examples, state.params, batch, key)
        mixed = find_mixed(examples, readings, state.params, batch, key)
        for loss_or_metric in mixed:
            if loss_or_metric.name == "loss":
                raise WrongProgramError(_describe_loss(loss_or_metric))
        metrics += mixed
        splits.append((examples, readings))
    return splits, metrics


def _split_examples(program: TrainProgram, state: TrainState, batch: Any) -> Examples:
    """How a step splits its examples, and the losses of each device."""
    placement = program.plan.placement(state.params, program.mesh)
    carried = Carried("step", state.carried, state.params, placement)

    def compute(params: Any, carried_at_rest: Any, batch: Any, keys: Any) -> dict[str, tuple[Any, ...]]:
        weights = enter(params, placement, program.policy)
        grad_fn = program.grad_fn
        if program.reads:
            grad_fn = carried.bind(grad_fn, carried_at_rest, program.policy)
        return local_terms(grad_fn, weights, batch, keys, placement, program.policy)

    parts = program.microbatches.for_batch(batch, placement).parts
    if isinstance(program.grad_fn, Staged) and program.grad_fn.schedule is not None:
        parts *= program.grad_fn.schedule.microbatches
    return Examples(placement, carried.tree, carried.specs, program.manual, parts, compute)


def _describe_loss(mixed: Mixed) -> str:
    """The error about a loss in which examples or tokens meet."""
    remedy = "send what other examples need, as sk.all_gather does,"
    if mixed.dim:
        remedy = (
            "attend over the tokens of all devices, as sk.layers.ring_attention does, take the positions of a device's "
            "own from sk.layers.positions and what stands beside them from sk.collectives.halo_exchange,"
        )
    return (
        f"step: the loss must add over its {mixed.noun}s, {mixed.describe()}. Return sk.Mean(total, weight) of sums "
        f"over {mixed.noun}s, {remedy} or pass make_train_step(..., examples='mixed') if each device's own "
        f"{mixed.noun}s are meant to meet."
    )


def warn_of_metrics(where: str, mixed: Sequence[Mixed], stacklevel: int) -> None:
    """Warns of metrics in which examples meet, once for each line where they do.

    An error would end a training run whose parameters are right.
    """
    by_name: dict[str, Mixed] = {}
    for metric in mixed:  # its examples may meet, and its tokens too: said once
        by_name.setdefault(metric.name, metric)
    by_line: dict[str, list[Mixed]] = {}
    for metric in by_name.values():
        by_line.setdefault(metric.met.line, []).append(metric)
    for metrics in by_line.values():
        first = metrics[0]
        subject = f"the metric {first.name!r}"
        if first.name == "loss":
            subject = "the loss"
        if len(metrics) > 1:
            subject += f" (and {len(metrics) - 1} more of that line)"
        warnings.warn(
            f"{where}: {subject} must add over its {first.noun}s, {first.describe()}. Return sk.Mean(total, "
            f"weight) of sums over {first.noun}s, or compute it from such means after the call.",
            Unintended,
            stacklevel=stacklevel,
        )


def check_rules(traced: jax.stages.Traced, args: Arguments) -> None:
    """Refuses a traced step in which one of the rules of `lint` finds wrong numbers or a deadlock.

    Raises:
        WrongProgramError: the first finding, with its remedy.
    """
    # Imported here, so that a training script that only imports shardkit does not wait for the rules of `lint`.
    from shardkit.analysis.jaxpr.step import TracedStep
    from shardkit.analysis.rules import TRACE_RULES
    from shardkit.analysis.rules.program import TracedProgram
    from shardkit.analysis.rules.rule import findings

    program = TracedProgram(TracedStep(traced, args, traced), large=0, small=0)  # sizes are for rules of waste
    rules = [rule for rule in TRACE_RULES.values() if rule.wrong]
    wrong = findings(rules, program)
    if not wrong:
        return
    first = wrong[0]
    place = f"{first.source}: " if first.source else ""
    raise WrongProgramError(
        f"step: {place}{first.message} {first.remedy} Pass make_train_step(..., check=False) to run it as it is."
    )
