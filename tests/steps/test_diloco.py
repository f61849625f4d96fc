"""DiLoCo: each worker trains as one alone, and an exchange is the outer optimizer's step from what they moved."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.collectives.algorithms import Algorithm
from support.training import lenient

KEY, WORKERS, LAYERS, D = jax.random.key(2), 2, 4, 8
RNG = np.random.default_rng(0)
PARAMS = {
    "layers": {"w": RNG.normal(size=(LAYERS, D, D)).astype("f") / 4},
    "out": RNG.normal(size=(D, 3)).astype("f"),
}
LAYERWISE: Any = {"min_size": 1, "layerwise": ("layers",)}
PLANS = {
    "dp": sk.dp("data"),
    "zero1": sk.zero1("data", min_size=1),
    "layer-wise": sk.fsdp("data", **LAYERWISE),
    "padded": sk.fsdp("data", min_size=1, rules=lambda path, shape: len(shape) - 1, uneven="pad"),
}
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def loss_fn(params: Any, batch: Any, keys: Any) -> Any:
    def layer(w: Any, x: jax.Array) -> jax.Array:
        return x + sk.dropout(jnp.tanh(x @ w["w"]), keys, 0.25)

    x = sk.scan_layers(layer, params["layers"], batch["x"])
    return sk.Mean.of(jnp.sum((x @ params["out"] - batch["y"]) ** 2, -1), batch["weight"])


def make_batch(seed: int, equal: bool = False) -> Any:
    rng = np.random.default_rng(seed)
    weight = np.ones(16) if equal else rng.integers(1, 4, 16)
    return {"x": rng.normal(size=(16, D)).astype("f"), "y": np.ones((16, 3), "f"), "weight": weight.astype("f")}


def inner(plan: sk.Plan, optimizer: Any, **sizes: int) -> sk.TrainStep:
    devices = jax.devices()[: int(np.prod([*sizes.values()]))]
    return sk.make_train_step(
        sk.value_and_grad(loss_fn), lenient(optimizer), mesh=sk.make_mesh(devices, **sizes), plan=plan
    )


def close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5), sk.unpadded(found), wanted)


# Catches a worker that sees another's examples, weights or state, and an outer step from another mean, or twice.
@pytest.mark.parametrize("plan", PLANS)
def test_workers_train_alone_and_meet_in_the_outer_optimizer(plan):
    run = sk.diloco(inner(PLANS[plan], optax.adam(1e-2), pod=WORKERS, data=4), OUTER, axis="pod")
    state, one = run.init(PARAMS, KEY), inner(sk.dp("data"), optax.adam(1e-2), data=1)
    alone = [one.init(PARAMS, jax.random.fold_in(KEY, k)) for k in range(WORKERS)]
    meet, outer = PARAMS, OUTER.init(PARAMS)
    for index in range(4):
        batch = make_batch(index)
        state, metrics = run.step(state, batch)
        for k in range(WORKERS):
            mine = jax.tree.map(lambda x, k=k: x[8 * k : 8 * k + 8], batch)
            alone[k], own = one.step(alone[k], mine)
            np.testing.assert_allclose(metrics["loss"][k], own["loss"], rtol=1e-5)
        if index % 2:
            state = run.exchange(state)
            moved = jax.tree.map(
                lambda old, *new: sum(old - x for x in new) / WORKERS, meet, *[s.params for s in alone]
            )
            updates, outer = OUTER.update(moved, outer, meet)
            meet = optax.apply_updates(meet, updates)
            close(state.params, meet)
            alone = [each._replace(params=jax.tree.map(jnp.copy, meet)) for each in alone]
    rows = sk.unpadded(jax.tree.map(lambda x: x[1], state.workers.params))
    close(rows, meet)


def test_one_step_a_round_is_data_parallelism():
    """With SGD on both sides, and examples that weigh the same; a worker's dropout is its own."""
    run = sk.diloco(inner(PLANS["layer-wise"], optax.sgd(0.1), pod=2, data=4), optax.sgd(1.0), axis="pod")
    state, params = run.init(PARAMS, KEY), PARAMS
    for index in range(3):
        batch = make_batch(index, equal=True)
        state = run.exchange(run.step(state, batch)[0])
        keys = [sk.example_keys(sk.step_key(jax.random.fold_in(KEY, k), index), 8) for k in range(WORKERS)]
        grads = jax.grad(lambda p, batch=batch, keys=keys: jnp.divide(*loss_fn(p, batch, jnp.concatenate(keys))))(
            params
        )
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        close(state.params, params)


def by_parity(path: str, shape: tuple[int, ...]) -> Any:
    return [row % 2 for row in range(LAYERS)] if path.startswith("layers") else 1


# Catches bytes on the slow axis in a step, a fragment that sends more than its rows, or changes others, and a state
# whose layout changes, which would compile the next step again.
def test_fragments_send_their_rows_alone():
    run = sk.diloco(inner(PLANS["layer-wise"], optax.adam(1e-2), pod=2, data=4), OUTER, axis="pod", fragments=by_parity)
    state = run.init(PARAMS, KEY)
    state, _ = run.step(state, make_batch(0))
    assert sk.census(run.step, state, make_batch(0)).sent(axis="pod") == 0
    each = 4 * np.array([2 * D * D, 2 * D * D + 3 * D]) / 4  # float32 parts of four devices, 2 (n-1)/n of them
    assert [sk.census(lambda s, k=k: run.start(s, k), state).sent(axis="pod") for k in range(2)] == each.tolist()
    before, rows = jax.device_get((state.params, state.workers.params))
    moved = run.start(state, 0)
    state, _ = run.step(state, make_batch(1))
    later = jax.device_get(state.workers.params)
    state = run.finish(state, moved, 0, keep=0.25)
    change = np.mean(before["layers"]["w"] - rows["layers"]["w"], 0)[::2]
    new = before["layers"]["w"][::2] - 0.7 * (1 + 0.9) * change
    np.testing.assert_allclose(state.params["layers"]["w"][::2], new, rtol=1e-5, atol=1e-6)
    mixed = 0.25 * later["layers"]["w"][:, ::2] + 0.75 * new[None]
    np.testing.assert_allclose(state.workers.params["layers"]["w"][:, ::2], mixed, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.params["layers"]["w"][1::2], before["layers"]["w"][1::2])
    np.testing.assert_array_equal(state.workers.params["out"], later["out"])
    state, _ = run.step(state, make_batch(2))
    assert run._step._cache_size() == 1


def test_an_exchange_of_four_bits():
    compressed = sk.algorithms.compressed(jnp.int4)
    runs = [
        sk.diloco(inner(sk.dp("data"), optax.sgd(0.1), pod=2, data=4), optax.sgd(1.0), axis="pod", **how)
        for how in ({}, {"reduce": compressed})
    ]
    plain, small = (run.exchange(run.step(run.init(PARAMS, KEY), make_batch(0))[0]) for run in runs)
    state = runs[1].init(PARAMS, KEY)
    assert sk.census(runs[1].start, state).sent(axis="pod") < sk.census(runs[0].start, state).sent(axis="pod") * 0.6
    step = np.abs(np.asarray(plain.params["out"]) - PARAMS["out"]).max()
    assert 0 < np.abs(np.asarray(plain.params["out"]) - small.params["out"]).max() < step / 4


def test_what_is_refused():
    good = inner(sk.dp("data"), optax.sgd(0.1), pod=2, data=4)
    wrong = {
        "diloco: axis must be one of the mesh that the plan of a worker does not use; got 'data' for the mesh pod=2, "
        "data=4 and the plan dp('data'). Add an axis to make_mesh, and leave it out of the plan.": {"axis": "data"},
        "diloco: reduce= must be an Algorithm with all_reduce; got none of them, which has none. Pass for example "
        "sk.algorithms.ring().": {"axis": "pod", "reduce": Algorithm("none of them")},
    }
    for sentence, options in wrong.items():
        with pytest.raises(ValueError) as e:
            sk.diloco(good, OUTER, **options)
        assert str(e.value) == sentence
    run = sk.diloco(good, OUTER, axis="pod")
    state = run.init(PARAMS, KEY)
    with pytest.raises(ValueError, match=r"^diloco: the examples of a batch must be divisible by its workers; got 15 "):
        run.step(state, jax.tree.map(lambda x: x[:15], make_batch(0)))
    with pytest.raises(ValueError, match=r"^diloco: the fragment must be one of 1, from 0 on; got 1"):
        run.start(state, 1)
    gap, short = lambda path, shape: 2, lambda path, shape: [0]
    for fragments, begin in ((gap, "must be numbered from 0, none left out; got"), (short, "of rows must be a number")):
        with pytest.raises(ValueError, match=f"^diloco: fragments {begin}"):
            sk.diloco(good, OUTER, axis="pod", fragments=fragments).init(PARAMS, KEY)
