"""What the first call of a step refuses before anything runs: programs that give other numbers than one device."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from shardkit.on_device.advice import warn_of
from shardkit.plans.axis_types import change_axis_types
from shardkit.plans.manual import record_automatic_splits
from shardkit.steps.examples import WrongProgramError, check_examples
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
                check_examples(*self._take_first_step(args))
        warn_of(traced.jaxpr.jaxpr, stacklevel=3)

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
