"""A training run's state: what it holds, how each leaf is laid out, how it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardkit.parallel.padded import is_padded, padded, unpadded
from shardkit.parallel.plan import Plan, map_layouts
from shardkit.precision import LossScale, Precision, cast_floating, first_loss_scale

_REPLICATED = PartitionSpec()


class TrainState(NamedTuple):
    """Everything a training run carries from step to step.

    Attributes:
        step: int32 scalar, steps taken.
        params: the parameters, each leaf laid out as the plan's `rest`; `unpadded` gives those that a plan pads in
            their natural shapes.
        opt_state: the optimizer's state; leaves that mirror a parameter are laid out as the plan's `update`.
        key: typed key from which the keys of every step's examples are derived; it never changes.
        loss_scale: the float16 loss scale, or None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: Any
    loss_scale: LossScale | None = None


class Master(NamedTuple):
    """An optimizer state with a master copy of the parameters.

    Attributes:
        copy: the parameters in the master dtype, laid out as the plan's `update`.
        inner: the optimizer's own state.
    """

    copy: Any
    inner: Any


def first_opt_state(optimizer: Any, policy: Precision, params: Any) -> Any:
    """The optimizer state that a fresh TrainState holds; `params` are in the master dtype where there is one."""
    if policy.master is None:
        return optimizer.init(params)
    return Master(params, optimizer.init(params))


def advance(optimizer: Any, policy: Precision, grads: Any, opt_state: Any, params: Any, value: Any) -> tuple[Any, Any]:
    """One update, of the master copy where there is one: the new parameters and the new optimizer state."""
    import optax

    if policy.master is None:
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state
    updates, inner = optimizer.update(grads, opt_state.inner, opt_state.copy, value=value)
    copy = optax.apply_updates(opt_state.copy, updates)
    return cast_floating(copy, policy.param), Master(copy, inner)


def make_init(optimizer: Any, mesh: Mesh, plan: Plan, policy: Precision) -> Callable[[Any, jax.Array], TrainState]:
    """The `init` of a train step, with `init.abstract(params)` for its shapes and layouts alone."""

    def pinned(tree: Any, specs: Any) -> Any:
        return jax.lax.with_sharding_constraint(tree, shardings(mesh, specs))

    def init(params: Any, key: jax.Array) -> TrainState:
        key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
        params = _place_params(params, key, plan, mesh, policy)
        layouts = plan.layouts(params, mesh)
        update = map_layouts(lambda layout: layout.update, layouts)

        def fresh(params: Any) -> Any:  # the copies keep donated buffers apart from the parameters'
            natural = pinned(unpadded(params), update)
            return jax.tree.map(jnp.copy, first_opt_state(optimizer, policy, natural))

        specs = optimizer_specs(jax.eval_shape(fresh, params), params, update)
        opt_state = jax.jit(lambda p: padded(fresh(p), specs, mesh), out_shardings=shardings(mesh, specs))(params)
        params = cast_floating(params, policy.param)
        rest = lambda key: (jnp.int32(0), jnp.copy(key), first_loss_scale(policy))  # noqa: E731
        step, key, loss_scale = jax.jit(rest, out_shardings=NamedSharding(mesh, _REPLICATED))(key)
        return TrainState(step, params, opt_state, key, loss_scale)

    def abstract(params: Any) -> TrainState:
        key = jax.eval_shape(lambda: jax.random.key(0))
        params = jax.eval_shape(params, key) if callable(params) else params
        params = jax.eval_shape(lambda p: cast_floating(p, policy.master or policy.param), params)
        layouts = plan.layouts(params, mesh)
        opt_state = jax.eval_shape(lambda p: first_opt_state(optimizer, policy, p), params)
        specs = optimizer_specs(opt_state, params, map_layouts(lambda layout: layout.update, layouts))
        rest = map_layouts(lambda layout: layout.rest, layouts)
        params, opt_state = jax.eval_shape(lambda *trees: padded(trees, (rest, specs), mesh), params, opt_state)
        scalars = jax.eval_shape(lambda: (jnp.int32(0), first_loss_scale(policy)))
        step, key, loss_scale = _described((scalars[0], key, scalars[1]), NamedSharding(mesh, _REPLICATED))
        return TrainState(
            step,
            _described(jax.eval_shape(lambda p: cast_floating(p, policy.param), params), shardings(mesh, rest)),
            _described(opt_state, shardings(mesh, specs)),
            key,
            loss_scale,
        )

    init.abstract = abstract  # type: ignore[attr-defined]
    return init


def optimizer_specs(opt_state: Any, params: Any, update: Any) -> Any:
    """The layout of an optimizer's state: a leaf that mirrors a parameter has the parameter's update layout.

    A leaf mirrors a parameter when its path ends with the parameter's and its shape is the same; all others are
    replicated.
    """
    spec_leaves = jax.tree.leaves(update, is_leaf=lambda s: isinstance(s, PartitionSpec))
    param_leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)[0]
    known = {path: (x.shape, spec) for (path, x), spec in zip(param_leaves, spec_leaves, strict=True)}

    def spec_of(path: Any, x: Any) -> PartitionSpec:
        for start in range(len(path) + 1):
            shape, spec = known.get(path[start:], (None, _REPLICATED))
            if shape == x.shape:
                return spec
        return _REPLICATED

    return jax.tree_util.tree_map_with_path(spec_of, opt_state, is_leaf=is_padded)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The specs of a tree as shardings over a mesh."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))


def _place_params(params: Any, key: jax.Array, plan: Plan, mesh: Mesh, policy: Precision) -> Any:
    if callable(params):
        make = params
        shapes = jax.eval_shape(make, key)
        rest = map_layouts(lambda layout: layout.rest, plan.layouts(shapes, mesh))

        def held(key: jax.Array) -> Any:
            return padded(cast_floating(make(key), policy.master or policy.param), rest, mesh)

        return jax.jit(held, out_shardings=shardings(mesh, rest))(key)

    def strong(x: Any) -> Any:  # weakly typed leaves would compile the step twice
        return (
            jax.lax.convert_element_type(x, x.dtype) if isinstance(x, jax.Array) else jnp.asarray(x, jnp.result_type(x))
        )

    params = cast_floating(jax.tree.map(strong, unpadded(params)), policy.master or policy.param)
    specs = map_layouts(lambda layout: layout.rest, plan.layouts(params, mesh))
    params, rest = padded(params, specs, mesh), shardings(mesh, specs)
    # device_put may hand back the caller's own buffers; the step donates the state's, so these are copies.
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=rest)(jax.device_put(params, rest))


def _described(shapes: Any, layouts: Any) -> Any:
    """Shapes with their shardings; one sharding does for a whole tree."""

    def one(layout: NamedSharding, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), tree)

    return jax.tree.map(one, layouts, shapes)
