"""Steps as tutorials write them: whole gathers, a reduction in every microbatch, and GPipe as one scan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardkit.bench.automatic import Loss, mean, updated
from shardkit.bench.measure import Case
from shardkit.models import transformer


def in_microbatches(
    name: str, loss_fn: Loss, optimizer: Any, carry: Any, batch: Any, mesh: Mesh, axes: tuple[str, ...], count: int
) -> Case:
    """Data parallelism, or FSDP where the carry is split: each microbatch gathers all weights, and reduces gradients.

    Autodiff places the reductions: of a replicated weight a psum, of a gathered one a reduce-scatter.
    """
    specs = jax.tree.map(lambda x: x.sharding.spec, carry[0])
    ways = mesh.size

    def whole(shard: jax.Array, spec: P) -> jax.Array:
        dims = [dim for dim, names in enumerate(spec) if names is not None]
        return lax.all_gather(shard, axes, axis=dims[0], tiled=True) if dims else shard

    def local(params: Any, batch: Any) -> Any:
        def loss(params: Any, micro: Any) -> jax.Array:
            return mean(loss_fn)(jax.tree.map(whole, params, specs), micro) / (ways * count)

        def add(total: Any, micro: Any) -> tuple[Any, None]:
            found = jax.value_and_grad(loss)(params, micro)
            return jax.tree.map(jnp.add, total, found), None

        split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        nothing = lax.pcast(jnp.float32(0), axes, to="varying"), jax.tree.map(jnp.zeros_like, params)
        (total, gradients), _ = lax.scan(add, nothing, split)
        return lax.psum(total, axes), gradients

    gradient = jax.shard_map(local, mesh=mesh, in_specs=(specs, P(axes)), out_specs=(P(), specs))

    def step(carry: Any, batch: Any) -> Any:
        loss, gradients = gradient(carry[0], batch)
        return updated(optimizer, carry, gradients, loss)

    return Case(name, _jitted(step, carry, mesh), carry, (batch,))


def scan_gpipe(
    name: str, config: transformer.Config, optimizer: Any, carry: Any, batch: Any, mesh: Mesh, axis: str, count: int
) -> Case:
    """GPipe as one scan, differentiated: every device computes its stage at each of m + p - 1 ticks, and all is saved.

    The examples are split over the other axes of the mesh.
    """
    specs = jax.tree.map(lambda x: x.sharding.spec, carry[0])
    embed, stage, head = transformer.pieces(config)
    others = tuple(name for name in mesh.axis_names if name != axis)
    last = mesh.shape[axis] - 1

    def local(params: Any, batch: Any) -> jax.Array:
        device = lax.axis_index(axis)
        split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), batch)
        layers = (params["layers"], jnp.arange(config.layers // (last + 1)))

        def at(t: jax.Array) -> Any:
            return jax.tree.map(lambda x: x[jnp.clip(t, 0, count - 1)], split)

        def tick(state: Any, t: jax.Array) -> Any:
            before, total = state
            first = embed(params, at(t), None)
            x = first._replace(x=jnp.where(device == 0, first.x, before))
            y = stage(layers, x, None)
            nats = head(params, y, at(t - last))[0].total
            total = total + jnp.where((device == last) & (t >= last), nats, 0.0)
            return (lax.ppermute(y.x, axis, [(i, i + 1) for i in range(last)]), total), None

        shape = jax.eval_shape(lambda: embed(params, at(jnp.int32(0)), None)).x
        zero = lax.pcast((jnp.zeros(shape.shape, shape.dtype), jnp.float32(0)), mesh.axis_names, to="varying")
        (_, total), _ = lax.scan(tick, zero, jnp.arange(count + last))
        return lax.psum(total, mesh.axis_names)

    split = P(others) if others else P()
    nats = jax.shard_map(local, mesh=mesh, in_specs=(specs, split), out_specs=P())

    def step(carry: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda params: nats(params, batch) / batch["tokens"].size)(carry[0])
        return updated(optimizer, carry, gradients, loss)

    return Case(name, _jitted(step, carry, mesh), carry, (batch,))


def _jitted(step: Any, carry: Any, mesh: Mesh) -> Any:
    """The step with its carry donated, and laid out after it as before."""
    held = jax.tree.map(lambda x: x.sharding, carry)
    return jax.jit(step, out_shardings=(held, NamedSharding(mesh, P())), donate_argnums=0)
