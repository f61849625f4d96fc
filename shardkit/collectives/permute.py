"""Point-to-point messages: shifts, permutations and the broadcast of one device's value."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import Axis, member
from shardkit._arguments.typed import Arrays, typed
from shardkit._jax import compat
from shardkit._jax.compat import bound
from shardkit.collectives.axes import axis_size, vary

Pairs = list[tuple[int, int]]  # (source, target)
_Names = tuple[str, ...]


@typed
def shift(x: Arrays, axis: Axis, *, by: int = 1, wrap: bool = True) -> Any:
    """Sends each leaf `by` devices up along `axis`: device i gets the value of device i - by.

    Layout: `X[...] on device i -> X[...] on device i + by`
    Args:
        x: pytree of arrays.
        axis: axis name or tuple of names (then along the joint index).
        by: number of devices, negative for the other direction.
        wrap: send from the last device to the first, as in a ring; False: the devices at the end receive zeros.

    Returns:
        Arrays of the same shapes.

    Raises:
        ValueError: an unbound axis.

    Cost: B bytes in one step (min(by, n - by) hops in a ring); none where by is a multiple of n.

    Example:
        >>> up = lambda x: sk.shift(x, "model", wrap=False)
        >>> print(jax.shard_map(up, mesh=mesh, in_specs=P("model"), out_specs=P("model"))(jnp.arange(1, 5)))
        [0 1 2 3]
    """
    names = bound("shift", axis)
    return jax.tree.map(lambda leaf: shift_array(leaf, names, by=by, wrap=wrap), x)


def shift_array(x: jax.Array, names: _Names, *, by: int = 1, wrap: bool = True) -> jax.Array:
    """`shift` of one array, for kernels whose arguments are checked already."""
    count = axis_size(names)
    pairs = []
    for source in range(count):
        target = source + by
        if wrap:
            pairs.append((source, target % count))
        elif 0 <= target < count:  # of 4 devices, by=1: 0 to 1, 1 to 2 and 2 to 3
            pairs.append((source, target))
    stays = by == 0 or (wrap and by % count == 0)
    if stays:  # every device keeps its value, and nothing is sent
        return vary(x, names)
    return permute(x, names, pairs)


@typed
def broadcast(x: Arrays, axis: Axis, *, source: int = 0) -> Any:
    """Sends the value of device `source` to every device of `axis`.

    Layout: `X[...] on device source -> X[...]`
    Args:
        x: pytree of arrays. Values of the other devices are ignored, also NaN.
        axis: axis name or tuple of names (then `source` is a joint index).
        source: index of the sending device, 0 <= source < n.

    Returns:
        Arrays of the same shapes, dtypes and bits, invariant over `axis`.

    Raises:
        ValueError: an unbound axis, or a source outside the axis.

    Cost: 2 B (n-1)/n bytes in 2 (n-1) hops: a masked all_reduce, which makes the result invariant.

    Example:
        >>> last = lambda x: sk.broadcast(x, "model", source=3)
        >>> print(jax.shard_map(last, mesh=mesh, in_specs=P("model"), out_specs=P())(jnp.arange(4)))
        [3]
    """
    names = bound("broadcast", axis)
    member("broadcast", "source", source, axis_size(names))
    return jax.tree.map(lambda leaf: _broadcast_leaf(vary(leaf, names), names, source), x)


def permute(x: jax.Array, names: _Names, pairs: Pairs) -> jax.Array:
    """Sends an array by (source, target) pairs of joint indices over `names`, the first axis major."""
    if not compat.tracked_axes() & set(names):
        return _permute_in_vmap(x, names, pairs)
    mesh_names, mesh_pairs = _convert_to_mesh_order(names, pairs)
    return lax.ppermute(vary(x, names), mesh_names, mesh_pairs)


def _permute_in_vmap(x: jax.Array, names: _Names, pairs: Pairs) -> jax.Array:
    """`permute` by an all_gather: under vmap jax refuses a ppermute over several axes, or with a silent device."""
    gathered = x[None]
    for name in reversed(names):
        gathered = lax.all_gather(gathered, name, axis=0, tiled=True)
    sender_of = np.full(axis_size(names), -1, np.int32)  # -1: nothing arrives
    for source, target in pairs:
        sender_of[target] = source
    sender = jnp.asarray(sender_of)[lax.axis_index(names)]
    return jnp.where(sender >= 0, gathered[sender], jnp.zeros_like(x))


def _convert_to_mesh_order(names: _Names, pairs: Pairs) -> tuple[_Names, Pairs]:
    """The axes in mesh order, and the pairs as joint indices over them.

    Unlike other collectives, ppermute ignores the order of the names and counts devices in mesh order (jax 0.12 refuses
    names in another order). On a mesh (data=2, model=4), device 1 over ("model", "data") is model=0, data=1: device 4
    over ("data", "model").
    """
    sizes = compat.bound_axes()
    mesh_names = tuple(name for name in sizes if name in names)
    if mesh_names == names:
        return names, pairs
    # The devices in mesh order, indexed by their coordinates in the order of the names.
    mesh_shape = [sizes[name] for name in mesh_names]
    mesh_devices = np.arange(math.prod(mesh_shape)).reshape(mesh_shape)
    order = [mesh_names.index(name) for name in names]
    devices = mesh_devices.transpose(order).ravel()
    mesh_pairs = []
    for source, target in pairs:
        mesh_pairs.append((int(devices[source]), int(devices[target])))
    return mesh_names, mesh_pairs


# A broadcast is a masked all_reduce: all devices but the source add zeros. A ppermute cannot go from one source to
# several targets, and an all_gather sends n/2 times the bytes. The results of both would be typed as varying, which
# `out_specs=P()` refuses.


def _broadcast_leaf(x: jax.Array, names: _Names, source: int) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return _broadcast_bits(x, names, source)
    addend = _zero_unless_source(x, names, source)
    if x.dtype == bool:  # a sum of booleans would send four bytes per element
        return lax.pmax(addend, names)
    return lax.psum(addend, names)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _broadcast_bits(x: jax.Array, names: _Names, source: int) -> jax.Array:
    # Sent as integers: a sum of floats turns -0.0 into 0.0.
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}"))
    source_bits = lax.psum(_zero_unless_source(bits, names, source), names)
    return lax.bitcast_convert_type(source_bits, x.dtype)


@_broadcast_bits.defjvp
def _differentiate_broadcast(names: _Names, source: int, primals: Any, tangents: Any) -> Any:
    (x,) = primals
    (dx,) = tangents
    result = _broadcast_bits(x, names, source)
    return result, lax.psum(_zero_unless_source(dx, names, source), names)


def _zero_unless_source(x: jax.Array, names: _Names, source: int) -> jax.Array:
    return jnp.where(lax.axis_index(names) == source, x, jnp.zeros_like(x))
