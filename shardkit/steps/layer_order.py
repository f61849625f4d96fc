"""Whether a function treats all layers of a stack alike, proved from its jaxpr: then their order does not matter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._jax import compat
from shardkit._jax.jaxprs import find_called_jaxpr, flow, scan_operands

# Each element of the result depends on the elements of the operands at the same index only.
_ELEMENTWISE = {
    *("abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p"),
    *("cos", "cosh", "div", "eq", "erf", "erfc", "erf_inv", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag"),
    *("integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg"),
    *("nextafter", "not", "or", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin"),
    *("sharding_constraint", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
}
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}


class _Place(NamedTuple):
    """What is known of a value."""

    # the dim with one row per layer; None where the value does not depend on the order of the layers
    layers: int | None
    alike: frozenset[int]  # dims along which all elements are equal


class _MattersError(Exception):
    """The order of the layers matters, or is not known not to."""


def order_matters(fn: Callable[..., Any], args: Any, stacked: Any, results: Any) -> bool:
    """Whether the results of a function, layer by layer, may change with the order of the layers.

    Sums over layers count as independent of their order. What is not known to be independent counts as dependent: a
    slice or an index along the layers, an array of their length, a sort, a loop over them, random numbers. `stacked`
    and `results` say for each leaf of the arguments and of the result whether dim 0 counts layers.
    """
    closed = jax.make_jaxpr(fn)(*args)
    leaves = zip(closed.jaxpr.invars, jax.tree.leaves(stacked), strict=True)
    try:
        outs = _run(closed.jaxpr, [_Place(0 if rows else None, _short(v)) for v, rows in leaves])
    except _MattersError:
        return True
    wanted = zip(outs, jax.tree.leaves(results), strict=True)
    return not all(out.layers == 0 or 0 in out.alike if rows else out.layers is None for out, rows in wanted)


def _run(jaxpr: Any, places: Sequence[_Place]) -> list[_Place]:
    def literal(atom: Any) -> _Place:
        return _Place(None, _every(atom) if np.size(atom.val) == 1 else _short(atom))

    return flow(jaxpr, [*(_Place(None, _short(v)) for v in jaxpr.constvars), *places], _step, literal)


def _step(equation: Any, ins: list[_Place]) -> list[_Place]:
    name, outs = equation.primitive.name, equation.outvars
    inner = [sub for _, sub in compat.inner_jaxprs(equation)]
    if (sub := find_called_jaxpr(equation)) is not None:
        return _run(sub, ins)
    if name == "cond" and ins[0].layers is None:
        branches = [_run(sub, ins[1:]) for sub in inner]
        return [_joined(list(each), v) for each, v in zip(zip(*branches, strict=True), outs, strict=True)]
    if name == "scan":
        return _scan(equation, inner[0], ins)
    if name == "optimization_barrier":
        return ins
    if name in _ELEMENTWISE:
        # A scalar has no dims; a dim of size one broadcasts.
        arrays = [p for p, v in zip(ins, equation.invars, strict=True) if v.aval.ndim]
        return [_joined(arrays, outs[0])]
    if name == "iota":
        return [_Place(None, _every(outs[0]) - {equation.params["dimension"]})]
    if name == "broadcast_in_dim":
        return [_broadcast(ins[0], equation)]
    if name == "transpose":
        order = equation.params["permutation"]
        layers = None if ins[0].layers is None else order.index(ins[0].layers)
        return [_Place(layers, frozenset(i for i, dim in enumerate(order) if dim in ins[0].alike))]
    if name in _REDUCTIONS:
        return [_without(ins[0], equation.params["axes"], outs[0])]
    if name == "squeeze":
        return [_without(ins[0], equation.params["dimensions"], outs[0])]
    if name == "reshape":
        return [_reshaped(ins[0], equation)]
    if name == "dot_general":
        return [_product(ins, equation)]
    if any(p.layers is not None for p in ins):
        raise _MattersError
    return [_Place(None, _short(v)) for v in outs]


def _scan(equation: Any, body: Any, ins: list[_Place]) -> list[_Place]:
    """A loop of known length, not over the layers; what is known of its carry holds in every iteration."""
    fixed, carried, each = scan_operands(equation, ins)
    if any(p.layers == 0 for p in each):
        raise _MattersError
    each = [_Place(p.layers and p.layers - 1, frozenset(dim - 1 for dim in p.alike if dim)) for p in each]
    while True:
        outs = _run(body, [*fixed, *carried, *each])
        after = [_joined([a, b], v) for a, b, v in zip(carried, outs, equation.outvars, strict=False)]
        if after == carried:
            stacked = [_Place(None if p.layers is None else p.layers + 1, frozenset()) for p in outs[len(carried) :]]
            return [*carried, *stacked]
        carried = after


def _joined(places: list[_Place], out: Any) -> _Place:
    """The place of an elementwise result of operands of its shape."""
    found = {p.layers for p in places} - {None}
    alike = frozenset.intersection(_every(out), *(p.alike for p in places))
    if not found:
        return _Place(None, alike | _short(out))
    (layers,) = found if len(found) == 1 else (None,)
    if layers is None or any(p.layers is None and layers not in p.alike for p in places):
        raise _MattersError
    return _Place(layers, (alike | _short(out)) - {layers})


def _broadcast(place: _Place, equation: Any) -> _Place:
    out, dims = equation.outvars[0], equation.params["broadcast_dimensions"]
    shape = equation.invars[0].aval.shape
    kept = {to: dim for dim, to in enumerate(dims) if shape[dim] == out.aval.shape[to] or dim == place.layers}
    alike = {to for to in range(out.aval.ndim) if to not in kept or kept[to] in place.alike}
    layers = None if place.layers is None else dims[place.layers]
    if layers is not None and shape[place.layers] != out.aval.shape[layers]:  # a stack of one layer
        raise _MattersError
    return _Place(layers, frozenset(alike) - {layers})


def _without(place: _Place, dims: Sequence[int], out: Any) -> _Place:
    kept = [dim for dim in range(out.aval.ndim + len(dims)) if dim not in dims]
    layers = kept.index(place.layers) if place.layers in kept else None
    return _Place(layers, frozenset(i for i, dim in enumerate(kept) if dim in place.alike) | _short(out))


def _reshaped(place: _Place, equation: Any) -> _Place:
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if place.layers is None:
        everywhere = len(place.alike) == len(before)
        return _Place(None, _every(equation.outvars[0]) if everywhere else _short(equation.outvars[0]))
    ahead, size = math.prod(before[: place.layers]), before[place.layers]
    for dim in range(len(after)):
        if math.prod(after[:dim]) == ahead and after[dim] == size and equation.params.get("dimensions") is None:
            return _Place(dim, _short(equation.outvars[0]) - {dim})
    raise _MattersError


def _product(ins: list[_Place], equation: Any) -> _Place:
    """Layers as a batch dim, as a free dim of one operand, or contracted in both."""
    contracting, batch = equation.params["dimension_numbers"]
    ndims = [v.aval.ndim for v in equation.invars]
    layers = None
    for side, place in enumerate(ins):
        if place.layers is None:
            continue
        if place.layers in contracting[side] or place.layers in batch[side]:
            pairs = contracting if place.layers in contracting[side] else batch
            at = pairs[side].index(place.layers)
            if ins[1 - side].layers != pairs[1 - side][at]:
                raise _MattersError
            layers = at if pairs is batch else layers
            continue
        free = [
            [d for d in range(ndims[each]) if d not in contracting[each] and d not in batch[each]] for each in (0, 1)
        ]
        if layers is not None or ins[1 - side].layers is not None:
            raise _MattersError
        layers = len(batch[0]) + free[side].index(place.layers) + (len(free[0]) if side else 0)
    return _Place(layers, _short(equation.outvars[0]) - {layers})


def _every(v: Any) -> frozenset[int]:
    return frozenset(range(jnp.ndim(v.val) if hasattr(v, "val") else v.aval.ndim))


def _short(v: Any) -> frozenset[int]:
    """Dims of size one."""
    return frozenset(dim for dim, size in enumerate(getattr(v.aval, "shape", ())) if size == 1)
