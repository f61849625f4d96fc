"""A training step on a mesh, traced, lowered, compiled and run once, for every law to read."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardkit._arguments.typed import Optimizer, typed
from shardkit.meshes.mesh import make_mesh
from shardkit.on_device.advice import Unintended
from shardkit.on_device.gradient import GradFn
from shardkit.on_device.means import Mean
from shardkit.on_device.pipelines import PipelineGradFn
from shardkit.pipelines.stages import fit_plan
from shardkit.plans.plan import Plan
from shardkit.plans.storage import unpadded
from shardkit.steps.builder import TrainStep, make_train_step
from shardkit.steps.examples import WrongProgramError
from shardkit.steps.optimizer import wrap_optimizer
from shardkit.steps.state import TrainState
from shardkit.testing._compare import is_float
from shardkit.testing.rows import Row

Build = Callable[[Row], TrainStep]

# The `scale` of a GradFn in a proof, times the loss scale: a power of two, which rounds nothing, and below 1, so that
# float16 does not overflow.
SCALE = 0.5


class Recorded(NamedTuple):
    """The state of a recording optimizer: that of the wrapped optimizer, and the last gradients."""

    inner: Any
    grads: Any


@typed
def recording(optimizer: Optimizer) -> Any:
    """Wraps an optimizer so that its state also holds the gradients of the last step.

    A clipped or adaptive optimizer hides a wrong factor in the gradients. Here you can read them.

    Args:
        optimizer: an optax GradientTransformation.

    Returns:
        A GradientTransformation with the same updates. Its state is `Recorded(inner, grads)`, with grads laid out as
            the plan's update.

    Example:
        >>> from shardkit.testing.program import recording
        >>> optimizer = recording(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
        >>> _, state = optimizer.update(jnp.float32(5), optimizer.init(jnp.float32(0)))
        >>> float(state.grads)
        5.0
    """
    import optax

    optimizer = wrap_optimizer(optimizer)

    def init(params: Any) -> Recorded:
        return Recorded(optimizer.init(params), jax.tree.map(jnp.zeros_like, params))

    @functools.wraps(optimizer.update)
    def update(grads: Any, state: Recorded, params: Any = None, **extra: Any) -> tuple[Any, Recorded]:
        updates, inner = optimizer.update(grads, state.inner, params, **extra)
        never = jnp.zeros((), bool)

        def replace_grad(new: Any, old: Any) -> Any:
            # The old gradients are read, without effect, because jit does not donate an unused argument.
            return jnp.where(never, old, new)

        recorded = jax.tree.map(replace_grad, grads, state.grads)
        return updates, Recorded(inner, recorded)

    return optax.GradientTransformationExtraArgs(init, update)


class StepResult(NamedTuple):
    """The results of one step, on the host, in original shapes."""

    metrics: dict[str, Any]  # by name
    # the gradients that the optimizer got; None if the step records none, or if it is not the last of a call
    grads: Any
    params: Any  # the parameters after it; None if it is not the last of a call
    carried: Any  # the carried state after it; None if there is none, or it is not the last of a call
    compiled: int  # programs that the backend compiled during the call


class RunResult(NamedTuple):
    """All steps of a run, and the state and the metrics of the last, on the devices."""

    steps: tuple[StepResult, ...]
    state: TrainState
    metrics: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Program:
    """The step of a row, built, traced, lowered, compiled and run at most once, each on first use.

    Attributes:
        row: the mesh, the plan and the options.
        mesh: the row's mesh.
        plan: its plan, with the stages of the GradFn if it is a pipeline.
        init: as of `make_train_step`.
        step: as of `make_train_step`.
        params: pytree of arrays.
        batches: one global batch for each step.
        key: the key of the run.
        carried: the first carried state, or a function of the parameters; None for none.
        checked: builds the same step as outside of a proof, with the checks of its first call; None for a foreign step.
    """

    row: Row
    mesh: Mesh
    plan: Plan
    init: Callable[..., TrainState]
    step: Any
    params: Any
    batches: Sequence[Any]
    key: jax.Array
    carried: Any = None
    checked: Callable[[], TrainStep] | None = None

    @classmethod
    def of(
        cls,
        row: Row,
        step: GradFn | Build,
        optimizer: Any,
        params: Any,
        batches: Sequence[Any],
        key: jax.Array,
        mesh: Mesh | None = None,
        carry: Any = None,
        carried: Any = None,
    ) -> Program:
        """Builds the program of a row.

        Args:
            row: what to run; its grad_fn and optimizer override the arguments.
            step: a GradFn, or a function from the row to a TrainStep; the row's optimizer records gradients.
            optimizer: an optax GradientTransformation.
            params: pytree of arrays.
            batches: one global batch for each step.
            key: the key of the run.
            mesh: the row's mesh; by default over the row's devices, or over the first devices.
            carry, carried: as for `make_train_step` and its `init`.

        Raises:
            TypeError: a step that is neither of these.
            ValueError: a mesh of more devices than there are, or steps per call that do not divide the batches.
        """
        if row.steps is not None and (row.steps < 1 or len(batches) % row.steps):
            raise ValueError(
                f"prove: steps must be 1 or more and divide the number of batches; got steps={row.steps} and "
                f"{len(batches)} batches. Pass as many batches as the calls have steps."
            )
        if row.optimizer is not None:
            optimizer = row.optimizer
        row = row._replace(optimizer=recording(optimizer))
        if row.grad_fn is None:
            row = row._replace(grad_fn=_as_grad_fn(step))
        if mesh is None:
            mesh = make_row_mesh(row)
        if row.grad_fn is None:  # the step is a function that builds a TrainStep
            build: Any = step
            train_step = build(row)
            return cls(row, mesh, row.plan, train_step.init, train_step.step, params, batches, key, carried)
        grad_fn = _rescale(row.grad_fn)
        row = row._replace(grad_fn=grad_fn)
        build_checked = partial(
            make_train_step,
            grad_fn,
            row.optimizer,
            mesh=mesh,
            plan=row.plan,
            carry=carry,
            accumulate=row.accumulate,
            precision=row.precision,
            nonfinite=cast(Any, row.nonfinite),
            deterministic=row.deterministic,
            manual=row.manual,
            steps=row.steps,
        )
        # A proof compares numbers; what the first call would refuse explains them.
        train_step = build_checked(check=False)
        plan = fit_plan(row.plan, grad_fn, row.deterministic or row.accumulate)
        return cls(row, mesh, plan, train_step.init, train_step.step, params, batches, key, carried, build_checked)

    def refused(self) -> str:
        """Says why the first call of the step would be refused outside of a proof, or ""."""
        if self.checked is None:
            return ""
        # A state of its own, because the run has donated the first one.
        state = self.init(self.params, self.key, **self.init_options)
        try:
            self.checked().step(state, self.calls[0])
        except WrongProgramError as error:
            return f"The first call says: {str(error).removeprefix('step: ')}"
        return ""

    @cached_property
    def start(self) -> TrainState:
        """The state before the first step; the first step donates it."""
        return self.init(self.params, self.key, **self.init_options)

    @property
    def init_options(self) -> dict[str, Any]:
        """The options of `init` beside parameters and key; a foreign step may know no carried state."""
        if self.carried is None:
            return {}
        return {"carried": self.carried}

    @cached_property
    def calls(self) -> Sequence[Any]:
        """The batch of each call of the step."""
        if self.row.steps is None:
            return self.batches
        calls = []
        for first in range(0, len(self.batches), self.row.steps):
            # Of steps=2 and four batches [8, 4]: two calls with [2, 8, 4].
            batches = self.batches[first : first + self.row.steps]
            calls.append(jax.tree.map(_stack, *batches))
        return calls

    @cached_property
    def shapes(self) -> tuple[TrainState, Any]:
        """The arguments of a step as shapes, dtypes and layouts."""
        return jax.tree.map(_describe_array, (self.start, self.calls[0]))

    @cached_property
    def traced(self) -> Any:
        """The traced step (`jax.stages.Traced`)."""
        return self.step.trace(self.start, self.calls[0])

    @cached_property
    def lowered(self) -> Any:
        """The lowered step (`jax.stages.Lowered`)."""
        return self.traced.lower()

    @cached_property
    def compiled(self) -> Any:
        """The compiled step (`jax.stages.Compiled`), which the run uses too."""
        return self.lowered.compile()

    @cached_property
    def ran(self) -> RunResult:
        """A step for each batch."""
        # The first step donates the first state. These two need its layouts, and are computed before.
        _ = self.shapes
        _ = self.compiled
        state = self.start
        metrics: Any = {}
        results: list[StepResult] = []
        for batch in self.calls:
            with warnings.catch_warnings(), _CompileCounter() as compiles:
                warnings.simplefilter("ignore", Unintended)  # the proof says more, or an axis is idle on purpose
                state, metrics = self.step(state, batch)
                jax.block_until_ready(metrics)
            results += self._fetch_results(state, metrics, compiles.count)
        return RunResult(tuple(results), state, metrics)

    def _fetch_results(self, state: TrainState, metrics: Any, compiled: int) -> list[StepResult]:
        """The results of each step of one call; parameters and gradients are those after its last step."""
        grads = jax.device_get(unpadded(_find_recorded(state.opt_state)))
        params, carried = jax.device_get(unpadded((state.params, state.carried)))
        host_metrics = jax.device_get(metrics)
        if self.row.steps is None:
            return [StepResult(host_metrics, grads, params, carried, compiled)]
        results = []
        for step in range(self.row.steps):
            # A call stacks the metrics of its steps: each leaf is [steps, ...].
            step_metrics = jax.tree.map(operator.itemgetter(step), host_metrics)
            results.append(StepResult(step_metrics, None, None, None, compiled))
        results[-1] = results[-1]._replace(grads=grads, params=params, carried=carried)
        return results


def make_row_mesh(row: Row) -> Mesh:
    """The mesh of a row, over its devices, or over the first devices."""
    sizes: dict[str, Any] = dict(row.mesh)
    devices = row.devices
    if not devices:
        count = math.prod(row.mesh.values())
        devices = jax.devices()[:count]
    return make_mesh(devices, axis_types=row.axis_types, **sizes)


def _rescale(grad_fn: GradFn) -> GradFn:
    """The GradFn called with another scale, which is divided out again: ignoring it changes the result."""
    # For example a gradient of 3: a GradFn that heeds its scale of 0.5 returns 1.5, which is 3 again below. One that
    # ignores it returns 3, and the 6 below differs from the reference.
    # A pipeline is known by its type, which a plain function around it would hide.
    if isinstance(grad_fn, PipelineGradFn):
        return replace(grad_fn, function=_rescale(grad_fn.function))

    def unscale(g: Any) -> Any:
        if is_float(g):
            return g / SCALE
        return g

    @functools.wraps(grad_fn)
    def rescaled(
        params: Any, batch: Any, keys: jax.Array, *, scale: Any = 1, **carried: Any
    ) -> tuple[Mean, Mapping[str, Any], Any]:
        loss, aux, grads = grad_fn(params, batch, keys, scale=SCALE * scale, **carried)
        return loss, aux, jax.tree.map(unscale, grads)

    return rescaled


class _CompileCounter:
    """Counts the programs that the backend compiles in a `with` block."""

    def __enter__(self) -> _CompileCounter:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)


def _find_recorded(opt_state: Any) -> Any:
    """The gradients that a recording optimizer kept; None if none is in the state."""

    def is_recorded(x: Any) -> bool:
        return isinstance(x, Recorded)

    for node in jax.tree.leaves(opt_state, is_leaf=is_recorded):
        if is_recorded(node):
            return node.grads
    return None


def _as_grad_fn(step: Any) -> GradFn | None:
    """The step if it is a GradFn; None if it builds a step from a row."""
    if callable(step):
        parameters = inspect.signature(step).parameters
        if "scale" in parameters:
            return step
        required = [p for p in parameters.values() if p.default is p.empty]
        if len(required) == 1:
            return None
    raise TypeError(
        f"prove: step must be a GradFn, from value_and_grad(loss_fn), or a function of a Row that returns a TrainStep; "
        f"got {getattr(step, '__name__', step)!r}. Wrap a loss in value_and_grad."
    )


def _stack(*leaves: Any) -> Any:
    if isinstance(leaves[0], jax.Array):
        return jnp.stack(leaves)
    return np.stack(leaves)


def _describe_array(x: Any) -> Any:
    if isinstance(x, jax.Array):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
