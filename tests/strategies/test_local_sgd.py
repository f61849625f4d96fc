"""Local SGD of `examples/local_sgd.py`: a strategy of a user's own, by public names, against replicas one by one."""

import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_sgd.py"
LOCAL = runpy.run_path(str(EXAMPLE))
KEY = jax.random.key(0)
REPLICAS, EVERY, ROWS = 4, 2, 16
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(3, 5)).astype("f"), "out": RNG.normal(size=5).astype("f")}
BATCHES = [
    {"x": RNG.normal(size=(ROWS, 3)).astype("f"), "weight": RNG.integers(1, 4, ROWS).astype("f")}
    for _ in range(2 * EVERY + 1)
]


def loss_fn(params, batch, keys):
    h = sk.dropout(jnp.tanh(batch["x"] @ params["w"]), keys, 0.25)
    return sk.Mean.of((h @ params["out"] - jnp.sum(batch["x"], 1)) ** 2, batch["weight"])


def train(optimizer, every, replicas=REPLICAS):
    mesh = sk.make_mesh(jax.devices()[:replicas], data=replicas)
    grad_fn = sk.value_and_grad(LOCAL["own_loss"](loss_fn))
    step = sk.make_train_step(grad_fn, LOCAL["averaging"](optimizer, every), mesh=mesh, plan=LOCAL["replicas"]("data"))
    return step, step.init(jax.tree.map(lambda x: np.stack([x] * replicas), PARAMS), KEY)


def one_by_one(optimizer):
    """The replicas one after the other on one device: the loss and all parameters after each step."""

    @jax.jit
    def own_step(params, opt_state, batch, keys):
        loss, grads = jax.value_and_grad(lambda p: jnp.divide(*loss_fn(p, batch, keys)))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return loss, optax.apply_updates(params, updates), opt_state, norm

    runs = [(PARAMS, optimizer.init(PARAMS))] * REPLICAS
    for index, batch in enumerate(BATCHES):
        keys = sk.example_keys(sk.step_key(KEY, index), ROWS)
        parts = [
            jax.tree.map(lambda x, i=i: x.reshape(REPLICAS, -1, *x.shape[1:])[i], (batch, keys))
            for i in range(REPLICAS)
        ]
        steps = [own_step(*run, *part) for run, part in zip(runs, parts, strict=True)]
        runs = [(params, opt_state) for _, params, opt_state, _ in steps]
        if (index + 1) % EVERY == 0:
            mean = jax.tree.map(lambda *x: sum(x) / REPLICAS, *[params for params, _ in runs])
            runs = [(mean, opt_state) for _, opt_state in runs]
        yield np.mean([step[0] for step in steps]), [params for params, _ in runs], [step[3] for step in steps]


# Catches a gradient that is reduced or divided by the weights of all, one norm for all replicas, a momentum that is
# averaged or shared, replicas that are averaged a step too early, and keys that all replicas share.
def test_it_equals_the_replicas_one_after_the_other():
    optimizer = optax.chain(optax.clip_by_global_norm(3.0), optax.sgd(0.05, momentum=0.9))
    (_, step), state = train(optimizer, EVERY)
    clipped = []
    for batch, (loss, replicas, norms) in zip(BATCHES, one_by_one(optimizer), strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        for i, params in enumerate(replicas):
            got = jax.tree.map(lambda x, i=i: x[i], jax.device_get(state.params))
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, params)
        clipped += [norm > 3.0 for norm in norms]
    assert any(clipped) and not all(clipped)


# Catches a factor between the two, such as the number of replicas.
@pytest.mark.filterwarnings("ignore::shardkit.on_device.advice.Unintended")
@pytest.mark.optimized
def test_averaged_after_every_step_it_is_data_parallelism():
    (_, step), state = train(optax.sgd(0.05), 1)
    mesh = sk.make_mesh(jax.devices()[:REPLICAS], data=REPLICAS)
    grad_fn = sk.value_and_grad(lambda *args: jnp.divide(*loss_fn(*args)))
    init, plain = sk.make_train_step(grad_fn, optax.sgd(0.05), mesh=mesh, plan=sk.dp("data"))
    other = init(PARAMS, KEY)
    for batch in BATCHES:
        state, _ = step(state, batch)
        other, _ = plain(other, batch)
    pair = jax.device_get((state.params, other.params))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, np.stack([y] * REPLICAS), atol=1e-6), *pair)


# Catches gradients that are reduced after all, and an average that is sent in every step, taken or not.
@pytest.mark.optimized
def test_nothing_but_the_loss_is_sent_between_averages():
    (_, step), state = train(optax.sgd(0.05), EVERY, replicas=2)
    assert [(row.kind, row.total) for row in sk.census(step, state, BATCHES[0]).rows] == [("all_reduce", 8)]
    text = step.lower(state, BATCHES[0]).compile().as_text()
    always = re.findall(r"= (\S+) all-reduce", text[text.index("\nENTRY") :])
    assert len(always) == 1 and "all-reduce" in text[: text.index("\nENTRY")], always


def test_the_example_runs():
    assert len(EXAMPLE.read_text().splitlines()) <= 40
    runpy.run_path(str(EXAMPLE), run_name="__main__")
