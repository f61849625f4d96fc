"""Batch statistics under data parallelism: those of one device over the global batch, in flax and equinox."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from support.examples import difference, example_of

pytestmark = pytest.mark.usefixtures("any_promotion")
ADAM = optax.adam(1e-2)
RNG = np.random.default_rng(0)
DRIFT = np.linspace(0, 3, 16, dtype="f")[:, None, None, None]  # examples differ, and so do devices
IMAGES = [DRIFT + RNG.normal(size=(16, 5, 5, 3)).astype("f") for _ in range(3)]
LABELS = RNG.integers(0, 4, 16)


def nnx_loop(example, batches):
    """The loop of nnx on one device: loss, statistics and parameters after each step."""
    from flax import nnx

    @nnx.jit
    def step(model, optimizer, batch, keys):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"], keys), batch["y"]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    model = example["ConvNet"](nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    for batch, keys in batches:
        loss = step(model, optimizer, batch, keys)
        yield loss, jax.device_get(nnx.split(model, nnx.BatchStat, nnx.Param)[1:])  # the next step changes them


def equinox_loop(example, batches):
    """The loop of equinox on one device: loss, statistics and parameters after each step."""
    import equinox as eqx

    @eqx.filter_value_and_grad(has_aux=True)
    def loss_fn(model, stats, batch):
        logits, stats = model(batch["x"], stats)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), stats

    @eqx.filter_jit
    def step(model, stats, opt_state, batch):
        (loss, stats), grads = loss_fn(model, stats, batch)
        updates, opt_state = ADAM.update(grads, opt_state, model)
        return loss, eqx.apply_updates(model, updates), stats, opt_state

    model, stats = eqx.nn.make_with_state(example["ConvNet"])(jax.random.key(0))
    opt_state = ADAM.init(eqx.filter(model, eqx.is_inexact_array))
    for batch, _ in batches:
        loss, model, stats, opt_state = step(model, stats, opt_state, batch)
        yield loss, (stats, eqx.filter(model, eqx.is_inexact_array))


LOOPS = {"nnx": nnx_loop, "equinox": equinox_loop}
PLANS = [sk.dp("data"), sk.zero1("data", min_size=1), sk.fsdp("data", min_size=1)]


def batches_of(name):
    """The batches, each with the keys of its examples; equinox has channels first."""
    images = [np.moveaxis(x, 3, 1) for x in IMAGES] if name == "equinox" else IMAGES
    keys = [sk.example_keys(sk.step_key(jax.random.key(0), number), 16) for number in range(3)]
    return [({"x": x, "y": LABELS}, each) for x, each in zip(images, keys, strict=True)]


@cache
def one_device(name):
    """Loss, statistics and parameters after each step."""
    return list(LOOPS[name](example_of(f"{name}_batch_norm"), batches_of(name)))


# Catches statistics of one device's examples or of another step, an average of them that is reduced or differentiated,
# and a key of Dropout that depends on the mesh.
@pytest.mark.quick("nnx-plan2")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", LOOPS)
def test_batch_statistics_are_those_of_the_global_batch(name, plan):
    example = example_of(f"{name}_batch_norm")
    step, state = example["make"](sk.make_mesh(jax.devices()[:4], data=4), plan)
    for (batch, _), (loss, wanted) in zip(batches_of(name), one_device(name), strict=True):
        state, metrics = step(state, batch)
        off = abs(metrics["loss"] - loss), difference((state.carried, state.params), wanted)
        assert max(off) < 1e-5, off
    print(f"{name} {plan}: loss {off[0]:.1e}, statistics and parameters {off[1]:.1e} from one device")


# Catches a stream that draws the same on every device, in every step or in every layer, and one that differs along an
# axis over which devices must agree (which check_vma refuses).
@pytest.mark.deep
@pytest.mark.parametrize("stream", ["default", "dropout"])
def test_a_stream_that_a_module_holds_follows_the_keys(stream):
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed; pip install 'shardkit[test]' installs it")
    graph, streams = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(**{stream: 0})))
    streams = nnx.to_pure_dict(streams)

    def draw(keys):
        drop = nnx.merge(graph, streams)
        nnx.reseed(drop, **{stream: keys[0]})
        return jnp.stack([drop(jnp.ones(64)), drop(jnp.ones(64))])

    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2)
    on_mesh = jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    draws = [on_mesh(sk.example_keys(sk.step_key(jax.random.key(0), step), 8)) for step in (0, 0, 1)]
    np.testing.assert_array_equal(*draws[:2])
    assert len({row.tobytes() for row in np.concatenate(draws[1:])}) == 2 * 2 * 2
