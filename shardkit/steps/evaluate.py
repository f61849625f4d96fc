"""Evaluation: a loss function, a mesh and a plan become one function of parameters and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import Axis, mesh_in_context
from shardkit._arguments.typed import ARRAYS, check_kind, typed
from shardkit._jax import compat
from shardkit.on_device.batch import batch_specs
from shardkit.on_device.gradient import LossFn, takes_carried
from shardkit.on_device.local_step import local_means, note_split_leaf
from shardkit.on_device.loss_results import terms_by_name
from shardkit.on_device.mean_sums import global_means
from shardkit.on_device.metrics import cast_metrics, metrics_of
from shardkit.on_device.pipelines import Staged
from shardkit.on_device.precision import Precision, precision_of
from shardkit.on_device.seam import enter
from shardkit.pipelines.stages import fit_plan
from shardkit.plans.axis_types import auto_mesh, change_axis_types, set_auto_mesh, wrap_for_explicit_axes
from shardkit.plans.manual import JitByLayouts, manual_axes, record_automatic_splits
from shardkit.plans.plan import Placement, Plan
from shardkit.plans.storage import check_storage, pad_leaves
from shardkit.steps.arguments import check_function
from shardkit.steps.carry import Carried
from shardkit.steps.examples import Examples, read_traces
from shardkit.steps.first_call import warn_of_metrics
from shardkit.steps.mixed_examples import Mixed, find_mixed
from shardkit.steps.state import TrainState, call_initializer, is_initializer
from shardkit.steps.state_layouts import attach_shardings, shardings

_REPLICATED = PartitionSpec()
_CARRIED_MISSING = (
    "evaluate: the loss takes carried state, and there is none. Pass evaluate(params, batch, state.carried)."
)
_CARRIED_UNUSED = (
    "evaluate: the loss takes no carried state; got some. Write loss_fn(params, batch, keys, carried), or pass "
    "evaluate(params, batch)."
)


@dataclass(frozen=True, eq=False)
class EvalProgram:
    """`program(params, batch, carried) -> metrics`, one evaluation on global arrays, for jit."""

    loss_fn: LossFn  # what one device computes
    mesh: Mesh  # the mesh, with Auto axes
    plan: Plan  # how its axes are used
    manual: tuple[str, ...]  # those that are Manual inside of the evaluation
    policy: Precision  # the dtypes
    reads: bool  # whether the loss takes carried state
    local: bool  # whether the loss is traced as on one device
    __name__ = "evaluate"  # of the program, in profiles and in jax's own messages

    def __call__(self, params: Any, batch: Any, carried: Any = None) -> dict[str, Any]:
        placement = self.plan.placement(params, self.mesh)
        check_storage("evaluate: the parameters", params, placement.at_rest, self.mesh)
        if self.reads and carried is None:
            raise ValueError(_CARRIED_MISSING)
        if carried is not None and not self.reads:
            raise ValueError(_CARRIED_UNUSED)
        state = Carried("evaluate", carried, params, placement)

        # As in a step: the parameters enter, the loss computes sums of this device's examples, and totals and weights
        # are summed over devices after the loss. A division inside the loss would be by the weight of one device.
        def on_device(params_at_rest: Any, carried: Any, batch: Any) -> dict[str, Any]:
            weights = enter(params_at_rest, placement, self.policy)
            compute = self._bind_loss(state, carried, batch, placement)
            with note_split_leaf(compute, self.loss_fn, params, placement, self.policy.compute):
                means = compute(weights)
            metrics = metrics_of(global_means(means, self.plan.batch_axes, self.plan.stage_axes))
            return cast_metrics(metrics, self.policy.output)

        batch_spec = batch_specs(batch, placement.batch, self.mesh, 1, "evaluate")
        on_mesh = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(placement.rest, state.specs, batch_spec),
            out_specs=_REPLICATED,
            axis_names=set(self.manual),
        )
        return on_mesh(params, state.tree, batch)

    def split_examples(self, params: Any, carried: Any) -> Examples:
        """How an evaluation splits its examples, and the terms of the loss and of each metric."""
        placement = self.plan.placement(params, self.mesh)
        state = Carried("evaluate", carried, params, placement)

        def compute_terms(params_at_rest: Any, carried: Any, batch: Any, keys: None) -> dict[str, tuple[Any, ...]]:
            weights = enter(params_at_rest, placement, self.policy)
            compute = self._bind_loss(state, carried, batch, placement)
            return terms_by_name(compute(weights))

        return Examples(placement, state.tree, state.specs, self.manual, 1, compute_terms)

    def _bind_loss(
        self, state: Carried, carried: Any, batch: Any, placement: Placement
    ) -> Callable[[Any], dict[str, Any]]:
        """The means of this device's examples, as a function of the weights."""
        entered = [state.enter(carried, self.policy)] if self.reads else []

        def compute_means(weights: Any) -> dict[str, Any]:
            return local_means(self.loss_fn, weights, batch, placement, self.policy, *entered, local=self.local)

        return compute_means


class Evaluate:
    """`evaluate(params, batch, carried=None) -> metrics`, one evaluation; `make_eval_step` returns one."""

    __name__ = "evaluate"  # in profiles and reports

    def __init__(self, program: EvalProgram, mesh: Any):
        self._program = program
        self._mesh = mesh  # the caller's mesh, perhaps with Explicit axes
        self._is_first = True
        self._run: Any
        if self._has_automatic_axes:
            self._run = JitByLayouts(self._compile_for, program.plan, program.manual, lambda params: params)
        else:
            self._run = self._compile_for(program.plan)

    def __call__(self, params: Any, batch: Any, carried: Any = None) -> dict[str, Any]:
        """The metrics by name."""
        if isinstance(params, TrainState):
            raise TypeError("evaluate: params must be the parameters; got a TrainState. Pass state.params.")
        try:
            metrics = self._run(params, batch, carried)
            self._check_first(params, batch, carried)
            return metrics
        except (TypeError, ValueError):  # jax's names no argument
            check_kind("evaluate", "params", params, (ARRAYS,))
            check_kind("evaluate", "batch", batch, (ARRAYS,))
            raise

    def trace(self, params: Any, batch: Any, carried: Any = None) -> jax.stages.Traced:
        """The program of one call, as a jaxpr."""
        return self._run.trace(params, batch, carried)

    def lower(self, params: Any, batch: Any, carried: Any = None) -> jax.stages.Lowered:
        """The program of one call, for the compiler."""
        return self._run.lower(params, batch, carried)

    def abstract(self, params: Any) -> Any:
        """The shapes and layouts of the parameters, for `runtime.load_params`."""
        mesh = self._program.mesh
        if is_initializer(params):
            params = jax.eval_shape(partial(call_initializer, params), jax.random.key(0))
        plan = record_automatic_splits(self._program.plan, params, self._program.manual)
        at_rest = plan.placement(params, mesh).at_rest
        shapes = jax.eval_shape(lambda params: pad_leaves(params, at_rest, mesh), params)
        return change_axis_types(attach_shardings(shapes, shardings(mesh, at_rest)), self._mesh)

    @property
    def _has_automatic_axes(self) -> bool:
        """Whether some axes are left to the partitioner."""
        return set(self._program.manual) != set(self._mesh.axis_names)

    def _compile_for(self, plan: Plan, layouts: Any = None) -> Any:
        """The jitted evaluation for a plan; the metrics are replicated, however the parameters are laid out."""
        program = replace(self._program, plan=plan)
        out = None
        if self._program.mesh is not self._mesh:
            out = NamedSharding(self._mesh, _REPLICATED)
        return jax.jit(wrap_for_explicit_axes(program, self._mesh), out_shardings=out)

    def _check_first(self, params: Any, batch: Any, carried: Any) -> None:
        """Warns at the first call with numbers of a loss or metrics in which examples meet."""
        # Inside another jit there are no numbers to compare yet.
        if self._is_first and not compat.is_tracing():
            self._is_first = False
            warn_of_metrics("evaluate", self._find_mixed(params, batch, carried), stacklevel=4)

    def _find_mixed(self, params: Any, batch: Any, carried: Any) -> list[Mixed]:
        """The loss and the metrics in which examples or tokens meet."""
        program = self._program
        if isinstance(program.loss_fn, Staged):
            return []
        mixed: list[Mixed] = []
        try:
            with set_auto_mesh(self._mesh):
                if program.mesh is not self._mesh:
                    params, batch, carried = change_axis_types((params, batch, carried), program.mesh)
                if self._has_automatic_axes:
                    program = replace(program, plan=record_automatic_splits(program.plan, params, program.manual))
                for examples in program.split_examples(params, carried).split_along_dims():
                    readings = read_traces(examples, params, batch, key=None)
                    mixed += find_mixed(examples, readings, params, batch, key=None)
        except Exception:
            # The metrics are computed already, and only a warning could follow. A loss that is written for a fixed
            # number of examples on each device cannot be traced for twice as many, or there may be too little memory.
            return []
        return mixed


@typed
def make_eval_step(
    loss_fn: LossFn,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    plan: Plan,
    precision: Precision | str | None = None,
    manual: Axis | None = None,
    local: bool = False,
) -> Evaluate:
    """Builds `evaluate(params, batch, carried=None) -> metrics`: the loss of the whole batch, without dropout.

    Args:
        loss_fn: as for `value_and_grad`; it is called with `keys=None`.
        mesh: the mesh; by default the mesh of `jax.set_mesh`.
        plan: the plan of the parameters, as in training.
        precision: as for `make_train_step`.
        manual: as for `make_train_step`.
        local: as for `value_and_grad`.

    Returns:
        An Evaluate. Its metrics are "loss", "weight" and the auxiliary means, float32. Pass `state.carried` if the loss
            takes carried state. Its first call warns of a loss or a metric that mixes examples, such as the root of
            their mean, because each device computes it of its own examples. It does not check a loss that calls Python
            or sends over an axis of the batch.

    Raises:
        ValueError: as `make_train_step`. From `evaluate`, for parameters that another plan pads or stores in the order
            of its stages (pass `unpadded(params)`), and for carried state that is missing or that
            the loss does not take.

    Cost: an all_gather of `rest - seen` for each leaf, and one all_reduce of 8 bytes per mean.

    Example:
        >>> loss_fn = lambda params, batch, keys: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=sk.dp("data"))
        >>> metrics = evaluate({"w": jnp.zeros(2)}, {"x": jnp.eye(2), "y": jnp.ones(2)})
        >>> print(metrics["loss"])
        1.0
    """
    mesh = mesh_in_context("make_eval_step", mesh)
    check_function("make_eval_step", loss_fn)
    plan = fit_plan(plan, loss_fn)
    plan.check(mesh)
    policy = precision_of(precision)
    axes = manual_axes("make_eval_step", manual, plan, mesh)
    program = EvalProgram(loss_fn, auto_mesh(mesh), plan, axes, policy, takes_carried(loss_fn), local)
    return Evaluate(program, mesh)
