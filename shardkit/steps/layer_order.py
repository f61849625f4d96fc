"""Whether a function treats all layers of a stack alike, proved from its jaxpr: then their order does not matter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._jax.interpreter import FactInterpreter
from shardkit._jax.primitives import ELEMENTWISE


class _Knowledge(NamedTuple):
    """What is known of a value."""

    layers: int | None  # the dim with one row per layer; None if the value does not depend on the order of the layers
    alike: frozenset[int]  # dims along which all elements are equal


class _MattersError(Exception):
    """The order of the layers matters, or nothing shows that it does not."""


def order_matters(fn: Callable[..., Any], args: Any, stacked: Any, results: Any) -> bool:
    """Whether the results of a function, layer by layer, may change with the order of the layers.

    Sums over layers count as independent of their order. An operation without a rule here counts as dependent: a slice
    or an index along the layers, an array of their length, a sort, a loop over the layers, random numbers. `stacked`
    and `results` say for each leaf of the arguments and of the result whether dim 0 counts layers.
    """
    closed = jax.make_jaxpr(fn)(*args)
    inputs = []
    for variable, is_stacked in zip(closed.jaxpr.invars, jax.tree.leaves(stacked), strict=True):
        inputs.append(_Knowledge(0 if is_stacked else None, _unit_dims(variable.aval)))
    try:
        outs = _LayerReader().run(closed, inputs)
    except _MattersError:
        return True
    for out, is_stacked in zip(outs, jax.tree.leaves(results), strict=True):
        if is_stacked:
            follows_layers = out.layers == 0 or 0 in out.alike
        else:
            follows_layers = out.layers is None
        if not follows_layers:
            return True
    return False


# Worked example: `w - mean(w)` of a stack w[L, 8], with the mean over dim 0. The operand w has layers=0. The reduce_sum
# over dim 0 gives [8] with layers=None, since a sum does not depend on the order. The mean is broadcast to [1, 8], and
# is alike along dim 0. So the difference has layers=0: in another order of the layers, it has the same rows in that
# order. `w - w[0]` takes a slice of an array with layers, for which there is no rule: the order matters.
class _LayerReader(FactInterpreter[_Knowledge]):
    """Follows the `_Knowledge` of values through a jaxpr."""

    def constant(self, x: Any) -> _Knowledge:
        return _Knowledge(None, _unit_dims(x))

    def literal(self, atom: Any) -> _Knowledge:
        if np.size(atom.val) == 1:
            return _Knowledge(None, _all_dims(atom))
        return _Knowledge(None, _unit_dims(atom.aval))

    def join(self, facts: Sequence[_Knowledge], variable: Any) -> _Knowledge:
        return _join(facts, variable)

    def cond(self, equation: Any, branches: list[Any], operands: list[_Knowledge]) -> Sequence[_Knowledge]:
        index, *arguments = operands
        # A branch that is chosen by one layer's number treats that layer unlike the others.
        if index.layers is not None:
            raise _MattersError
        return self.join_branches(equation, branches, arguments)

    def row(self, fact: _Knowledge) -> _Knowledge:
        """The piece of an array that one iteration gets; a loop over the layers runs in their order."""
        if fact.layers == 0:
            raise _MattersError
        # Dim 0 of the array is gone in its rows, and all other dims move by one.
        layers = None if fact.layers is None else fact.layers - 1
        return _Knowledge(layers, frozenset(dim - 1 for dim in fact.alike if dim > 0))

    def stack(self, fact: _Knowledge) -> _Knowledge:
        return _Knowledge(None if fact.layers is None else fact.layers + 1, frozenset())

    def equation(self, equation: Any, operands: list[_Knowledge]) -> Sequence[_Knowledge]:
        rule = _RULES.get(equation.primitive.name, _know_nothing)
        return rule(operands, equation)


# Rules: what is known of the results of an equation, from what is known of its operands.


def _know_nothing(operands: list[_Knowledge], equation: Any) -> list[_Knowledge]:
    """A primitive without a rule: of layers it might pick one, or sort them."""
    if any(fact.layers is not None for fact in operands):
        raise _MattersError
    return [_Knowledge(None, _unit_dims(out.aval)) for out in equation.outvars]


def _keep(operands: list[_Knowledge], equation: Any) -> list[_Knowledge]:
    return operands


def _iota(operands: list[_Knowledge], equation: Any) -> list[_Knowledge]:
    """The elements of an iota differ along its own dim, and are equal along all others."""
    return [_Knowledge(None, _all_dims(equation.outvars[0]) - {equation.params["dimension"]})]


def _combine(operands: list[_Knowledge], equation: Any) -> list[_Knowledge]:
    """An elementwise operation."""
    arrays = []
    for fact, variable in zip(operands, equation.invars, strict=True):
        if variable.aval.ndim:  # a scalar is the same for all layers
            arrays.append(fact)
    return [_join(arrays, out) for out in equation.outvars]


def _join(values: Sequence[_Knowledge], out: Any) -> _Knowledge:
    """What is known of an elementwise result, from operands of its shape."""
    dims_of_layers = {value.layers for value in values} - {None}
    alike = _all_dims(out)
    for value in values:
        alike &= value.alike
    if not dims_of_layers:
        return _Knowledge(None, alike | _unit_dims(out.aval))
    if len(dims_of_layers) > 1:
        raise _MattersError
    (layers,) = dims_of_layers
    # An operand without layers must be equal for all layers: otherwise it adds to each layer by its place in the stack.
    for value in values:
        if value.layers is None and layers not in value.alike:
            raise _MattersError
    return _Knowledge(layers, (alike | _unit_dims(out.aval)) - {layers})


def _broadcast(operands: list[_Knowledge], equation: Any) -> list[_Knowledge]:
    value = operands[0]
    out = equation.outvars[0]
    shape = equation.invars[0].aval.shape
    places = equation.params["broadcast_dimensions"]
    source = {}  # the dim of the operand that a dim of the result has the elements of
    for dim, place in enumerate(places):
        if shape[dim] == out.aval.shape[place] or dim == value.layers:
            source[place] = dim
    alike = set()
    for place in range(out.aval.ndim):
        if place not in source or source[place] in value.alike:
            alike.add(place)
    if value.layers is None:
        return [_Knowledge(None, frozenset(alike))]
    layers = places[value.layers]
    if shape[value.layers] != out.aval.shape[layers]:  # a stack of one layer
        raise _MattersError
    return [_Knowledge(layers, frozenset(alike) - {layers})]


def _transpose(operands: list[_Knowledge], equation: Any) -> list[_Knowledge]:
    (value,) = operands
    order = list(equation.params["permutation"])
    layers = None
    if value.layers is not None:
        layers = order.index(value.layers)
    alike = frozenset(place for place, dim in enumerate(order) if dim in value.alike)
    return [_Knowledge(layers, alike)]


def _reduce(operands: list[_Knowledge], equation: Any) -> list[_Knowledge]:
    """A sum over the layers does not depend on their order."""
    return [_drop_dims(operands[0], equation.params["axes"], equation.outvars[0])]


def _squeeze(operands: list[_Knowledge], equation: Any) -> list[_Knowledge]:
    return [_drop_dims(operands[0], equation.params["dimensions"], equation.outvars[0])]


def _drop_dims(value: _Knowledge, dims: Sequence[int], out: Any) -> _Knowledge:
    remaining = [dim for dim in range(out.aval.ndim + len(dims)) if dim not in dims]
    layers = None
    if value.layers in remaining:
        layers = remaining.index(value.layers)
    alike = frozenset(place for place, dim in enumerate(remaining) if dim in value.alike)
    return _Knowledge(layers, alike | _unit_dims(out.aval))


def _reshape(operands: list[_Knowledge], equation: Any) -> list[_Knowledge]:
    value = operands[0]
    out = equation.outvars[0]
    before = equation.invars[0].aval.shape
    after = out.aval.shape
    if value.layers is None:
        all_equal = len(value.alike) == len(before)
        alike = _all_dims(out) if all_equal else _unit_dims(out.aval)
        return [_Knowledge(None, alike)]
    # The layers become the dim of the result that has the same size, and equally many elements before it.
    elements_before = math.prod(before[: value.layers])
    size = before[value.layers]
    for dim in range(len(after)):
        # Of 4 layers, [4, 8, 6] as [4, 48] keeps them in dim 0. As [32, 6] no dim counts layers, and the order matters.
        same_place = math.prod(after[:dim]) == elements_before and after[dim] == size
        if same_place and equation.params.get("dimensions") is None:
            return [_Knowledge(dim, _unit_dims(out.aval) - {dim})]
    raise _MattersError


def _multiply(operands: list[_Knowledge], equation: Any) -> list[_Knowledge]:
    """A matrix product: layers as a batch dim, as a free dim of one operand, or contracted in both."""
    contracting, batch = equation.params["dimension_numbers"]
    ndims = [variable.aval.ndim for variable in equation.invars]
    layers = None
    for side, value in enumerate(operands):
        if value.layers is None:
            continue
        partner = operands[1 - side]
        if value.layers in contracting[side]:
            number = contracting[side].index(value.layers)
            if partner.layers != contracting[1 - side][number]:
                raise _MattersError
        elif value.layers in batch[side]:
            number = batch[side].index(value.layers)
            if partner.layers != batch[1 - side][number]:
                raise _MattersError
            layers = number
        else:
            if layers is not None or partner.layers is not None:
                raise _MattersError
            # The result has the batch dims, the free dims of the left operand, then those of the right one.
            layers = len(batch[0]) + _free_dims(ndims[side], contracting[side], batch[side]).index(value.layers)
            if side == 1:
                layers += len(_free_dims(ndims[0], contracting[0], batch[0]))
    return [_Knowledge(layers, _unit_dims(equation.outvars[0].aval) - {layers})]


def _free_dims(ndim: int, contracting: Sequence[int], batch: Sequence[int]) -> list[int]:
    """The dims of an operand of a product that are neither contracted nor batch dims."""
    return [dim for dim in range(ndim) if dim not in contracting and dim not in batch]


def _all_dims(atom: Any) -> frozenset[int]:
    ndim = jnp.ndim(atom.val) if hasattr(atom, "val") else atom.aval.ndim
    return frozenset(range(ndim))


def _unit_dims(array: Any) -> frozenset[int]:
    """Dims of size one, of an array or its type."""
    shape = getattr(array, "shape", ())
    return frozenset(dim for dim, size in enumerate(shape) if size == 1)


# A bitcast to a dtype of another width changes the dims.
_ELEMENTWISE = (ELEMENTWISE - {"bitcast_convert_type"}) | {"copy", "name", "sharding_constraint"}
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
_RULES: dict[str, Callable[[list[_Knowledge], Any], list[_Knowledge]]] = {
    **dict.fromkeys(_ELEMENTWISE, _combine),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "optimization_barrier": _keep,
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "dot_general": _multiply,
}
