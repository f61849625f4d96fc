"""The optimizer of a step: called with the arguments that it takes, on global arrays in the layout of the update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from traceback import walk_tb
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import describe_error
from shardkit.meshes.layout import path_name
from shardkit.on_device.groups import Groups
from shardkit.on_device.handles import cast_floating
from shardkit.on_device.metrics import if_finite
from shardkit.on_device.microbatches import Microbatches
from shardkit.on_device.precision import LossScale, Precision, next_loss_scale
from shardkit.plans.plan import Placement
from shardkit.plans.storage import check_storage, is_padded, pad_leaves, restore_leaves
from shardkit.steps.layer_order import order_matters
from shardkit.steps.state_layouts import match_storage, shardings


class Master(NamedTuple):
    """An optimizer state with a master copy of the parameters."""

    copy: Any  # the parameters in the master dtype, laid out as the plan's `update`
    inner: Any  # the optimizer's own state


def wrap_optimizer(optimizer: Any) -> Any:
    """The optimizer, with an `update` that may be called with `value=loss` even if the optimizer takes no value.

    An error of optax itself, such as a line search that gets no function to search along, becomes a TypeError that says
    which arguments a step passes. An error of the user's own optimizer is raised as it is, with a note of these
    arguments: only its writer knows whether it needs more.

    Raises:
        TypeError: from update, if an optimizer of optax fails, if updates do not have the shapes of the gradients, or
            if the new state has another tree.
    """
    import optax

    name = getattr(optimizer.update, "__qualname__", type(optimizer).__name__).split(".")[0]
    takes_value = _takes_value(optimizer)

    # Every call goes through here, so that an error says which arguments a step passes to an optimizer.
    def call_noted(call: Callable[..., Any], *args: Any, **extra: Any) -> Any:
        try:
            return call(*args, **extra)
        except Exception as error:
            if isinstance(error, AttributeError) or _is_of_its_arguments(error):
                raise TypeError(_describe_call(name, f", and fails: {describe_error(error)}")) from error
            error.add_note(_describe_call(name))
            raise

    @wraps(optimizer.update)
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        # optax passes extra arguments on to every part of a chain, but a plain GradientTransformation takes none.
        if not takes_value:
            extra = {}
        updates, new = call_noted(optimizer.update, grads, state, params, **extra)
        if _leaf_shapes(updates) != _leaf_shapes(grads):
            rule = ", and must return updates of the gradients' shapes; it returns others"
            raise TypeError(_describe_call(name, rule))
        if str(jax.tree.structure(state)) != str(jax.tree.structure(new)):
            raise TypeError(_describe_call(name, ", and must return a state of the same tree; it returns another"))
        return updates, new

    return optax.GradientTransformationExtraArgs(partial(call_noted, optimizer.init), update)


def _takes_value(optimizer: Any) -> bool:
    """Whether `update` takes `value=loss`."""
    import optax

    try:
        inspect.signature(optimizer.update).bind_partial(None, None, None, value=None)
    except TypeError:  # such as sam, which takes another argument
        return False
    return isinstance(optimizer, optax.GradientTransformationExtraArgs)


def _leaf_shapes(tree: Any) -> list[tuple[int, ...]]:
    return [jnp.shape(x) for x in jax.tree.leaves(tree)]


def _is_of_its_arguments(error: BaseException) -> bool:
    """Whether an error comes from the call itself, or from code of optax, and not from a user's function.

    The innermost frame outside of jax tells.
    """
    packages = []  # of the frames, from the call to where it was raised
    for frame, _ in walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        packages.append(module.split(".")[0])
    # Raised by the call itself: Python could not bind the arguments.
    if len(packages) == 1:
        return True
    outside_jax = [package for package in packages if package not in ("jax", "jaxlib")]
    return outside_jax[-1] == "optax"


def _describe_call(name: str, failure: str = "") -> str:
    """The arguments that a step passes to an optimizer, how the call fails, and the remedy."""
    return (
        f"make_train_step: the optimizer {name} gets gradients, its state, the parameters and value=loss{failure}. If "
        "it needs more, pass another one, or wrap it in a GradientTransformation that passes the missing arguments."
    )


def init_opt_state(optimizer: Any, policy: Precision, params: Any) -> Any:
    """The optimizer state of a new TrainState; `params` are in the master dtype where there is one."""
    if policy.master is None:
        return optimizer.init(params)
    return Master(params, optimizer.init(params))


def apply_optimizer(
    optimizer: Any, policy: Precision, grads: Any, opt_state: Any, params: Any, value: Any
) -> tuple[Any, Any]:
    """The new parameters and optimizer state after one update, which is applied to the master copy if there is one."""
    import optax

    if policy.master is None:
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state
    updates, inner = optimizer.update(grads, opt_state.inner, opt_state.copy, value=value)
    # Added to the copy: in bfloat16, with 8 bits, an update below 1/512 of a parameter would be rounded away, in every
    # step.
    copy = optax.apply_updates(opt_state.copy, updates)
    return cast_floating(copy, policy.param), Master(copy, inner)


def update_state(
    optimizer: Any,
    policy: Precision,
    placement: Placement,
    state: Any,
    grads: Any,
    metrics: Any,
    microbatches: Microbatches | Groups,
    frozen: Sequence[bool],
) -> tuple[Any, Any, LossScale | None]:
    """The new parameters (in the layout of the update), optimizer state and loss scale, in the jit of the step.

    If the metrics have "finite" and it is False, parameters and optimizer state stay as they were. Leaves that are
    `frozen` stay in any case: an optimizer may move a leaf without a gradient, as weight decay does.
    """
    # No collective is written here. The optimizer runs outside of shard_map, on global arrays in their original shapes.
    # So an optax transformation that reads across shards (a global norm, a factored moment) is right unmodified: the
    # partitioner sends the data, and `audit` shows it. Arguments and results are pinned to the layout of the update.
    # Otherwise the partitioner might compute the whole update on every device, and gather the arrays that the plan has
    # split.
    mesh = placement.mesh
    storage = placement.in_update
    opt_storage = match_storage(state.opt_state, state.params, storage)
    check_storage("step: the optimizer state", state.opt_state, opt_storage, mesh)
    trees = (grads, state.opt_state, state.params)
    in_order = depends_on_layer_order(optimizer, policy, trees, storage, opt_storage)

    def pin(tree: Any, storage: Any) -> Any:
        return jax.lax.with_sharding_constraint(tree, shardings(mesh, storage))

    def restore(tree: Any, storage: Any) -> Any:
        return pin(restore_leaves(tree, in_order=in_order), storage)

    def store(tree: Any, storage: Any) -> Any:
        return pin(pad_leaves(tree, storage, mesh, in_order=in_order), storage)

    grads = restore(grads, storage)
    old_params = restore(state.params, storage)
    old_opt_state = restore(state.opt_state, opt_storage)
    _check_is_of(optimizer, policy, old_opt_state, old_params)

    def update(inputs: Any, old: Any) -> Any:
        grads, loss = inputs
        params, opt_state = old
        return apply_optimizer(optimizer, policy, grads, opt_state, params, loss)

    inputs = (grads, metrics["loss"])
    old = (old_params, old_opt_state)
    words = ("an optimizer", "Use dp, or an optimizer without it: clip by value, not by norm.")
    new = microbatches.update_apart(update, inputs, old, step=state.step, specs=placement.update, words=words)
    params, opt_state = if_finite(metrics, new, old)
    params = _keep_frozen(params, old_params, frozen)
    if policy.master is not None:
        # The next step makes the parameters from the copy, which must stand still too.
        opt_state = opt_state._replace(copy=_keep_frozen(opt_state.copy, old_opt_state.copy, frozen))
    loss_scale = state.loss_scale
    if loss_scale is not None and "finite" in metrics:
        loss_scale = next_loss_scale(policy, loss_scale, metrics["finite"])
    return store(params, storage), store(opt_state, opt_storage), loss_scale


def _check_is_of(optimizer: Any, policy: Precision, opt_state: Any, params: Any) -> None:
    """Refuses the state of another optimizer or precision. `sgd` would ignore a state of `adam`, and return it as is.

    Two optimizers of the same state cannot be told apart, as `optax.adam` and `optax.adamax`: both have a
    `ScaleByAdamState`, with the same leaves. Nor can other hyperparameters.

    Raises:
        ValueError: for a state with other leaves than the optimizer makes of these parameters.
    """
    # The names of leaves are compared, not the types of nodes: a node may hold a function that init makes anew.
    names = _leaf_names(opt_state)
    expected = _leaf_names(jax.eval_shape(partial(init_opt_state, optimizer, policy), params))
    lacking = [name for name in expected if name not in names]
    further = [name for name in names if name not in expected]
    if lacking:
        difference = f"lacks leaf {lacking[0]}"
    elif further:
        difference = f"has leaf {further[0]}, which this optimizer does not make"
    else:
        return
    raise ValueError(
        f"step: the state must be of the optimizer and the precision of the step; it {difference}. Build the step "
        "with those of the state, or begin anew with init(state.params, state.key)."
    )


def _leaf_names(opt_state: Any) -> list[str]:
    """The leaves of a TrainState's optimizer state, by name."""
    names = []
    for path, _ in jax.tree_util.tree_leaves_with_path(opt_state):
        names.append(f"opt_state.{path_name(path)}")
    return names


def _keep_frozen(new: Any, old: Any, frozen: Sequence[bool]) -> Any:
    """The new parameters, with the old arrays for frozen leaves."""
    leaves, structure = jax.tree.flatten(new)
    for number, old_leaf in enumerate(jax.tree.leaves(old)):
        if frozen[number]:
            leaves[number] = old_leaf
    return jax.tree.unflatten(structure, leaves)


def depends_on_layer_order(
    optimizer: Any, policy: Precision, trees: tuple[Any, Any, Any], storage: Any, opt_storage: Any
) -> bool:
    """Whether an optimizer depends on the order of a stack's layers, for example because it indexes them.

    `trees` are gradients, optimizer state and parameters in any form; `storage` and `opt_storage` say how the update
    stores parameters and optimizer state.
    """
    stacked = jax.tree.map(lambda leaf: bool(leaf.rows), storage)
    opt_stacked = jax.tree.map(lambda leaf: bool(leaf.rows), opt_storage)
    if not any(jax.tree.leaves(stacked)):
        return False
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trees, is_leaf=is_padded)
    update = partial(apply_optimizer, optimizer, policy)
    args = *shapes, jax.ShapeDtypeStruct((), jnp.float32)
    return order_matters(update, args, (stacked, opt_stacked, stacked, False), (stacked, opt_stacked))
