"""Runs a table inside shard_map: one program for all devices, in which each device reads its own column of the table.

The chunks are the rows of a buffer, [chunks, ...]. In each step a device slices the rows that it sends, all devices
call one ppermute for each message, and each device stores the arriving chunks in the rows that the table says, or adds
them there. The numbers of the rows differ between devices, so they are arrays in the program, indexed by the device.
Who sends to whom is part of the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardkit._arguments.checks import name_axes
from shardkit._jax import compat
from shardkit.collectives._parts import join_parts, stack_parts
from shardkit.collectives._sums import typed_zeros
from shardkit.collectives.axes import axis_index, axis_size, varies, vary
from shardkit.collectives.permute import permute
from shardkit.collectives.replicated import assume_replicated
from shardkit.collectives.tables.messages import Message, are_consecutive
from shardkit.collectives.tables.table import Op, SendTable

_Names = tuple[str, ...]
# Of a message on this device: the rows that it sends, and the rows that it stores.
_Rows = tuple[jax.Array, jax.Array]


def check_table(where: str, table: SendTable, op: Op, names: _Names) -> None:
    """Refuses a table that is wrong, or for another collective or number of devices."""
    if table.op != op or table.devices != axis_size(names):
        raise ValueError(
            f"{where}: table must be an {op} over the {axis_size(names)} devices of {name_axes(names)}; got "
            f"{table.name}, an {table.described()}. Make one for them."
        )
    table.check()


def all_gather(
    piece: jax.Array,
    names: _Names,
    dim: int,
    replicated: bool,
    table: SendTable,
) -> jax.Array:
    """Gathers one array along `dim`."""
    kernel = _all_gather
    # The mesh is asked, and not the array's type: without check_vma no type says over which axes an array varies.
    if replicated and compat.tracked_axes().issuperset(names):
        kernel = _all_gather_replicated
    pieces = kernel(vary(piece, names), names, table)
    return join_parts(pieces, dim)


def reduce_scatter(x: jax.Array, names: _Names, dim: int, table: SendTable) -> jax.Array:
    """Sums one array over the devices, and scatters the sum along `dim`."""
    pieces = stack_parts(vary(x, names), dim, table.devices)
    return _reduce_scatter(pieces, names, table)


def all_reduce(x: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    """Sums one array over the devices; the result is typed as invariant."""
    x = vary(x, names)
    if varies(x, names):
        return _all_reduce_replicated(x, names, table)
    return _all_reduce(x, names, table)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather(piece: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    """`[...] -> [n, ...]`"""
    n = table.devices
    chunks_of_piece = table.chunks // n
    chunks = _make_chunks(piece, chunks_of_piece)
    rows = table.chunks + _count_scratch_rows(table)
    buffer = typed_zeros(chunks, shape=(rows, *chunks.shape[1:]))
    first_chunk = axis_index(names) * chunks_of_piece
    buffer = lax.dynamic_update_slice_in_dim(buffer, chunks, first_chunk, 0)
    buffer = run_steps(buffer, names, table)
    pieces = buffer[: table.chunks].reshape(n, chunks_of_piece, *chunks.shape[1:])
    return _join_chunks(pieces, piece.shape)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _reduce_scatter(x: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    """`[n, ...] -> [...]`"""
    chunks_of_piece = table.chunks // table.devices
    # [n, ...] to [n, chunks of a piece, ...]: each piece is padded by itself, so that no chunk has elements of two.
    make_chunks = jax.vmap(partial(_make_chunks, count=chunks_of_piece))
    chunks = make_chunks(x)
    buffer = _append_scratch_rows(chunks.reshape(table.chunks, *chunks.shape[2:]), table)
    buffer = run_steps(buffer, names, table)
    # Only this device's own chunks are complete sums; the others are what it has passed on.
    first_chunk = axis_index(names) * chunks_of_piece
    sums = lax.dynamic_slice_in_dim(buffer, first_chunk, chunks_of_piece)
    return _join_chunks(sums[None], x.shape[1:])[0]


def _all_reduce(x: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    chunks = _make_chunks(x.reshape(-1), table.chunks)
    buffer = _append_scratch_rows(chunks, table)
    buffer = run_steps(buffer, names, table)
    return _join_chunks(buffer[None, : table.chunks], x.shape)[0]


# The cotangent of a replicated result is on every device already, so the transpose sends nothing. The transpose of the
# varying result would add n equal copies of it.


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_gather_replicated(piece: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    return assume_replicated(_all_gather(piece, names, table), names)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_reduce_replicated(x: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    return assume_replicated(_all_reduce(x, names, table), names)


def _take_cotangent(names: _Names, table: SendTable, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    cotangent = vary(cotangent, names)
    return (lax.dynamic_index_in_dim(cotangent, axis_index(names), 0, keepdims=False),)


def _copy_cotangent(names: _Names, table: SendTable, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (vary(cotangent, names),)


def _run_forward(kernel: Any, x: jax.Array, names: _Names, table: SendTable) -> tuple[jax.Array, None]:
    return kernel(x, names, table), None


def _run_transpose(
    kernel: Any,
    names: _Names,
    table: SendTable,
    _: None,
    cotangent: jax.Array,
) -> tuple[jax.Array]:
    return (kernel(cotangent, names, table.transpose()),)


_all_gather.defvjp(partial(_run_forward, _all_gather), partial(_run_transpose, _reduce_scatter))
_reduce_scatter.defvjp(partial(_run_forward, _reduce_scatter), partial(_run_transpose, _all_gather))
_all_gather_replicated.defvjp(partial(_run_forward, _all_gather_replicated), _take_cotangent)
_all_reduce_replicated.defvjp(partial(_run_forward, _all_reduce_replicated), _copy_cotangent)


def _make_chunks(x: jax.Array, count: int) -> jax.Array:
    """`[...] -> [count, ...]`: flat, and padded where the chunks do not divide it; one chunk keeps its shape."""
    if count == 1:
        return x[None]
    flat = jnp.pad(x.reshape(-1), (0, -x.size % count))
    return flat.reshape(count, -1)


def _join_chunks(chunks: jax.Array, shape: Sequence[int]) -> jax.Array:
    """`[n, chunks, ...] -> [n, *shape]`"""
    n = len(chunks)
    flat = chunks.reshape(n, -1)
    size = math.prod(shape)  # without padding
    return flat[:, :size].reshape(n, *shape)


def _count_scratch_rows(table: SendTable) -> int:
    """The number of rows after the last chunk: a device to which nobody sends stores the ppermute's zeros there."""
    rows = 0
    for messages in table.by_step:
        for message in messages:
            if message.is_partial:
                rows = max(rows, message.chunks)
    return rows


def _append_scratch_rows(chunks: jax.Array, table: SendTable) -> jax.Array:
    rows = _count_scratch_rows(table)
    if not rows:
        return chunks
    zeros = typed_zeros(chunks, shape=(rows, *chunks.shape[1:]))
    return jnp.concatenate([chunks, zeros])


def run_steps(buffer: jax.Array, names: _Names, table: SendTable) -> jax.Array:
    """The chunks `[chunks + scratch rows, ...]` after all steps of the table.

    Steps that send alike, and differ in their chunks alone, are one loop: all n-1 steps of a ring. Its program has one
    ppermute, whatever the number of devices.
    """
    me = axis_index(names)
    nonempty_steps = [messages for messages in table.by_step if messages]
    for _, group in groupby(nonempty_steps, key=_list_kinds):
        steps = list(group)
        rows = []
        for messages in zip(*steps, strict=True):  # of each step one: they differ in their rows alone
            sent_rows = _select_rows([message.sent_rows for message in messages], me)
            stored_rows = _select_rows([message.stored_rows for message in messages], me)
            rows.append((sent_rows, stored_rows))
        run_step = partial(_run_step, steps[0], names)
        if len(steps) == 1:
            rows_of_step = jax.tree.map(lambda rows: rows[0], rows)
            buffer, _ = run_step(buffer, rows_of_step)
        else:
            buffer, _ = lax.scan(run_step, buffer, rows)
    return buffer


def _list_kinds(messages: Sequence[Message]) -> list[Any]:
    return [message.kind for message in messages]


def _select_rows(rows: Sequence[np.ndarray], device: jax.Array) -> jax.Array:
    """The rows of one device in each step, `[steps, chunks]`; `rows` has an array `[devices, chunks]` for each step."""
    rows_of_all = np.stack(rows)
    # In as few bytes as hold the numbers: for many devices they are a part of the program's size.
    small_dtype = np.min_scalar_type(int(rows_of_all.max()))
    small = jnp.asarray(rows_of_all.astype(small_dtype))
    return lax.dynamic_index_in_dim(small, device, 1, keepdims=False).astype(jnp.int32)


def _run_step(
    messages: tuple[Message, ...], names: _Names, buffer: jax.Array, rows: list[_Rows]
) -> tuple[jax.Array, None]:
    """One step on this device; `rows` has, for each message, the rows that it sends and the rows where it stores."""
    # All chunks are taken before any is stored: a message carries what its source had before the step. Each ppermute is
    # one call of all devices. A device that takes no part in it calls it too, and stores the result in the scratch
    # rows: in a branch that it skips, the other devices would wait for it.
    sent = []
    for message, (sent_rows, _) in zip(messages, rows, strict=True):
        sent.append(_take_rows(buffer, sent_rows, message.sent_rows))
    arrivals = []
    for message, chunks in zip(messages, sent, strict=True):
        arrivals.append(permute(chunks, names, list(message.pairs)))
    for message, arrival, (_, stored_rows) in zip(messages, arrivals, rows, strict=True):
        chunks = arrival
        if message.reduce:
            chunks = _take_rows(buffer, stored_rows, message.stored_rows) + arrival
        buffer = _store_rows(buffer, chunks, stored_rows, message.stored_rows)
    return buffer, None


# Rows that follow each other on every device are one slice; others are a gather or a scatter, which copies more.


def _take_rows(buffer: jax.Array, rows: jax.Array, rows_of_all: np.ndarray) -> jax.Array:
    if are_consecutive(rows_of_all):
        return lax.dynamic_slice_in_dim(buffer, rows[0], len(rows))
    return jnp.take(buffer, rows, axis=0, mode="clip")


def _store_rows(buffer: jax.Array, chunks: jax.Array, rows: jax.Array, rows_of_all: np.ndarray) -> jax.Array:
    if are_consecutive(rows_of_all):
        return lax.dynamic_update_slice_in_dim(buffer, chunks, rows[0], 0)
    return buffer.at[rows].set(chunks, unique_indices=True, mode="promise_in_bounds")
