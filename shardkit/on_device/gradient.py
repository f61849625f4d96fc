"""What one device computes: a loss as total and weight, and the gradients of the total."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from shardkit._arguments.checks import quoted
from shardkit._arguments.typed import typed
from shardkit._jax.compat import bound_axes, tracked_axes, varying_axes
from shardkit._jax.jaxprs import MEAN, TOTALS
from shardkit._jax.one_device import as_on_one_device, noting
from shardkit.collectives import all_reduce, vary
from shardkit.collectives.axes import axis_size, vary_like
from shardkit.meshes.layout import path_name
from shardkit.on_device.batch import check_whole
from shardkit.on_device.handles import call_sealed, is_handle, parts, with_parts
from shardkit.on_device.trained import check_trained, chosen


class Mean(NamedTuple):
    """A mean over devices and microbatches, as two sums that are divided only at the end.

    A loss may be a sum of them with different weights, `a - b / 10`: their weights are summed over devices first, by
    an all_reduce of 4 bytes each, and one gradient follows. A step cannot split it into microbatches.

    Attributes:
        total: scalar, the sum of this device's values; for an auxiliary mean an array or a pytree of arrays too.
        weight: scalar, the number of those values or the sum of their weights, float32 or integer, computed from this
            device's examples. It is summed over devices and microbatches in float32: counts are exact up to 2^24, and
            to 7 digits beyond. Beside an array, an array of its shape too: a weight for each element.
    """

    total: Any
    weight: Any

    @classmethod
    @typed
    def of(cls, values: jax.Array, weights: jax.Array | None = None) -> Mean:
        """Sums `values` (any shape), weighted by `weights` (the same shape), both in float32.

        Raises:
            TypeError: complex values or weights.
            ValueError: weights of another shape, because a broadcast weight would count once for many values.
        """
        for name, x in (("values", values), ("weights", weights)):
            if x is not None and not is_real(x.dtype):
                raise TypeError(
                    f"Mean.of: {name} must be real numbers, of which a mean is one; got {kind(x)}. Pass a real part, "
                    "as jnp.real(x) or jnp.abs(x)."
                )
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

    def __add__(self, other: Any) -> Any:
        return Sum((self,)) + other

    def __radd__(self, other: Any) -> Any:
        return self if isinstance(other, int) and other == 0 else self + other  # `sum` begins with 0

    def __sub__(self, other: Any) -> Any:
        return Sum((self,)) - other

    def __rsub__(self, other: Any) -> Any:
        return -1 * self + other

    def __neg__(self) -> Mean:
        return -1 * self

    def __mul__(self, factor: Any) -> Mean:
        factor = factor_of(factor)
        return Mean(jax.tree.map(lambda total: factor * total, self.total), self.weight)

    def __rmul__(self, factor: Any) -> Mean:
        return self * factor

    def __truediv__(self, factor: Any) -> Mean:
        factor = factor_of(factor)
        return Mean(jax.tree.map(lambda total: total / factor, self.total), self.weight)

    def __rtruediv__(self, other: Any) -> Mean:
        raise TypeError(_NOT_LINEAR.format(did="divided by"))

    def __pow__(self, other: Any) -> Mean:
        raise TypeError(_NOT_LINEAR.format(did="raised to a power"))


class Sum(NamedTuple):
    """A sum of Means, `terms`, each with its own weight: what `a + 0.1 * b` is."""

    terms: tuple[Mean, ...]

    def __add__(self, other: Any) -> Sum:
        if not isinstance(other, Mean | Sum):
            raise TypeError(f"Mean: only Means can be added to it; got {kind(other)}. Pass Mean(value, 1).")
        return Sum((*self.terms, *terms_of(other)))

    def __radd__(self, other: Any) -> Any:
        return self if isinstance(other, int) and other == 0 else self + other

    def __sub__(self, other: Any) -> Sum:
        return self + (-1 * other if isinstance(other, Mean | Sum) else other)

    def __rsub__(self, other: Any) -> Any:
        return -1 * self + other

    def __neg__(self) -> Sum:
        return -1 * self

    def __mul__(self, factor: Any) -> Sum:
        factor = factor_of(factor)
        return Sum(tuple(factor * mean for mean in self.terms))

    def __rmul__(self, factor: Any) -> Sum:
        return self * factor

    def __truediv__(self, factor: Any) -> Sum:
        factor = factor_of(factor)
        return Sum(tuple(mean / factor for mean in self.terms))

    def __rtruediv__(self, other: Any) -> Sum:
        raise TypeError(_NOT_LINEAR.format(did="divided by"))

    def __pow__(self, other: Any) -> Sum:
        raise TypeError(_NOT_LINEAR.format(did="raised to a power"))


# A factor that is a scalar of numpy leaves the product to these classes.
Mean.__array_ufunc__ = None  # type: ignore[attr-defined]
Sum.__array_ufunc__ = None  # type: ignore[attr-defined]

_NOT_LINEAR = (
    "Mean: means can be added, and multiplied by numbers, because they are divided only after the sum over devices; "
    "got one that is {did}. Do that to the values before they are summed, or use the metric of the step."
)


def factor_of(factor: Any) -> Any:
    """What a Mean is multiplied or divided by; refuses anything but a real number or an array of them."""
    if isinstance(factor, int) and abs(factor) >= 2**31:
        factor = _counted(factor)
    dtype = getattr(factor, "dtype", None) or (jnp.result_type(factor) if isinstance(factor, int | float) else None)
    if not is_real(dtype):
        raise TypeError(
            f"Mean: the factor of a mean must be a real number or an array of them; got {kind(factor)}. Multiply the "
            "values before they are summed."
        )
    return factor


def is_real(dtype: Any) -> bool:
    """Whether a dtype is of floats, integers or booleans; None is none."""
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return dtype is not None and any(jnp.issubdtype(dtype, each) for each in kinds)


def terms_of(loss: Any) -> tuple[Any, ...]:
    """The Means of which a loss is the sum."""
    return loss.terms if isinstance(loss, Sum) else (loss,)


def largest_weight(loss: Any) -> jax.Array:
    """The weight by which a loss's gradient is still to be divided: the only one, or the largest of a sum of Means."""
    return reduce(jnp.maximum, [mean.weight for mean in terms_of(loss)])


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
def value_and_grad(loss_fn: LossFn, *, trained: Any = None, local: bool = False) -> GradFn:
    """The function that each device runs in a step, from a loss function of any pytree model.

    Args:
        loss_fn: `loss_fn(params, batch, keys)` over this device's examples, with one key for each of them (None in
            evaluation). Returns a scalar (a mean over equally many examples on every device), a
            `Mean(total, weight)`, or either with a dict of auxiliary scalars or Means, which may be nested. With a
            fourth positional parameter without default, `loss_fn(params, batch, keys, carried)`, it gets the carried
            state, which is not differentiated.
        trained: a tree of bools like the parameters, or a prefix of them: False for leaves that are frozen. Their
            gradients are zeros, which are neither computed nor sent, and which algorithms with `feedback=True` refuse.
            The step keeps them as they are, whatever the optimizer does (as weight decay); it need have no state for
            them, as `optax.masked(optimizer, trained)`. None: all are trained.
        local: whether the loss is traced as on one device, without the mesh. Loops inside libraries, such as those of
            diffrax, then need no casts, and the gradient of a constant inside the loss is this device's. For a loss
            that does not communicate, under plans that pass it whole leaves and examples.

    Returns:
        A GradFn: `(params, batch, keys, *, scale=1) -> (Mean, aux, gradients of scale * total)`; it takes `carried=` if
        the loss does.

    Raises:
        TypeError: a loss of other arguments; `trained` is not a tree of bools; at trace time, if the loss is neither a
            real scalar nor a Mean, a weight is not float32 or integer, or the weight of the loss depends on the
            parameters.
        ValueError: `trained` is True nowhere; at trace time, if it is not a prefix of the parameters; with `local`, a
            loss that communicates or is a sum of means, lazy leaves, tp, cp, ep.

    Cost: what `loss_fn` sends. With `local` it is traced as often as without, and lowered as a function of its own.

    Example:
        >>> loss_fn = lambda params, batch, keys: sk.Mean.of((batch @ params) ** 2)
        >>> loss, aux, grads = sk.value_and_grad(loss_fn)(jnp.ones(2), jnp.ones((3, 2)), None)
        >>> print(loss.total, loss.weight, grads)
        12.0 3.0 [12. 12.]
    """

    check_trained(trained)
    _check_loss(loss_fn)

    def loss_and_gradient(some: list[Any], params: Any, scale: Any, *args: Any) -> tuple[Any, Mapping[str, Any], Any]:
        _, joined, _ = chosen(parts(params), trained)

        def total(some: list[Any]) -> tuple[jax.Array, tuple[Any, Mapping[str, Any]]]:
            loss, aux = loss_and_aux(call_loss(loss_fn, with_parts(params, joined(some)), *args), several=True)
            return _total(loss, local), (loss, aux)

        _, (loss, aux), (grads,) = scaled_gradients(total, scale, some)
        return loss, aux, grads

    def through(call: Callable[..., Any], params: Any, *args: Any) -> tuple[Any, Mapping[str, Any], Any]:
        some, joined, gradients = chosen(parts(params), trained)

        # Leaves that are opened just before the loss are gathered here, and their gradients scattered, outside of what
        # is differentiated: a loss that is traced as on one device cannot do it.
        def opened(some: list[Any]) -> tuple[list[Any], Any]:
            tree = with_parts(params, joined(some))
            return chosen(parts(tree), trained)[0], tree

        seen, backward, tree = jax.vjp(opened, some, has_aux=True)
        loss, aux, grads = call(loss_and_gradient, seen, tree, *(with_parts(each, parts(each)) for each in args))
        return loss, aux, gradients(*backward(grads))

    def run(params: Any, scale: Any, *args: Any) -> tuple[Any, Mapping[str, Any], Any]:
        if _LOSS_ALONE.get():
            opened = [with_parts(tree, parts(tree)) for tree in (params, *args)]
            call = partial(call_loss, loss_fn)
            out = alone(call, *opened) if local else call(*opened)
            return *loss_and_aux(out, several=True), jax.tree.map(jnp.zeros_like, parts(params))
        if local:
            return through(alone, params, scale, *args)
        with noting_types(*(partial(through, call, params, scale, *args) for call in (alone, untyped))):
            return through(lambda fn, *args: fn(*args), params, scale, *args)

    def grad_fn(params: Any, batch: Any, keys: Any, *, scale: Any = 1) -> tuple[Any, Mapping[str, Any], Any]:
        return run(params, scale, batch, keys)

    def carrying(
        params: Any, batch: Any, keys: Any, *, scale: Any = 1, carried: Any
    ) -> tuple[Any, Mapping[str, Any], Any]:
        return run(params, scale, batch, keys, carried)

    made: Any = carrying if takes_carried(loss_fn) else grad_fn
    return made


def _total(loss: Any, local: bool) -> jax.Array:
    """What is differentiated: the total, or the sum of several, each over its own weight and times the largest.

    An all_reduce stands here, because one gradient of several means divides each by the weight of the whole batch, of
    which a device knows its share. The largest divides them all at the end, as the weight of one Mean does.
    """
    if not isinstance(loss, Sum):
        return loss.total
    if local:
        raise ValueError(
            "value_and_grad: with local=True a loss does not communicate, and a sum of means sums its weights over "
            "devices; got both. Leave out local=, or weight the values of one Mean."
        )
    over = [varying_axes(mean.total) for mean in loss.terms]
    axes = tuple(sorted(frozenset[str]().union(*over)))
    weights = jnp.stack([vary(mean.weight.astype(jnp.float32), axes) for mean in loss.terms])
    whole = all_reduce(weights, axes) if axes else weights
    # Beside one that varies, a mean that is the same along an axis counts once for each of its devices: its gradient,
    # and its weight here, but not in the weights of which the divisor is the largest.
    times = jnp.array([math.prod(axis_size(axis) for axis in axes if axis not in each) for each in over], jnp.float32)
    largest, whole = divisor_of(jnp.max(whole / times)), divisor_of(whole)
    return reduce(jnp.add, [largest / w * mean.total for w, mean in zip(whole, loss.terms, strict=True)])


# Whether GradFns of `value_and_grad` leave out the gradients, for those who only look at the loss of a step.
_LOSS_ALONE: ContextVar[bool] = ContextVar("loss alone", default=False)


@contextmanager
def loss_alone() -> Iterator[None]:
    """Inside of it, while it is traced, a GradFn of `value_and_grad` returns zeros in place of the gradients."""
    token = _LOSS_ALONE.set(True)
    try:
        yield
    finally:
        _LOSS_ALONE.reset(token)


def noting_types(alone: Callable[[], Any], untyped: Callable[[], Any]) -> AbstractContextManager[None]:
    """A loss inside of it that only the types of axes keep from being traced ends in an error with a note of it.

    `alone` calls it as on one device, which a loss that communicates cannot be; `untyped` without these types.
    """
    cast = "what is the same on all devices at {line}, as a loop's beginning is, sk.vary_like(start, x) of its data x."
    local = "Pass value_and_grad(loss_fn, local=True), and local=True to make_eval_step; or cast " + cast
    remedies = [
        (f"value_and_grad: as on one device the loss can be traced. {local}", alone),
        (f"value_and_grad: without the types of axes the loss can be traced. Cast {cast}", untyped),
    ]
    return noting(*remedies) if tracked_axes() else nullcontext()


untyped = partial(as_on_one_device, may_send=True)


def alone(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, a loss and what it is called with, as on one device.

    Raises:
        ValueError: an argument of which this device has a part.
    """
    check_whole()
    lazy = [leaf for leaf in jax.tree.leaves(args, is_leaf=is_handle) if is_handle(leaf)]
    if lazy:
        raise ValueError(
            "value_and_grad: with local=True a loss does not communicate, and must get weights that are gathered; got "
            f"{lazy[0]}, a lazy leaf. Leave out layerwise= of the plan, or local=."
        )
    return as_on_one_device(fn, *args)


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
            "value_and_grad: loss_fn must take (params, batch, keys), or (params, batch, keys, carried); got "
            f"{signature}. Add the arguments that are missing: keys has one key per example, and may go unused."
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

    def with_carried(tree: Any) -> Any:
        return call_sealed(lambda *args: loss_fn(*args, tree), params, batch, keys)

    return call_sealed(with_carried, *carried, at="carried")


@jax.custom_jvp
def _constant(weight: jax.Array, total: jax.Array) -> jax.Array:
    """The weight of a loss, beside its total; deriving it is an error, because gradients are those of the total."""
    return weight


@partial(_constant.defjvp, symbolic_zeros=True)
def _weight_jvp(primals: Any, tangents: Any) -> Any:
    (weight, _), (tangent, _) = primals, tangents
    if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
        raise TypeError(
            "Mean: the weight of a loss must not depend on the parameters, because gradients are those of the total; "
            "this one does. Pass jax.lax.stop_gradient(weight), or divide in the loss and return a scalar."
        )
    return weight, tangent


def loss_and_aux(out: Any, several: bool = False) -> tuple[Any, dict[str, Any]]:
    """What a loss function returned, as a Mean, or a Sum where there may be several, and a dict of Means."""
    aux: Any = {}
    if isinstance(out, tuple) and not isinstance(out, Mean) and len(out) == 2:
        out, aux = out
    rule = "value_and_grad: loss_fn must return a scalar, Mean(total, weight) or (either, aux)"
    terms = [_as_mean(each, rule) for each in (terms_of(out) if several else (out,))]
    with jax.named_scope(MEAN):
        terms = [mean._replace(weight=_constant(mean.weight, mean.total)) for mean in terms]
    if not isinstance(aux, Mapping):
        raise TypeError(
            f"value_and_grad: aux must be a dict of scalars or Means by name; got {kind(aux)}. "
            "Return for example (loss, {'accuracy': Mean(correct, count)})."
        )
    loss = Sum(tuple(terms)) if len(terms) > 1 else terms[0]
    return loss, {name: _aux(name, value) for name, value in aux.items()}


def named_means(out: Any) -> dict[str, Any]:
    """What a loss function returned, as Means or trees of them by name; the loss under "loss"."""
    loss, aux = loss_and_aux(out, several=True)
    return {"loss": loss, **aux}


def is_mean(x: Any) -> bool:
    """Whether a node of a tree is a Mean."""
    return isinstance(x, Mean)


def means_by_path(means: Any) -> list[tuple[str, Mean]]:
    """The Means of a tree, each after its path, such as "stats.variance"."""
    return [(path_name(path), mean) for path, mean in jax.tree_util.tree_leaves_with_path(means, is_leaf=is_mean)]


def _aux(name: Any, value: Any) -> Any:
    """A metric as a Mean, or a tree of metrics as one of Means.

    Worked example: `Mean({"mean": m, "variance": v}, count)` is `{"mean": Mean(m, count), "variance": Mean(v, count)}`.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"value_and_grad: aux must be a dict of scalars or Means by name; got the key {name!r}. Use a string."
        )

    def is_metric(x: Any) -> bool:
        return x is None or isinstance(x, Mean | Sum)

    def convert(path: Any, metric: Any) -> Any:
        if is_mean(metric) and not jax.tree_util.all_leaves([metric.total], is_metric):

            def convert_total(path_in_total: Any, total: Any) -> Any:
                return convert((*path, *path_in_total), Mean(total, metric.weight))

            return jax.tree_util.tree_map_with_path(convert_total, metric.total, is_leaf=is_metric)
        label = path_name((jax.tree_util.DictKey(name), *path))
        rule = f"value_and_grad: aux {label!r} must be a scalar or Mean(total, weight)"
        mean = _as_mean(metric, rule, shaped=is_mean(metric))
        if mean.weight.shape not in ((), mean.total.shape):
            raise ValueError(
                f"Mean {label!r}: the weight must be a scalar or have the shape of the total; got {kind(mean)}. "
                "Broadcast it with jnp.broadcast_to(weight, total.shape)."
            )
        return mean

    return jax.tree_util.tree_map_with_path(convert, value, is_leaf=is_metric)


def _as_mean(value: Any, rule: str, shaped: bool = False) -> Mean:
    pair = value if isinstance(value, Mean) else Mean(value, jnp.float32(1))
    for x in pair:
        dtype = getattr(x, "dtype", None) or (jnp.result_type(x) if isinstance(x, int | float) else None)
        if not is_real(dtype) or (jnp.shape(x) and not shaped):
            raise TypeError(
                f"{rule}; got {kind(value)}. Sum over the examples and return Mean(total, weight), or their mean."
            )
    _check_known_weight(pair.weight)
    weight = _counted(pair.weight)
    if jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize < 4:
        raise TypeError(
            f"Mean: the weight must be float32 or an integer, because {weight.dtype} cannot count; got {weight.dtype}. "
            "Sum it in float32, as Mean.of(values, weights) does."
        )
    return Mean(_counted(pair.total), weight)


def _counted(x: Any) -> jax.Array:
    """A number or an array as an array; a Python integer that int32 cannot hold as float32, in which it is summed."""
    _check_size(x)
    return jnp.asarray(x, jnp.float32 if isinstance(x, int) and abs(x) >= 2**31 else None)


def _check_size(x: Any) -> None:
    if isinstance(x, int) and abs(x) >= 2**63:
        raise ValueError(f"Mean: a whole number must be below 2**63; got {x.bit_length()} bits. Pass a float.")


def _check_known_weight(weight: Any) -> None:
    """Refuses a weight that no batch changes, and by which nothing can be divided: the total would stay as it is.

    Inside shard_map every value of a batch is traced, so that an array which is known is a constant. Outside of it, as
    on one device without jit, the batch is known too, and may be of padding alone: then only a plain number is checked.
    """
    if not (type(weight) in (int, float) or (bound_axes() and not isinstance(weight, jax.core.Tracer))):
        return
    _check_size(weight)
    numbers = np.asarray(weight, np.float64)
    if not (np.isfinite(numbers).all() and (numbers >= 0).all() and (numbers > 0).any()):
        told = numbers if numbers.ndim else f"{numbers.item():g}"
        raise ValueError(
            f"Mean: the weight must be above 0 and finite, because the total is divided by the sum of weights; got "
            f"{told}. Pass the number of values, or the sum of their weights."
        )


def global_means(means: Mapping[str, Any], batch_axes: Collection[str]) -> dict[str, Any]:
    """The means over all devices: each summed over exactly the axes over which its total varies.

    The sums are float32 and invariant over all axes.

    Raises:
        ValueError: a weight that varies over other axes of several devices than its total, except for one that varies
            over none while the total varies over `batch_axes`, which split the batch; an array that varies over further
            axes, whose devices may have parts of it instead of parts of a sum.

    Cost: one all_reduce of 8 bytes per mean, of an array for each element; those over the same axes share one
        collective.
    """
    leaves, structure = jax.tree.flatten(dict(means), is_leaf=is_mean)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, (name, mean) in enumerate(means_by_path(dict(means))):
        groups.setdefault(_axes_of_sum(name, mean, batch_axes), []).append(i)
    # After the loss, total and weight are summed by one collective for all means over the same axes, those over which
    # the total varies. In the loss, the sum would be sent for each microbatch, and divided where no device has the
    # weight of them all. Over an axis along which all devices have the same total, as tp's, a sum would count it once
    # for each.
    for axes, group in groups.items():
        flat, restored = ravel_pytree([vary(x.astype(jnp.float32), axes) for i in group for x in leaves[i]])
        with jax.named_scope(TOTALS):
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
    # Along an axis of one device nothing is counted twice, and what varies by an index along it is whole.
    several = frozenset(axis for axis in total | weight if axis_size(axis) > 1)
    beyond = sorted(several & total - frozenset(batch_axes))
    if beyond and jnp.ndim(mean.total):
        raise ValueError(
            f"Mean {name!r}: an array may vary only over the axes of the batch; got {kind(mean.total)}, which varies "
            f"over {quoted(beyond)} too. Pass all_gather(..., replicated=True) of parts of the array, or "
            "all_reduce(...) of parts of a sum."
        )
    # A weight that varies over no axis, such as a number of values, counts once on each device; one that varies over
    # only some of the axes of the total would be counted again along the others.
    cast = frozenset(batch_axes) if not weight else frozenset()
    wrong = sorted(several & ((weight - total) | ((total - weight) - cast)))
    if wrong:
        raise ValueError(
            f"Mean {name!r}: total and weight must vary over the same axes; the total varies over "
            f"{quoted(sorted(total))} and the weight over {quoted(sorted(weight))}, which differ in {quoted(wrong)}. "
            f"Compute both from the same shards, or reduce both alike{', as row_linear over a tp axis' * bool(beyond)}."
        )
    return tuple(sorted(total | weight))


def kind(x: Any) -> str:
    """A value as an error names it: `float32[2,3]`, or the name of its type."""
    if isinstance(x, Mean):
        return f"Mean({kind(x.total)}, {kind(x.weight)})"
    if hasattr(x, "dtype"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return type(x).__name__
