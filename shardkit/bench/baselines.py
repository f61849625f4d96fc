"""The steps beside which plans are measured: jit's partitioner, with constraints by hand too, and those of tutorials.

The partitioner's steps hold their parameters and their optimizer's state in given layouts, those of a plan, and donate
them. Tutorials gather whole weights, reduce in every microbatch, and write GPipe as one scan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.bench.measure import Case
from shardkit.layers.attention import dot_attention
from shardkit.models import transformer
from shardkit.models.transformer import Axes

Loss = Callable[[Any, Any, Any], Any]


def updated(optimizer: Any, carry: Any, gradients: Any, loss: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
    """The carry after a step of the optimizer, as every step that is not of `make_train_step` ends."""
    params, opt_state = carry
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def mean(loss_fn: Loss) -> Callable[[Any, Any], jax.Array]:
    """A loss for `value_and_grad` as a scalar function of parameters and batch, without keys."""

    def scalar(params: Any, batch: Any) -> jax.Array:
        out = loss_fn(params, batch, None)
        out = out[0] if isinstance(out, tuple) and not isinstance(out, sk.Mean) else out
        return out.total / out.weight if isinstance(out, sk.Mean) else out

    return scalar


def partitioned(name: str, loss_fn: Loss, optimizer: Any, carry: Any, batch: Any, update: Any) -> Case:
    """The step on global arrays, as one writes it for one device, with the layouts of its arguments and results.

    Args:
        name: of the case.
        loss_fn: for one device, or with constraints.
        optimizer: of optax.
        carry: parameters and optimizer state, in the layouts to hold.
        batch: the global batch, in its layout.
        update: the layout of gradients, as shardings.
    """

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(mean(loss_fn))(carry[0], batch)
        return updated(optimizer, carry, jax.lax.with_sharding_constraint(gradients, update), loss)

    held = jax.tree.map(lambda x: x.sharding, carry)
    given = jax.tree.map(lambda x: x.sharding, batch)
    whole = NamedSharding(jax.tree.leaves(held)[0].mesh, P())
    jitted = jax.jit(step, in_shardings=(held, given), out_shardings=(held, whole), donate_argnums=0)
    return Case(name, jitted, carry, (batch,))


def gathered_once(loss_fn: Loss, mesh: Mesh, seen: Any) -> Loss:
    """Any loss with a constraint on its parameters: laid out as the plan's loss sees them, before they are used."""
    whole = jax.tree.map(lambda spec: NamedSharding(mesh, spec), seen)
    return lambda params, batch, keys: loss_fn(jax.lax.with_sharding_constraint(params, whole), batch, keys)


def constrained(config: transformer.Config, mesh: Mesh, seen: Any, split: Any, axes: Axes, *, by_layer: bool) -> Loss:
    """The reference transformer's loss with constraints wherever a careful author would put them.

    Args:
        config: the sizes.
        mesh: the mesh.
        seen: specs of the parameters where the loss uses them.
        split: the axes that split the examples.
        axes: those that split heads and columns, and, with `sequence`, tokens.
        by_layer: gather each layer's weights in the scan, which recomputes all but matmuls.
    """

    def at(*spec: Any) -> Callable[[Any], Any]:
        sharding = NamedSharding(mesh, P(split, *spec))
        return lambda x: jax.lax.with_sharding_constraint(x, sharding)

    between, tokens, columns = at(axes.model if axes.sequence else None), at(), at(None, axes.model)
    whole = jax.tree.map(lambda spec: NamedSharding(mesh, spec), seen)
    layer_whole = jax.tree.map(lambda spec: NamedSharding(mesh, P(*spec[1:])), seen["layers"])

    def attention(weights: Any, x_BTD: jax.Array) -> jax.Array:
        q, k, v = (columns(jnp.einsum("BTD,DHK->BTHK", x_BTD, weights[name])) for name in ("query", "key", "value"))
        positions_T = jnp.arange(x_BTD.shape[1])
        y_BTHK = columns(dot_attention(transformer.rotate(q, positions_T), transformer.rotate(k, positions_T), v))
        return jnp.einsum("BTHK,HKD->BTD", y_BTHK, weights["attention_out"])

    def mlp(weights: Any, x_BTD: jax.Array) -> jax.Array:
        gate_BTF, up_BTF = (columns(jnp.einsum("BTD,DF->BTF", x_BTD, weights[name])) for name in ("gate", "up"))
        return jnp.einsum("BTF,FD->BTD", jax.nn.silu(gate_BTF) * up_BTF, weights["down"])

    def layer(x_BTD: jax.Array, weights: Any) -> jax.Array:
        weights = jax.lax.with_sharding_constraint(weights, layer_whole)
        for name, block in (("attention_norm", attention), ("mlp_norm", mlp)):
            h_BTD = tokens(transformer.rms_norm(x_BTD, weights[name]))
            x_BTD = x_BTD + between(block(weights, h_BTD))
        return x_BTD

    run = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable) if by_layer else layer

    def loss(params: Any, batch: Any, keys: None) -> sk.Mean:
        once = {name for name in params if not (by_layer and name == "layers")}
        held = params | {name: jax.lax.with_sharding_constraint(params[name], whole[name]) for name in once}
        x_BTD = between(held["embed"][batch["tokens"]])
        x_BTD, _ = jax.lax.scan(lambda x, weights: (run(x, weights), None), x_BTD, held["layers"])
        x_BTD = tokens(transformer.rms_norm(x_BTD, held["final_norm"]))
        logits_BTV = columns(jnp.einsum("BTD,DV->BTV", x_BTD, held["head"]))
        right_BT = jnp.take_along_axis(logits_BTV, batch["targets"][..., None], axis=-1)[..., 0]
        return sk.Mean.of(jax.nn.logsumexp(logits_BTV, axis=-1) - right_BT)

    return loss


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
