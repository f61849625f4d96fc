"""Handles: leaves that reach a loss unopened, so that the loss decides when their weights are gathered.

A handle holds this device's part of a leaf. `opened` makes the weight: gathered (fsdp), or whole already, with a
gradient that is scattered as soon as it exists (zero2). Its gradient always leaves as the part, reduced over the axes
that it names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._check import quoted
from shardkit.collectives import all_gather, reduce_scatter

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
    """

    def __init__(
        self, part: Any, whole: Any, gathers: Splits, scatters: Splits, compute: Any, reduce: Any, entry: bool
    ):
        self.part, self.whole, self.gathers, self.scatters = part, whole, gathers, scatters
        self.compute, self.reduce, self.entry = compute, reduce, entry

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        return (self.part, self.whole), (self.gathers, self.scatters, self.compute, self.reduce, self.entry)

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

    def _unopened(self) -> TypeError:
        axes = [axis for _, axes in (*self.gathers, *self.scatters) for axis in axes]
        return TypeError(
            f"a leaf that is sharded over {quoted(axes)} was used before it was gathered. Wrap the function that uses "
            "it in gathered(...), or run the stack with scan_layers."
        )


def _refuse(handle: Handle, *_: Any) -> Any:
    raise handle._unopened()


for _name in ("add", "sub", "mul", "matmul", "truediv", "pow", "neg", "getitem", "len", "iter", "float"):
    setattr(Handle, f"__{_name}__", _refuse)
    setattr(Handle, f"__r{_name}__", _refuse)

_FIELDS = ("part", "whole", "gathers", "scatters", "compute", "reduce", "entry")


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


def gathered(layer_fn: Callable[..., Any], *, keep: bool = False) -> Callable[..., Any]:
    """A function that gathers its weights when it is called, and again for its backward pass.

    On plain arrays, without handles among its arguments, it is `layer_fn` itself: one text of a loss runs on one device
    and under every plan.

    Args:
        layer_fn: any function; handles anywhere in its arguments are opened before it sees them.
        keep: hold the gathered weights for the backward pass instead of gathering again; one gather less, and all
            layers' weights in memory. Otherwise the backward pass keeps the results of matmuls only and recomputes
            what stands between them.

    Returns:
        A function of the same arguments.

    Cost: an all_gather of each handle's part, twice unless `keep`, and a reduce_scatter of its gradient.

    Source: Zhao et al., PyTorch FSDP (VLDB 2023), section 3: reshard after forward.
    """

    @wraps(layer_fn)
    def layer(*args: Any, **kwargs: Any) -> Any:
        if not any(is_handle(x) for x in jax.tree.leaves((args, kwargs), is_leaf=is_handle)):
            return layer_fn(*args, **kwargs)

        def run(args: Any, kwargs: Any) -> Any:
            return layer_fn(*opened(args), **opened(kwargs))

        if keep:
            return run(args, kwargs)
        # The results of gathers are never among what this policy saves, nor anything that is only derived from them.
        return jax.checkpoint(run, policy=jax.checkpoint_policies.dots_saveable)(args, kwargs)

    return layer


def _open(handle: Handle) -> jax.Array:
    part = handle.part
    if handle.scatters:
        part = _scattered(handle.scatters, handle.reduce, handle.whole, part)
    if handle.gathers:
        return _gathered(handle.gathers, handle.compute, handle.reduce, part)
    return cast(part, handle.compute)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """A floating-point array in another dtype; any other as it is."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gathered(gathers: Splits, compute: Any, reduce: Any, part: jax.Array) -> jax.Array:
    """The whole of a part, sent in the compute dtype; its gradient is summed in the reduce dtype."""
    x = cast(part, compute)
    for dim, axes in gathers:
        x = all_gather(x, axes, dim=x.ndim + dim)
    return x


def _gathered_forward(gathers: Splits, compute: Any, reduce: Any, part: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gathered(gathers, compute, reduce, part), part[:0]  # an empty array remembers the dtype


def _gathered_backward(gathers: Splits, compute: Any, reduce: Any, like: jax.Array, grad: jax.Array) -> tuple[Any]:
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
    """A whole gradient summed and scattered, dim by dim, in a dtype."""
    grad = grad.astype(dtype)
    for dim, axes in splits:
        grad = reduce_scatter(grad, axes, dim=grad.ndim + dim)
    return grad
