"""Carried state: arrays that a step updates without a gradient, such as batch statistics or averaged parameters.

Leaves that mirror a parameter are laid out as the parameter at rest, and reach the loss as the parameter does. Other
leaves are replicated, and reach the loss unchanged. The statistics that a loss returns are Means, which are summed over
microbatches and devices. So one update per step, on global arrays, is right on every mesh.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.typed import is_array
from shardkit.meshes.layout import path_name
from shardkit.on_device.gradient import GradFn, WithCarried
from shardkit.on_device.groups import Groups
from shardkit.on_device.means import describe_type
from shardkit.on_device.metrics import if_finite
from shardkit.on_device.microbatches import Microbatches
from shardkit.on_device.precision import Precision
from shardkit.on_device.seam import enter_leaf
from shardkit.plans.plan import Placement, Plan
from shardkit.plans.splits import LeafLayout, is_layout, map_layouts
from shardkit.plans.storage import Storage, check_storage, is_padded, pad_leaves, restore_leaves, unpadded
from shardkit.steps.layer_order import order_matters
from shardkit.steps.state import is_initializer, strip_weak_type
from shardkit.steps.state_layouts import attach_shardings, match_parameters, match_storage, shardings

Update = Callable[[Any, Any, Any], Any]


def reads_carried(grad_fn: GradFn) -> bool:
    """Whether a GradFn must be passed `carried=`, as for a loss of `value_and_grad` with a fourth argument.

    If `carried` has a default, as in `functools.partial(grad_fn, carried=fixed)`, it need not be passed.
    """
    try:
        parameter = inspect.signature(grad_fn).parameters.get("carried")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is parameter.empty


def check_carried(
    where: str, reads: bool, carry: Update | None, carried: Any, remedy: str = "init(params, key, carried=...)"
) -> None:
    """Refuses a state without the carried state that loss or step need, and a carried state that nothing uses.

    Raises:
        ValueError: either.
    """
    if carried is None and (reads or carry):
        needs = "carry= updates carried state"
        if reads:
            needs = "the loss takes carried state"
        raise ValueError(f"{where}: {needs}, and there is none. Pass {remedy}.")
    if carried is not None and not (reads or carry):
        raise ValueError(
            f"{where}: carried state must be read by the loss or updated by carry=; got some that nothing uses. Write "
            "loss_fn(params, batch, keys, carried), pass make_train_step(..., carry=update), or pass no carried=. The "
            "loss of a pipeline cannot read it."
        )


class Carried:
    """The carried state of one step or evaluation as it is stored, and its layouts under a plan; `tree` may be None."""

    def __init__(self, where: str, tree: Any, params: Any, placement: Placement):
        self.tree = () if tree is None else tree
        self._placement = placement
        layouts = jax.tree.leaves(placement.layouts, is_leaf=is_layout)
        # For each leaf the LeafLayout of the parameter that it mirrors, or the Storage of a replicated one.
        self._layouts = match_parameters(self.tree, params, layouts, Storage(PartitionSpec()))
        self.storage = match_storage(self.tree, params, placement.at_rest)
        self.specs = match_parameters(self.tree, params, jax.tree.leaves(placement.rest), PartitionSpec())
        check_storage(f"{where}: the carried state", self.tree, self.storage, placement.mesh)

    def enter(self, tree: Any, policy: Precision) -> Any:
        """The state as the loss sees it, inside shard_map.

        Cost: for a leaf that mirrors a parameter what the parameter costs; nothing for others.
        """
        policy = policy._replace(reduce=jnp.float32)  # it has no gradient

        def enter_or_keep(layout: Any, x: Any) -> Any:
            if is_layout(layout):
                return enter_leaf(self._placement, policy, layout, x)
            return x

        return map_layouts(enter_or_keep, self._layouts, tree)

    def bind(self, grad_fn: GradFn, tree: Any, policy: Precision) -> GradFn:
        """The GradFn with the state that it takes, inside shard_map."""
        bound: Any = WithCarried(grad_fn, carried=self.enter(tree, policy))
        return bound

    def update(self, carry: Update, metrics: Any, params: Any, step: Any, microbatches: Microbatches | Groups) -> Any:
        """`carry(state, metrics, params)` on global arrays in original shapes, laid out as before.

        If the metrics have "finite" and it is False, the state stays as it was.
        """
        # The update runs outside of shard_map, on global arrays, once per step. Inside it would run on each device for
        # the sums of this device, and batch statistics would be other ones on each mesh. If an update reads across
        # shards, the partitioner sends the data.
        mesh = self._placement.mesh
        shapes = _shapes((self.tree, metrics, params))
        _check_same(shapes[0], jax.eval_shape(carry, *shapes))
        in_order = self._depends_on_order(carry, shapes)

        old = restore_leaves(self.tree, in_order=in_order)
        inputs = (metrics, restore_leaves(params, in_order=in_order))

        def update(inputs: Any, old: Any) -> Any:
            metrics, params = inputs
            new = carry(old, metrics, params)
            # Weakly typed leaves would compile the next step again.
            return jax.tree.map(lambda x, like: lax.convert_element_type(x, like.dtype), new, old)

        words = ("a carry=", "Use dp or zero1, or sum in the loss, as an auxiliary Mean.")
        new = microbatches.update_apart(update, inputs, old, step=step, specs=self._placement.rest, words=words)
        stored = pad_leaves(if_finite(metrics, new, old), self.storage, mesh, in_order=in_order)
        return lax.with_sharding_constraint(stored, shardings(mesh, self.storage))

    def _depends_on_order(self, carry: Update, shapes: tuple[Any, Any, Any]) -> bool:
        """Whether `carry` depends on the order of a stack's layers, if the plan stores the layers in another order."""
        _, metrics, _ = shapes
        params_at_rest = map_layouts(LeafLayout.at_rest, self._placement.layouts)
        rows = jax.tree.map(lambda leaf: bool(leaf.rows), self.storage)
        param_rows = jax.tree.map(lambda leaf: bool(leaf.rows), params_at_rest)
        if not any(jax.tree.leaves(param_rows)):
            return False
        stacked = (rows, jax.tree.map(lambda _: False, metrics), param_rows)
        return order_matters(carry, shapes, stacked, rows)


def make_abstract_carried(carried: Any, params: Any, mesh: Any, plan: Plan) -> Any:
    """The shapes and layouts of what `make_carried` returns; `params` are the shapes of the parameters."""
    if is_initializer(carried):
        carried = jax.eval_shape(lambda p: carried(unpadded(p)), params)
    carried = jax.eval_shape(lambda tree: tree, _check_arrays(carried))
    storage = match_storage(carried, params, plan.placement(params, mesh).at_rest)
    shapes = jax.eval_shape(lambda tree: pad_leaves(tree, storage, mesh), carried)
    return attach_shardings(shapes, shardings(mesh, storage))


def make_carried(carried: Any, params: Any, mesh: Mesh, plan: Plan) -> Any:
    """The carried state of a new TrainState, from its arrays or a function of the parameters, which runs inside jit."""
    at_rest = plan.placement(params, mesh).at_rest
    if is_initializer(carried):
        shapes = _check_arrays(jax.eval_shape(lambda p: carried(unpadded(p)), params))
        storage = match_storage(shapes, params, at_rest)

        def init(params: Any) -> Any:
            tree = jax.tree.map(jnp.asarray, carried(unpadded(params)))
            tree = pad_leaves(jax.tree.map(strip_weak_type, tree), storage, mesh)
            return jax.tree.map(jnp.copy, tree)  # a parameter that it returns must not be donated twice

        return jax.jit(init, out_shardings=shardings(mesh, storage))(params)
    tree = jax.tree.map(strip_weak_type, _check_arrays(unpadded(carried)))
    storage = match_storage(tree, params, at_rest)
    layouts = shardings(mesh, storage)
    tree = jax.device_put(pad_leaves(tree, storage, mesh), layouts)  # host arrays are never whole on a device

    def copy(tree: Any) -> Any:  # the caller's own buffers must not be donated
        return jax.tree.map(jnp.copy, tree)

    return jax.jit(copy, out_shardings=layouts)(tree)


def _check_arrays(tree: Any) -> Any:
    """The tree, after a check of its leaves.

    Raises:
        TypeError: a leaf that is neither an array nor a number.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not is_array(x) and not isinstance(x, bool | int | float | complex):
            raise TypeError(
                f"init: every leaf of carried must be an array or a number; leaf {path_name(path)} is "
                f"{type(x).__name__}. Let the loss and carry= close over anything else."
            )
    return tree


def _check_same(old: Any, new: Any) -> None:
    """Refuses an update that returns another tree, shape or dtype than it was passed."""
    rule = "make_train_step: carry= must return carried state of the same tree, shapes and dtypes"
    old_tree = str(jax.tree.structure(old))
    new_tree = str(jax.tree.structure(new))
    if new_tree != old_tree:
        raise ValueError(f"{rule}; got {new_tree} for {old_tree}. Return every leaf that it was passed.")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True):
        if describe_type(x) != describe_type(y):
            raise ValueError(
                f"{rule}; leaf {path_name(path)} was {describe_type(x)} and is {describe_type(y)}. Return it with "
                ".astype(...) and in its shape."
            )


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree, is_leaf=is_padded)
