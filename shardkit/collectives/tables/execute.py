"""What runs a table inside shard_map: one program for all devices, which reads its own column of the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import named
from shardkit._jax import compat
from shardkit.collectives._sums import typed_zeros
from shardkit.collectives.axes import axis_index, axis_size, varies, vary
from shardkit.collectives.permute import permute
from shardkit.collectives.replicated import assume_replicated
from shardkit.collectives.tables.messages import Message, consecutive
from shardkit.collectives.tables.table import Op, SendTable

_Names = tuple[str, ...]


def check_table(where: str, table: SendTable, op: Op, names: _Names) -> None:
    """Refuses a table that is wrong, or for another collective or number of devices."""
    if table.op != op or table.devices != axis_size(names):
        raise ValueError(
            f"{where}: table must be an {op} over the {axis_size(names)} devices of {named(names)}; got "
            f"{table.name}, an {table.described()}. Make one for them."
        )
    table.check()


def all_gather(piece: jax.Array, names: _Names, dim: int, replicated: bool, table: SendTable) -> jax.Array:
    """One array gathered along `dim`."""
    own = replicated and compat.tracked_axes().issuperset(names)  # also without check_vma, where no type says so
    whole = (_replicated_all_gather if own else _all_gather)(vary(piece, names), names, table)
    size = table.devices * piece.shape[dim]
    return jnp.moveaxis(whole, 0, dim).reshape(*piece.shape[:dim], size, *piece.shape[dim + 1 :])


def reduce_scatter(x: jax.Array, names: _Names, dim: int, table: SendTable) -> jax.Array:
    """The sums of one array, scattered along `dim`."""
    split = x.reshape(*x.shape[:dim], table.devices, x.shape[dim] // table.devices, *x.shape[dim + 1 :])
    return _reduce_scatter(jnp.moveaxis(vary(split, names), dim, 0), names, table)


def all_reduce(x: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    """The sum of one array, typed as invariant."""
    x = vary(x, names)
    return (_replicated_all_reduce if varies(x, names) else _all_reduce)(x, names, table)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather(piece: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    """`[...] -> [n, ...]`"""
    n, each = table.devices, table.chunks // table.devices
    mine = _in_chunks(piece, each)
    buffer = typed_zeros(mine, shape=(table.chunks + scratch(table), *mine.shape[1:]))
    buffer = lax.dynamic_update_slice_in_dim(buffer, mine, axis_index(names) * each, 0)
    return _from_chunks(executed(buffer, names, table)[: table.chunks].reshape(n, each, *mine.shape[1:]), piece.shape)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _reduce_scatter(x: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    """`[n, ...] -> [...]`"""
    each = table.chunks // table.devices
    parts = jax.vmap(partial(_in_chunks, each=each))(x)
    buffer = _with_scratch(parts.reshape(table.chunks, *parts.shape[2:]), table)
    mine = lax.dynamic_slice_in_dim(executed(buffer, names, table), axis_index(names) * each, each)
    return _from_chunks(mine[None], x.shape[1:])[0]


def _all_reduce(x: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    buffer = _with_scratch(_in_chunks(x.reshape(-1), table.chunks), table)
    return _from_chunks(executed(buffer, names, table)[None, : table.chunks], x.shape)[0]


# The cotangent of a replicated result is on every device already.


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _replicated_all_gather(piece: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    return assume_replicated(_all_gather(piece, names, table), names)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _replicated_all_reduce(x: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    return assume_replicated(_all_reduce(x, names, table), names)


def _own_part(names: _Names, table: SendTable, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (lax.dynamic_index_in_dim(vary(cotangent, names), axis_index(names), 0, keepdims=False),)


def _own_copy(names: _Names, table: SendTable, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (vary(cotangent, names),)


def _forward(kernel: Any, x: jax.Array, names: _Names, table: SendTable) -> tuple[jax.Array, None]:
    return kernel(x, names, table), None


def _transposed(kernel: Any, names: _Names, table: SendTable, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (kernel(cotangent, names, table.transpose()),)


_all_gather.defvjp(partial(_forward, _all_gather), partial(_transposed, _reduce_scatter))
_reduce_scatter.defvjp(partial(_forward, _reduce_scatter), partial(_transposed, _all_gather))
_replicated_all_gather.defvjp(partial(_forward, _replicated_all_gather), _own_part)
_replicated_all_reduce.defvjp(partial(_forward, _replicated_all_reduce), _own_copy)


def _in_chunks(x: jax.Array, each: int) -> jax.Array:
    """`[...] -> [each, ...]`: flat, and padded where the chunks do not divide it; in its own shape if there is one."""
    if each == 1:
        return x[None]
    return jnp.pad(x.reshape(-1), (0, -x.size % each)).reshape(each, -1)


def _from_chunks(parts: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`[n, chunks, ...] -> [n, *shape]`"""
    size = int(np.prod(shape))
    return parts.reshape(len(parts), -1)[:, :size].reshape(len(parts), *shape)


def scratch(table: SendTable) -> int:
    """Rows after the last chunk, for what does not arrive."""
    return max((m.each for step in table.by_step for m in step if m.partial), default=0)


def _with_scratch(chunks: jax.Array, table: SendTable) -> jax.Array:
    rows = scratch(table)
    return jnp.concatenate([chunks, typed_zeros(chunks, shape=(rows, *chunks.shape[1:]))]) if rows else chunks


def executed(buffer: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    """The chunks `[chunks + scratch, ...]` after all steps; steps alike in all but their chunks are one loop."""
    me = axis_index(names)
    for steps in _runs(table.by_step):
        mine = [(_column(taken, me), _column(put, me)) for taken, put in _places(steps)]
        once = partial(_step, steps[0], names)
        if len(steps) == 1:
            buffer, _ = once(buffer, jax.tree.map(lambda rows: rows[0], mine))
        else:
            buffer, _ = lax.scan(once, buffer, mine)
    return buffer


def _runs(steps: Sequence[tuple[Message, ...]]) -> Iterator[list[tuple[Message, ...]]]:
    """Steps that follow each other and differ in their chunks alone; without those in which nothing is sent."""
    for _, group in groupby((step for step in steps if step), key=lambda step: [message.kind for message in step]):
        yield list(group)


def _places(steps: Sequence[tuple[Message, ...]]) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    """For each message of a step, the chunks taken and put in all steps."""
    for number in range(len(steps[0])):
        yield [step[number].taken for step in steps], [step[number].put for step in steps]


def _column(rows: Sequence[np.ndarray], device: jax.Array) -> jax.Array:
    """What a device has of the rows of each step: `[steps, rows]`."""
    whole = np.stack(rows)
    # In as few bytes as hold the numbers: for many devices they are a part of the program's size.
    small = jnp.asarray(whole.astype(np.min_scalar_type(int(whole.max()))))
    return lax.dynamic_index_in_dim(small, device, 1, keepdims=False).astype(jnp.int32)


def _step(sent: tuple[Message, ...], names: _Names, buffer: jax.Array, places: Any) -> tuple[jax.Array, None]:
    """One step on this device; `places` are the chunks that it takes and puts, for each message."""
    # Everything is taken before anything is put: a message carries what its source had before the step. Each ppermute
    # is one call of all devices, also of those that take no part in it, whose rows then go to the scratch rows. It
    # stands in no branch: devices would wait for those that skip it.
    taken = [_taken(buffer, rows, message.taken) for message, (rows, _) in zip(sent, places, strict=True)]
    arrived = [permute(rows, names, list(message.pairs)) for message, rows in zip(sent, taken, strict=True)]
    for message, new, (_, rows) in zip(sent, arrived, places, strict=True):
        if message.reduce:
            new = _taken(buffer, rows, message.put) + new
        buffer = _put(buffer, new, rows, message.put)
    return buffer, None


def _taken(buffer: jax.Array, rows: jax.Array, of_all: np.ndarray) -> jax.Array:
    if consecutive(of_all):
        return lax.dynamic_slice_in_dim(buffer, rows[0], len(rows))
    return jnp.take(buffer, rows, axis=0, mode="clip")


def _put(buffer: jax.Array, new: jax.Array, rows: jax.Array, of_all: np.ndarray) -> jax.Array:
    if consecutive(of_all):
        return lax.dynamic_update_slice_in_dim(buffer, new, rows[0], 0)
    return buffer.at[rows].set(new, unique_indices=True, mode="promise_in_bounds")
