"""An equinox ConvNet with BatchNorm over the whole batch, whose statistics are carried.

The norm gets all examples of a device, as one more dim, and not one example under vmap: jax takes no mean over an axis
of vmap and one of the mesh together."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import shardkit as sk


class ConvNet(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key, axes=()):
        conv_key, head_key = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(3, 8, 3, use_bias=False, key=conv_key)
        self.norm = eqx.nn.BatchNorm(8, axis_name=axes, mode="batch")
        self.head = eqx.nn.Linear(8, 4, key=head_key)

    def __call__(self, x, stats):
        x, stats = self.norm(jax.vmap(self.conv, out_axes=1)(x), stats)  # [channels, examples, ..]
        return jax.vmap(self.head, in_axes=1)(jax.nn.relu(x).mean((2, 3))), stats


def make(mesh, plan):
    model, stats = eqx.nn.make_with_state(ConvNet)(jax.random.key(0), plan.batch_axes)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, batch, keys, stats):
        logits, stats = eqx.combine(params, static)(batch["x"], stats)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return sk.Mean.of(losses), {"stats": sk.Mean(stats, jnp.float32(1))}

    def carry(stats, metrics, params):
        return jax.tree.map(lambda x, y: y.astype(x.dtype), stats, metrics["stats"])

    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.adam(1e-2), mesh=mesh, plan=plan, carry=carry)
    return step, init(params, jax.random.key(0), carried=stats)
