"""A training run's state: what it holds, how it is laid out, made and updated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from traceback import walk_tb
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardkit._arguments.checks import raised, sized
from shardkit.meshes.layout import canonical, path_name, spec_axes
from shardkit.on_device.groups import Groups
from shardkit.on_device.handles import cast_floating
from shardkit.on_device.metrics import if_finite
from shardkit.on_device.microbatches import Microbatches
from shardkit.on_device.precision import LossScale, Precision, first_loss_scale, next_loss_scale
from shardkit.on_device.residuals import residual_layouts, residual_shapes, zero_residuals
from shardkit.plans.plan import Placement, Plan
from shardkit.plans.storage import Storage, check_storage, is_padded, pad_leaves, restore_leaves, stored_array, unpadded
from shardkit.steps.layer_order import order_matters

_REPLICATED = PartitionSpec()


class TrainState(NamedTuple):
    """Everything a training run carries from step to step.

    Attributes:
        step: int32 scalar, steps taken.
        params: the parameters, each leaf laid out as the plan's `rest`; `unpadded` returns padded leaves, and stacks in
            the order of stages, in their original form.
        opt_state: the optimizer's state; leaves that mirror a parameter are laid out as the plan's `update`.
        key: typed key from which the keys of every step's examples are derived; it never changes.
        loss_scale: the float16 loss scale, or None.
        residuals: what compressed reductions with `feedback` have left out so far, or None: for each parameter float32
            `[R, *shape]`, a row for each device over which its gradient is summed, in units of the mean gradient.
        carried: what the loss reads and the step updates without a gradient, or None; leaves that mirror a parameter
            are laid out as the plan's `rest`, all others replicated.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: Any
    loss_scale: LossScale | None = None
    residuals: Any = None
    carried: Any = None


class Master(NamedTuple):
    """An optimizer state with a master copy of the parameters."""

    copy: Any  # the parameters in the master dtype, laid out as the plan's `update`
    inner: Any  # the optimizer's own state


def passed_what_it_takes(optimizer: Any) -> Any:
    """The optimizer, whose update may be called with `value=loss` whether it takes that or not.

    What optax itself raises, as of a line search without the function that it searches along, is a TypeError of what
    it is given. What a user's own raises is raised as it is, with a note: only its writer knows whether it needs more.

    Raises:
        TypeError: from update, for one of optax that fails, or that returns no updates of the gradients, or another
            state.
    """
    import optax

    name = getattr(optimizer.update, "__qualname__", type(optimizer).__name__).split(".")[0]
    takes = isinstance(optimizer, optax.GradientTransformationExtraArgs)
    try:
        inspect.signature(optimizer.update).bind_partial(None, None, None, value=None)
    except TypeError:  # as sam, which takes another one
        takes = False

    def noted(call: Callable[..., Any], *args: Any, **extra: Any) -> Any:
        try:
            return call(*args, **extra)
        except Exception as error:
            if isinstance(error, AttributeError) or _of_its_arguments(error):
                raise TypeError(_given(name, f", and fails: {raised(error)}")) from error
            error.add_note(_given(name))
            raise

    @wraps(optimizer.update)
    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, new = noted(optimizer.update, grads, state, params, **(extra if takes else {}))
        if [jnp.shape(x) for x in jax.tree.leaves(updates)] != [jnp.shape(x) for x in jax.tree.leaves(grads)]:
            raise TypeError(_given(name, ", and must return updates of the gradients' shapes; it returns others"))
        before, after = str(jax.tree.structure(state)), str(jax.tree.structure(new))
        if before != after:
            raise TypeError(_given(name, ", and must return a state of the same tree; it returns another"))
        return updates, new

    return optax.GradientTransformationExtraArgs(partial(noted, optimizer.init), update)


def _of_its_arguments(error: BaseException) -> bool:
    """Whether the call itself failed, or code of optax, in a call of jax or not, and no user's that it called."""
    rooms = [str(frame.f_globals.get("__name__", "")).split(".")[0] for frame, _ in walk_tb(error.__traceback__)]
    return len(rooms) == 1 or [room for room in rooms if room not in ("jax", "jaxlib")][-1] == "optax"


def _given(name: str, what: str = "") -> str:
    return (
        f"make_train_step: the optimizer {name} is given gradients, its state, the parameters and value=loss{what}. If "
        "it needs more, pass another, or a GradientTransformation of your own around it that gives it what it asks for."
    )


def first_opt_state(optimizer: Any, policy: Precision, params: Any) -> Any:
    """The optimizer state of a new TrainState; `params` are in the master dtype where there is one."""
    if policy.master is None:
        return optimizer.init(params)
    return Master(params, optimizer.init(params))


def advance(optimizer: Any, policy: Precision, grads: Any, opt_state: Any, params: Any, value: Any) -> tuple[Any, Any]:
    """The new parameters and optimizer state after one update, which is applied to the master copy if there is one."""
    import optax

    if policy.master is None:
        updates, opt_state = optimizer.update(grads, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state
    updates, inner = optimizer.update(grads, opt_state.inner, opt_state.copy, value=value)
    copy = optax.apply_updates(opt_state.copy, updates)
    return cast_floating(copy, policy.param), Master(copy, inner)


def first_state(params: Any, key: jax.Array, optimizer: Any, mesh: Mesh, plan: Plan, policy: Precision) -> TrainState:
    """The state that a run begins with, without carried state; `params` may be a function of the key."""
    if isinstance(mesh, AbstractMesh):
        sizes = sized(mesh.shape.items())
        raise ValueError(
            f"init: the mesh must have devices; got an abstract mesh of {sizes}. Call init.abstract(params), or "
            f"make the step over sk.make_mesh({sizes})."
        )
    made, dtype = makes(params), policy.master or policy.param
    if made:
        shapes = trained(jax.eval_shape(partial(made_by, params), key))
        placement = plan.placement(jax.eval_shape(partial(cast_floating, dtype=dtype), shapes), mesh)
        params = _made(params, key, placement, dtype)
    else:
        params = cast_floating(jax.tree.map(strong, trained(unpadded(params))), dtype)
        placement = plan.placement(params, mesh)
        params = _placed(params, placement)
    update = placement.in_update

    def fresh(params: Any) -> Any:  # copied: a buffer must not be donated twice
        original = jax.lax.with_sharding_constraint(unpadded(params), shardings(mesh, update))
        return jax.tree.map(jnp.copy, first_opt_state(optimizer, policy, original))

    held = optimizer_held(jax.eval_shape(fresh, params), params, update)

    def first(params: Any, key: jax.Array) -> Any:  # one program, to compile once
        # Copied, since device_put may return the caller's own buffers and the step donates the state's.
        copies = None if made else jax.tree.map(jnp.copy, params)
        return pad_leaves(fresh(params), held, mesh), copies, (jnp.int32(0), jnp.copy(key), first_loss_scale(policy))

    rest = None if made else shardings(mesh, placement.at_rest)
    out = (shardings(mesh, held), rest, NamedSharding(mesh, _REPLICATED))
    opt_state, copies, (step, key, loss_scale) = jax.jit(first, out_shardings=out)(params, key)
    residuals = zero_residuals(params, placement)
    params = cast_floating(params if made else copies, policy.param)
    return TrainState(step, params, opt_state, key, loss_scale, residuals)


def abstract_state(params: Any, optimizer: Any, mesh: Any, plan: Plan, policy: Precision) -> TrainState:
    """The shapes, dtypes and layouts of what `first_state` returns, without making an array."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(partial(made_by, params), key) if makes(params) else params
    params = jax.eval_shape(lambda p: cast_floating(p, policy.master or policy.param), trained(params))
    placement = plan.placement(params, mesh)
    rest = placement.at_rest
    opt_state = jax.eval_shape(lambda p: first_opt_state(optimizer, policy, p), params)
    held = optimizer_held(opt_state, params, placement.in_update)
    params, opt_state = jax.eval_shape(lambda *trees: pad_leaves(trees, (rest, held), mesh), params, opt_state)
    scalars = jax.eval_shape(lambda: (jnp.int32(0), first_loss_scale(policy)))
    step, key, loss_scale = described((scalars[0], key, scalars[1]), NamedSharding(mesh, _REPLICATED))
    return TrainState(
        step,
        described(jax.eval_shape(lambda p: cast_floating(p, policy.param), params), shardings(mesh, rest)),
        described(opt_state, shardings(mesh, held)),
        key,
        loss_scale,
        residual_shapes(params, placement),
    )


def optimizer_held(opt_state: Any, params: Any, update: Any) -> Any:
    """How each leaf of an optimizer state is stored: as the parameter that it mirrors, in the update, or replicated.

    A leaf mirrors a parameter if its path ends with the parameter's path and the shapes are equal.
    """
    return mirrored(opt_state, params, jax.tree.leaves(update), Storage(_REPLICATED))


def state_held(where: str, state: TrainState, mesh: Any, plan: Plan) -> TrainState:
    """How a plan stores each leaf of a state, as a `Storage` for each; `where` begins the errors about residuals."""
    placement = plan.placement(state.params, mesh)
    rest, whole = placement.at_rest, partial(jax.tree.map, lambda _: Storage(_REPLICATED))
    return TrainState(
        step=whole(state.step),
        params=rest,
        opt_state=optimizer_held(state.opt_state, state.params, placement.in_update),
        key=whole(state.key),
        loss_scale=whole(state.loss_scale),
        residuals=residual_layouts(where, state.residuals, state.params, placement),
        carried=optimizer_held(state.carried, state.params, rest),
    )


def state_check(plan: Plan, mesh: Mesh) -> Callable[[Any], None]:
    """What `step` asks of a state before it takes it: that it is one, on this mesh, and laid out as by this plan.

    jit would move the leaves of another layout by collectives that stand nowhere in the program.
    """
    known: set[tuple[Any, ...]] = set()  # layouts that were found right: comparing them anew would cost every step

    def check(state: Any) -> None:
        if not isinstance(state, TrainState):
            raise TypeError(
                f"step: the first argument must be the TrainState that init or the last step returned; got "
                f"{type(state).__name__}. Call step(state, batch), with state = init(params, key)."
            )
        if isinstance(state.step, jax.core.Tracer):
            return
        layouts = tuple(getattr(x, "sharding", None) for x in jax.tree.leaves(state))
        if layouts in known:
            return
        rest = state._replace(residuals=None)  # their shape is checked where the step is traced
        leaves = jax.tree_util.tree_leaves_with_path(rest, is_leaf=is_padded)
        each = jax.tree.leaves(state_held("step", rest, mesh, plan))
        for (path, x), held in zip(leaves, each, strict=True):
            sharding = getattr(stored_array(x), "sharding", None)
            if not isinstance(sharding, NamedSharding):  # an array of the host, or of one device: jit places it once
                continue
            if dict(sharding.mesh.shape) != dict(mesh.shape):
                raise ValueError(
                    f"step: the state must be on the mesh of the step, {sized(mesh.shape.items())}; leaf "
                    f"{path_name(path)} is on {sized(sharding.mesh.shape.items())}. Save and restore it as a "
                    "checkpoint, or pass jax.device_put(state, layouts of init.abstract(params))."
                )
            found, wanted = (_split_by(spec, mesh) for spec in (sharding.spec, held.spec))
            if found != wanted:
                raise ValueError(
                    f"step: the state must be laid out as the plan of the step says; leaf {path_name(path)} is "
                    f"{canonical(sharding.spec)} and must be {canonical(held.spec)}. Pass sk.reshard(state, its plan, "
                    "the plan of the step, mesh=mesh)."
                )
        known.add(layouts)

    return check


def _split_by(spec: PartitionSpec, mesh: Mesh) -> list[tuple[str, ...]]:
    """The axes that split each dim, without those of one device and without whole dims at the end."""
    split = [tuple(axis for axis in axes if mesh.shape[axis] > 1) for axes in spec_axes(spec)]
    while split and not split[-1]:
        split.pop()
    return split


def mirrored(tree: Any, params: Any, each: Sequence[Any], other: Any) -> Any:
    """For each leaf of a tree, the value in `each` of the parameter that it mirrors, else `other`."""
    param_leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)[0]
    known = {path: (x.shape, found) for (path, x), found in zip(param_leaves, each, strict=True)}

    def one(path: Any, x: Any) -> Any:
        for start in range(len(path) + 1):
            shape, found = known.get(path[start:], (None, None))
            if shape is not None and shape == jnp.shape(x):
                return found
        return other

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_padded)


def reads_order(optimizer: Any, policy: Precision, trees: tuple[Any, Any, Any], held: Any, opt_held: Any) -> bool:
    """Whether an optimizer depends on the order of a stack's layers, as one that indexes them does.

    `trees` are gradients, optimizer state and parameters in any form; `held` and `opt_held` say how the update stores
    parameters and optimizer state.
    """
    stacked, opt_stacked = (jax.tree.map(lambda each: bool(each.rows), tree) for tree in (held, opt_held))
    if not any(jax.tree.leaves(stacked)):
        return False
    original = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), trees, is_leaf=is_padded)
    update = partial(advance, optimizer, policy)
    args = *original, jax.ShapeDtypeStruct((), jnp.float32)
    return order_matters(update, args, (stacked, opt_stacked, stacked, False), (stacked, opt_stacked))


def shardings(mesh: Mesh, held: Any) -> Any:
    """The shardings over a mesh of leaves that are stored like this."""
    return jax.tree.map(lambda each: NamedSharding(mesh, each.spec), held)


def updated(
    optimizer: Any,
    policy: Precision,
    placement: Placement,
    state: TrainState,
    grads: Any,
    metrics: Any,
    microbatches: Microbatches | Groups,
    frozen: Sequence[bool],
) -> tuple[Any, Any, LossScale | None]:
    """The new parameters (in the layout of the update), optimizer state and loss scale, in the jit of the step.

    Where the metrics have "finite" and it is False, parameters and optimizer state stay as they were. Leaves that are
    `frozen` stay in any case: an optimizer may move what has no gradient, as weight decay does.
    """
    # No collective is written here. The optimizer runs outside of shard_map, on global arrays in their original shapes,
    # so that an optax transformation which reads across shards (a global norm, a factored moment) is right unmodified:
    # what it needs is sent by the partitioner, and `audit` shows it. What it gets and returns is pinned to the layout
    # of the update. Left to itself the partitioner may compute the whole update on every device, and gather for it what
    # the plan has split.
    mesh, held = placement.mesh, placement.in_update
    opt_held = optimizer_held(state.opt_state, state.params, held)
    check_storage("step: the optimizer state", state.opt_state, opt_held, mesh)
    in_order = reads_order(optimizer, policy, (grads, state.opt_state, state.params), held, opt_held)

    def pinned(tree: Any, held: Any) -> Any:
        return jax.lax.with_sharding_constraint(tree, shardings(mesh, held))

    def seen(tree: Any, held: Any) -> Any:
        return pinned(restore_leaves(tree, in_order=in_order), held)

    def stored(tree: Any, held: Any) -> Any:
        return pinned(pad_leaves(tree, held, mesh, in_order=in_order), held)

    grads, params, opt_state = seen(grads, held), seen(state.params, held), seen(state.opt_state, opt_held)

    def update(given: Any, old: Any) -> Any:
        (grads, loss), (params, opt_state) = given, old
        return advance(optimizer, policy, grads, opt_state, params, loss)

    what = "an optimizer", "Use dp, or an optimizer without it: clip by value, not by norm."
    given, old = (grads, metrics["loss"]), (params, opt_state)
    new = microbatches.update_apart(update, given, old, step=state.step, specs=placement.update, words=what)
    params, opt_state = if_finite(metrics, new, old)
    params = _kept(params, old[0], frozen)
    if policy.master is not None:
        opt_state = opt_state._replace(copy=_kept(opt_state.copy, old[1].copy, frozen))
    loss_scale = state.loss_scale
    if "finite" in metrics:
        loss_scale = loss_scale and next_loss_scale(policy, loss_scale, metrics["finite"])
    return stored(params, held), stored(opt_state, opt_held), loss_scale


def _kept(new: Any, old: Any, frozen: Sequence[bool]) -> Any:
    """The new parameters, and the old ones of frozen leaves."""
    kept, structure = jax.tree.flatten(new)
    for number, before in enumerate(jax.tree.leaves(old)):
        if frozen[number]:
            kept[number] = before
    return jax.tree.unflatten(structure, kept)


def trained(params: Any) -> Any:
    """The parameters, after a check that an optimizer can train every leaf.

    Raises:
        TypeError: a leaf that is not a real floating-point array, or one of float64 where jax computes with it.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(x) if isinstance(x, int | float | complex) else getattr(x, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                "init: every leaf of the parameters must be a real floating-point array, which the optimizer trains; "
                f"leaf {path_name(path)} is {dtype or type(x).__name__}. Pass what is not trained in the batch, or let "
                "the loss close over it (eqx.partition and nnx.split take it out of a module); split a complex leaf "
                "into its real and imaginary parts."
            )
        if not isinstance(x, float) and jax.dtypes.canonicalize_dtype(dtype) == jnp.float64:
            raise TypeError(
                "init: a step sums over devices in float32, and would round what is float64; leaf "
                f"{path_name(path)} is. Pass jax.tree.map(jnp.float32, params), or leave jax_enable_x64 off."
            )
    return params


def makes(params: Any) -> bool:
    """Whether this is a function that makes the parameters.

    A callable pytree with leaves, such as an equinox module, is the parameters.
    """
    leaves = jax.tree.leaves(params)
    return callable(params) and not [leaf for leaf in leaves if leaf is not params]


def made_by(make: Callable[[jax.Array], Any], key: jax.Array) -> Any:
    """`make(key)`.

    Raises:
        TypeError: a callable object that is not a pytree fails: probably parameters of an unregistered type.
    """
    kinds: tuple[Any, ...] = (type, partial)
    function = inspect.isroutine(make) or hasattr(make, "__wrapped__") or isinstance(make, kinds)
    try:
        return make(key)
    except Exception as error:
        if function:
            raise
        raise TypeError(
            "init: params must be a pytree of arrays, or a function of the key that makes one; got an object of type "
            f"{type(make).__name__}, which is not a pytree and failed when called with the key: {error}. Register the "
            "type with jax.tree_util.register_dataclass, or pass its arrays."
        ) from error


def _made(make: Callable[[jax.Array], Any], key: jax.Array, placement: Placement, dtype: Any) -> Any:
    """Parameters made inside jit, in the layout at rest."""
    rest, mesh = placement.at_rest, placement.mesh

    def made(key: jax.Array) -> Any:
        return pad_leaves(cast_floating(made_by(make, key), dtype), rest, mesh)

    return jax.jit(made, out_shardings=shardings(mesh, rest))(key)


def _placed(params: Any, placement: Placement) -> Any:
    """The caller's parameters in the layout at rest; host arrays are never whole on a device."""
    rest, mesh = placement.at_rest, placement.mesh
    return jax.device_put(pad_leaves(params, rest, mesh), shardings(mesh, rest))


def strong(x: Any) -> Any:
    """An array or number as an array that is not weakly typed, which would compile the step twice."""
    if isinstance(x, jax.Array):
        return jax.lax.convert_element_type(x, x.dtype)
    return np.asarray(x, jnp.result_type(x))


def described(shapes: Any, layouts: Any) -> Any:
    """Shapes with their shardings, which may be a prefix of the tree."""

    def one(layout: NamedSharding, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), tree)

    return jax.tree.map(one, layouts, shapes)
