"""The batch: its layout over devices and of its tokens, its split into microbatches, and a key for each example."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import format_count, name_axes, quote
from shardkit.collectives import axis_index, axis_size, vary
from shardkit.meshes.layout import count_devices, path_name, spec_axes
from shardkit.meshes.rng import fold_keys


def batch_specs(batch: Any, spec: PartitionSpec, mesh: Mesh, accumulate: int, where: str = "make_train_step") -> Any:
    """The spec of each leaf of a batch: `spec` as far as the leaf has dims; scalars are replicated.

    Raises:
        ValueError: a batch without arrays, leaves with different numbers of examples, or a dim that does not divide.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    sizes = {path_name(path): jnp.shape(x)[0] for path, x in leaves if jnp.ndim(x)}
    if len(set(sizes.values())) != 1:
        got = ", ".join(f"{name}: {size}" for name, size in sizes.items()) or "no array"
        raise ValueError(
            f"{where}: every array of the batch must have the same number of examples along dim 0; got {got}. Pass "
            "arrays that share dim 0, and put values for all examples into carried state, or into the loss."
        )
    axes_of_dims = spec_axes(spec) or [()]  # dim 0 may be split by microbatches alone
    for path, x in leaves:
        for dim, axes in enumerate(axes_of_dims[: jnp.ndim(x)]):
            devices = count_devices(mesh, axes)
            parts = accumulate if dim == 0 else 1
            size = jnp.shape(x)[dim]
            if size % (devices * parts):
                divisor, pieces = _describe_divisor(axes, devices, parts)
                raise ValueError(
                    f"{where}: batch dim {dim} must be divisible by {divisor}; leaf {path_name(path)} has size {size} "
                    f"over {pieces}. Choose another size, or pad with examples of weight 0."
                )
    return jax.tree.map(lambda x: PartitionSpec(*spec[: jnp.ndim(x)]), batch)


def _describe_divisor(axes: tuple[str, ...], devices: int, parts: int) -> tuple[str, str]:
    """By what a dim of the batch must be divisible, and how many pieces these are, as an error names them."""
    divisor = name_axes(axes) if axes else "accumulate"
    pieces = format_count(devices, "device")
    if parts > 1:
        pieces += f" x {parts} microbatches"
        if axes:
            divisor += " times accumulate"
    return divisor, pieces


def example_axes(batch_spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that split the examples, major first."""
    if not batch_spec:
        return ()
    return spec_axes(batch_spec)[0]


def device_keys(key: jax.Array, batch: Any, batch_spec: PartitionSpec) -> jax.Array:
    """This device's rows of `example_keys(key, global batch size)`, inside shard_map."""
    # Worked example: 8 examples over 4 devices. Device 2 has rows 0 and 1 of its own, which are examples 4 and 5 of the
    # batch, and folds these numbers into the key. On one device the examples 4 and 5 get the same keys.
    arrays = [x for x in jax.tree.leaves(batch) if x.ndim]
    rows = arrays[0].shape[0]  # all have as many
    axes = example_axes(batch_spec)
    numbers = jnp.arange(rows, dtype=jnp.uint32)
    if axes and axis_size(axes) > 1:
        numbers = numbers + axis_index(axes).astype(jnp.uint32) * jnp.uint32(rows)
    # Over one device no index was added that varies, and the keys must have the type of the examples.
    return vary(fold_keys(key, numbers), axes)


def split_microbatches(tree: Any, count: int) -> Any:
    """The arrays of a tree with the microbatch as dim 0, each a contiguous part; scalars belong to every microbatch.

    Layout: `X[B, ..] -> X[M, B/M, ..]`
    """

    def split(x: Any) -> Any:
        if not x.ndim:
            return x
        return x.reshape(count, x.shape[0] // count, *x.shape[1:])

    return jax.tree.map(split, tree)


def take_microbatch(split: Any, number: Any) -> Any:
    """One microbatch, by its number or a traced index, of what `split_microbatches` returned."""

    def take(x: Any) -> Any:
        if not x.ndim:
            return x
        if x.shape[0] == 1:
            return x[0]
        if isinstance(number, int):
            return x[number]
        return take_row(x, number)

    return jax.tree.map(take, split)


def take_row(tree: Any, number: Any) -> Any:
    """One row of dim 0 of every array, by its number or a traced index."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, 0, keepdims=False), tree)


# The type of an array says over which axes it varies, but neither on which dim nor in which order. This says so for the
# tokens; like an axis name of jax, it is bound only while the step is traced.
_SPLIT: ContextVar[tuple[tuple[str, ...] | None, str]] = ContextVar("what is split", default=(None, ""))


@contextmanager
def bind_token_axes(axes: tuple[str, ...], leaf: str = "") -> Iterator[None]:
    """Binds, while a loss is traced, the axes over which the plan splits the tokens, in order, and a leaf it splits."""
    token = _SPLIT.set((axes, leaf))
    try:
        yield
    finally:
        _SPLIT.reset(token)


def check_whole() -> None:
    """Refuses, for a loss that does not communicate, a plan that passes it a part of a leaf or of an example.

    Raises:
        ValueError: names what is split.
    """
    axes, leaf = _SPLIT.get()
    if not leaf and not axes:
        return
    part_of = f"leaf {leaf}"
    if not leaf:
        part_of = f"each example, split over {quote(axes or ())}"
    raise ValueError(
        "value_and_grad: with local=True a loss does not communicate, and must get whole leaves and examples; the "
        f"plan passes it a part of {part_of}. Leave out local=, or use dp, zero1, zero2 or fsdp."
    )


def token_axes() -> tuple[str, ...] | None:
    """The axes over which the plan splits the tokens, in order; None outside a step."""
    axes, _ = _SPLIT.get()
    return axes


def in_plan_order(where: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a sequence, if they are in the order in which the plan splits the tokens."""
    plan_order = [axis for axis in token_axes() or () if axis in names]
    user_order = [axis for axis in names if axis in plan_order]
    if user_order != plan_order:
        raise ValueError(
            f"{where}: the axes must be in the order in which the plan splits the tokens, {quote(plan_order)}; got "
            f"{quote(names)}. Name them in that order."
        )
    return names
