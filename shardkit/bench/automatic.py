"""The step that jit's partitioner completes: one device's text, with layouts, and with constraints placed by hand.

Every step here holds its parameters and its optimizer's state in given layouts, those of a plan, and donates them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
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
