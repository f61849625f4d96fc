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

from shardkit._arguments.checks import quoted
from shardkit._jax import compat
from shardkit._jax.jaxprs import find_called_jaxpr, find_fixed_point, flow, scan_operands
from shardkit._jax.primitives import registered
from shardkit.meshes.layout import path_name
from shardkit.on_device.handles import cast_floating
from shardkit.on_device.means import means_by_path

MeansFn = Callable[[Any], Mapping[str, Any]]


class _Tag(NamedTuple):
    """A leaf of the batch on which a value depends, and whether by its value or (also) through a comparison."""

    leaf: int
    value: bool


Tags = frozenset[_Tag]
_STATE, _KEYS = -1, -2  # in place of a leaf: parameters and carried state; the keys of this device's examples


def in_compute(means_of: MeansFn, batch: Any, compute: Any, *, once: bool, split: int = 0, reads: bool = False) -> Any:
    """The batch as a loss sees it: floating-point arrays in the compute dtype, except for those that make a weight.

    `means_of` returns the loss and the auxiliary means of a batch by name; `once` says whether all examples are on one
    device, in one microbatch; `split` is the first dim that devices split, and `reads` whether the loss takes
    carried state.

    Raises:
        ValueError: a total over examples whose weight is computed from scalar leaves only: each device and each
            microbatch would count it again; one over parts of examples, from leaves that are whole on each device; one
            whose weight is computed from carried state only.

    Cost: nothing is sent. A batch with arrays that would be rounded, or with scalars, and carried state cost a second
        trace of the loss.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(batch)
    leaves = [leaf for _, leaf in paths]
    scalars = {i for i, leaf in enumerate(leaves) if not leaf.ndim}
    whole = {i for i, leaf in enumerate(leaves) if leaf.ndim <= split}
    rounded = {i for i, leaf in enumerate(leaves) if _rounds(leaf.dtype, compute)}

    def lower(exact: Collection[int]) -> list[Any]:
        return [x if i in exact else cast_floating(x, compute) for i, x in enumerate(leaves)]

    if not rounded and (once or not (whole or reads)):
        return jax.tree.unflatten(structure, lower(()))
    names: list[tuple[str, Any]] = []

    def pairs(*leaves: Any) -> list[Any]:
        means = means_by_path(means_of(jax.tree.unflatten(structure, leaves)))
        names[:] = [(name, compat.varying_axes(x.total) - compat.varying_axes(x.weight)) for name, x in means]
        return [x for _, mean in means for x in mean]

    try:
        closed = jax.make_jaxpr(pairs)(*lower(()))
    except TypeError as error:  # a weight that was summed in the compute dtype: find out which one in the given dtypes
        try:
            closed = jax.make_jaxpr(pairs)(*lower(rounded))
        except Exception:
            raise error from None
    given = [*map(_outside, closed.consts), *range(len(leaves))]
    tags = _flow(
        closed.jaxpr, [frozenset({_Tag(i, True), _Tag(i, False)}) if i is not None else frozenset() for i in given]
    )
    exact: set[int] = set()
    for (name, axes), total, weight in zip(names, tags[::2], tags[1::2], strict=True):
        exact |= {tag.leaf for tag in weight if tag.value} & rounded
        made_of, counted = {tag.leaf for tag in weight}, {tag.leaf for tag in total} - {_STATE}
        over = quoted(sorted(axes))
        if axes and counted and made_of == {_STATE}:
            raise ValueError(
                f"Mean {name!r}: the weight of examples must be a sum over them, because it counts once on each device "
                f"along {over}, and in each microbatch; got one that depends only on parameters or carried state. Pass "
                "the weights of this device's examples, or vary(weight, axes) of its own share."
            )
        made_of -= {_STATE}
        if not once and made_of and made_of <= scalars and not counted <= scalars:
            raise ValueError(
                f"Mean {name!r}: the weight of examples must be a sum over them, because the weights of all devices "
                f"and microbatches are added; got one that depends only on leaf {path_name(paths[min(made_of)][0])}, a "
                "scalar. Pass a weight for each example: an array with the examples along dim 0."
            )
        if split and axes and made_of and made_of <= whole and not counted <= whole:
            raise ValueError(
                f"Mean {name!r}: the weight must be that of the parts of examples which a device has, because it "
                f"counts once on each along {over}; got one that depends only on leaf "
                f"{path_name(paths[min(made_of)][0])}, which all of them have whole. Pass a weight for each part, as "
                "an array with its dims, or vary(weight, axes) if the total is of whole examples too."
            )
    return jax.tree.unflatten(structure, lower(exact))


def _outside(x: Any) -> int | None:
    """What a constant of the traced loss is; None if it follows from nothing that a step is passed."""
    if not isinstance(x, jax.core.Tracer):
        return None
    return _KEYS if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else _STATE


def _rounds(dtype: Any, compute: Any) -> bool:
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    given, here = jnp.finfo(dtype), jnp.finfo(compute)
    return bool(given.nmant > here.nmant or given.maxexp > here.maxexp)


def _flow(jaxpr: Any, given: Sequence[Tags]) -> list[Tags]:
    """The tags of each result of a jaxpr, from those of its arguments."""

    def step(equation: Any, ins: list[Tags]) -> list[Tags]:
        outs = zip(equation.outvars, _step(equation, ins), strict=True)
        return [_compared(tags) if getattr(v.aval, "dtype", None) == np.bool_ else tags for v, tags in outs]

    constants = len(jaxpr.constvars) + len(jaxpr.invars) - len(given)
    return flow(jaxpr, [*[frozenset[_Tag]()] * constants, *given], step, lambda _: frozenset())


def _step(equation: Any, ins: list[Tags]) -> list[Tags]:
    name, count = equation.primitive.name, len(equation.outvars)
    inner = [sub for _, sub in compat.inner_jaxprs(equation)]
    if not frozenset[_Tag]().union(*ins):
        return [frozenset()] * count
    if (sub := find_called_jaxpr(equation)) is not None:
        return _flow(sub, ins)
    if name == "cond":
        branches = [_flow(sub, ins[1:]) for sub in inner]
        return [ins[0].union(*each) for each in zip(*branches, strict=True)]
    if name == "scan":
        return _scan(equation, inner[0], ins)
    if (registered(name).same or registered(name).kind) and len(ins) == count:  # result i depends on operand i
        return ins
    return [frozenset[_Tag]().union(*ins)] * count


def _scan(equation: Any, body: Any, ins: list[Tags]) -> list[Tags]:
    """The tags of a scan's results, with those of its carry iterated to a fixed point."""
    fixed, carried, each = scan_operands(equation, ins)

    def turn(held: list[Tags]) -> list[Tags]:
        return [old | new for old, new in zip(held, _flow(body, [*fixed, *held, *each]), strict=False)]

    carried = find_fixed_point(carried, turn)
    return [*carried, *_flow(body, [*fixed, *carried, *each])[len(carried) :]]


def _compared(tags: Tags) -> Tags:
    return frozenset(tag for tag in tags if not tag.value)
