"""Several steps in one call."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import shardkit as sk
from shardkit.analysis.hlo.differences import compiled, is_written
from support.training import lenient

STEPS = 3
DRAW = np.random.default_rng(0).normal
PARAMS = {"w": np.float32(DRAW(size=(6, 5))), "b": np.zeros(5, np.float32)}
BATCHES = {"x": np.float32(DRAW(size=(STEPS, 16, 6))), "y": np.float32(DRAW(size=(STEPS, 16, 5)))}


def loss_fn(params, batch, keys):
    kept = sk.dropout(batch["x"], keys, 0.2)
    error = (kept @ params["w"] + params["b"][None] - batch["y"]) ** 2
    return sk.Mean(error.sum(), error.size), {"error": sk.Mean(jnp.abs(error).sum(), error.size)}


def built(mesh, plan, **options):
    optimizer = lenient(optax.adamw(1e-2))
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optimizer, mesh=mesh, plan=plan, **options)
    return init(PARAMS, jax.random.key(0)), step


PLANS = {
    "dp": (sk.dp("data"), {}),
    "fsdp pad": (sk.fsdp("data", min_size=1, uneven="pad"), {"accumulate": 2, "nonfinite": "skip"}),
}


@pytest.mark.quick("fsdp pad-AxisType.Auto")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.optimized
def test_they_are_the_steps_one_by_one(name, kind):
    """It alone would see a key, a step count or a batch that does not advance inside the program."""
    plan, options = PLANS[name]
    mesh = sk.make_mesh(jax.devices()[:4], data=4, axis_types=kind)
    state, step = built(mesh, plan, **options)
    each = []
    for i in range(STEPS):
        state, metrics = step(state, jax.tree.map(lambda x, i=i: x[i], BATCHES))
        each.append(metrics)
    at_once, several = built(mesh, plan, steps=STEPS, **options)
    layouts = [x.sharding for x in jax.tree.leaves(at_once)]
    at_once, metrics = several(at_once, BATCHES)
    assert [x.sharding for x in jax.tree.leaves(at_once)] == layouts and int(at_once.step) == STEPS
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *each)
    chex.assert_trees_all_close(metrics, stacked, rtol=1e-5)
    chex.assert_trees_all_close(jax.device_get(at_once.params), jax.device_get(state.params), rtol=1e-5, atol=1e-6)

    traffic = sk.census(several, at_once, BATCHES).sent()
    assert traffic == STEPS * sk.census(step, state, jax.tree.map(lambda x: x[0], BATCHES)).sent()


@pytest.mark.optimized
def test_parameters_that_a_loop_carries_are_not_gathered_again():
    """It alone would see the partitioner split what the loop carries as the optimizer's state is split."""
    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    state, several = built(mesh, sk.zero1("data", min_size=1, uneven="pad"), steps=STEPS)
    rows = compiled(several, state, BATCHES).rows
    assert rows and all(map(is_written, rows))


def test_a_batch_without_the_dim_of_steps(data8):
    state, step = built(data8, sk.dp("data"), steps=STEPS)
    message = (
        "step: every array of the batch must have dim 0 of size steps=3; leaf x has shape (16, 6). Stack the batches "
        "of 3 steps."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        step.trace(state, jax.tree.map(lambda x: x[0], BATCHES))


@pytest.mark.check
def test_stopping_needs_every_step(data8):
    message = (
        "make_train_step: nonfinite='stop' checks every step, but steps=3 returns after 3. Pass nonfinite='skip', "
        "and check the metric 'finite'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        built(data8, sk.dp("data"), steps=STEPS, nonfinite="stop")
