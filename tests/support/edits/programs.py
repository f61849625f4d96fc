"""Ten training programs whose compiled modules are edited: by the partitioner, and by shard_map."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk


class Program(NamedTuple):
    """A function to compile, with what it is called with.

    Attributes:
        function: of `jax.jit`.
        args: its arguments, on the devices.
    """

    function: Any
    args: tuple[Any, ...]


def draw(*shape: int) -> np.ndarray:
    """Floats, the same for the same shape."""
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def put(mesh: Any, x: Any, *spec: Any) -> Any:
    """An array on the devices of a mesh."""
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


# By the partitioner


def make_matmul() -> Program:
    """Two matmuls and their gradients."""
    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2)

    def loss(up: Any, down: Any, x: Any) -> Any:
        hidden = jnp.tanh(x @ up)
        return jnp.mean((hidden @ down - x) ** 2)

    up = put(mesh, draw(4, 4), None, "model")
    down = put(mesh, draw(4, 4), "model")
    return Program(jax.jit(jax.grad(loss, (0, 1))), (up, down, put(mesh, draw(4, 4), "data")))


def make_attention() -> Program:
    """Attention with rotary positions and a causal mask, of heads over one axis and rows over the other."""
    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2)

    def rotate(x: Any) -> Any:
        first, second = x[..., :2], x[..., 2:]
        angles = jnp.arange(4.0)[:, None, None]
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("thk,shk->hts", rotate(q), rotate(k)) / 2
        position = jnp.arange(4)
        causal = position[:, None] >= position[None, :]
        weights = jax.nn.softmax(jnp.where(causal[None], scores, -1e30), -1)
        return jnp.einsum("hts,shk->thk", weights, v)

    args = [put(mesh, draw(4, 2, 4), "data", "model") for _ in range(3)]
    return Program(jax.jit(attend), tuple(args))


def make_scan() -> Program:
    """The gradient of a scan over stacked layers."""
    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2)

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.sin(x @ w), None

        x, _ = lax.scan(layer, x, weights)
        return jnp.sum(x * x)

    weights = put(mesh, draw(3, 4, 4), None, None, "model")
    return Program(jax.jit(jax.grad(loss)), (weights, put(mesh, draw(4, 4), "data")))


def make_embedding() -> Program:
    """The gradient of a table of embeddings whose rows are split."""
    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2)

    def loss(table: Any, weights: Any, tokens: Any) -> Any:
        vectors = table[tokens]
        return jnp.sum(jnp.tanh(vectors) * weights)

    table = put(mesh, draw(8, 4), "model")
    tokens = put(mesh, np.asarray([3, 1, 0, 7, 7, 2], np.int32), "data")
    return Program(jax.jit(jax.grad(loss)), (table, put(mesh, draw(6, 4), "data"), tokens))


def make_muon() -> Program:
    """One step of Newton-Schulz on the momentum of a matrix, as muon takes it."""
    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2)

    def update(w: Any, momentum: Any, gradient: Any) -> Any:
        momentum = 0.5 * momentum + gradient
        x = momentum / jnp.sum(momentum * momentum)
        product = x @ x.T
        x = 3 * x - 4 * product @ x + 2 * (product @ product) @ x
        return w - 0.25 * x, momentum

    args = [put(mesh, draw(4, 4), "data", "model") for _ in range(2)]
    return Program(jax.jit(update), (*args, put(mesh, draw(4, 4), "model")))


def make_routing() -> Program:
    """Each token to the expert of its largest score, with a constraint on the experts."""
    mesh = sk.make_mesh(jax.devices()[:4], expert=4)

    def route(scores: Any, weights: Any, x: Any) -> Any:
        chosen = jnp.argmax(scores, -1)
        masks = jax.nn.one_hot(chosen, 4)
        inputs = jnp.einsum("te,td->etd", masks, x)
        inputs = lax.with_sharding_constraint(inputs, NamedSharding(mesh, P("expert")))
        outputs = jnp.maximum(jnp.einsum("etd,edf->etf", inputs, weights), 0)
        return jnp.einsum("te,etf->tf", masks, outputs)

    args = [put(mesh, draw(4, 4), "expert"), put(mesh, draw(4, 3, 3), "expert"), put(mesh, draw(4, 3), "expert")]
    return Program(jax.jit(route), tuple(args))


# By shard_map


def make_dp() -> Program:
    """A step of SGD with momentum and dropout, by data parallelism."""
    mesh = sk.make_mesh(jax.devices()[:4], data=4)

    def loss(params: Any, x: Any, keys: Any) -> Any:
        x = sk.dropout(x, keys, 0.5)
        hidden = jnp.tanh(x @ params["up"])
        return jnp.sum((hidden @ params["down"]) ** 2)

    def step(params: Any, momentum: Any, x: Any, key: Any) -> Any:
        def device(params: Any, momentum: Any, x: Any, key: Any) -> Any:
            keys = jax.random.split(sk.fold_axis(key, "data"), len(x))
            gradients = jax.grad(loss)(sk.vary(params, "data"), x, keys)
            gradients = jax.tree.map(partial(sk.all_reduce, axis="data", op="mean"), gradients)
            momentum = jax.tree.map(lambda m, g: 0.5 * m + g, momentum, gradients)
            return jax.tree.map(lambda p, m: p - 0.25 * m, params, momentum), momentum

        run = jax.shard_map(device, mesh=mesh, in_specs=(P(), P(), P("data"), P()), out_specs=P())
        return run(params, momentum, x, key)

    params = {"up": put(mesh, draw(3, 4)), "down": put(mesh, draw(4, 2))}
    return Program(jax.jit(step), (params, params, put(mesh, draw(8, 3), "data"), jax.random.key(3)))


def make_fsdp() -> Program:
    """Weights gathered where they are used; gradients reduce-scattered along one axis and summed along the other."""
    mesh = sk.make_mesh(jax.devices()[:4], data=2, fsdp=2)

    def device(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            whole = sk.all_gather(w, "fsdp")
            return jnp.sum(jnp.tanh(x @ whole) ** 2)

        value, gradient = jax.value_and_grad(loss)(sk.vary(w, "data"))
        gradient = sk.all_reduce(gradient, "data")
        return w - 0.25 * gradient, sk.all_reduce(value, ("data", "fsdp"))

    step = jax.shard_map(device, mesh=mesh, in_specs=(P("fsdp"), P(("data", "fsdp"))), out_specs=(P("fsdp"), P()))
    return Program(jax.jit(step), (put(mesh, draw(4, 4), "fsdp"), put(mesh, draw(8, 4), ("data", "fsdp"))))


def make_tp() -> Program:
    """A column-parallel and a row-parallel matmul, and the gradients of both."""
    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2)

    def device(up: Any, down: Any, x: Any) -> Any:
        def loss(up: Any, down: Any) -> Any:
            partial_sums = jnp.exp(x @ up) @ down
            y = sk.all_reduce(partial_sums, "model")
            return jnp.sum(y * y) / 4

        gradients = jax.grad(loss, (0, 1))(*sk.vary((up, down), "data"))
        return sk.all_reduce(gradients, "data")

    specs = (P(None, "model"), P("model"))
    step = jax.shard_map(device, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs)
    args = put(mesh, draw(4, 4), None, "model"), put(mesh, draw(4, 4), "model"), put(mesh, draw(4, 4), "data")
    return Program(jax.jit(step), args)


def make_ring() -> Program:
    """Attention in which keys and values go around a ring, in a loop that accumulates by online softmax."""
    mesh = sk.make_mesh(jax.devices()[:4], ring=4)

    def device(q: Any, k: Any, v: Any) -> Any:
        def turn(_: Any, carry: Any) -> Any:
            k, v, top, total, sums = carry
            scores = q @ k.T
            new_top = jnp.maximum(top, scores.max(1))
            weights = jnp.exp(scores - new_top[:, None])
            scale = jnp.exp(top - new_top)
            total = total * scale + weights.sum(1)
            sums = sums * scale[:, None] + weights @ v
            return sk.shift(k, "ring"), sk.shift(v, "ring"), new_top, total, sums

        top, total, sums = sk.vary((jnp.full(2, -jnp.inf), jnp.zeros(2), jnp.zeros((2, 2))), "ring")
        _, _, _, total, sums = lax.fori_loop(0, 4, turn, (k, v, top, total, sums))
        return sums / total[:, None]

    attend = jax.shard_map(device, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"))
    return Program(jax.jit(attend), tuple(put(mesh, draw(8, 2), "ring") for _ in range(3)))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "matmul": make_matmul,
    "attention": make_attention,
    "scan": make_scan,
    "embedding": make_embedding,
    "muon": make_muon,
    "routing": make_routing,
    "dp": make_dp,
    "fsdp": make_fsdp,
    "tp": make_tp,
    "ring": make_ring,
}
