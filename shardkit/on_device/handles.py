"""Lazy leaves: the loss decides when their weights are gathered.

The loss gets a lazy leaf as a Handle around this device's part. Opening it returns the weight: gathered (fsdp), or
whole already, with a gradient that is scattered as soon as it exists (zero2). The gradient of a lazy leaf is that of
its part, reduced over the axes that split it. A Handle is a pytree node, so scans, slices and checkpoints work on it.
Its arrays are sealed in the user's function: computing with a part as if it were the weight is a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import quoted
from shardkit._jax.jaxprs import walk
from shardkit._jax.sealed import misused, seal, unseal
from shardkit.collectives.axes import vary_like
from shardkit.meshes.layout import path_name
from shardkit.on_device.cuts import to_parts, whole
from shardkit.plans.splits import Cuts, separate_kept_cuts
from shardkit.plans.storage import Sizes

_FIELDS = ["gathers", "scatters", "compute", "reduce", "entry", "sizes", "path"]


@partial(jax.tree_util.register_dataclass, data_fields=["part", "whole", "slope"], meta_fields=_FIELDS)
@dataclass(eq=False, repr=False)
class Handle:
    """A lazy leaf. `gathered` opens it; computing with it is a TypeError."""

    part: Any  # this device's part, in the dtype of the master copy; differentiated in place of the leaf
    whole: Any  # the whole weight where every device has it (zero2), else None; it has no gradient
    # what opening gathers. Dims are counted from the end, so that they stay right when `scan` takes the layer's dim off
    # the front.
    gathers: Cuts
    scatters: Cuts  # what only the gradient is split over
    compute: Any  # dtype of the opened weight
    reduce: Any  # dtype in which its gradient is summed
    entry: bool  # whether it is opened just before the loss, and not by it
    sizes: Sizes = ()  # dims of the part that are padded, with their original size, to which opening cuts them
    path: str = ""  # the leaf's path in the parameters, for errors
    # what has the gradient of the part while that is sealed, else None: NaN, since nothing may use its value
    slope: Any = None

    def replaced(self, **fields: Any) -> Handle:
        """A copy with other fields."""
        return replace(self, **fields)

    def __repr__(self) -> str:
        return f"Handle({getattr(self.part, 'shape', '?')} over {self._axes()})"

    def _axes(self) -> str:
        return quoted(axis for cut in (*self.gathers, *self.scatters) for axis in cut.axes)

    def __jax_array__(self) -> Any:
        raise self._unopened()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._unopened()

    @property
    def words(self) -> str:
        """The leaf as an error names it."""
        return f"{self.path or 'a leaf'}, which is sharded over {self._axes()}"

    def _unopened(self) -> TypeError:
        return TypeError(_unopened(self.words))


def _unopened(words: str, use: str = "") -> str:
    return (
        f"{words}, was used before it was gathered{use}. Wrap the function that uses it in gathered(...), or run the "
        "stack with scan_layers."
    )


def _refuse(handle: Handle, *_: Any) -> Any:
    raise handle._unopened()


for _name in ("add", "sub", "mul", "matmul", "truediv", "pow", "neg", "getitem", "len", "iter", "float"):
    setattr(Handle, f"__{_name}__", _refuse)
    setattr(Handle, f"__r{_name}__", _refuse)

_BEGIN, _END = "the unopened leaf <", ">"  # delimit `words` in the name of the sealed dtype


def is_handle(x: Any) -> bool:
    """Whether a node of a tree is a lazy leaf."""
    return isinstance(x, Handle)


def opened(tree: Any) -> Any:
    """The tree with the weight of each lazy leaf."""
    return jax.tree.map(lambda x: _open(x) if is_handle(x) else x, tree, is_leaf=is_handle)


def near(tree: Any, kept: Iterable[jax.Array] | None = None) -> tuple[Any, list[jax.Array]]:
    """The tree with each lazy leaf gathered as far as it is kept for the backward pass, and the list of these parts.

    The backward pass hands in the parts that the forward pass `kept`.
    """
    found, given = [], None if kept is None else iter(kept)

    def one(x: Any) -> Any:
        first, gathers = separate_kept_cuts(x.gathers) if is_handle(x) else ((), ())
        if not first:
            return x
        held = x.part if x.whole is None else x.whole
        found.append(next(given) if given else whole(cast_floating(held, x.compute), first, ()))
        return x.replaced(part=found[-1], whole=None, gathers=gathers, scatters=())

    return jax.tree.map(one, tree, is_leaf=is_handle), found


def parts(tree: Any) -> Any:
    """What is differentiated: the part of each lazy leaf, and all other leaves."""
    return jax.tree.map(lambda x: x.part if is_handle(x) else x, tree, is_leaf=is_handle)


def with_parts(tree: Any, leaves: Any) -> Any:
    """The tree with these parts and leaves; lazy leaves with `entry` are opened."""

    def one(x: Any, part: Any) -> Any:
        if not is_handle(x):
            return part
        x = x.replaced(part=part)
        return _open(x) if x.entry else x

    return jax.tree.map(one, tree, leaves, is_leaf=is_handle)


def call_sealed(fn: Callable[..., Any], tree: Any, *args: Any, at: str = "") -> Any:
    """`fn(tree, *args)`, a function of the user's, with the lazy leaves of the tree sealed.

    `fn` opens them with `gathered` and `scan_layers`; `at` is the path of the tree in the parameters, such as "layers".
    It is traced, and read, before it is differentiated: a flip of a part is no part of the flipped weight, and jax's
    types say nothing of it.

    Raises:
        TypeError: `fn` computes with a lazy leaf, changes its dims from the first sharded one on, or calls jax.jvp.
    """
    if not any(map(is_handle, jax.tree.leaves(tree, is_leaf=is_handle))):
        return fn(jax.tree.map(lambda x: x, tree), *args)  # made anew: flax changes no variable of an outer trace
    prefix = (jax.tree_util.DictKey(at),) if at else ()

    def sealed(path: Any, x: Any) -> Any:
        if not is_handle(x):
            return x
        x = x.replaced(path=path_name((*prefix, *path)))
        name, last = f"{_BEGIN}{x.words}{_END}", -min((cut.dim for cut in (*x.gathers, *x.scatters)), default=0)
        held = None if x.whole is None else seal(x.whole, name, last)
        return x.replaced(part=seal(jax.lax.stop_gradient(x.part), name, last), whole=held, slope=_slope(x.part))

    returned: list[Any] = []
    found = ""

    def traced(tree: Any) -> list[Any]:
        returned[:] = jax.tree.flatten(fn(jax.tree_util.tree_map_with_path(sealed, tree, is_leaf=is_handle), *args))
        return [x for x in returned[0] if isinstance(x, jax.core.Tracer)]

    try:
        closed = jax.make_jaxpr(traced)(tree)
        if found := misused(closed.jaxpr):
            raise TypeError(found)
        if any(site.name == "custom_lin" for site in walk(closed.jaxpr)):
            raise TypeError("jax.jvp cannot pass lazy leaves; the loss calls it. Leave layerwise= out of the plan.")
        arrays = iter(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(tree)))
        leaves, structure = returned
        return jax.tree.unflatten(structure, [next(arrays) if isinstance(x, jax.core.Tracer) else x for x in leaves])
    except Exception as error:
        # jax raises a TypeError, a ValueError or an AssertionError for a dtype that it does not know.
        _, begun, rest = str(error).partition(_BEGIN)
        if not begun:
            raise
        words, _, use = rest.partition(_END)
        raise TypeError(_unopened(words, use if found else "")) from error


def unsealed(tree: Any) -> Any:
    """The tree with its lazy leaves as they were before `call_sealed`."""

    def one(x: Any) -> Any:
        if not is_handle(x):
            return x
        part = unseal(x.part) if x.slope is None else _with_slope(unseal(x.part), x.slope.astype(x.part.dtype.holds))
        return x.replaced(part=part, whole=None if x.whole is None else unseal(x.whole), slope=None)

    return jax.tree.map(one, tree, is_leaf=is_handle)


# A sealed part has no gradient, because jax.lax.stop_gradient would pass it by: the leaf's goes through a float array
# beside it, which stop_gradient, a scan or an index treat as any other.
@jax.custom_jvp
def _slope(part: jax.Array) -> jax.Array:
    return vary_like(jnp.full(part.shape, jnp.nan, part.dtype), part)


@jax.custom_jvp
def _with_slope(part: jax.Array, slope: jax.Array) -> jax.Array:
    return part


_slope.defjvp(lambda primals, tangents: (_slope(*primals), tangents[0]))
_with_slope.defjvp(lambda primals, tangents: (primals[0], tangents[1]))


def _open(handle: Handle) -> jax.Array:
    part = handle.part
    if handle.scatters:
        part = _scattered(handle.scatters, handle.reduce, handle.whole, part)
    if handle.gathers:
        return _gathered(handle.gathers, handle.sizes, handle.compute, handle.reduce, part)
    return cast_floating(part, handle.compute)


def cast_floating(tree: Any, dtype: Any) -> Any:
    """The pytree with its floating-point leaves in another dtype; integers, booleans and keys stay as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gathered(gathers: Cuts, sizes: Sizes, compute: Any, reduce: Any, part: jax.Array) -> jax.Array:
    """The gathered weight, sent in the compute dtype; its gradient is summed in the reduce dtype."""
    return whole(cast_floating(part, compute), gathers, sizes)


def _gathered_forward(gathers: Cuts, sizes: Sizes, compute: Any, reduce: Any, part: jax.Array) -> Any:
    return _gathered(gathers, sizes, compute, reduce, part), part[:0]  # an empty array, for its dtype


def _gathered_backward(
    gathers: Cuts, sizes: Sizes, compute: Any, reduce: Any, like: jax.Array, grad: jax.Array
) -> tuple[Any]:
    return (to_parts(grad, gathers, reduce).astype(like.dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scattered(scatters: Cuts, reduce: Any, beside: jax.Array, part: jax.Array) -> jax.Array:
    """The whole weight, an argument since custom_vjp closes over no tracers; its summed gradient goes to the part."""
    return beside


def _scattered_forward(scatters: Cuts, reduce: Any, beside: jax.Array, part: jax.Array) -> Any:
    return beside, part[:0]


def _scattered_backward(scatters: Cuts, reduce: Any, like: jax.Array, grad: jax.Array) -> tuple[None, Any]:
    return None, to_parts(grad, scatters, reduce).astype(like.dtype)


_scattered.defvjp(_scattered_forward, _scattered_backward)


def part_gradient(node: Any, grad: jax.Array) -> jax.Array:
    """The gradient of a lazy leaf's part, or of an array, from that of the weight."""
    if not is_handle(node):
        return grad.astype(node.dtype)
    grad = to_parts(to_parts(grad, node.gathers, node.reduce), node.scatters, node.reduce)
    return grad.astype(node.part.dtype)
