"""The weights of a loss are data: the arrays from which they are computed are not rounded, and count once.

The traced loss says from which arrays of the batch a weight is computed. A comparison ends the dependence on an array's
precision: a mask is exact even if it is computed from rounded numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.checks import quote
from shardkit._jax import compat
from shardkit._jax.interpreter import FactInterpreter
from shardkit._jax.primitives import registered
from shardkit.meshes.layout import path_name
from shardkit.on_device.handles import cast_floating
from shardkit.on_device.means import means_by_path

MeansFn = Callable[[Any], Mapping[str, Any]]


class _Tag(NamedTuple):
    """A leaf of the batch on which a value depends.

    A value that is computed from a leaf has two tags, with `value` True and False. A comparison drops the True ones:
    its result depends on the leaf, but not on the digits of the leaf's numbers.
    """

    leaf: int
    value: bool


Tags = frozenset[_Tag]
_NOTHING: Tags = frozenset()
_STATE = -1  # in place of a leaf: parameters and carried state
_KEYS = -2  # the keys of this device's examples


class _Leaves(NamedTuple):
    """The leaves of a batch by their numbers."""

    scalars: set[int]
    whole: set[int]  # leaves without a dim that devices split
    rounded: set[int]  # leaves that the compute dtype would round


class _TracedMean(NamedTuple):
    """What a traced mean depends on."""

    name: str
    unshared: frozenset[str]  # the axes over which its total varies and its weight does not
    total: Tags
    weight: Tags


def in_compute(means_of: MeansFn, batch: Any, compute: Any, *, once: bool, split: int = 0, reads: bool = False) -> Any:
    """The batch as a loss sees it: floating-point arrays in the compute dtype, except for those that make a weight.

    `means_of` returns the loss and the auxiliary means of a batch by name; `once` says whether all examples are on one
    device, in one microbatch; `split` is the first dim that devices split, and `reads` whether the loss takes
    carried state.

    Raises:
        ValueError: each device and each microbatch would count the same weight again. The weight of a total over
            examples is computed from scalar leaves only, or from carried state only; or that of a total over parts of
            examples from leaves that are whole on each device.

    Cost: nothing is sent. A batch with arrays that would be rounded, or with scalars, and carried state cost a second
        trace of the loss.
    """
    # Worked example: a batch {"x": float32[8, 4], "mask": float32[8]} in bfloat16, with the weight sum(mask). In the
    # trace the weight depends on the value of "mask", which stays float32: bfloat16 counts exactly only up to 256. A
    # weight sum(mask > 0) depends on it through a comparison alone, and "mask" may be rounded.
    paths, structure = jax.tree_util.tree_flatten_with_path(batch)
    names = [path_name(path) for path, _ in paths]
    arrays = [leaf for _, leaf in paths]
    leaves = _Leaves(
        scalars={number for number, x in enumerate(arrays) if not x.ndim},
        whole={number for number, x in enumerate(arrays) if x.ndim <= split},
        rounded={number for number, x in enumerate(arrays) if _rounds(x.dtype, compute)},
    )

    def cast_all_but(exact: Collection[int]) -> list[Any]:
        cast = []
        for number, x in enumerate(arrays):
            cast.append(x if number in exact else cast_floating(x, compute))
        return cast

    # A trace takes as long as that of the loss itself, and is made only if a weight could be rounded or counted twice.
    needs_trace = bool(leaves.rounded) or (not once and (bool(leaves.whole) or reads))
    if not needs_trace:
        return jax.tree.unflatten(structure, cast_all_but(()))

    def trace(arrays: list[Any]) -> list[_TracedMean]:
        return _trace_means(lambda arrays: means_of(jax.tree.unflatten(structure, arrays)), arrays)

    try:
        means = trace(cast_all_but(()))
    except TypeError as error:
        # Probably the loss sums a weight in the compute dtype, which a Mean refuses. In the dtypes of the batch the
        # loss can be traced, and the trace shows which arrays make the weight.
        try:
            means = trace(cast_all_but(leaves.rounded))
        except Exception:
            raise error from None
    exact: set[int] = set()
    for mean in means:
        exact |= {tag.leaf for tag in mean.weight if tag.value} & leaves.rounded
        _check_weight(mean, leaves, names, once, split)
    return jax.tree.unflatten(structure, cast_all_but(exact))


def _trace_means(means_of: Callable[[list[Any]], Mapping[str, Any]], arrays: list[Any]) -> list[_TracedMean]:
    """On which arrays the total and the weight of each mean depend."""
    described: list[tuple[str, frozenset[str]]] = []

    def totals_and_weights(*arrays: Any) -> list[Any]:
        means = means_by_path(means_of(list(arrays)))
        results = []
        described.clear()
        for name, mean in means:
            described.append((name, compat.varying_axes(mean.total) - compat.varying_axes(mean.weight)))
            results += [mean.total, mean.weight]
        return results

    closed = jax.make_jaxpr(totals_and_weights)(*arrays)
    tags = _TagReader().run(closed, [_tags_of(leaf) for leaf in range(len(arrays))])
    means = []
    for (name, unshared), total, weight in zip(described, tags[::2], tags[1::2], strict=True):
        means.append(_TracedMean(name, unshared, total, weight))
    return means


def _check_weight(mean: _TracedMean, leaves: _Leaves, names: Sequence[str], once: bool, split: int) -> None:
    """Refuses a weight that each device, or each microbatch, counts in full, while its total is a share of a sum."""
    made_of = {tag.leaf for tag in mean.weight}
    counted = {tag.leaf for tag in mean.total} - {_STATE}
    axes = quote(sorted(mean.unshared))
    if mean.unshared and counted and made_of == {_STATE}:
        raise ValueError(
            f"Mean {mean.name!r}: the weight of examples must be a sum over them, because it counts once on each "
            f"device along {axes}, and in each microbatch; got one that depends only on parameters or carried state. "
            "Pass the weights of this device's examples, or vary(weight, axes) of this device's share."
        )
    made_of -= {_STATE}
    if not once and made_of and made_of <= leaves.scalars and not counted <= leaves.scalars:
        raise ValueError(
            f"Mean {mean.name!r}: the weight of examples must be a sum over them, because the weights of all devices "
            f"and microbatches are added; got one that depends only on leaf {names[min(made_of)]}, a "
            "scalar. Pass a weight for each example: an array with the examples along dim 0."
        )
    if split and mean.unshared and made_of and made_of <= leaves.whole and not counted <= leaves.whole:
        raise ValueError(
            f"Mean {mean.name!r}: the weight must count this device's parts of examples, because it is added once on "
            f"each device along {axes}; got one that depends only on leaf {names[min(made_of)]}, which every device "
            "has whole. Pass a weight for each part, as an array with its dims, or vary(weight, axes) if the total "
            "is of whole examples too."
        )


def _outside(x: Any) -> int | None:
    """The tag of a constant of the traced loss: the keys, or the state for other traced values; None for a number."""
    if not isinstance(x, jax.core.Tracer):
        return None
    return _KEYS if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else _STATE


def _rounds(dtype: Any, compute: Any) -> bool:
    """Whether numbers of a dtype lose digits, or overflow, in the compute dtype."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    before = jnp.finfo(dtype)
    after = jnp.finfo(compute)
    return bool(before.nmant > after.nmant or before.maxexp > after.maxexp)


class _TagReader(FactInterpreter[Tags]):
    """Follows the tags of values through a traced loss."""

    def constant(self, x: Any) -> Tags:
        leaf = _outside(x)
        return _NOTHING if leaf is None else _tags_of(leaf)

    def literal(self, atom: Any) -> Tags:
        return _NOTHING

    def join(self, facts: Sequence[Tags], variable: Any) -> Tags:
        return _NOTHING.union(*facts)

    def step(self, equation: Any, operands: list[Tags]) -> Sequence[Tags]:
        if not any(operands):
            return [_NOTHING] * len(equation.outvars)
        results = []
        for variable, tags in zip(equation.outvars, super().step(equation, operands), strict=True):
            is_comparison = getattr(variable.aval, "dtype", None) == np.bool_
            results.append(_without_values(tags) if is_comparison else tags)
        return results

    def equation(self, equation: Any, operands: list[Tags]) -> Sequence[Tags]:
        count = len(equation.outvars)
        row = registered(equation.primitive.name)
        if (row.same or row.kind) and len(operands) == count:  # result i depends on operand i
            return operands
        return [_NOTHING.union(*operands)] * count


def _tags_of(leaf: int) -> Tags:
    return frozenset({_Tag(leaf, True), _Tag(leaf, False)})


def _without_values(tags: Tags) -> Tags:
    return frozenset(tag for tag in tags if not tag.value)
