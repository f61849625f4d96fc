"""How the batch is split, over devices and over microbatches, and the keys that belong to its examples."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardkit._check import named, quoted
from shardkit._compat import varying_axes
from shardkit.collectives import axis_index, axis_size, vary
from shardkit.layout import path_name, spec_axes
from shardkit.partitioning.gradient import GradFn, Mean, named_means
from shardkit.partitioning.handles import parts
from shardkit.rng import fold_keys


def batch_specs(batch: Any, spec: PartitionSpec, mesh: Mesh, accumulate: int) -> Any:
    """The spec of every leaf of a batch; scalars are replicated, other leaves split as far as they have dims.

    Raises:
        ValueError: a batch without arrays, leaves with different numbers of examples, or a dim that does not divide.
    """
    leaves = jax.tree_util.tree_flatten_with_path(batch)[0]
    sizes = {path_name(path): jnp.shape(x)[0] for path, x in leaves if jnp.ndim(x)}
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"{name}: {size}" for name, size in sizes.items()) or "no array"
        raise ValueError(
            "make_train_step: every array of the batch must have the same number of examples along dim 0; "
            f"got {found}. Return a batch whose arrays share dim 0."
        )
    for path, x in leaves:
        for dim, axes in enumerate(spec_axes(spec)[: jnp.ndim(x)]):
            count = math.prod(mesh.shape[axis] for axis in axes)
            parts = accumulate if dim == 0 else 1
            if jnp.shape(x)[dim] % (count * parts):
                over = f"{count} devices" + (f" x {parts} microbatches" if parts > 1 else "")
                raise ValueError(
                    f"make_train_step: batch dim {dim} must be divisible by {named(axes) if axes else 'accumulate'}"
                    f"{' times accumulate' if parts > 1 and axes else ''}; leaf {path_name(path)} has size "
                    f"{jnp.shape(x)[dim]} over {over}. Choose another size, or pad with examples of weight 0."
                )
    return jax.tree.map(lambda x: PartitionSpec(*spec[: jnp.ndim(x)]), batch)


def device_keys(key: jax.Array, batch: Any, batch_spec: PartitionSpec) -> jax.Array:
    """This device's rows of `example_keys(key, global batch)`."""
    rows = next(x.shape[0] for x in jax.tree.leaves(batch) if x.ndim)
    first = spec_axes(batch_spec)[:1]
    axes = first[0] if first else ()
    index = jnp.arange(rows, dtype=jnp.uint32)
    if axes and axis_size(axes) > 1:
        index = index + axis_index(axes).astype(jnp.uint32) * jnp.uint32(rows)
    return vary(fold_keys(key, index), axes)


def accumulated(
    grad_fn: GradFn, params: Any, batch: Any, keys: jax.Array, scale: jax.Array, accumulate: int
) -> tuple[dict[str, Mean], Any]:
    """Runs the GradFn over the microbatches, inside shard_map; the sums stay on the device.

    Args:
        grad_fn: what one device computes.
        params: the parameters as they are seen.
        batch: this device's examples.
        keys: a key for each of them.
        scale: the loss scale.
        accumulate: number of microbatches, each a contiguous part of the device's examples.

    Returns:
        The loss (under "loss") and the auxiliary Means, and the gradients: sums over the microbatches, in float32 where
        there are several.

    Cost: nothing is sent beyond what the GradFn sends, `accumulate` times.
    """

    def call(batch: Any, keys: jax.Array) -> tuple[dict[str, Mean], Any]:
        loss, aux, grads = grad_fn(params, batch, keys, scale=scale)
        taken = {"loss", "weight", "finite", "loss_scale"} & set(aux)
        if taken:
            raise ValueError(f"make_train_step: aux must not use the names {quoted(sorted(taken))}. Rename them.")
        _check_gradients(params, grads)
        return named_means((loss, aux)), grads

    if accumulate == 1:
        return call(batch, keys)

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(accumulate, x.shape[0] // accumulate, *x.shape[1:])

    def add(carry: Any, microbatch: tuple[list[jax.Array], jax.Array]) -> tuple[Any, None]:
        out = call(*rejoin(microbatch))
        return jax.tree.map(lambda sum_, x: sum_ + x.astype(sum_.dtype), carry, out), None

    leaves, structure = jax.tree.flatten(batch)
    split = [cut(x) for x in leaves if x.ndim]

    def rejoin(microbatch: tuple[list[jax.Array], jax.Array]) -> tuple[Any, jax.Array]:
        arrays = iter(microbatch[0])
        return jax.tree.unflatten(structure, [next(arrays) if x.ndim else x for x in leaves]), microbatch[1]

    every = (split, cut(keys))
    shapes = jax.eval_shape(lambda m: call(*rejoin(m)), jax.tree.map(lambda x: x[0], every))

    def zero(x: jax.ShapeDtypeStruct) -> jax.Array:
        return vary(jnp.zeros(x.shape, jnp.float32), tuple(varying_axes(x)))

    sums, _ = jax.lax.scan(add, jax.tree.map(zero, shapes), every)
    return sums


def _check_gradients(params: Any, grads: Any) -> None:
    """Refuses gradients that are not one for each parameter, of the shape in which the GradFn saw it."""
    rule = "make_train_step: a GradFn must return a gradient of every parameter, of the shape that it was given"
    remedy = "Return what value_and_grad returns, or pytrees like it."
    seen = parts(params)
    ours, theirs = str(jax.tree.structure(grads)), str(jax.tree.structure(seen))
    if ours != theirs:
        raise ValueError(f"{rule}; got {ours} for {theirs}. {remedy}")
    for (path, grad), x in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(seen), strict=True):
        if jnp.shape(grad) != x.shape:
            raise ValueError(f"{rule}; leaf {path_name(path)} has {x.shape}, its gradient {jnp.shape(grad)}. {remedy}")
