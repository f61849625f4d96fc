"""An equinox model, split over data, fsdp and model by rules, and as a pipeline."""

import equinox as eqx
import jax
import optax

import shardkit as sk

sk.simulate_devices(8)


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __call__(self, x, axis=None):  # self.mlp, with its second product summed over the axis
        h = self.mlp.activation(jax.vmap(self.mlp.layers[0])(jax.vmap(self.norm)(x)))
        return x + sk.layers.row_linear(h, self.mlp.layers[1].weight.T, axis) + self.mlp.layers[1].bias[None]


make = eqx.filter_vmap(lambda key: Block(eqx.nn.LayerNorm(8), eqx.nn.MLP(8, 8, 32, 1, jax.nn.gelu, key=key)))
model = {"layers": make(jax.random.split(jax.random.key(0), 4)), "head": eqx.nn.Linear(8, 1, key=jax.random.key(1))}
params, static = eqx.partition(model, eqx.is_inexact_array)  # static: what is not trained, such as jax.nn.gelu
dims = {"layers.mlp.layers.0.weight": 1, "layers.mlp.layers.0.bias": 1, "layers.mlp.layers.1.weight": 2}
embed = lambda model, batch, keys: batch
stage = lambda layers, x, keys: sk.scan_layers(lambda p, x: eqx.combine(p, static["layers"])(x, "model"), layers, x)
head = lambda model, x, batch: sk.Mean.of((jax.vmap(model["head"])(x)[:, 0] - batch.sum(1)) ** 2)
own = sk.value_and_grad(lambda p, batch, keys: head(p, stage(p["layers"], embed(p, batch, keys), keys), batch))
pipe, tp = sk.pipeline(sk.schedules.lockstep(2, 4), "stage"), sk.tp("model", lambda path, shape: dims.get(path))
fsdp = sk.fsdp("fsdp", layerwise=("layers",), min_size=1)
ways = {"fsdp": (own, fsdp), "stage": (pipe.value_and_grad(embed, stage, head), pipe.plan)}
runs = {}
for axis, (grad_fn, plan) in ways.items():
    mesh, plan = sk.make_mesh(**{"data": 2, axis: 2, "model": 2}), sk.chain(sk.dp("data"), plan, tp)
    train = sk.make_train_step(grad_fn, optax.adam(1e-2), mesh=mesh, plan=plan)
    state = train.init(params, jax.random.key(0))
    for batch in jax.random.normal(jax.random.key(1), (3, 16, 8)):
        state, metrics = train.step(state, batch)
    runs[axis] = metrics["loss"], state.params
