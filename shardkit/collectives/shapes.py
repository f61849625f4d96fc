"""Kernels built from the basic ones: prefix sums, halo exchange, gathering to one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import Axis, at_least, dim_of, member
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax.compat import bound, eval_shape
from shardkit.collectives.axes import as_numbers, axis_size, vary, vary_like
from shardkit.collectives.basic import gather_array
from shardkit.collectives.permute import shift_array

Combine = Callable[[Any, Any], Any]
_COMBINE: dict[str, Combine] = {
    "sum": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
}
_MOST_NEIGHBORS = 1024  # devices that a halo may reach: each sends a message of its own


@typed
def prefix_scan(
    x: Arrays,
    axis: Axis,
    combine: Combine | None = None,
    identity: Arrays | None = None,
    *,
    op: Literal["sum", "max", "min"] = "sum",
    exclusive: bool = False,
    reverse: bool = False,
) -> Any:
    """Gives device i the values of devices 0 to i, combined in this order: a sum, max, min, or your own function.

    Layout: `X[...] on device i -> X[...] {combined over devices 0..i}`
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names (then along the joint index).
        combine: `combine(earlier, later)`, of two pytrees like `x` to a third one; it must be associative, which
            `sk.testing.assert_associative` proves. It need not be commutative. None: `op`, leaf by leaf.
        identity: needed with `combine`: the pytree that combines with any value to that value; each leaf may be a
            number.
        op: "sum", "max" or "min". Booleans count as integers for "sum". Equal values share the derivative of a "max"
            or "min".
        exclusive: leave out device i itself; device 0 gets the identity: 0, or the lowest or highest value of the
            dtype.
        reverse: combine the values of devices i to n-1 instead, in the same order: device n-1 has its own alone.

    Returns:
        Arrays of the same shapes, varying over `axis`. The derivative is a scan in the other direction, of as many
            steps.

    Raises:
        TypeError: a `combine` that returns another tree, shape or dtype.
        ValueError: an unbound axis, another `op`, a `combine` without `identity` or with an `op`, or an identity of
            another tree.

    Cost: s B bytes in s steps, s = ceil(log2 n), or 1 + ceil(log2(n-1)) if exclusive; an all_gather needs n-1.

    Example:
        >>> offset = lambda size: sk.collectives.prefix_scan(size, "model", exclusive=True)
        >>> print(jax.shard_map(offset, mesh=mesh, in_specs=P("model"), out_specs=P("model"))(jnp.array([3, 1, 2, 2])))
        [0 3 4 6]

        The state s = a s + b of a recurrence whose steps are split over devices:

        >>> def follow(earlier, later):
        ...     (a, b), (later_a, later_b) = earlier, later
        ...     return later_a * a, later_a * b + later_b
        >>> scan = lambda a, b: sk.collectives.prefix_scan((a, b), "model", follow, (1, 0))[1]
        >>> a, b = jnp.full(4, 2.0), jnp.ones(4)
        >>> print(jax.shard_map(scan, mesh=mesh, in_specs=P("model"), out_specs=P("model"))(a, b))
        [ 1.  3.  7. 15.]

    Source: Hillis, Steele, Data Parallel Algorithms (1986); Blelloch, Prefix Sums and Their Applications (1990).
    """
    names = bound("prefix_scan", axis)
    if combine is None:
        if identity is not None:
            raise ValueError("prefix_scan: identity must go with combine; got none. Pass combine too.")
        return _scan_by_name(x, names, op, exclusive, reverse)
    if identity is None or op != "sum":
        got = "no identity"
        if op != "sum":
            got = f"op={op!r}"
        raise ValueError(
            f"prefix_scan: combine must go with an identity, and without op; got {got}. Pass combine and identity, "
            "and no op."
        )
    x = jax.tree.map(lambda leaf: vary(leaf, names), x)
    neutral = broadcast_identity("prefix_scan", identity, x)
    check_combine("prefix_scan", combine, x)
    return _scan(x, names, combine, neutral, exclusive, reverse, hides_missing=True)


def _scan_by_name(x: Any, names: tuple[str, ...], op: str, exclusive: bool, reverse: bool) -> Any:
    """The scan of a pytree by a named operation, leaf by leaf."""

    def combine(earlier: Any, later: Any) -> Any:
        return jax.tree.map(_COMBINE[op], earlier, later)

    def make_neutral(leaf: jax.Array) -> jax.Array:
        return vary(jnp.full_like(leaf, _find_neutral_value(op, leaf.dtype)), names)

    if op == "sum":
        x = jax.tree.map(as_numbers, x)
    x = jax.tree.map(lambda leaf: vary(leaf, names), x)
    neutral = None
    if exclusive:
        neutral = jax.tree.map(make_neutral, x)
    # What arrives where no device sends is zeros, which no sum, max or min turns into NaN.
    return _scan(x, names, combine, neutral, exclusive, reverse, hides_missing=False)


def _scan(
    total: Any,
    names: tuple[str, ...],
    combine: Combine,
    neutral: Any,
    exclusive: bool,
    reverse: bool,
    *,
    hides_missing: bool,
) -> Any:
    """The scan of a pytree; `hides_missing` if `combine` must not see what arrives where no device sends."""
    # Recursive doubling. Sums over five devices with the values 1 1 1 1 1, by the distance from which a value comes:
    #   distance 1: 1 2 2 2 2      device i has the sum of devices i-1 and i
    #   distance 2: 1 2 3 4 4      of i-3 to i
    #   distance 4: 1 2 3 4 5      of 0 to i
    # An exclusive sum begins with the values shifted up by one, and device 0 takes no part. In reverse the values come
    # from above.
    count = axis_size(names)
    first = int(exclusive)  # the first device, from the end at which the scan begins, that has a value to combine
    place = lax.axis_index(names)
    step = 1
    if reverse:
        place = count - 1 - place
        step = -1
    if exclusive:
        # The first device would receive zeros from a shift without wrap, and they are larger than a max of negative
        # values.
        if count == 1:
            return neutral
        arrival = _shift_tree(total, names, step)
        total = _select(place > 0, arrival, neutral)
    distance = 1
    while distance < count - first:
        arrival = _shift_tree(total, names, step * distance)
        is_sent_to = place >= distance + first
        if hides_missing:
            # A function of the user's may divide by what arrives, and the gradient of a NaN is NaN even where it is not
            # selected.
            arrival = _select(is_sent_to, arrival, neutral)
        # The earlier devices stand first: `combine` need not be commutative.
        if reverse:
            longer_total = combine(total, arrival)
        else:
            longer_total = combine(arrival, total)
        total = _select(is_sent_to, longer_total, total)
        distance *= 2
    return total


def _shift_tree(tree: Any, names: tuple[str, ...], by: int) -> Any:
    return jax.tree.map(lambda leaf: shift_array(leaf, names, by=by, wrap=False), tree)


def _select(condition: jax.Array, chosen: Any, other: Any) -> Any:
    """The leaves of one tree or of the other."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), chosen, other)


def broadcast_identity(where: str, identity: Any, x: Any) -> Any:
    """The identity as arrays like those of x."""
    structure: Any = jax.tree.structure(identity)
    structure_of_x = jax.tree.structure(x)
    if structure != structure_of_x:
        raise ValueError(
            f"{where}: identity must be a pytree like x, {structure_of_x}; got {structure}. Pass a number or an array "
            "for each leaf."
        )
    neutral = []
    for leaf, like in zip(jax.tree.leaves(identity), jax.tree.leaves(x), strict=True):
        if not _fits(leaf, like):
            raise ValueError(
                f"{where}: a leaf of the identity must be a value of {_describe_leaf(like)}; got {leaf!r}. Pass one "
                "that this dtype has, as a number or in a shape that broadcasts."
            )
        neutral.append(vary_like(jnp.broadcast_to(jnp.asarray(leaf, like.dtype), like.shape), like))
    return jax.tree.unflatten(structure, neutral)


def _fits(leaf: Any, like: Any) -> bool:
    """Whether a leaf of an identity broadcasts to an array, and keeps its value in that array's dtype.

    For example 0.5 would be 0 among integers, and -inf an overflow.
    """
    try:
        if np.broadcast_shapes(np.shape(leaf), like.shape) != tuple(like.shape):
            return False
    except ValueError:
        return False
    if isinstance(leaf, jax.core.Tracer):
        return bool(leaf.dtype == like.dtype)
    value = np.asarray(leaf)
    if jnp.issubdtype(like.dtype, jnp.inexact):
        return bool(jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool)
    if not np.isfinite(value.astype(np.float64)).all():
        return False
    with np.errstate(all="ignore"):
        return bool((value.astype(like.dtype) == value).all())


def check_combine(where: str, combine: Combine, x: Any) -> None:
    """Refuses a function whose result could not be combined again."""
    expected = jax.tree.map(_describe_leaf, x)
    actual = jax.tree.map(_describe_leaf, eval_shape(combine, x, x))
    if actual != expected:
        raise TypeError(
            f"{where}: combine must return a pytree like its arguments, {expected}; got {actual}. Return the same "
            "shapes and dtypes."
        )


def _find_neutral_value(op: str, dtype: Any) -> Any:
    """The value that changes no sum, max or min of this dtype."""
    if op == "sum":
        return 0
    if jnp.issubdtype(dtype, jnp.bool_):
        return op == "min"
    lowest, highest = -jnp.inf, jnp.inf
    if not jnp.issubdtype(dtype, jnp.floating):
        info = jnp.iinfo(dtype)
        lowest, highest = info.min, info.max
    return lowest if op == "max" else highest


def _describe_leaf(x: Any) -> str:
    """As "float32[2, 3]"."""
    return f"{x.dtype}{list(x.shape)}"


@typed
def halo_exchange(
    x: Arrays,
    axis: Axis,
    *,
    dim: int = 0,
    before: int = 1,
    after: int = 1,
    wrap: bool = False,
) -> Any:
    """Extends this device's block by the last rows of the devices before it and the first rows of those after it.

    Layout: `X[.., D_a, ..] -> X[.., before + D_a + after, ..]`
    Args:
        x: pytree of arrays, a block on each device.
        axis: axis name or tuple of names (then along the joint index).
        dim: the dim split over the axis.
        before: rows from before the block; they may come from several devices.
        after: rows from after the block.
        wrap: periodic boundary: the last device precedes the first. False: zeros at both ends.

    Returns:
        Arrays with before + after more rows along `dim`.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have or that is empty, a negative number of rows, or
            more rows than 1024 devices have (each sends a message).

    Cost: B (before + after)/D bytes, D the block's size along `dim`, in one step for each neighbor reached.

    Example:
        >>> halo = lambda x: sk.collectives.halo_exchange(x, "data", before=1, after=1)
        >>> print(jax.shard_map(halo, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(jnp.array([1, 2, 3, 4])))
        [0 1 2 3 2 3 4 0]
    """
    names = bound("halo_exchange", axis)
    at_least("halo_exchange", 0, before=before, after=after)

    def extend_leaf(leaf: jax.Array) -> jax.Array:
        split_dim = dim_of("halo_exchange", dim, jnp.ndim(leaf))
        size = leaf.shape[split_dim]
        _check_halo(leaf.shape, split_dim, before=before, after=after)
        block = vary(leaf, names)
        pieces = [block]
        # Blocks of 3 rows and before=7: 3 rows of the nearest device, 3 of the next, and the last row of the third.
        for nearer_rows in range(0, before, size):
            rows = min(size, before - nearer_rows)
            edge = lax.slice_in_dim(block, size - rows, size, axis=split_dim)
            distance = nearer_rows // size + 1
            pieces.insert(0, shift_array(edge, names, by=distance, wrap=wrap))
        for nearer_rows in range(0, after, size):
            rows = min(size, after - nearer_rows)
            edge = lax.slice_in_dim(block, 0, rows, axis=split_dim)
            distance = nearer_rows // size + 1
            pieces.append(shift_array(edge, names, by=-distance, wrap=wrap))
        return jnp.concatenate(pieces, axis=split_dim)

    return jax.tree.map(extend_leaf, x)


def _check_halo(shape: tuple[int, ...], dim: int, **halos: int) -> None:
    size = shape[dim]
    if not size:
        raise ValueError(
            f"halo_exchange: dim {dim} must have at least one row per device; got shape {shape}. "
            "Choose another dim, or fewer devices."
        )
    for side, rows in halos.items():
        if rows > _MOST_NEIGHBORS * size:
            raise ValueError(
                f"halo_exchange: {side} must be at most the rows of {_MOST_NEIGHBORS} devices of {size} rows each; got "
                f"{rows}. Lower {side}."
            )


@typed
def gather_to_one(x: Arrays, axis: Axis, *, dim: int = 0, target: int = 0) -> Any:
    """Concatenates the devices' shards of each leaf along `dim` on device `target`; the others get zeros.

    Layout: `X[.., D_a, ..] -> X[.., D, ..] on device target`
    Args:
        x: pytree of arrays, this device's shards.
        axis: axis name or tuple of names (then `target` is a joint index).
        dim: the dim to concatenate along.
        target: index of the receiving device, 0 <= target < n.

    Returns:
        Arrays with n times the shard's size along `dim`, on every device, varying over `axis`.

    Raises:
        ValueError: an unbound axis, a `dim` the array does not have, or a target outside the axis.

    Cost: B (n-1) bytes in n-1 hops, B being one shard: an all_gather, because n-1 single messages are limited by the
    target's links just as much.

    Example:
        >>> first = lambda x: sk.collectives.gather_to_one(x, "data")
        >>> print(jax.shard_map(first, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(jnp.array([1, 2])))
        [1 2 0 0]
    """
    names = bound("gather_to_one", axis)
    member("gather_to_one", "target", target, axis_size(names))
    is_target = lax.axis_index(names) == target

    def gather_leaf(leaf: jax.Array) -> jax.Array:
        gathered_dim = dim_of("gather_to_one", dim, jnp.ndim(leaf))
        gathered = gather_array(leaf, names, gathered_dim)
        return jnp.where(is_target, gathered, jnp.zeros_like(gathered))

    return jax.tree.map(gather_leaf, x)
