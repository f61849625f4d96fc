"""What the first call of a step refuses before anything runs: programs that give other numbers than one device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardkit.on_device.advice import Unintended, warn_of
from shardkit.on_device.batch import example_axes
from shardkit.on_device.local_step import local_terms
from shardkit.on_device.pipelines import Staged
from shardkit.on_device.seam import enter
from shardkit.plans.axis_types import change_axis_types
from shardkit.plans.manual import record_automatic_splits
from shardkit.steps.carry import Carried
from shardkit.steps.examples import Examples, WrongProgramError, find_mixed
from shardkit.steps.state import TrainState
from shardkit.steps.train import TrainProgram

Arguments = tuple[TrainState, jax.Array, Any]


@dataclass(frozen=True)
class FirstCall:
    """Looks at a step once, with the trace and the arguments of its first call."""

    program: TrainProgram
    mesh: Mesh  # as the caller made it, perhaps with Explicit axes
    steps: int | None  # in one call, or None where the batch is that of one step
    mixed: bool  # whether examples of one device may meet

    def __call__(self, traced: jax.stages.Traced, args: Arguments) -> None:
        """Refuses a program that breaks a rule, or whose loss mixes examples; warns of what is unintended.

        Raises:
            WrongProgramError: either; names the line of the loss.
        """
        check_rules(traced, args)
        if not self.mixed:
            # jax.set_mesh of a mesh with Explicit axes may surround the call.
            of_explicit_axes = self.program.mesh is not self.mesh
            with jax.set_mesh(self.program.mesh) if of_explicit_axes else nullcontext():
                self._check_examples(args)
        warn_of(traced.jaxpr.jaxpr, stacklevel=3)

    def _check_examples(self, args: Arguments) -> None:
        """Refuses a loss in which examples meet, and warns of such metrics. A pipeline's loss is not checked."""
        if isinstance(self.program.grad_fn, Staged):
            return
        program, state, key, batch = self._take_first_step(args)
        mixed = find_mixed(_split_examples(program, state, batch), state.params, batch, key)
        if "loss" in mixed:
            raise WrongProgramError(
                f"step: the loss must add over its examples, {mixed['loss']}. Return sk.Mean(total, weight) of sums "
                "over examples, send what other examples need, as sk.all_gather does, or pass make_train_step(..., "
                "examples='mixed') if each device's own examples are meant to meet."
            )
        warn_of_metrics("step", mixed, stacklevel=5)

    def _take_first_step(self, args: Arguments) -> tuple[TrainProgram, TrainState, jax.Array, Any]:
        """The program, and the arguments of its first step, on the mesh with Auto axes."""
        program = self.program
        if program.mesh is not self.mesh:
            args = change_axis_types(args, program.mesh)
        state, key, batch = args
        if set(program.manual) != set(program.mesh.axis_names):
            program = replace(program, plan=record_automatic_splits(program.plan, state.params, program.manual))
        if self.steps is not None:
            batch = jax.tree.map(lambda x: x[0], batch)
        return program, state, key, batch


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

    return Examples(
        placement,
        carried.tree,
        carried.specs,
        program.manual,
        example_axes(placement.batch),
        program.microbatches.for_batch(batch, placement).parts,
        bool(jnp.finfo(program.policy.compute).bits < 32),
        compute,
    )


def warn_of_metrics(where: str, mixed: Mapping[str, str], stacklevel: int) -> None:
    """Warns of metrics in which examples meet; an error would end a training run whose parameters are right."""
    for name, how in mixed.items():
        subject = "the loss" if name == "loss" else f"the metric {name!r}"
        warnings.warn(
            f"{where}: {subject} must add over its examples, {how}. Return sk.Mean(total, weight) of sums over "
            "examples, or compute it from such means after the call.",
            Unintended,
            stacklevel=stacklevel,
        )


def check_rules(traced: jax.stages.Traced, args: Arguments) -> None:
    """Refuses a traced step in which one of the rules of `lint` finds wrong numbers or a deadlock.

    Raises:
        WrongProgramError: the first finding, with its remedy.
    """
    # Here, because a training script that only imports shardkit should not wait for what reads programs.
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
