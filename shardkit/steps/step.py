"""The function that a user calls for one training step, around its compiled program."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardkit._arguments.checks import format_sizes
from shardkit._arguments.typed import ARRAYS, check_kind
from shardkit._jax import compat
from shardkit.meshes.layout import path_name
from shardkit.plans.plan import Plan
from shardkit.steps.state import TrainState


class NonFiniteError(FloatingPointError):
    """`step` raises this under `nonfinite="stop"`, when the loss or a gradient is not finite.

    Attributes:
        state: the TrainState with the parameters and optimizer state from before the step.
        metrics: the metrics of the step.
    """

    def __init__(self, message: str, state: TrainState, metrics: dict[str, jax.Array]):
        super().__init__(message)
        self.state: TrainState = state
        self.metrics: dict[str, jax.Array] = metrics


class Step:
    """`step(state, batch) -> (state, metrics)`, one training step.

    The key of a state never changes, and stays outside jit: a typed key that jit returns is rebuilt in Python at every
    call, which costs more than the rest of the dispatch.

    Attributes:
        plan: how the axes of the mesh are used. None, as mesh, manual and schedule, in a step loaded from a file.
        mesh: the mesh; `manual` are the axes that were named as Manual.
        schedule: the schedule of a pipeline.
        ends: the reaction to numbers that are not finite, as `analysis.compiled(...).save` keeps it: whether the step
            raises ("stop"), and whether it raises for the loss alone, because a loss scale is "dynamic".
    """

    __name__: str = "step"  # in profiles and reports
    plan: Plan | None
    mesh: Any
    manual: Any
    schedule: Any

    def __init__(
        self,
        run: Any,
        *,
        ends: dict[str, bool],
        check: Callable[[TrainState, list[Any]], None] | None = None,
        first: Callable[[Any, tuple[Any, Any, Any]], Any] | None = None,
        plan: Plan | None = None,
        mesh: Any = None,
        manual: Any = None,
        schedule: Any = None,
    ):
        self.plan = plan
        self.mesh = mesh
        self.manual = manual
        self.schedule = schedule
        self.ends: dict[str, bool] = ends
        self._run = run
        self._check = check
        self._first = first

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """The next state, and the metrics by name."""
        args = self._arguments(state, batch, runs=True)
        expected = None
        try:
            if self._first:  # before anything runs
                expected = self._first(self._run.trace(*args), args)
                if not compat.is_tracing():  # else numbers come later
                    self._first = None
            new, metrics = self._run(*args)
        except (TypeError, ValueError):
            _check_batch(batch, self.mesh)
            raise
        if expected is not None:
            expected.compare(metrics)
        new = new._replace(key=state.key)
        # Here Python reads a number, and waits for the step to end. Only "stop" pays for that.
        if self.ends["stop"] and not metrics["finite"]:
            self._stop(new, metrics)
        return new, metrics

    def with_run(self, wrap: Callable[[Any], Any]) -> Step:
        """The same step around another form of its program: `wrap` gets the jitted function."""
        step = copy(self)
        step._run = wrap(self._run)
        return step

    def trace(self, state: TrainState, batch: Any = None) -> jax.stages.Traced:
        """The program of one call, as a jaxpr."""
        return _call_checked(self._run.trace, self._arguments(state, batch), self.mesh)

    def lower(self, state: TrainState, batch: Any = None) -> jax.stages.Lowered:
        """The program of one call, for the compiler."""
        return _call_checked(self._run.lower, self._arguments(state, batch), self.mesh)

    def _stop(self, new: TrainState, metrics: dict[str, jax.Array]) -> None:
        """Raises for a step that is not finite."""
        # A dynamic loss scale is searched by letting gradients overflow, so only the loss shows an error.
        if self.ends["dynamic"] and jnp.isfinite(metrics["loss"]):
            return
        raise NonFiniteError(
            f"step {int(new.step)}: the loss ({float(metrics['loss'])}) or a gradient is not finite. The "
            "parameters are as before the step; lower the learning rate, or pass nonfinite='skip'.",
            new,
            metrics,
        )

    def _arguments(self, state: TrainState, batch: Any, runs: bool = False) -> tuple[TrainState, jax.Array, Any]:
        """The arguments of the compiled program, after the checks of the state; `runs` if the program is to run."""
        if batch is None:
            raise TypeError(
                "step: the batch must follow the state; got none. Pass for example sk.census(step, state, batch)."
            )
        if not isinstance(state, TrainState):
            raise TypeError(
                f"step: the first argument must be the TrainState that init or the last step returned; got "
                f"{type(state).__name__}. Call step(state, batch), with state = init(params, key)."
            )
        # A call of a small step takes 50 us, and to flatten a state of 30 leaves takes 5: once for both checks.
        without_key = state._replace(key=None)
        leaves = jax.tree.leaves(without_key)
        if runs:
            _check_newest(state, leaves)
        if self._check:
            self._check(state, leaves)
        return without_key, state.key, batch


def _check_newest(state: TrainState, leaves: list[Any]) -> None:
    """Refuses a state whose memory an earlier step has taken."""
    deleted = compat.find_deleted(leaves)
    if deleted is None:
        return
    with_paths = jax.tree_util.tree_leaves_with_path(state)
    path = next(path for path, x in with_paths if x is deleted)
    raise ValueError(  # jax 0.10 on simulated devices aborts the process instead
        "step: the state must be the newest; an earlier step was passed its leaf "
        f"{path_name(path)} and donated the buffer. Pass the state that step returned, copy one that you "
        "want to keep, jax.tree.map(jnp.copy, state), or pass make_train_step(..., donate=False)."
    )


def _call_checked(call: Callable[..., Any], args: tuple[TrainState, jax.Array, Any], mesh: Any) -> Any:
    """`call(*args)`; where it fails, an error says what is wrong with the batch."""
    try:
        return call(*args)
    except (TypeError, ValueError):
        _, _, batch = args
        _check_batch(batch, mesh)
        raise


def _check_batch(batch: Any, mesh: Any) -> None:
    """After a call has failed, refuses a batch with a leaf that is no array, or on other devices: jax names no remedy.

    `mesh` is None for a step that was loaded from a file.
    """
    check_kind("step", "batch", batch, (ARRAYS,))
    if not isinstance(mesh, Mesh):
        return
    devices = set(mesh.devices.flat)
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        # jit moves an array that nobody has put on a device.
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed and x.devices() != devices:
            numbers = sorted(device.id for device in x.devices())
            raise ValueError(
                f"step: the batch must be on the devices of the mesh, {format_sizes(mesh.shape.items())}; leaf "
                f"{path_name(path)} is on devices {numbers}. Pass arrays of the host, or sk.shard(batch, mesh, "
                "plan.batch_spec(mesh))."
            )
