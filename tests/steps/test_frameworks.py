"""Models of flax, equinox and haiku: each example runs, and trains as its library's own loop does on one device."""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardkit as sk
from support.examples import difference, example_of

pytestmark = pytest.mark.usefixtures("any_promotion")
BATCHES = jax.random.normal(jax.random.key(1), (3, 16, 8))  # as in each example
ADAM = optax.adam(1e-2)


def nnx_loop(example):
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, layers, head):
            self.layers, self.head = layers, head

        def __call__(self, x):
            through = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.head(through(x, self.layers))[:, 0]

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(batch) - batch.sum(1)) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    model = nnx.clone(Model(**example["model"]))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    losses = [step(model, optimizer, batch) for batch in BATCHES]
    return losses[-1], {"layers": model.layers, "head": model.head}


def equinox_loop(example):
    import equinox as eqx

    def loss_fn(model, batch):
        arrays, static = eqx.partition(model["layers"], eqx.is_array)
        x, _ = jax.lax.scan(lambda x, layer: (eqx.combine(layer, static)(x), None), batch, arrays)
        return jnp.mean((jax.vmap(model["head"])(x)[:, 0] - batch.sum(1)) ** 2)

    @eqx.filter_jit
    def step(model, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        updates, opt_state = ADAM.update(grads, opt_state, model)
        return loss, eqx.apply_updates(model, updates), opt_state

    model = example["model"]
    opt_state = ADAM.init(eqx.filter(model, eqx.is_inexact_array))
    for batch in BATCHES:
        loss, model, opt_state = step(model, opt_state, batch)
    return loss, eqx.filter(model, eqx.is_inexact_array)


def linen_loop(example):
    import flax.linen as nn
    from flax.training.train_state import TrainState

    def apply(params, batch):
        x, _ = example["Stack"]().apply({"params": params["layers"]}, batch)
        return nn.Dense(1).apply({"params": params["head"]}, x)[:, 0]

    @jax.jit
    def step(state, batch):
        loss_fn = lambda params: jnp.mean((state.apply_fn(params, batch) - batch.sum(1)) ** 2)  # noqa: E731
        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return loss, state.apply_gradients(grads=grads)

    state = TrainState.create(apply_fn=apply, params=nn.unbox(example["boxed"]), tx=ADAM)
    for batch in BATCHES:
        loss, state = step(state, batch)
    return loss, state.params


def haiku_loop(example):
    def loss_fn(params, batch):
        x, _ = jax.lax.scan(lambda x, layer: (example["first"].apply(layer, x), None), batch, params["layers"])
        return jnp.mean((example["last"].apply(params["head"], x) - batch.sum(1)) ** 2)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = ADAM.update(grads, opt_state)
        return loss, optax.apply_updates(params, updates), opt_state

    params = example["params"]
    opt_state = ADAM.init(params)
    for batch in BATCHES:
        loss, params, opt_state = step(params, opt_state, batch)
    return loss, params


LOOPS = {"nnx": nnx_loop, "equinox": equinox_loop, "linen": linen_loop, "haiku": haiku_loop}
SPLIT = {"nnx": 3, "equinox": 3, "linen": 2, "haiku": 3}  # leaves over the axis "model"
DEEP = ("equinox", "linen", "haiku")


# Catches a module, a stack or a static leaf that the builders do not take, and metadata or rules that split the wrong
# dim. Each library is used as its users use it, so that nothing of it needs to be known here.
# proves S26: of nnx, and in the deep tier of linen, the metadata of the parameters are the only rules of `tp`
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.deep) if n in DEEP else n for n in LOOPS])
def test_an_example_trains_as_the_librarys_own_loop(name):
    example = example_of(f"{name}_model")
    loss, params = LOOPS[name](example)
    for axis, (own, state) in example["runs"].items():
        off = difference(sk.unpadded(state), params)
        print(f"{name} {axis}: loss {abs(own - loss):.1e}, parameters {off:.1e} from one device")
        assert abs(own - loss) < 1e-5 and off < 1e-5, axis
        assert len([x for x in jax.tree.leaves(state) if "model" in str(x.sharding.spec)]) == SPLIT[name], axis
