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
        up, down = self.mlp.layers
        hidden = self.mlp.activation(jax.vmap(up)(jax.vmap(self.norm)(x)))
        return x + sk.layers.row_linear(hidden, down.weight.T, axis) + down.bias[None]


def make_block(key):
    return Block(eqx.nn.LayerNorm(8), eqx.nn.MLP(8, 8, 32, 1, jax.nn.gelu, key=key))


layers = eqx.filter_vmap(make_block)(jax.random.split(jax.random.key(0), 4))
model = {"layers": layers, "head": eqx.nn.Linear(8, 1, key=jax.random.key(1))}
params, static = eqx.partition(model, eqx.is_inexact_array)  # static: what is not trained, such as jax.nn.gelu
dims = {"layers.mlp.layers.0.weight": 1, "layers.mlp.layers.0.bias": 1, "layers.mlp.layers.1.weight": 2}


def embed(params, x, keys):
    return x


def apply_layer(layer, x):
    block = eqx.combine(layer, static["layers"])
    return block(x, "model")


def stage(layers, x, keys):
    return sk.scan_layers(apply_layer, layers, x)


def head(params, x, batch):
    prediction = jax.vmap(params["head"])(x)[:, 0]
    return sk.Mean.of((prediction - batch.sum(1)) ** 2)


def loss_fn(params, batch, keys):
    x = embed(params, batch, keys)
    x = stage(params["layers"], x, keys)
    return head(params, x, batch)


pipe = sk.pipeline(sk.schedules.lockstep(2, 4), "stage")
grad_fns = {"fsdp": sk.value_and_grad(loss_fn), "stage": pipe.value_and_grad(embed, stage, head)}
runs = {}
for axis, plan in {"fsdp": sk.fsdp("fsdp", layerwise=("layers",), min_size=1), "stage": pipe.plan}.items():
    mesh = sk.make_mesh(**{"data": 2, axis: 2, "model": 2})
    plan = sk.chain(sk.dp("data"), plan, sk.tp("model", lambda path, shape: dims.get(path)))
    train = sk.make_train_step(grad_fns[axis], optax.adam(1e-2), mesh=mesh, plan=plan)
    state = train.init(params, jax.random.key(0))
    for batch in jax.random.normal(jax.random.key(1), (3, 16, 8)):
        state, metrics = train.step(state, batch)
    runs[axis] = (metrics["loss"], state.params)
