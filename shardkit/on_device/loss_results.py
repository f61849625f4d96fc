"""What a loss function returned, as Means: the loss, and the auxiliary values by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._jax.compat import bound_axes
from shardkit._jax.jaxprs import MEAN
from shardkit.meshes.layout import path_name
from shardkit.on_device.means import (
    Mean,
    Sum,
    check_size,
    describe_type,
    dtype_of,
    is_mean,
    is_real,
    terms_of,
    to_array,
)


def loss_and_aux(out: Any, *, allow_sum: bool = False) -> tuple[Any, dict[str, Any]]:
    """What a loss function returned, as a Mean and a dict of Means; with `allow_sum` the loss may be a Sum too."""
    aux: Any = {}
    if isinstance(out, tuple) and not isinstance(out, Mean) and len(out) == 2:
        out, aux = out
    rule = "value_and_grad: loss_fn must return a scalar, Mean(total, weight) or (either, aux)"
    values = terms_of(out) if allow_sum else (out,)
    terms = [_make_mean(value, rule) for value in values]
    # The scope marks where a weight meets its total, for those who read the traced program.
    with jax.named_scope(MEAN):
        terms = [mean._replace(weight=_hold_constant(mean.weight, mean.total)) for mean in terms]
    loss: Any = terms[0]
    if len(terms) > 1:
        loss = Sum(tuple(terms))
    if not isinstance(aux, Mapping):
        raise TypeError(
            f"value_and_grad: aux must be a dict of scalars or Means by name; got {describe_type(aux)}. "
            "Return for example (loss, {'accuracy': Mean(correct, count)})."
        )
    return loss, {name: _make_metric(name, value) for name, value in aux.items()}


def named_means(out: Any) -> dict[str, Any]:
    """What a loss function returned, as Means or trees of them by name; the loss under "loss"."""
    loss, aux = loss_and_aux(out, allow_sum=True)
    return {"loss": loss, **aux}


def terms_by_name(means: Mapping[str, Any]) -> dict[str, tuple[Mean, ...]]:
    """Named means without trees and sums: the terms of the loss, and each Mean of a tree by its path.

    The terms of a sum of means are not combined. To combine them divides by the weights of all devices, but who
    compares the losses of parts of the examples needs the terms of each part.
    """
    terms = {"loss": terms_of(means["loss"])}
    for name, value in means.items():
        if name == "loss":
            continue
        for path, mean in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_mean):
            terms[path_name((jax.tree_util.DictKey(name), *path))] = (mean,)
    return terms


@jax.custom_jvp
def _hold_constant(weight: jax.Array, total: jax.Array) -> jax.Array:
    """The weight, unchanged; differentiating it is an error, because gradients are those of the total alone.

    The total is an operand so that a reader of the traced program finds both in one equation.
    """
    return weight


@partial(_hold_constant.defjvp, symbolic_zeros=True)
def _differentiate_weight(primals: Any, tangents: Any) -> Any:
    weight, _ = primals
    tangent, _ = tangents
    if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
        raise TypeError(
            "Mean: the weight of a loss must not depend on the parameters, because the step differentiates the total "
            "alone; this one does. Pass jax.lax.stop_gradient(weight), or divide in the loss and return a scalar."
        )
    return weight, tangent


def _make_metric(name: Any, value: Any) -> Any:
    """A metric as a Mean, or a tree of metrics as one of Means.

    Worked example: `Mean({"mean": m, "variance": v}, count)` is `{"mean": Mean(m, count), "variance": Mean(v, count)}`.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"value_and_grad: aux must be a dict of scalars or Means by name; got the key {name!r}. Use a string."
        )

    def convert(path: Any, metric: Any) -> Any:
        is_mean_of_tree = is_mean(metric) and not jax.tree_util.all_leaves([metric.total], _is_metric)
        if is_mean_of_tree:

            def convert_total(path_in_total: Any, total: Any) -> Any:
                return convert((*path, *path_in_total), Mean(total, metric.weight))

            return jax.tree_util.tree_map_with_path(convert_total, metric.total, is_leaf=_is_metric)
        label = path_name((jax.tree_util.DictKey(name), *path))
        rule = f"value_and_grad: aux {label!r} must be a scalar or Mean(total, weight)"
        mean = _make_mean(metric, rule, shaped=is_mean(metric))
        if mean.weight.shape not in ((), mean.total.shape):
            raise ValueError(
                f"Mean {label!r}: the weight must be a scalar or have the shape of the total; got "
                f"{describe_type(mean)}. Broadcast it with jnp.broadcast_to(weight, total.shape)."
            )
        return mean

    return jax.tree_util.tree_map_with_path(convert, value, is_leaf=_is_metric)


def _is_metric(x: Any) -> bool:
    return x is None or isinstance(x, Mean | Sum)


def _make_mean(value: Any, rule: str, shaped: bool = False) -> Mean:
    """A scalar or a Mean as a Mean of arrays; only with `shaped` may total and weight have dims."""
    mean = value
    if not isinstance(value, Mean):
        # A scalar counts as the mean of equally many examples on every device: weight 1 for each of them.
        mean = Mean(value, jnp.float32(1))
    for number in mean:
        # First the dtype: what is no number has no shape.
        if not is_real(dtype_of(number)) or (jnp.shape(number) and not shaped):
            raise TypeError(
                f"{rule}; got {describe_type(value)}. Sum over the examples and return Mean(total, weight), or their "
                "mean."
            )
    _check_constant_weight(mean.weight)
    weight = to_array(mean.weight)
    if jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize < 4:
        raise TypeError(
            f"Mean: the weight must be float32 or an integer, because {weight.dtype} cannot count; got {weight.dtype}. "
            "Sum it in float32, as Mean.of(values, weights) does."
        )
    return Mean(to_array(mean.total), weight)


def refuse_rounded_totals(out: Any) -> None:
    """Refuses the total of a Mean that a loss returned where its dtype rounds the sum.

    With a weight of 1 the total is no sum, but a value with the dtype of the model, as a penalty.
    """
    for mean in jax.tree.leaves(out, is_leaf=is_mean):
        if not is_mean(mean):
            continue
        is_known = not isinstance(mean.weight, jax.core.Tracer)
        is_one = is_known and np.all(np.asarray(mean.weight) == 1)
        for total in jax.tree.leaves(mean.total):
            dtype = dtype_of(total)
            is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
            if is_float and dtype.itemsize < 4 and not is_one:
                digits = int(jnp.finfo(dtype).precision)  # 3 of float16, 2 of bfloat16
                raise TypeError(
                    f"Mean: the total must be float32, because {dtype} rounds a sum to {digits} digits; got {dtype}. "
                    "Sum it in float32, as Mean.of(values, weights) does."
                )


def _check_constant_weight(weight: Any) -> None:
    """Refuses a constant weight that is zero, negative or not finite: nothing can be divided by it.

    Inside shard_map the arrays of a batch are traced, so that an array with values is a constant. Outside of it, as on
    one device without jit, the batch has values too, and its weights may be zero where all of it is padding. There only
    a plain number is checked.
    """
    is_number = type(weight) in (int, float)
    is_constant_array = bool(bound_axes()) and not isinstance(weight, jax.core.Tracer)
    if not is_number and not is_constant_array:
        return
    check_size(weight)
    numbers = np.asarray(weight, np.float64)
    divides = np.isfinite(numbers).all() and (numbers >= 0).all() and (numbers > 0).any()
    if not divides:
        shown = numbers if numbers.ndim else f"{numbers.item():g}"
        raise ValueError(
            f"Mean: the weight must be above 0 and finite, because the total is divided by the sum of weights; got "
            f"{shown}. Pass the number of values, or the sum of their weights."
        )
