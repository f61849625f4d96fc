"""What travels from stage to stage: trees with integers and losses, widths on a common carrier, a router's losses."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk
from shardkit import schedules
from support.pipelines import PIECES, assert_close, check, layer, make, pipelined_grad
from support.training import KEY, recording_sgd

D = 8


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("lockstep", {"recompute": False}),
        pytest.param("zero_bubble_h1", {"recompute": False, "mode": "branch"}, marks=pytest.mark.deep),
        pytest.param("lockstep", {}, marks=pytest.mark.deep),
    ],
)
def test_integers_and_losses_travel_with_the_activations(name, how):  # proves F41
    embed, _, head = PIECES

    def through(layers: Any, x: Any, keys: Any) -> Any:
        def one(weights: Any, x: Any) -> Any:
            y = layer(keys, weights, jnp.where(x["segments"][..., None] > 2, x["x"], 0.5 * x["x"]))
            return x | {"x": y, "losses": x["losses"] + jnp.sum(y * y, axis=(1, 2))}

        return sk.scan_layers(one, layers, x)

    def start(shared: Any, batch: Any, keys: Any) -> Any:
        x = embed(shared, batch, keys)
        return {"x": x, "segments": batch["tokens"], "losses": jnp.zeros(x.shape[0])}

    def end(shared: Any, x: Any, batch: Any) -> Any:
        mean, aux = head(shared, x["x"], batch)
        return sk.Mean(mean.total + 0.01 * jnp.sum(x["losses"]), mean.weight), aux

    check(make(name, 2, 3), pieces=(start, through, end), **how)


# proves S76: 784-512-512-256-10, sixty-four times smaller, on a common carrier
def test_stages_of_different_widths():
    widths, rng = (12, 8, 8, 4, 3), np.random.default_rng(0)
    real = [rng.normal(size=pair).astype(np.float32) * 0.5 for pair in pairwise(widths)]
    stack = np.stack([np.pad(w, [(0, 12 - size) for size in w.shape]) for w in real])
    x, y = rng.normal(size=(8, 12)).astype(np.float32), rng.integers(0, 3, 8).astype(np.int32)

    def end(shared: Any, x: Any, batch: Any) -> Any:
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x[:, :3]), batch["y"][:, None], axis=1))

    def through(layers: Any, x: Any, keys: Any) -> Any:
        return sk.scan_layers(lambda w, x: jnp.tanh(x @ w), layers, x)

    grad_fn = pipelined_grad(lambda shared, batch, keys: batch["x"], through, end, schedules.one_f_one_b(4, 4), "stage")
    mesh = sk.make_mesh(jax.devices()[:4], stage=4)
    init, step = sk.make_train_step(grad_fn, recording_sgd(0.5), mesh=mesh, plan=sk.pp("stage"))
    state, metrics = step(init({"layers": jnp.asarray(stack)}, KEY), {"x": x, "y": y})

    def narrow(weights: Any) -> Any:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return end(None, h, {"y": y})

    loss, grads = jax.jit(jax.value_and_grad(narrow))(real)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    for got, grad in zip(np.asarray(state.opt_state["layers"]), grads, strict=True):
        assert_close(got[: grad.shape[0], : grad.shape[1]], grad)
        assert np.count_nonzero(got) <= grad.size


@pytest.mark.deep
def test_the_losses_of_a_router_are_those_of_each_microbatch():  # proves F41
    E, m, ways = 4, 2, 2
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    stack = {"router": draw(2, D, E), "experts": draw(2, E, D, D) * 0.3}

    def make_pieces(expert: str | None, stages: str | None) -> Any:
        def layer(weights: Any, x: Any) -> Any:
            answer = lambda w, rows, dot: jnp.tanh(dot(rows, w))  # noqa: E731
            options = {"routing": sk.layers.Dropless(), "stage": stages}
            y, stats = sk.layers.moe(x["x"], weights["router"], weights["experts"], answer, expert, **options)
            return {"x": x["x"] + y, "losses": x["losses"] + stats.balance_loss}

        def embed(shared: Any, batch: Any, keys: Any) -> Any:
            return {"x": batch["x"], "losses": jnp.zeros(batch["x"].shape[0])}

        def head(shared: Any, x: Any, batch: Any) -> Any:
            return sk.Mean.of(jnp.sum(x["x"] ** 2, axis=(1, 2)) + x["losses"]), {"balance": sk.Mean.of(x["losses"])}

        return embed, lambda layers, x, keys: sk.scan_layers(layer, layers, x), head

    x = rng.normal(size=(8, 3, D)).astype(np.float32)
    grad_fn = pipelined_grad(*make_pieces("expert", "stage"), schedules.lockstep(2, m), "stage")
    mesh = sk.make_mesh(jax.devices()[:4], expert=ways, stage=2)
    init, step = sk.make_train_step(
        grad_fn, recording_sgd(0.5), mesh=mesh, plan=sk.chain(sk.pp("stage"), sk.ep("expert"))
    )
    state, metrics = step(init({"layers": stack}, KEY), {"x": x})

    # Microbatch i is the i-th part of every device's examples.
    cut = x.reshape(ways, m, -1, 3, D).swapaxes(0, 1).reshape(m, -1, 3, D)
    embed, stage, head = make_pieces(None, None)

    def mean(stack: Any) -> Any:
        each = [head({}, stage(stack, embed({}, {"x": part}, None), None), None) for part in cut]
        return sum(loss.total for loss, _ in each) / len(x), sum(aux["balance"].total for _, aux in each) / len(x)

    (loss, balance), grads = jax.value_and_grad(mean, has_aux=True)(stack)
    np.testing.assert_allclose([metrics["loss"], metrics["balance"]], [loss, balance], rtol=1e-5)
    assert_close(sk.unpadded(state.opt_state["layers"]), grads, 1e-5)
