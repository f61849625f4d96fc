"""The batch: its layout over devices and of its tokens, its split into microbatches, and a key for each example."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import counted, named, quoted
from shardkit.collectives import axis_index, axis_size, vary
from shardkit.meshes.layout import path_name, spec_axes
from shardkit.meshes.rng import fold_keys


def batch_specs(batch: Any, spec: PartitionSpec, mesh: Mesh, accumulate: int, where: str = "make_train_step") -> Any:
    """The spec of each leaf of a batch: `spec` as far as the leaf has dims; scalars are replicated.

    Raises:
        ValueError: a batch without arrays, leaves with different numbers of examples, or a dim that does not divide.
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    sizes = [(path_name(path), jnp.shape(x)[0]) for path, x in leaves if jnp.ndim(x)]
    if len({size for _, size in sizes}) != 1:
        found = ", ".join(f"{name}: {size}" for name, size in sizes) or "no array"
        raise ValueError(
            f"{where}: every array of the batch must have the same number of examples along dim 0; got {found}. Pass "
            "arrays that share dim 0; what all examples share goes into carried state, or the loss."
        )
    for path, x in leaves:
        for dim, axes in enumerate((spec_axes(spec) or [()])[: jnp.ndim(x)]):
            count = math.prod(mesh.shape[axis] for axis in axes)
            parts = accumulate if dim == 0 else 1
            if jnp.shape(x)[dim] % (count * parts):
                over = counted(count, "device") + (f" x {parts} microbatches" if parts > 1 else "")
                raise ValueError(
                    f"{where}: batch dim {dim} must be divisible by {named(axes) if axes else 'accumulate'}"
                    f"{' times accumulate' if parts > 1 and axes else ''}; leaf {path_name(path)} has size "
                    f"{jnp.shape(x)[dim]} over {over}. Choose another size, or pad with examples of weight 0."
                )
    return jax.tree.map(lambda x: PartitionSpec(*spec[: jnp.ndim(x)]), batch)


def split_over(batch_spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that split the examples, major first."""
    return spec_axes(batch_spec)[0] if batch_spec else ()


def device_keys(key: jax.Array, batch: Any, batch_spec: PartitionSpec) -> jax.Array:
    """This device's rows of `example_keys(key, global batch size)`, inside shard_map."""
    rows = next(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim)
    axes = split_over(batch_spec)
    index = jnp.arange(rows, dtype=jnp.uint32)
    if axes and axis_size(axes) > 1:
        index = index + axis_index(axes).astype(jnp.uint32) * jnp.uint32(rows)
    return vary(fold_keys(key, index), axes)


def split_microbatches(tree: Any, count: int) -> Any:
    """The arrays of a tree with the microbatch as dim 0, each a contiguous part; scalars belong to every microbatch.

    Layout: `X[B, ..] -> X[M, B/M, ..]`
    """
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]) if x.ndim else x, tree)


def take_microbatch(split: Any, i: Any) -> Any:
    """Microbatch `i`, a number or a traced index, of what `split_microbatches` returned."""

    def one(x: Any) -> Any:
        if not x.ndim:
            return x
        at = 0 if x.shape[0] == 1 else i
        return x[at] if isinstance(at, int) else row(x, at)

    return jax.tree.map(one, split)


def row(tree: Any, i: Any) -> Any:
    """Row `i` of dim 0 of every array, a number or a traced index."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, keepdims=False), tree)


# The type of an array says over which axes it varies, but neither on which dim nor in which order. This says so for the
# tokens; like an axis name of jax, it is bound only while the step is traced.
_SPLIT: ContextVar[tuple[tuple[str, ...] | None, str]] = ContextVar("what is split", default=(None, ""))


@contextmanager
def tokens_split(axes: tuple[str, ...], leaf: str = "") -> Iterator[None]:
    """Binds, while a loss is traced, the axes over which the plan splits the tokens, in order, and a leaf it splits."""
    before = _SPLIT.set((axes, leaf))
    try:
        yield
    finally:
        _SPLIT.reset(before)


def check_whole() -> None:
    """Refuses, for a loss that does not communicate, a plan that passes it a part of a leaf or of an example.

    Raises:
        ValueError: names what is split.
    """
    axes, leaf = _SPLIT.get()
    if leaf or axes:
        what = f"leaf {leaf}" if leaf else f"each example, split over {quoted(axes or ())}"
        raise ValueError(
            "value_and_grad: with local=True a loss does not communicate, and must get whole leaves and examples; the "
            f"plan passes it a part of {what}. Leave out local=, or use dp, zero1, zero2 or fsdp."
        )


def token_axes() -> tuple[str, ...] | None:
    """The axes over which the plan splits the tokens, in order; None outside a step."""
    return _SPLIT.get()[0]


def in_plan_order(where: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of a sequence, if they are in the order in which the plan splits the tokens."""
    split = [axis for axis in token_axes() or () if axis in names]
    if split != [axis for axis in names if axis in split]:
        raise ValueError(
            f"{where}: the axes must be in the order in which the plan splits the tokens, {quoted(split)}; got "
            f"{quoted(names)}. Name them in that order."
        )
    return names
