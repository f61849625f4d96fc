"""What one device computes: a loss as total and weight, and the gradients of the total."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from shardkit._check import quoted
from shardkit._compat import varying_axes
from shardkit._typed import typed
from shardkit.collectives import all_reduce, vary
from shardkit.collectives.axes import vary_like
from shardkit.layout import path_name
from shardkit.partitioning.handles import call_sealed, parts, with_parts
from shardkit.partitioning.trained import check_trained, chosen


class Mean(NamedTuple):
    """A mean over devices and microbatches, as two sums that are divided only at the end.

    Attributes:
        total: scalar, the sum of this device's values; for an auxiliary mean an array or a pytree of arrays too.
        weight: scalar, the number of those values or the sum of their weights, float32 or integer, computed from this
            device's examples. It is summed over devices and microbatches in float32: counts are exact up to 2^24, and
            to 7 digits beyond. Beside an array, an array of its shape too: a weight for each element.
    """

    total: Any
    weight: Any

    @classmethod
    def of(cls, values: jax.Array, weights: jax.Array | None = None) -> Mean:
        """Sums `values` (any shape), weighted by `weights` (the same shape), both in float32.

        Raises:
            ValueError: weights of another shape, because a broadcast weight would count once for many values.
        """
        values = values.astype(jnp.float32)
        if weights is None:
            return cls(jnp.sum(values), jnp.float32(values.size))
        if jnp.shape(weights) != values.shape:
            raise ValueError(
                f"Mean.of: the weights must have the shape of the values; got {jnp.shape(weights)} for "
                f"{values.shape}. Broadcast them with jnp.broadcast_to(weights, values.shape)."
            )
        weights = weights.astype(jnp.float32)
        return cls(jnp.sum(values * weights), jnp.sum(weights))


class GradFn(Protocol):
    """What one device computes inside shard_map, as `value_and_grad(loss_fn)` does.

    Returns partial sums: the loss as a Mean, auxiliary means by name, and the gradients of `scale * total` with respect
    to the parameters that it was passed.
    """

    def __call__(
        self, params: Any, batch: Any, keys: jax.Array, *, scale: Any = 1
    ) -> tuple[Mean, Mapping[str, Any], Any]: ...


LossFn = Callable[..., Any]


@typed
def value_and_grad(loss_fn: LossFn, *, trained: Any = None) -> GradFn:
    """The function that each device runs in a step, from a loss function of any pytree model.

    Args:
        loss_fn: `loss_fn(params, batch, keys)` over this device's examples, with one key for each of them (None in
            evaluation). Returns a scalar (a mean over equally many examples on every device), a
            `Mean(total, weight)`, or either with a dict of auxiliary scalars or Means, which may be nested. With a
            fourth positional parameter without default, `loss_fn(params, batch, keys, carried)`, it gets the carried
            state, which is not differentiated.
        trained: a tree of bools like the parameters, or a prefix of them: False for leaves that are frozen. Their
            gradients are zeros, which are neither computed nor sent, and which algorithms with `feedback=True` refuse;
            the optimizer should have no state for them, as `optax.masked(optimizer, trained)`. None: all are trained.

    Returns:
        A GradFn: `(params, batch, keys, *, scale=1) -> (Mean, aux, gradients of scale * total)`; it takes `carried=` if
        the loss does.

    Raises:
        TypeError: a loss of other arguments; `trained` is not a tree of bools; at trace time, if the loss is neither a real scalar nor a Mean, a
            weight is not float32 or integer, or the weight of the loss depends on the parameters.
        ValueError: `trained` is True nowhere; at trace time, if it is not a prefix of the parameters.

    Cost: what `loss_fn` sends.

    Example:
        >>> loss_fn = lambda params, batch, keys: sk.Mean.of((batch @ params) ** 2)
        >>> loss, aux, grads = sk.value_and_grad(loss_fn)(jnp.ones(2), jnp.ones((3, 2)), None)
        >>> print(loss.total, loss.weight, grads)
        12.0 3.0 [12. 12.]
    """

    check_trained(trained)
    _check_loss(loss_fn)

    def run(params: Any, batch: Any, keys: Any, scale: Any, *carried: Any) -> tuple[Mean, Mapping[str, Any], Any]:
        some, joined, gradients = chosen(parts(params), trained)

        def total(some: list[Any]) -> tuple[jax.Array, tuple[Any, Mapping[str, Any]]]:
            mean, aux = loss_and_aux(call_loss(loss_fn, with_parts(params, joined(some)), batch, keys, *carried))
            return mean.total, (mean.weight, aux)

        value, (weight, aux), (grads,) = scaled_gradients(total, scale, some)
        return Mean(value, weight), aux, gradients(grads)

    def grad_fn(params: Any, batch: Any, keys: Any, *, scale: Any = 1) -> tuple[Mean, Mapping[str, Any], Any]:
        return run(params, batch, keys, scale)

    def carrying(
        params: Any, batch: Any, keys: Any, *, scale: Any = 1, carried: Any
    ) -> tuple[Mean, Mapping[str, Any], Any]:
        return run(params, batch, keys, scale, carried)

    made: Any = carrying if takes_carried(loss_fn) else grad_fn
    return made


def scaled_gradients(total: Callable[..., Any], scale: Any, *args: Any) -> tuple[jax.Array, Any, tuple[Any, ...]]:
    """The value and the rest that `total(*args)` returns, and the gradients of `scale * value`."""
    value, backward, rest = jax.vjp(total, *args, has_aux=True)  # a scaled float16 total would overflow
    return value, rest, backward(vary_like(jnp.asarray(scale, value.dtype), value))


def _check_loss(loss_fn: LossFn) -> None:
    """Refuses a loss that cannot be called with parameters, batch and keys, nor with carried state too."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return
    wrong = []
    for count in (3, 4):
        try:
            signature.bind(*[None] * count)
        except TypeError as error:
            wrong.append(error)
    if len(wrong) == 2:
        raise TypeError(
            f"value_and_grad: loss_fn must take (params, batch, keys), or (params, batch, keys, carried); got {signature}. "
            "Add the arguments that are missing: keys has one key per example, and may go unused."
        )


def takes_carried(loss_fn: LossFn) -> bool:
    """Whether a loss takes carried state: as its fourth positional parameter, without a default."""
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(required) > 3 and required[3].default is inspect.Parameter.empty


def call_loss(loss_fn: LossFn, params: Any, batch: Any, keys: Any, *carried: Any) -> Any:
    """The loss of parameters, and of carried state if there is some, with the lazy leaves of both sealed."""
    if not carried:
        return call_sealed(loss_fn, params, batch, keys)
    (tree,) = carried
    call = lambda tree: call_sealed(lambda *args: loss_fn(*args, tree), params, batch, keys)  # noqa: E731
    return call_sealed(call, with_parts(tree, parts(tree)), at="carried")


@jax.custom_jvp
def _constant(weight: jax.Array) -> jax.Array:
    """The weight of a loss; differentiating it is an error, because gradients are those of the total."""
    return weight


@partial(_constant.defjvp, symbolic_zeros=True)
def _weight_jvp(primals: Any, tangents: Any) -> Any:
    (weight,), (tangent,) = primals, tangents
    if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
        raise TypeError(
            "Mean: the weight of a loss must not depend on the parameters, because gradients are those of the total; "
            "this one does. Pass jax.lax.stop_gradient(weight), or divide in the loss and return a scalar."
        )
    return weight, tangent


def loss_and_aux(out: Any) -> tuple[Mean, dict[str, Any]]:
    """What a loss function returned, as a Mean and a dict of Means or trees of them."""
    aux: Any = {}
    if isinstance(out, tuple) and not isinstance(out, Mean) and len(out) == 2:
        out, aux = out
    loss = _as_mean(out, "value_and_grad: loss_fn must return a scalar, Mean(total, weight) or (either, aux)")
    if not isinstance(aux, Mapping):
        raise TypeError(
            f"value_and_grad: aux must be a dict of scalars or Means by name; got {kind(aux)}. "
            "Return for example (loss, {'accuracy': Mean(correct, count)})."
        )
    return loss._replace(weight=_constant(loss.weight)), {name: _aux(name, value) for name, value in aux.items()}


def named_means(out: Any) -> dict[str, Any]:
    """What a loss function returned, as Means or trees of them by name; the loss under "loss"."""
    loss, aux = loss_and_aux(out)
    return {"loss": loss, **aux}


def is_mean(x: Any) -> bool:
    """Whether a node of a tree is a Mean."""
    return isinstance(x, Mean)


def means_by_path(means: Any) -> list[tuple[str, Mean]]:
    """The Means of a tree, each after its path, such as "stats.variance"."""
    return [(path_name(path), mean) for path, mean in jax.tree_util.tree_leaves_with_path(means, is_leaf=is_mean)]


def _aux(name: Any, value: Any) -> Any:
    if not isinstance(name, str):
        raise TypeError(
            f"value_and_grad: aux must be a dict of scalars or Means by name; got the key {name!r}. Use a string."
        )

    leaf = lambda x: x is None or is_mean(x)  # noqa: E731

    def one(path: Any, value: Any) -> Any:
        at = path_name((jax.tree_util.DictKey(name), *path))
        if is_mean(value) and not jax.tree_util.all_leaves([value.total], leaf):
            each = lambda below, total: one((*path, *below), Mean(total, value.weight))  # noqa: E731
            return jax.tree_util.tree_map_with_path(each, value.total, is_leaf=leaf)
        mean = _as_mean(value, f"value_and_grad: aux {at!r} must be a scalar or Mean(total, weight)", is_mean(value))
        if mean.weight.shape not in ((), mean.total.shape):
            raise ValueError(
                f"Mean {at!r}: the weight must be a scalar or have the shape of the total; got {kind(mean)}. "
                "Broadcast it with jnp.broadcast_to(weight, total.shape)."
            )
        return mean

    return jax.tree_util.tree_map_with_path(one, value, is_leaf=leaf)


def _as_mean(value: Any, rule: str, shaped: bool = False) -> Mean:
    pair = value if isinstance(value, Mean) else Mean(value, jnp.float32(1))
    for x in pair:
        dtype = getattr(x, "dtype", None) or (jnp.result_type(x) if isinstance(x, int | float) else None)
        real = dtype is not None and any(jnp.issubdtype(dtype, each) for each in (jnp.floating, jnp.integer, jnp.bool_))
        if not real or (jnp.shape(x) and not shaped):
            raise TypeError(
                f"{rule}; got {kind(value)}. Sum over the examples and return Mean(total, weight), or their mean."
            )
    weight = jnp.asarray(pair.weight)
    if jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize < 4:
        raise TypeError(
            f"Mean: the weight must be float32 or an integer, because {weight.dtype} cannot count; got {weight.dtype}. "
            "Sum it in float32, as Mean.of(values, weights) does."
        )
    return Mean(jnp.asarray(pair.total), weight)


def global_means(means: Mapping[str, Any], batch_axes: Collection[str]) -> dict[str, Any]:
    """The means over all devices: each summed over exactly the axes over which its total varies.

    The sums are float32 and invariant over all axes.

    Raises:
        ValueError: a weight that varies over other axes than its total, except for one that varies over none while the
            total varies over `batch_axes`, which split the batch; an array that varies over further axes, whose devices
            may have parts of it instead of parts of a sum.

    Cost: one all_reduce of 8 bytes per mean, of an array for each element; those over the same axes share one
        collective.
    """
    leaves, structure = jax.tree.flatten(dict(means), is_leaf=is_mean)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, (name, mean) in enumerate(means_by_path(dict(means))):
        groups.setdefault(_axes_of_sum(name, mean, batch_axes), []).append(i)
    for axes, group in groups.items():
        flat, restored = ravel_pytree([vary(x.astype(jnp.float32), axes) for i in group for x in leaves[i]])
        back = restored(all_reduce(flat, axes) if axes else flat)
        for i, total, weight in zip(group, back[::2], back[1::2], strict=True):
            leaves[i] = Mean(total, weight)
    out = jax.tree.unflatten(structure, leaves)
    return {name: out[name] for name in means}


def divisor_of(weight: jax.Array) -> jax.Array:
    """The weight, or 1 where it is 0: without a weight the total is 0, and so are the gradients."""
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def _axes_of_sum(name: str, mean: Mean, batch_axes: Collection[str]) -> tuple[str, ...]:
    total, weight = varying_axes(mean.total), varying_axes(mean.weight)
    beyond = sorted(total - frozenset(batch_axes))
    if beyond and jnp.ndim(mean.total):
        raise ValueError(
            f"Mean {name!r}: an array may vary only over the axes of the batch; got {kind(mean.total)}, which varies "
            f"over {quoted(beyond)} too. Pass all_gather(..., replicated=True) of parts of the array, or "
            "all_reduce(...) of parts of a sum."
        )
    # A weight that varies over no axis, such as a number of values, counts once on each device; one that varies over
    # only some of the axes of the total would be counted again along the others.
    cast = frozenset(batch_axes) if not weight else frozenset()
    wrong = sorted((weight - total) | ((total - weight) - cast))
    if wrong:
        raise ValueError(
            f"Mean {name!r}: total and weight must vary over the same axes; the total varies over "
            f"{quoted(sorted(total))} and the weight over {quoted(sorted(weight))}, which differ in {quoted(wrong)}. "
            "Compute both from the same shards, or reduce both alike."
        )
    return tuple(sorted(total))


def kind(x: Any) -> str:
    """A value as an error names it: `float32[2,3]`, or the name of its type."""
    if isinstance(x, Mean):
        return f"Mean({kind(x.total)}, {kind(x.weight)})"
    if hasattr(x, "dtype"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return type(x).__name__
