"""A haiku model, split over data, fsdp and model by rules, and as a pipeline."""

import haiku as hk
import jax
import optax

import shardkit as sk

sk.simulate_devices(8)


def block(x, hidden=32, axis=None):  # hidden: on this device
    h = jax.nn.gelu(hk.Linear(hidden, name="up")(hk.LayerNorm(-1, True, True)(x)))
    y = hk.Linear(8, with_bias=False, name="down")(h)
    return x + (sk.all_reduce(y, axis) if axis else y)


first, last = (hk.without_apply_rng(hk.transform(f)) for f in (block, lambda x: hk.Linear(1)(x)[:, 0]))
layer = hk.without_apply_rng(hk.transform(lambda x: block(x, hidden=16, axis="model"))).apply
x, keys = jax.numpy.ones((1, 8)), jax.random.split(jax.random.key(0), 4)
model = {"layers": jax.vmap(first.init, (0, None))(keys, x), "head": last.init(keys[0], x)}
dims = {"layers.up.w": 2, "layers.up.b": 1, "layers.down.w": 1}
embed = lambda model, batch, keys: batch
stage = lambda layers, x, keys: sk.scan_layers(layer, layers, x)
head = lambda model, x, batch: sk.Mean.of((last.apply(model["head"], x) - batch.sum(1)) ** 2)
own = sk.value_and_grad(lambda p, batch, keys: head(p, stage(p["layers"], embed(p, batch, keys), keys), batch))
pipe, tp = sk.pipeline(sk.schedules.lockstep(2, 4), "stage"), sk.tp("model", lambda path, shape: dims.get(path))
ways = {
    "fsdp": (own, sk.fsdp("fsdp", layerwise=("layers",), min_size=1)),
    "stage": (pipe.value_and_grad(embed, stage, head), pipe.plan),
}
runs = {}
for axis, (grad_fn, plan) in ways.items():
    mesh, plan = sk.make_mesh(**{"data": 2, axis: 2, "model": 2}), sk.chain(sk.dp("data"), plan, tp)
    train = sk.make_train_step(grad_fn, optax.adam(1e-2), mesh=mesh, plan=plan)
    state = train.init(model, jax.random.key(0))
    for batch in jax.random.normal(jax.random.key(1), (3, 16, 8)):
        state, metrics = train.step(state, batch)
    runs[axis] = metrics["loss"], state.params
