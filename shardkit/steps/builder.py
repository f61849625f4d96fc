"""The builder of training steps: a GradFn, an optax optimizer, a mesh and a plan become `init` and `step`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import Axis, at_least, mesh_in_context
from shardkit._arguments.typed import Optimizer, typed
from shardkit.meshes.layout import path_name
from shardkit.on_device.gradient import GradFn
from shardkit.on_device.groups import Groups
from shardkit.on_device.microbatches import Microbatches
from shardkit.on_device.pipelines import PipelineGradFn
from shardkit.on_device.precision import Precision, precision_of
from shardkit.pipelines.stages import fit_plan
from shardkit.plans.axis_types import auto_mesh, wrap_for_explicit_axes
from shardkit.plans.manual import JitByLayouts, manual_axes
from shardkit.plans.plan import Plan
from shardkit.steps.arguments import check_function
from shardkit.steps.carry import reads_carried
from shardkit.steps.first_call import FirstCall
from shardkit.steps.init import Init
from shardkit.steps.optimizer import wrap_optimizer
from shardkit.steps.state import TrainState
from shardkit.steps.state_check import StateCheck
from shardkit.steps.step import Step
from shardkit.steps.train import TrainProgram


class TrainStep(NamedTuple):
    """The two functions of a training run.

    Attributes:
        init: `init(params, key, carried=None) -> TrainState`. Pass `params` as a pytree, or as a function of the key
            that returns one. The function runs inside jit, so no device ever holds the whole model. A callable pytree
            with leaves, such as a module, counts as a pytree. `carried` is a pytree, or a function of the parameters.
            `init.abstract(params, carried=None)` makes no array and takes any mesh, even an AbstractMesh.
        step: `step(state, batch) -> (state, metrics)`. It donates `state`, unless `donate=False`. Metrics are float32
            scalars by name: "loss", "weight" (the divisor of the loss; for a sum of means the largest one), and the
            auxiliary means, as arrays or trees if the loss returns these.
    """

    init: Init
    step: Step


@typed
def make_train_step(
    grad_fn: GradFn,
    optimizer: Optimizer,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    plan: Plan,
    accumulate: int = 1,
    precision: Precision | str | None = None,
    nonfinite: Literal["keep", "skip", "stop"] = "keep",
    carry: Callable[..., Any] | None = None,
    deterministic: int | None = None,
    manual: Axis | None = None,
    steps: int | None = None,
    donate: bool = True,
    examples: Literal["apart", "mixed"] = "apart",
    check: bool = True,
) -> TrainStep:
    """Builds a training step from a gradient function and an optimizer. You see every collective it sends.

    You get the loss and the gradients of the whole batch: the sum of all totals divided by the sum of all weights, on
    every mesh and with every accumulation. The optimizer runs on global arrays. An optax transformation works
    unmodified if it needs only gradients, its state, the parameters and the loss; the step refuses others.

    Args:
        grad_fn: the computation of one device, from `value_and_grad(loss_fn)`.
        optimizer: an optax GradientTransformation. It gets `value=loss` if it takes a value.
        mesh: the mesh; by default the mesh of `jax.set_mesh`.
        plan: how the step uses the mesh axes, for example `dp("data")`.
        accumulate: microbatches per step. The step splits the batch into this many parts, runs them one after the
            other, and reduces the gradient once. The effective batch does not change. You get a warning with a
            pipeline, because more microbatches in its schedule do the same and it fills and drains only once. You also
            get one if the loss sends over an axis of the batch, because it then mixes the examples of one microbatch
            only.
        precision: a Precision, or "no", "bf16", "fp16".
        nonfinite: the reaction to a NaN or infinity in loss or gradient. "keep" takes the step anyway. "skip" leaves
            parameters, optimizer and carried state unchanged on all devices. "stop" does the same and raises. With a
            loss scale such a step is always skipped, and with a dynamic one "stop" raises only if the loss itself is
            not finite. "skip" and "stop" add the metric "finite"; "stop" waits for each step to end.
        carry: a function `carry(carried, metrics, params) -> carried`. It runs once per step and updates the state you
            passed to `init(params, key, carried=...)`. It gets the float32 metrics and the new parameters, as
            global arrays. A loss with a fourth argument reads this state. None: the state never changes.
        deterministic: G, a number of groups. The step then gives the same bits on every number of devices that divides
            G, under dp, zero1 and whole fsdp. It cuts the batch into G parts, computes them one by one, and sums them
            in a fixed order. This holds for one kind of device, one version of jax and one dtype. The loss must not
            depend on the mesh, and the optimizer and `carry` must not multiply matrices or sum over the elements of
            split leaves.
        manual: the Manual mesh axes of the step, with all axes of the plan among them. None: all axes. XLA's
            partitioner handles the other axes, as in `jit`: over these, parameters keep the layout you pass to `init`,
            and your loss may use `jax.lax.with_sharding_constraint`.
        steps: the number of steps in one call, as a scan. Add a leading dim for the step to every array of the batch;
            every metric has one too. Python then dispatches once for all steps.
        donate: whether the new state takes the memory of the old state, which you cannot use afterwards. With False,
            memory holds both, and you may use arrays of one state in another.
        examples: "apart": the loss is a sum over examples, and so the same on every mesh. The first call of the step
            refuses a loss that mixes examples, such as negatives or statistics of the batch without a collective. Where
            its trace does not tell, it compares the loss of two devices' examples with the losses of each, also of
            planted numbers such as NaN; if the loss has a while loop, of the first batch alone. It warns of metrics
            that mix examples. If the loss sends over an axis of the batch, it computes the loss of the whole batch on
            one device too, and warns if that is another number. It does the same if a stage of a pipeline asks for the
            index of its device. Not checked are a pipeline of more than 1 GiB, and a loss that calls Python, as by
            `jax.pure_callback`, `jax.experimental.io_callback` or `jax.debug.print`. Nor is a loss that sends and draws
            random numbers by the index of the device, gets microbatches, runs in several processes, or needs more than
            1 GiB for the whole batch. If the plan splits the tokens too, as `cp`, the same holds of tokens: the first
            call refuses attention over a device's own tokens, positions that begin with 0 on each device, or a shift of
            labels within a device, and computes a loss that sends tokens, or asks where its own stand, on one device.
            It looks at losses: what a `custom_vjp` mixes in its backward pass alone is found by
            `testing.assert_same_training`. "mixed": the loss may mix the examples and tokens of one device (with
            `accumulate`, of one microbatch), as in a norm over the batch of each device. The loss of the step is then
            the mean over the devices.
        check: whether the first call also refuses a program if `sk.lint` finds wrong numbers or a deadlock in it, such
            as one dropout mask for the columns of all devices. False leaves out all checks of the first call.

    Returns:
        TrainStep(init, step). `step` calls one compiled program; `step.lower(state, batch)` and `step.trace` show it.

    Raises:
        ValueError: an axis missing from the mesh or from `manual`, an accumulation below 1, an unknown name, no `pp`.
            At trace time: a batch that the batch axes times `accumulate` do not divide, a weight computed only from
            scalars of the batch, missing or unused carried state, or a `carry` that changes its tree, shapes or
            dtypes.
        ValueError: with `deterministic`, anything that depends on the mesh: other strategies and algorithms, a loss
            that communicates, an optimizer or `carry` that multiplies matrices or sums over split leaves. Also a
            batch that G does not divide.
        ValueError: from the first call of `step`, for a loss that mixes examples, and for a finding of `sk.lint` that
            means wrong numbers, with its source line.
        ValueError: from `step`, for a state you already passed to a step that donates it, a state on another mesh,
            or a state of another plan, with other layouts, padding, order or residuals.
        TypeError: from `step`, for a state of another type, and for an optax optimizer that needs more
            arguments, as line searches do, or returns updates that do not look like the gradients. If you wrote the
            optimizer, you see its errors unchanged.
        FloatingPointError: from `step`, under `nonfinite="stop"`: a NonFiniteError, with `state` and `metrics`.

    Cost: the cost of the plan, one all_reduce of 8 bytes for the loss and for each auxiliary mean (for each element, if
        it is an array), and what the compiler adds for a `carry` that mixes shards. With `deterministic`
        the same bytes if each device has 1, 2, 4, .. groups, and log2 of this number more gradients in memory.

    Example:
        >>> loss_fn = lambda params, batch, keys: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> grad_fn = sk.value_and_grad(loss_fn)
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.5), mesh=mesh, plan=sk.dp("data"))
        >>> state = init({"w": jnp.zeros(2)}, jax.random.key(0))
        >>> state, metrics = step(state, {"x": jnp.eye(2), "y": jnp.ones(2)})
        >>> print(metrics["loss"], state.params["w"])
        1.0 [0.5 0.5]
        >>> average = lambda old, metrics, params: optax.incremental_update(params, old, 0.5)
        >>> init, step = sk.make_train_step(grad_fn, optax.sgd(0.5), mesh=mesh, plan=sk.dp("data"), carry=average)
        >>> state = init({"w": jnp.zeros(2)}, jax.random.key(0), carried=lambda params: params)
        >>> print(step(state, {"x": jnp.eye(2), "y": jnp.ones(2)})[0].carried["w"])
        [0.25 0.25]
    """
    mesh = mesh_in_context("make_train_step", mesh)
    check_function("make_train_step", grad_fn)
    at_least("make_train_step", 1, accumulate=accumulate, steps=1 if steps is None else steps)
    if steps and nonfinite == "stop":
        raise ValueError(
            f"make_train_step: nonfinite='stop' checks every step, but steps={steps} returns after {steps}. Pass "
            "nonfinite='skip', and check the metric 'finite'."
        )
    # Before any layout is read: the GradFn of a pipeline says which layers a device has, and with several microbatches
    # zero1 scatters a gradient at the end of the step instead of in its layer.
    plan = fit_plan(plan, grad_fn, deterministic or accumulate)
    plan.check(mesh)
    policy = precision_of(precision)
    axes = manual_axes("make_train_step", manual, plan, mesh)
    all_manual = set(axes) == set(mesh.axis_names)
    if accumulate > 1 and isinstance(grad_fn, PipelineGradFn):
        warnings.warn(
            f"make_train_step: accumulate={accumulate} fills and drains the pipeline {accumulate} times per step. Give "
            f"the schedule {accumulate} times as many microbatches instead.",
            stacklevel=3,  # the caller's line, above `typed`
        )
    reads = reads_carried(grad_fn)
    parts: Microbatches | Groups = Microbatches(accumulate)
    if deterministic is not None:
        parts = Groups(deterministic)
    program = TrainProgram(
        grad_fn,
        wrap_optimizer(optimizer),
        auto_mesh(mesh),
        plan,
        axes,
        policy,
        microbatches=parts,
        watches=nonfinite != "keep" or policy.loss_scale is not None,
        reads=reads,
        carry=carry,
        in_loop=steps is not None,
    )
    _check_deterministic(program, accumulate, manual)

    def compile_for(plan: Plan, layouts: Any = None) -> Any:
        """The jitted step for a plan; the new state has these layouts, if they are passed."""
        for_plan = dataclasses.replace(program, plan=plan)
        run: Callable[..., Any] = for_plan
        if steps is not None:
            run = partial(_run_in_sequence, for_plan, steps)
        # The state alone: the caller may use the batch again.
        donated = (0,) if donate else ()
        out = None
        if layouts is not None:
            out = (layouts, NamedSharding(mesh, PartitionSpec()))
        return jax.jit(wrap_for_explicit_axes(run, mesh), donate_argnums=donated, out_shardings=out)

    # If the partitioner splits parameters too, the plan must know how, and only the first state tells. Otherwise the
    # plan knows all layouts, and one jit serves every state.
    if program.mesh is mesh and all_manual:
        run = compile_for(plan)
    else:
        run = JitByLayouts(compile_for, plan, axes, lambda state: state.params)
    first_call = None
    if check:
        first_call = FirstCall(program, mesh, steps, mixed=examples == "mixed")
    step = Step(
        run,
        ends={"stop": nonfinite == "stop", "dynamic": policy.loss_scale == "dynamic"},
        check=StateCheck(plan, mesh) if all_manual else None,  # else the layouts are the caller's
        first=first_call,
        plan=plan,
        mesh=program.mesh,
        manual=manual,
        schedule=getattr(grad_fn, "schedule", None),
    )
    return TrainStep(Init(program.optimizer, policy, mesh, plan, axes, reads, carry), step)


def _run_in_sequence(program: TrainProgram, steps: int, state: TrainState, key: jax.Array, batches: Any) -> Any:
    """A number of steps, over batches whose arrays have the step as dim 0."""
    for path, x in jax.tree_util.tree_leaves_with_path(batches):
        if jnp.shape(x)[:1] != (steps,):
            raise ValueError(
                f"step: every array of the batch must have dim 0 of size steps={steps}; leaf {path_name(path)} has "
                f"shape {jnp.shape(x)}. Stack the batches of {steps} steps."
            )

    def run_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        # All steps get the run's key: the program folds the number of the step into it.
        return program(state, key, batch)

    return jax.lax.scan(run_step, state, batches)


def _check_deterministic(program: TrainProgram, accumulate: int, manual: Any) -> None:
    """Refuses options and plans that cannot give the same bits on every mesh."""
    groups = program.microbatches
    if not isinstance(groups, Groups):
        return
    if set(program.manual) != set(program.mesh.axis_names):
        raise ValueError(
            f"make_train_step: deterministic={groups.number} needs every axis of the mesh to be "
            f"Manual; got {manual=}. Leave manual out, or deterministic."
        )
    groups.check(accumulate, program.plan, program.mesh, program.policy.reduce)
