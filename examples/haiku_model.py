"""A haiku model, split over data, fsdp and model by rules, and as a pipeline."""

import haiku as hk
import jax
import optax

import shardkit as sk

sk.simulate_devices(8)


def block(x, hidden=32, axis=None):  # hidden: on this device
    h = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
    y = hk.Linear(8, with_bias=False, name="down")(jax.nn.gelu(hk.Linear(hidden, name="up")(h)))
    if axis is not None:  # each device multiplied its part of the hidden width
        y = sk.all_reduce(y, axis)
    return x + y


first = hk.without_apply_rng(hk.transform(block))
last = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(1)(x)[:, 0]))
layer = hk.without_apply_rng(hk.transform(lambda x: block(x, hidden=16, axis="model"))).apply
x = jax.numpy.ones((1, 8))
layers_key, head_key = jax.random.split(jax.random.key(0))
layers = jax.vmap(first.init, (0, None))(jax.random.split(layers_key, 4), x)
params = {"layers": layers, "head": last.init(head_key, x)}
dims = {"layers.up.w": 2, "layers.up.b": 1, "layers.down.w": 1}


def embed(params, x, keys):
    return x


def stage(layers, x, keys):
    return sk.scan_layers(layer, layers, x)


def head(params, x, batch):
    prediction = last.apply(params["head"], x)
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
