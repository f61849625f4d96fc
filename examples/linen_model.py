"""A flax linen model, split as its own metadata say: over data, fsdp and model, and as a pipeline."""

import flax.linen as nn
import jax
import optax

import shardkit as sk

sk.simulate_devices(8)
split, normal = nn.with_partitioning, nn.initializers.lecun_normal()


class Block(nn.Module):
    hidden: int = 32  # on this device
    axis: str | None = None

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.Dense(self.hidden, use_bias=False, kernel_init=split(normal, (None, "model")))(nn.LayerNorm()(x))
        y = nn.Dense(8, use_bias=False, kernel_init=split(normal, ("model", None)))(nn.gelu(h))
        return x + (sk.all_reduce(y, self.axis) if self.axis else y), None


Stack = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=4, metadata_params={nn.PARTITION_NAME: None})
key, x = jax.random.key(0), jax.numpy.ones((1, 8))
boxed = {"layers": Stack().init(key, x)["params"], "head": nn.Dense(1).init(key, x)["params"]}
stage = lambda layers, x, keys: sk.scan_layers(lambda p, x: Block(16, "model").apply({"params": p}, x)[0], layers, x)
head = lambda params, x, batch: sk.Mean.of((nn.Dense(1).apply({"params": params["head"]}, x)[:, 0] - batch.sum(1)) ** 2)
loss_fn = lambda params, batch, keys: head(params, stage(params["layers"], batch, keys), batch)
pipe = sk.pipeline(sk.schedules.lockstep(2, 4), "stage")
grad_fns = {"fsdp": sk.value_and_grad(loss_fn), "stage": pipe.value_and_grad(lambda params, x, keys: x, stage, head)}
runs = {}
for axis, plan in {"fsdp": sk.fsdp("fsdp", min_size=1), "stage": pipe.plan}.items():
    mesh = sk.make_mesh(**{"data": 2, axis: 2, "model": 2})
    plan = sk.chain(sk.dp("data"), plan, sk.tp("model", nn.get_partition_spec(boxed)))
    train = sk.make_train_step(grad_fns[axis], optax.adam(1e-2), mesh=mesh, plan=plan)
    state = train.init(nn.unbox(boxed), jax.random.key(0))
    for batch in jax.random.normal(jax.random.key(1), (3, 16, 8)):
        state, metrics = train.step(state, batch)
    runs[axis] = (metrics["loss"], state.params)
