"""A flax nnx model, split as its own metadata say: over data, fsdp and model, and as a pipeline."""

import jax
import optax
from flax import nnx

import shardkit as sk

sk.simulate_devices(8)
nnx.use_eager_sharding(False)  # the plan places the parameters
split = nnx.with_partitioning
normal = nnx.initializers.lecun_normal()


class Block(nnx.Module):
    def __init__(self, rngs):
        bias = split(nnx.initializers.zeros, ("model",))
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 32, kernel_init=split(normal, (None, "model")), bias_init=bias, rngs=rngs)
        self.down = nnx.Linear(32, 8, use_bias=False, kernel_init=split(normal, ("model", None)), rngs=rngs)

    def __call__(self, x, axis=None):  # row_linear is self.down, summed over the axis
        return x + sk.layers.row_linear(nnx.gelu(self.up(self.norm(x))), self.down.kernel[...], axis)


layers = nnx.vmap(Block, transform_metadata={nnx.PARTITION_NAME: None})(nnx.Rngs(0).split(4))
model = {"layers": layers, "head": nnx.Linear(8, 1, rngs=nnx.Rngs(1))}  # modules are pytrees


def embed(model, x, keys):
    return x


def apply_layer(layer, x):
    return layer(x, "model")


def stage(layers, x, keys):
    return sk.scan_layers(apply_layer, layers, x)


def head(model, x, batch):
    prediction = model["head"](x)[:, 0]
    return sk.Mean.of((prediction - batch.sum(1)) ** 2)


def loss_fn(model, batch, keys):
    x = embed(model, batch, keys)
    x = stage(model["layers"], x, keys)
    return head(model, x, batch)


pipe = sk.pipeline(sk.schedules.lockstep(2, 4), "stage")
grad_fns = {"fsdp": sk.value_and_grad(loss_fn), "stage": pipe.value_and_grad(embed, stage, head)}
runs = {}
for axis, plan in {"fsdp": sk.fsdp("fsdp", min_size=1), "stage": pipe.plan}.items():
    mesh = sk.make_mesh(**{"data": 2, axis: 2, "model": 2})
    plan = sk.chain(sk.dp("data"), plan, sk.tp("model", nnx.get_partition_spec(model)))
    train = sk.make_train_step(grad_fns[axis], optax.adam(1e-2), mesh=mesh, plan=plan)
    state = train.init(model, jax.random.key(0))
    for batch in jax.random.normal(jax.random.key(1), (3, 16, 8)):
        state, metrics = train.step(state, batch)
    runs[axis] = (metrics["loss"], state.params)
