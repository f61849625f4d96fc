"""Handles: leaves that reach a loss unopened, so that the loss decides when their weights are gathered.

A handle holds this device's part of a leaf. `opened` makes the weight: gathered (fsdp), or whole already, with a
gradient that is scattered as soon as it exists (zero2). Its gradient always leaves as the part, reduced over the axes
that it names. A handle is a node of a pytree, so that scans, slices and checkpoints carry it; what a loss is `shown` is
sealed, so that nothing computes with a part as if it were the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._check import quoted
from shardkit._compat import varying_axes
from shardkit._sealed import seal, unseal
from shardkit.collectives import all_gather, axis_index, axis_size, pad_to_axis, reduce_scatter
from shardkit.layout import path_name
from shardkit.partitioning.storage import Sizes, cut

# Dims are counted from the end, so that they stay right when `scan` takes the layer's dim off the front.
Splits = tuple[tuple[int, tuple[str, ...]], ...]


@jax.tree_util.register_pytree_node_class
class Handle:
    """A leaf behind its handle. Open it with `gathered`; anything else that is done with it is a TypeError.

    Attributes:
        part: this device's part, in the dtype of the master copy; its gradient is the leaf's.
        whole: the weight as the device holds it anyway (zero2), else None; it has no gradient.
        gathers: dims and axes that opening gathers.
        scatters: dims and axes over which only the gradient is split.
        compute: dtype of the opened weight.
        reduce: dtype in which its gradient is summed.
        entry: whether it is opened before the loss sees it.
        sizes: dims that are padded in the part, with their natural size, to which opening cuts them.
        path: where the leaf stands in what the loss is shown.
    """

    def __init__(
        self,
        part: Any,
        whole: Any,
        gathers: Splits,
        scatters: Splits,
        compute: Any,
        reduce: Any,
        entry: bool,
        sizes: Sizes = (),
        path: str = "",
    ):
        self.part, self.whole, self.gathers, self.scatters = part, whole, gathers, scatters
        self.compute, self.reduce, self.entry, self.sizes, self.path = compute, reduce, entry, sizes, path

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        return (self.part, self.whole), tuple(getattr(self, name) for name in _FIELDS[2:])

    @classmethod
    def tree_unflatten(cls, static: Any, children: tuple[Any, Any]) -> Handle:
        return cls(*children, *static)

    def replaced(self, **fields: Any) -> Handle:
        """The same handle with other fields."""
        return Handle(**{name: getattr(self, name) for name in _FIELDS} | fields)

    def __repr__(self) -> str:
        axes = [axis for _, axes in (*self.gathers, *self.scatters) for axis in axes]
        return f"Handle({getattr(self.part, 'shape', '?')} over {quoted(axes)})"

    def __jax_array__(self) -> Any:
        raise self._unopened()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._unopened()

    @property
    def words(self) -> str:
        """The leaf in the words of an error."""
        axes = [axis for _, axes in (*self.gathers, *self.scatters) for axis in axes]
        return f"{self.path or 'a leaf'}, which is sharded over {quoted(axes)}"

    def _unopened(self) -> TypeError:
        return TypeError(_unopened(self.words))


def _unopened(words: str) -> str:
    return (
        f"{words}, was used before it was gathered. Wrap the function that uses it in gathered(...), or run the stack "
        "with scan_layers."
    )


def _refuse(handle: Handle, *_: Any) -> Any:
    raise handle._unopened()


for _name in ("add", "sub", "mul", "matmul", "truediv", "pow", "neg", "getitem", "len", "iter", "float"):
    setattr(Handle, f"__{_name}__", _refuse)
    setattr(Handle, f"__r{_name}__", _refuse)

_FIELDS = ("part", "whole", "gathers", "scatters", "compute", "reduce", "entry", "sizes", "path")
_BEGIN, _END = "the unopened leaf <", ">"  # around the words in the dtype's name


def is_handle(x: Any) -> bool:
    """Whether a node of a tree is a handle."""
    return isinstance(x, Handle)


def opened(tree: Any) -> Any:
    """Every handle of a tree as its weight; everything else as it is."""
    return jax.tree.map(lambda x: _open(x) if is_handle(x) else x, tree, is_leaf=is_handle)


def parts(tree: Any) -> Any:
    """What is differentiated: the part of every handle, and all other leaves."""
    return jax.tree.map(lambda x: x.part if is_handle(x) else x, tree, is_leaf=is_handle)


def with_parts(tree: Any, leaves: Any) -> Any:
    """The tree with these parts and leaves; the handles that the loss is not to see are opened."""

    def one(x: Any, part: Any) -> Any:
        if not is_handle(x):
            return part
        x = x.replaced(part=part)
        return _open(x) if x.entry else x

    return jax.tree.map(one, tree, leaves, is_leaf=is_handle)


def shown(fn: Callable[..., Any], tree: Any, *args: Any, at: str = "") -> Any:
    """`fn(tree, *args)`, a function of the user's, with every handle of the tree sealed.

    Args:
        fn: a loss, or a piece of a pipeline.
        tree: pytree of handles and arrays, which it may open with `gathered` and `scan_layers`.
        *args: its other arguments.
        at: where the tree stands in the parameters, such as "layers".

    Raises:
        TypeError: a handle's part is computed with, with the leaf's path and the remedy.
    """

    prefix = (jax.tree_util.DictKey(at),) if at else ()

    def sealed(path: Any, x: Any) -> Any:
        if not is_handle(x):
            return x
        x = x.replaced(path=path_name((*prefix, *path)))
        name = f"{_BEGIN}{x.words}{_END}"
        return x.replaced(part=seal(x.part, name), whole=None if x.whole is None else seal(x.whole, name))

    try:
        return fn(jax.tree_util.tree_map_with_path(sealed, tree, is_leaf=is_handle), *args)
    except Exception as error:
        # jax says in its own words, as TypeError, ValueError or an assertion, that it does not know the dtype.
        _, found, rest = str(error).partition(_BEGIN)
        if not found:
            raise
        raise TypeError(_unopened(rest.partition(_END)[0])) from error


def unsealed(tree: Any) -> Any:
    """The tree with its handles as they were before `shown` sealed them."""

    def one(x: Any) -> Any:
        if not is_handle(x):
            return x
        return x.replaced(part=unseal(x.part), whole=None if x.whole is None else unseal(x.whole))

    return jax.tree.map(one, tree, is_leaf=is_handle)


def _open(handle: Handle) -> jax.Array:
    part = handle.part
    if handle.scatters:
        part = _scattered(handle.scatters, handle.reduce, handle.whole, part)
    if handle.gathers:
        return _gathered(handle.gathers, handle.sizes, handle.compute, handle.reduce, part)
    return cast(part, handle.compute)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """A floating-point array in another dtype; any other as it is."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gathered(gathers: Splits, sizes: Sizes, compute: Any, reduce: Any, part: jax.Array) -> jax.Array:
    """The whole of a part, sent in the compute dtype; its gradient is summed in the reduce dtype."""
    x = cast(part, compute)
    for dim, axes in gathers:
        x = all_gather(x, axes, dim=x.ndim + dim)
    return cut(x, sizes)


def _gathered_forward(gathers: Splits, sizes: Sizes, compute: Any, reduce: Any, part: jax.Array) -> Any:
    return _gathered(gathers, sizes, compute, reduce, part), part[:0]  # an empty array remembers the dtype


def _gathered_backward(
    gathers: Splits, sizes: Sizes, compute: Any, reduce: Any, like: jax.Array, grad: jax.Array
) -> tuple[Any]:
    return (to_parts(grad, gathers, reduce).astype(like.dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scattered(scatters: Splits, reduce: Any, whole: jax.Array, part: jax.Array) -> jax.Array:
    """The whole weight, which must be an argument; its gradient goes to the part, summed."""
    return whole


def _scattered_forward(scatters: Splits, reduce: Any, whole: jax.Array, part: jax.Array) -> Any:
    return whole, part[:0]


def _scattered_backward(scatters: Splits, reduce: Any, like: jax.Array, grad: jax.Array) -> tuple[None, Any]:
    return None, to_parts(grad, scatters, reduce).astype(like.dtype)


_scattered.defvjp(_scattered_forward, _scattered_backward)


def to_parts(grad: jax.Array, splits: Splits, dtype: Any) -> jax.Array:
    """A whole gradient summed and scattered, dim by dim, in a dtype; padded where a dim does not divide.

    A gradient that does not vary over an axis is complete there: the device takes its part.
    """
    grad = grad.astype(dtype)
    for dim, axes in splits:
        grad = pad_to_axis(grad, axes, dim=dim)
        for together in [axes] if varying_axes(grad) >= set(axes) else [(axis,) for axis in axes]:
            split = reduce_scatter if varying_axes(grad) >= set(together) else own_part
            grad = split(grad, together, dim=grad.ndim + dim)
    return grad


def own_part(x: jax.Array, axes: tuple[str, ...], *, dim: int) -> jax.Array:
    """This device's part of what all devices hold; padded where the dim does not divide."""
    x = pad_to_axis(x, axes, dim=dim)
    size = x.shape[dim] // axis_size(axes)
    return lax.dynamic_slice_in_dim(x, axis_index(axes) * size, size, dim)


def part_gradient(node: Any, grad: jax.Array) -> jax.Array:
    """The gradient of a handle's part, or of an array, from that of the opened weight."""
    if not is_handle(node):
        return grad.astype(node.dtype)
    grad = to_parts(to_parts(grad, node.gathers, node.reduce), node.scatters, node.reduce)
    return grad.astype(node.part.dtype)
