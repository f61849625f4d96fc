"""A flax linen model, split as its own metadata say: over data, fsdp and model, and as a pipeline."""

import flax.linen as nn
import jax
import optax

import shardkit as sk

sk.simulate_devices(8)
split = nn.with_partitioning
normal = nn.initializers.lecun_normal()


class Block(nn.Module):
    hidden: int = 32  # on this device
    axis: str | None = None

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.Dense(self.hidden, use_bias=False, kernel_init=split(normal, (None, "model")))(nn.LayerNorm()(x))
        y = nn.Dense(8, use_bias=False, kernel_init=split(normal, ("model", None)))(nn.gelu(h))
        if self.axis is not None:  # each device multiplied its part of the hidden width
            y = sk.all_reduce(y, self.axis)
        return x + y, None


Stack = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=4, metadata_params={nn.PARTITION_NAME: None})
layers_key, head_key = jax.random.split(jax.random.key(0))
x = jax.numpy.ones((1, 8))
boxed = {"layers": Stack().init(layers_key, x)["params"], "head": nn.Dense(1).init(head_key, x)["params"]}


def embed(params, x, keys):
    return x


def apply_layer(layer, x):
    y, _ = Block(16, "model").apply({"params": layer}, x)
    return y


def stage(layers, x, keys):
    return sk.scan_layers(apply_layer, layers, x)


def head(params, x, batch):
    prediction = nn.Dense(1).apply({"params": params["head"]}, x)[:, 0]
    return sk.Mean.of((prediction - batch.sum(1)) ** 2)


def loss_fn(params, batch, keys):
    x = embed(params, batch, keys)
    x = stage(params["layers"], x, keys)
    return head(params, x, batch)


pipe = sk.pipeline(sk.schedules.lockstep(2, 4), "stage")
grad_fns = {"fsdp": sk.value_and_grad(loss_fn), "stage": pipe.value_and_grad(embed, stage, head)}
runs = {}
for axis, plan in {"fsdp": sk.fsdp("fsdp", min_size=1), "stage": pipe.plan}.items():
    mesh = sk.make_mesh(**{"data": 2, axis: 2, "model": 2})
    plan = sk.chain(sk.dp("data"), plan, sk.tp("model", nn.get_partition_spec(boxed)))
    train = sk.make_train_step(grad_fns[axis], optax.adam(1e-2), mesh=mesh, plan=plan)
    state = train.init(nn.unbox(boxed), jax.random.key(0))
    for batch in jax.random.normal(jax.random.key(1), (3, 16, 8)):
        state, metrics = train.step(state, batch)
    runs[axis] = (metrics["loss"], state.params)
