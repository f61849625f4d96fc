"""Lazy leaves: the loss decides when their weights are gathered.

The loss gets a lazy leaf as a Handle around this device's part. Opening it returns the weight: gathered (fsdp), or
whole already, with a gradient that is scattered as soon as it exists (zero2). The gradient of a lazy leaf is that of
its part, reduced over the axes that split it. A Handle is a pytree node, so scans, slices and checkpoints work on it.
Its arrays are sealed in the user's function: computing with a part as if it were the weight is a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardkit._arguments.checks import quote
from shardkit._jax.jaxprs import walk
from shardkit._jax.sealed import find_misuse, seal, unseal
from shardkit.collectives.axes import vary_like
from shardkit.meshes.layout import path_name
from shardkit.on_device.cuts import gather_cuts, scatter_cuts
from shardkit.plans.splits import Cuts, separate_kept_cuts
from shardkit.plans.storage import Sizes

_FIELDS = ["gathers", "scatters", "compute", "reduce", "opened_before_loss", "original_sizes", "path"]


@partial(jax.tree_util.register_dataclass, data_fields=["part", "whole", "slope"], meta_fields=_FIELDS)
@dataclass(eq=False, repr=False)
class Handle:
    """A lazy leaf. `gathered` opens it; computing with it is a TypeError."""

    # this device's part, which is differentiated in place of the leaf: in the dtype of the master copy, or in that of
    # sums of gradients where `whole` has the value
    part: Any
    whole: Any  # the whole weight where every device has it (zero2), else None; it has no gradient
    # the cuts that opening gathers. Dims are counted from the end, so that they stay right when `scan` takes the
    # layer's dim off the front.
    gathers: Cuts
    scatters: Cuts  # the cuts of the gradient alone
    compute: Any  # dtype of the opened weight
    reduce: Any  # dtype in which its gradient is summed
    opened_before_loss: bool  # by the GradFn, instead of by the loss
    original_sizes: Sizes = ()  # of the dims of the part that are padded: opening cuts them to these
    path: str = ""  # the leaf's path in the parameters, for errors
    # while the part is sealed, a float array that carries the part's gradient; else None. Its value is NaN, since
    # nothing may use it
    slope: Any = None

    def __repr__(self) -> str:
        return f"Handle({getattr(self.part, 'shape', '?')} over {self._axes()})"

    def _axes(self) -> str:
        axes: list[str] = []
        for cut in (*self.gathers, *self.scatters):
            axes += cut.axes
        return quote(axes)

    def __jax_array__(self) -> Any:
        raise self._misuse()

    def __getattr__(self, name: str) -> Any:
        # Python, jax and numpy ask for such names to learn what an object is, and expect this error.
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._misuse()

    @property
    def words(self) -> str:
        """The leaf as an error names it."""
        return f"{self.path or 'a leaf'}, which is sharded over {self._axes()}"

    def _misuse(self) -> TypeError:
        return TypeError(_misuse_message(self.words))


def _misuse_message(words: str, use: str = "") -> str:
    return (
        f"{words}, was used before it was gathered{use}. Wrap the function that uses it in gathered(...), or run the "
        "stack with scan_layers."
    )


def _refuse(handle: Handle, *_: Any) -> Any:
    raise handle._misuse()


# Python looks for operators on the class, past `__getattr__`.
for _name in ("add", "sub", "mul", "matmul", "truediv", "pow", "neg", "getitem", "len", "iter", "float"):
    setattr(Handle, f"__{_name}__", _refuse)
    setattr(Handle, f"__r{_name}__", _refuse)

# They delimit `words` in the name of the sealed dtype.
_BEGIN = "the unopened leaf <"
_END = ">"


def is_handle(x: Any) -> bool:
    """Whether a node of a tree is a lazy leaf."""
    return isinstance(x, Handle)


def open_handles(tree: Any) -> Any:
    """The tree with the weight of each lazy leaf, whose gradient becomes that of the leaf's part."""
    # Worked example: one layer of w[L, 8, 6] over "fsdp" of 4 devices, rows split. The state has w[L, 2, 6] on each;
    # `scan` takes the layer's dim off, so that a layer's handle has part[2, 6], and gathers dim -2 (the 0 of the layer,
    # counted from the end, so that the scan did not change it).
    #   forward   part[2, 6] float32 -> cast to bfloat16 -> all_gather dim 0 -> weight[8, 6] bfloat16
    #   backward  gradient[8, 6] -> cast to float32 -> reduce_scatter dim 0 -> gradient[2, 6] of the part
    # Of zero2, every device has whole[8, 6] beside the part: nothing is gathered, and the backward is the same.
    return jax.tree.map(_open_leaf, tree, is_leaf=is_handle)


def _map_handles(fn: Callable[[Handle], Any], tree: Any) -> Any:
    """The tree with `fn(handle)` in place of each handle; other leaves stay as they are."""
    nodes, structure = jax.tree.flatten(tree, is_leaf=is_handle)
    for place, node in enumerate(nodes):
        if is_handle(node):
            nodes[place] = fn(node)
    return jax.tree.unflatten(structure, nodes)


def _open_leaf(leaf: Any) -> jax.Array:
    """The weight of a lazy leaf; any other leaf as it is."""
    if not is_handle(leaf):
        return leaf
    handle: Handle = leaf
    weight = handle.part
    if handle.scatters:
        weight = _replace_part(handle.scatters, handle.reduce, handle.whole, weight)
    if not handle.gathers:
        return cast_floating(weight, handle.compute)
    return _gather_weight(handle.gathers, handle.original_sizes, handle.compute, handle.reduce, weight)


def gather_kept(tree: Any, kept: Iterable[jax.Array] | None = None) -> tuple[Any, list[jax.Array]]:
    """The tree with each lazy leaf gathered as far as it is kept for the backward pass, and the list of kept parts.

    The forward pass calls it without `kept`; the backward pass passes the parts that the forward pass kept.
    """
    saved_parts = None if kept is None else iter(kept)
    parts = []

    def gather(handle: Handle) -> Handle:
        kept_cuts, regathered_cuts = separate_kept_cuts(handle.gathers)
        if not kept_cuts:
            return handle
        if saved_parts is not None:
            part = next(saved_parts)
        else:
            primary = handle.part if handle.whole is None else handle.whole
            # Cast first: the secondary part is sent, and then kept, in the compute dtype.
            part = gather_cuts(cast_floating(primary, handle.compute), kept_cuts)
        parts.append(part)
        return replace(handle, part=part, whole=None, gathers=regathered_cuts, scatters=())

    return _map_handles(gather, tree), parts


def strip_handles(tree: Any) -> Any:
    """The arrays that are differentiated: the part of each lazy leaf, and all other leaves."""
    return _map_handles(lambda handle: handle.part, tree)


def replace_parts(tree: Any, leaves: Any) -> Any:
    """The tree with these parts and leaves; those lazy leaves are opened that are opened before the loss."""

    def replace_part(node: Any, leaf: Any) -> Any:
        if not is_handle(node):
            return leaf
        handle = replace(node, part=leaf)
        if handle.opened_before_loss:
            return _open_leaf(handle)
        return handle

    return jax.tree.map(replace_part, tree, leaves, is_leaf=is_handle)


def open_before_loss(tree: Any) -> Any:
    """The tree as it is just before the loss: with those lazy leaves opened that the loss does not open itself."""
    return replace_parts(tree, strip_handles(tree))


def call_sealed(fn: Callable[..., Any], *args: Any, at: Sequence[str] = ()) -> Any:
    """`fn(*args)`, a function of the user's, with the lazy leaves of its arguments sealed.

    `fn` opens them with `gathered` and `scan_layers`. `at` has the paths of the first arguments in the parameters, such
    as "layers". `fn` is traced, and the trace is read, before it is differentiated. jax's types do not tell a part from
    a weight: the flip of a part, for example, is no part of the flipped weight.

    Raises:
        TypeError: `fn` computes with a lazy leaf, changes its dims from the first sharded one on, or calls jax.jvp.
    """
    nodes, structure = jax.tree.flatten(args, is_leaf=is_handle)
    handles = {place: node for place, node in enumerate(nodes) if is_handle(node)}
    if not handles:
        # A new tree: flax refuses to change variables of an outer trace.
        return fn(*jax.tree.unflatten(structure, nodes))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(args, is_leaf=is_handle)]
    out: list[Any] = []  # what `fn` returned: its leaves, which may be no arrays, and its structure
    misuse = ""

    def run_sealed(handles: dict[int, Handle]) -> list[Any]:
        sealed = list(nodes)
        for place, handle in handles.items():
            sealed[place] = _seal_handle(handle, _name_leaf(paths[place], at))
        out[:] = jax.tree.flatten(fn(*jax.tree.unflatten(structure, sealed)))
        leaves, _ = out
        return [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]

    try:
        closed = jax.make_jaxpr(run_sealed)(handles)
        misuse = find_misuse(closed.jaxpr)
        if misuse:
            raise TypeError(misuse)
        if any(site.name == "custom_lin" for site in walk(closed.jaxpr)):
            raise TypeError("jax.jvp cannot pass lazy leaves; the loss calls it. Leave layerwise= out of the plan.")
        results = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(handles))
        leaves, structure_out = out
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
        for place, result in zip(places, results, strict=True):
            leaves[place] = result
        return jax.tree.unflatten(structure_out, leaves)
    except Exception as error:
        # jax raises a TypeError, a ValueError or an AssertionError for a dtype that it does not know.
        _, mark, message = str(error).partition(_BEGIN)
        if not mark:
            raise
        words, _, use = message.partition(_END)
        raise TypeError(_misuse_message(words, use if misuse else "")) from error


def _name_leaf(path: Any, at: Sequence[str]) -> str:
    """The name of a leaf, from its path in the arguments: the first key is the argument's number."""
    number, *keys = path
    if number.idx < len(at) and at[number.idx]:
        keys = [jax.tree_util.DictKey(at[number.idx]), *keys]
    return path_name(tuple(keys))


def _seal_handle(handle: Handle, path: str) -> Handle:
    """A handle whose arrays can be carried, and sliced along the dims before the first cut, but not computed with."""
    handle = replace(handle, path=path)
    name = f"{_BEGIN}{handle.words}{_END}"
    cut_dims = [cut.dim for cut in (*handle.gathers, *handle.scatters)]  # from the end, such as -2
    fixed_dims = -min(cut_dims, default=0)
    whole = handle.whole
    if whole is not None:
        whole = seal(whole, name, fixed_dims)
    part = seal(jax.lax.stop_gradient(handle.part), name, fixed_dims)
    return replace(handle, part=part, whole=whole, slope=_make_slope(handle.part))


def unseal_handles(tree: Any) -> Any:
    """The tree with its lazy leaves as they were before `call_sealed`."""
    return _map_handles(_unseal_handle, tree)


def _unseal_handle(handle: Handle) -> Handle:
    part = unseal(handle.part)
    if handle.slope is not None:
        part = _attach_slope(part, handle.slope.astype(handle.part.dtype.holds))
    whole = handle.whole
    if whole is not None:
        whole = unseal(whole)
    return replace(handle, part=part, whole=whole, slope=None)


# A sealed part has no gradient of its own: jax.lax.stop_gradient leaves arrays of such a dtype as they are, and would
# be ignored. So the leaf's gradient goes through a float array beside the part, `slope`, which stop_gradient, a scan or
# an index treats as any other array.
@jax.custom_jvp
def _make_slope(part: jax.Array) -> jax.Array:
    return vary_like(jnp.full(part.shape, jnp.nan, part.dtype), part)


@jax.custom_jvp
def _attach_slope(part: jax.Array, slope: jax.Array) -> jax.Array:
    return part


@_make_slope.defjvp
def _differentiate_make_slope(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (part,) = primals
    (part_tangent,) = tangents
    return _make_slope(part), part_tangent


@_attach_slope.defjvp
def _differentiate_attach_slope(primals: Any, tangents: Any) -> tuple[Any, Any]:
    part, _ = primals
    _, slope_tangent = tangents
    return part, slope_tangent


def cast_floating(tree: Any, dtype: Any) -> Any:
    """The pytree with its floating-point leaves in another dtype; integers, booleans and keys stay as they are."""

    def cast(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x.astype(dtype)
        return x

    return jax.tree.map(cast, tree)


# A weight is gathered from its parts (`_gather_weight`), or every device has it whole (`_replace_part`). Both have a
# backward pass of their own. jax would derive a reduce_scatter from an all_gather too, but in the dtype in which the
# weight was sent, and not by the algorithm that the strategy has for gradients.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _gather_weight(gathers: Cuts, sizes: Sizes, compute: Any, reduce: Any, part: jax.Array) -> jax.Array:
    """The gathered weight, sent in the compute dtype; its gradient is summed in the reduce dtype."""
    return gather_cuts(cast_floating(part, compute), gathers, sizes)


def _gather_weight_forward(gathers: Cuts, sizes: Sizes, compute: Any, reduce: Any, part: jax.Array) -> Any:
    weight = _gather_weight(gathers, sizes, compute, reduce, part)
    return weight, part[:0]  # an empty array, for its dtype


def _gather_weight_backward(
    gathers: Cuts, sizes: Sizes, compute: Any, reduce: Any, like: jax.Array, grad: jax.Array
) -> tuple[Any]:
    return (scatter_cuts(grad, gathers, reduce).astype(like.dtype),)


_gather_weight.defvjp(_gather_weight_forward, _gather_weight_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _replace_part(scatters: Cuts, reduce: Any, whole: jax.Array, part: jax.Array) -> jax.Array:
    """The whole weight, an argument since custom_vjp closes over no tracers; its summed gradient goes to the part."""
    return whole


def _replace_part_forward(scatters: Cuts, reduce: Any, whole: jax.Array, part: jax.Array) -> Any:
    return whole, part[:0]


def _replace_part_backward(scatters: Cuts, reduce: Any, like: jax.Array, grad: jax.Array) -> tuple[None, Any]:
    return None, scatter_cuts(grad, scatters, reduce).astype(like.dtype)


_replace_part.defvjp(_replace_part_forward, _replace_part_backward)


def reduce_to_part(node: Any, grad: jax.Array) -> jax.Array:
    """The gradient of the part of a lazy leaf, from that of its whole weight; a plain array's in its dtype.

    Worked example: a weight [8, 6] whose rows are split over fsdp=4. Each device has a gradient [8, 6] of its examples.
    These are summed over the devices and scattered, so that each has the total of its rows, [2, 6].
    """
    if not is_handle(node):  # a leaf that is not lazy was never cut
        return grad.astype(node.dtype)
    # The gathered cuts first, as fsdp is major to zero on a dim: what is left for the second scatter is 1/n as large.
    grad = scatter_cuts(grad, node.gathers, node.reduce)
    grad = scatter_cuts(grad, node.scatters, node.reduce)
    return grad.astype(node.part.dtype)
