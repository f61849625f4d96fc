"""A flax nnx ConvNet with BatchNorm over the whole batch, whose statistics are carried, and Dropout by example.

A module that holds its streams gets new keys in the loss, for each step and each part of the batch:
`nnx.reseed(model, default=keys[0])`, by the name of the stream, after `nnx.merge(graph, params, streams)`, where
`streams` comes from `nnx.to_pure_dict`. A stream of another name keeps its keys, without an error."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardkit as sk


class ConvNet(nnx.Module):
    def __init__(self, rngs, axes=None):
        self.conv = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name=axes, rngs=rngs)
        self.drop = nnx.Dropout(0.25)

    def __call__(self, x, keys):
        x = nnx.relu(self.norm(self.conv(x))).mean((1, 2))
        x = jax.vmap(lambda x, key: self.drop(x, rngs=nnx.Rngs(dropout=key)))(x, keys)
        return self.head(x)


def make(mesh, plan):
    graph, params, stats = nnx.split(ConvNet(nnx.Rngs(0), plan.batch_axes), nnx.Param, nnx.BatchStat)

    def loss_fn(params, batch, keys, stats):
        model = nnx.merge(graph, params, stats)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"], keys), batch["y"])
        return sk.Mean.of(losses), {"stats": sk.Mean(nnx.state(model, nnx.BatchStat), jnp.float32(1))}

    def carry(stats, metrics, params):
        return metrics["stats"]

    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.adam(1e-2), mesh=mesh, plan=plan, carry=carry)
    return step, init(params, jax.random.key(0), carried=stats)
