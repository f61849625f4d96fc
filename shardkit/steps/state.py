"""A training run's state: its fields, and how the first state is made.

Worked example: one leaf w[8, 6] under `zero1("data")` of 4 devices, by adam. The parameter is replicated, w[8, 6] on
every device. Its mirrors in the optimizer's state are split: mu[2, 6] and nu[2, 6]. The count, the step and the key
mirror nothing, and are replicated. The gradient arrives as [2, 6], the optimizer updates the device's 2 rows of w, and
the step gathers them again. `state_layouts.py` says which leaf mirrors which parameter, `optimizer.py` updates them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import format_sizes
from shardkit.meshes.layout import path_name
from shardkit.on_device.handles import cast_floating
from shardkit.on_device.precision import LossScale, Precision, first_loss_scale
from shardkit.on_device.residuals import residual_shapes, zero_residuals
from shardkit.plans.plan import Placement, Plan
from shardkit.plans.storage import pad_leaves, unpadded
from shardkit.steps.optimizer import init_opt_state
from shardkit.steps.state_layouts import attach_shardings, match_storage, shardings

_REPLICATED = PartitionSpec()


class TrainState(NamedTuple):
    """Everything a training run needs for its next step: you save it, and pass it to `step`.

    Attributes:
        step: int32 scalar, steps taken.
        params: the parameters, each leaf laid out as the plan's `rest`; `unpadded` returns padded leaves, and stacks in
            the order of stages, in their original form.
        opt_state: the optimizer's state; leaves that mirror a parameter are laid out as the plan's `update`.
        key: typed key. Every step derives the keys of its examples from it; it never changes.
        loss_scale: the float16 loss scale, or None.
        residuals: the parts of the gradients that compressed reductions with `feedback` have left out so far, or None.
            For each parameter float32 `[R, *shape]`, with a row for each device in the sum of its gradient, in units of
            the mean gradient.
        carried: state your loss reads and the step updates without a gradient, or None. Leaves that mirror a
            parameter are laid out as the plan's `rest`, all others are replicated.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: Any
    loss_scale: LossScale | None = None
    residuals: Any = None
    carried: Any = None


def make_first_state(
    params: Any, key: jax.Array, optimizer: Any, mesh: Mesh, plan: Plan, policy: Precision
) -> TrainState:
    """The state that a run begins with, without carried state; `params` may be a function of the key."""
    if isinstance(mesh, AbstractMesh):
        sizes = format_sizes(mesh.shape.items())
        raise ValueError(
            f"init: the mesh must have devices; got an abstract mesh of {sizes}. Call init.abstract(params), or "
            f"make the step over sk.make_mesh({sizes})."
        )
    dtype = policy.master or policy.param
    is_from_key = is_initializer(params)
    if is_from_key:
        shapes = check_trainable(jax.eval_shape(partial(call_initializer, params), key))
        shapes = jax.eval_shape(partial(cast_floating, dtype=dtype), shapes)
        placement = plan.placement(shapes, mesh)
        params = _initialize(params, key, placement, dtype)
    else:
        params = jax.tree.map(strip_weak_type, check_trainable(unpadded(params)))
        params = cast_floating(params, dtype)
        placement = plan.placement(params, mesh)
        params = _move_to_rest(params, placement)

    def make_opt_state(params: Any) -> Any:
        pinned = jax.lax.with_sharding_constraint(unpadded(params), shardings(mesh, placement.in_update))
        # Copied: the state may have a parameter itself, whose buffer must not be donated twice.
        return jax.tree.map(jnp.copy, init_opt_state(optimizer, policy, pinned))

    opt_storage = match_storage(jax.eval_shape(make_opt_state, params), params, placement.in_update)

    # The optimizer's state is made inside jit, in its layout. Outside of jit, its zeros would be whole on one device:
    # twice the size of the model for adam. All of the state is made by one program, to compile once.
    def init(params: Any, key: jax.Array) -> Any:
        copies = None
        if not is_from_key:
            # device_put may return the caller's own buffers, and the step donates the state's.
            copies = jax.tree.map(jnp.copy, params)
        opt_state = pad_leaves(make_opt_state(params), opt_storage, mesh)
        return opt_state, copies, (jnp.int32(0), jnp.copy(key), first_loss_scale(policy))

    copy_layouts = None if is_from_key else shardings(mesh, placement.at_rest)
    layouts = (shardings(mesh, opt_storage), copy_layouts, NamedSharding(mesh, _REPLICATED))
    opt_state, copies, scalars = jax.jit(init, out_shardings=layouts)(params, key)
    step, key, loss_scale = scalars
    residuals = zero_residuals(params, placement)
    if not is_from_key:
        params = copies
    return TrainState(step, cast_floating(params, policy.param), opt_state, key, loss_scale, residuals)


def make_abstract_state(params: Any, optimizer: Any, mesh: Any, plan: Plan, policy: Precision) -> TrainState:
    """The shapes, dtypes and layouts of what `make_first_state` returns, without making an array."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    if is_initializer(params):
        params = jax.eval_shape(partial(call_initializer, params), key)
    dtype = policy.master or policy.param
    params = jax.eval_shape(lambda p: cast_floating(p, dtype), check_trainable(params))
    placement = plan.placement(params, mesh)
    rest = placement.at_rest
    opt_state = jax.eval_shape(lambda p: init_opt_state(optimizer, policy, p), params)
    opt_storage = match_storage(opt_state, params, placement.in_update)
    storage = (rest, opt_storage)
    params, opt_state = jax.eval_shape(lambda *trees: pad_leaves(trees, storage, mesh), params, opt_state)
    residuals = residual_shapes(params, placement)
    step, loss_scale = jax.eval_shape(lambda: (jnp.int32(0), first_loss_scale(policy)))
    step, key, loss_scale = attach_shardings((step, key, loss_scale), NamedSharding(mesh, _REPLICATED))
    params = jax.eval_shape(lambda p: cast_floating(p, policy.param), params)
    return TrainState(
        step,
        attach_shardings(params, shardings(mesh, rest)),
        attach_shardings(opt_state, shardings(mesh, opt_storage)),
        key,
        loss_scale,
        residuals,
    )


def check_trainable(params: Any) -> Any:
    """The parameters, after a check that an optimizer can train every leaf.

    Raises:
        TypeError: a leaf that is not a real floating-point array, or one of float64 where jax computes with it.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        dtype = getattr(x, "dtype", None)
        if isinstance(x, int | float | complex):
            dtype = jnp.result_type(x)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                "init: every leaf of the parameters must be a real floating-point array, which the optimizer trains; "
                f"leaf {path_name(path)} is {dtype or type(x).__name__}. Pass values that you do not train in the "
                "batch, or let the loss close over them (eqx.partition and nnx.split take them out of a module); "
                "split a complex leaf into its real and imaginary parts."
            )
        if not isinstance(x, float) and jax.dtypes.canonicalize_dtype(dtype) == jnp.float64:
            raise TypeError(
                f"init: a step sums over devices in float32, and would round float64 values; leaf {path_name(path)} "
                "is float64. Pass jax.tree.map(jnp.float32, params), or leave jax_enable_x64 off."
            )
    return params


def is_initializer(params: Any) -> bool:
    """Whether this is a function that makes the parameters.

    A callable pytree with leaves, such as an equinox module, is the parameters.
    """
    if not callable(params):
        return False
    return all(leaf is params for leaf in jax.tree.leaves(params))


def call_initializer(make: Callable[[jax.Array], Any], key: jax.Array) -> Any:
    """`make(key)`.

    Raises:
        TypeError: a callable object that is not a pytree fails: probably parameters of an unregistered type.
    """
    classes: tuple[Any, ...] = (type, partial)
    is_function = inspect.isroutine(make) or hasattr(make, "__wrapped__") or isinstance(make, classes)
    try:
        return make(key)
    except Exception as error:
        if is_function:
            raise
        raise TypeError(
            "init: params must be a pytree of arrays, or a function of the key that makes one; got an object of type "
            f"{type(make).__name__}, which is not a pytree and failed when called with the key: {error}. Register the "
            "type with jax.tree_util.register_dataclass, or pass its arrays."
        ) from error


def _initialize(make: Callable[[jax.Array], Any], key: jax.Array, placement: Placement, dtype: Any) -> Any:
    """Parameters made inside jit, in the layout at rest."""
    rest = placement.at_rest
    mesh = placement.mesh

    def init_params(key: jax.Array) -> Any:
        params = cast_floating(call_initializer(make, key), dtype)
        return pad_leaves(params, rest, mesh)

    return jax.jit(init_params, out_shardings=shardings(mesh, rest))(key)


def _move_to_rest(params: Any, placement: Placement) -> Any:
    """The caller's parameters in the layout at rest; host arrays are never whole on a device."""
    rest = placement.at_rest
    mesh = placement.mesh
    return jax.device_put(pad_leaves(params, rest, mesh), shardings(mesh, rest))


def strip_weak_type(x: Any) -> Any:
    """An array or number as an array without a weak type: with a weak type, the step would compile twice."""
    if isinstance(x, jax.Array):
        return jax.lax.convert_element_type(x, x.dtype)
    return np.asarray(x, jnp.result_type(x))
