"""A small model in pieces, and the law of the pipeline: every schedule gives the unpipelined model's numbers."""

import inspect
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import schedules
from shardkit._jax.compat import varying_axes
from shardkit.schedules import Schedule

VOCABULARY, D, TOKENS, RATE = 7, 4, 2, 0.25
BUILDERS = {name: each for name in schedules.__all__ if inspect.isfunction(each := getattr(schedules, name))}
CHUNKED = tuple(name for name, each in BUILDERS.items() if "chunks" in inspect.signature(each).parameters)
# Every schedule as a function of devices and microbatches, with two chunks where one may choose; lockstep with one too.
EVERY_SCHEDULE = {name: partial(each, chunks=2) if name in CHUNKED else each for name, each in BUILDERS.items()}
EVERY_SCHEDULE["lockstep of one chunk"] = schedules.lockstep
SPECS = {"embed": P(), "gain": P(), "layers": P("stage")}


def pipelined_grad(
    embed: Any, stage: Any, head: Any, schedule: Schedule, axis: str, *, layers_per_stage: Any = None, **how: Any
) -> Any:
    """The GradFn of three pieces over a schedule, in one call."""
    return sk.pipeline(schedule, axis, layers_per_stage=layers_per_stage).value_and_grad(embed, stage, head, **how)


def pipelined_loss(
    embed: Any, stage: Any, head: Any, schedule: Schedule, axis: str, *, layers_per_stage: Any = None, **how: Any
) -> Any:
    """Their loss."""
    return sk.pipeline(schedule, axis, layers_per_stage=layers_per_stage).loss(embed, stage, head, **how)


# Its layers are NaN on zeros, which is what a masked device is given.
def make_params(layers: int, dim: int = D) -> Any:
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) * 0.5).astype(np.float32)  # noqa: E731
    stack = {"w": draw(layers, dim, dim), "b": draw(layers, dim)}
    return {"embed": 1 + draw(VOCABULARY, dim), "gain": 1 + draw(dim), "layers": stack}


def make_batch(examples: int, seed: int = 0) -> Any:
    """Examples of unequal weights, some of none at all."""
    rng = np.random.default_rng(seed)
    tokens, targets = rng.integers(0, VOCABULARY, (2, examples, TOKENS)).astype(np.int32)
    weights = rng.integers(0, 3, (examples, TOKENS)) + (np.arange(examples)[:, None] == 0)
    return {"tokens": tokens, "targets": targets, "weights": weights.astype(np.float32)}


def embed(shared: Any, batch: Any, keys: Any) -> jax.Array:
    return sk.dropout(shared["embed"][batch["tokens"]], keys, RATE / 2)


def layer(keys: Any, each: Any, x: jax.Array) -> jax.Array:
    weights, number = each
    h = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    h = 0.3 * jnp.tanh(h @ weights["w"] + weights["b"][None, None])
    return x + sk.dropout(h, None if keys is None else sk.fold_keys(keys, number), RATE)


def stage(layers: Any, x: jax.Array, keys: Any) -> jax.Array:
    return sk.scan_layers(partial(layer, keys), layers, x)


def head(shared: Any, x: jax.Array, batch: Any) -> Any:
    logits = (x * shared["gain"][None, None]) @ shared["embed"].T  # tied
    nats = -jax.nn.log_softmax(logits.astype(jnp.float32))
    nats = jnp.take_along_axis(nats, batch["targets"][..., None], axis=-1)[..., 0]
    hits = jnp.argmax(logits, axis=-1) == batch["targets"]
    aux = {"accuracy": sk.Mean.of(hits, batch["weights"]), "square": jnp.mean(jnp.square(x.astype(jnp.float32)))}
    return sk.Mean.of(nats, batch["weights"]), aux


def unpipelined(pieces: Any) -> Any:
    """The loss of the pieces, one after the other."""
    embed, stage, head = pieces

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        shared = {name: value for name, value in params.items() if name != "layers"}
        numbers = jnp.arange(jax.tree.leaves(params["layers"])[0].shape[0])
        return head(shared, stage((params["layers"], numbers), embed(shared, batch, keys), keys), batch)

    return loss


PIECES = (embed, stage, head)
# Unoptimized code is as right as any, and compiles sooner.
QUICKLY = {"xla_backend_optimization_level": 0}


def mesh_of(p: int) -> Any:
    return sk.make_mesh(jax.devices()[:p], stage=p)


def traced_step(schedule: Schedule, layers: int, pieces: Any = PIECES, **how: Any) -> Any:
    """`(params, batch, keys) -> (loss, aux, gradients)` on stacks in original order, over the schedule's devices."""
    grad_fn = pipelined_grad(*pieces, schedule, "stage", layer_numbers=True, **how)
    rows = np.array(grad_fn.stages.rows(layers) or range(layers))

    def summed(tree: Any) -> Any:
        return jax.tree.map(lambda x: sk.all_reduce(x, "stage") if varying_axes(x) else x, tree)

    def device(params: Any, batch: Any, keys: Any) -> Any:
        mean, aux, grads = grad_fn(params, batch, keys)
        shared = {name: summed(grad) for name, grad in grads.items() if name != "layers"}
        return *summed((mean, aux)), shared | {"layers": grads["layers"]}

    specs = {"in_specs": (SPECS, P(), P()), "out_specs": (P(), P(), SPECS)}
    per_device = jax.shard_map(device, mesh=mesh_of(schedule.devices), **specs)

    def step(params: Any, batch: Any, keys: Any) -> Any:
        held = jax.tree.map(lambda leaf: leaf[np.maximum(rows, 0)], params["layers"])
        # Rows that fill a stage up hold zeros.
        zeros = jax.tree.map(lambda leaf: jnp.where(rows.reshape(-1, *[1] * (leaf.ndim - 1)) < 0, 0.0, leaf), held)
        mean, aux, grads = per_device(params | {"layers": zeros}, batch, keys)
        natural = jax.tree.map(lambda leaf: leaf[np.argsort(rows, stable=True)[-layers:]], grads["layers"])
        return mean, aux, grads | {"layers": natural}

    return step


@cache
def reference(layers: int, examples: int, pieces: Any = PIECES) -> Any:
    keys = sk.example_keys(jax.random.key(1), examples)
    grad_fn = jax.jit(sk.value_and_grad(unpipelined(pieces)), compiler_options=QUICKLY)
    return grad_fn(make_params(layers), make_batch(examples), keys)


def assert_close(actual: Any, wanted: Any, relative: float = 4e-6) -> None:
    """Every leaf within `relative` of the largest value in it, and finite."""
    flat, wanted_flat = (jax.tree_util.tree_leaves_with_path(tree) for tree in (actual, wanted))
    for (path, x), (same, y) in zip(flat, wanted_flat, strict=True):
        assert path == same and x.shape == y.shape and np.isfinite(x).all(), path
        np.testing.assert_allclose(x, y, rtol=0, atol=relative * float(np.max(np.abs(y))), err_msg=str(path))


def check(schedule: Schedule, *, each: int = 1, layers: int = 0, pieces: Any = PIECES, **how: Any) -> None:
    """Loss, auxiliary means and gradients of a schedule equal those of the model without a pipeline."""
    layers = layers or schedule.devices * schedule.chunks
    examples = each * schedule.microbatches
    keys = sk.example_keys(jax.random.key(1), examples)
    step = jax.jit(traced_step(schedule, layers, pieces, **how), compiler_options=QUICKLY)
    mean, aux, grads = step(make_params(layers), make_batch(examples), keys)
    wanted, wanted_aux, wanted_grads = reference(layers, examples, pieces)
    assert_close((mean, aux["accuracy"]), (wanted, wanted_aux["accuracy"]))
    square, wanted_square = aux["square"], wanted_aux["square"]  # a scalar is a mean over equal microbatches
    assert square.weight == schedule.microbatches
    np.testing.assert_allclose(square.total / square.weight, wanted_square.total, rtol=1e-5)
    assert all(grad.dtype == jnp.float32 for grad in jax.tree.leaves(grads))
    assert_close(grads, wanted_grads)


def from_csv(p: int, m: int) -> Schedule:
    """A schedule that nobody published: all forwards, then backwards of which every other is split."""
    lines = []
    for device in range(p):
        actions = [f"{device}F{microbatch}" for microbatch in range(m)]
        for microbatch in reversed(range(m)):
            if (device + microbatch) % 2:
                actions.append(f"{device}B{microbatch}")
            else:
                actions += [f"{device}I{microbatch}", f"{device}W{microbatch}"]
        lines.append(",".join(actions))
    return Schedule.from_csv("\n".join(lines))


def make(name: str, p: int, m: int, v: int = 1) -> Schedule:
    if name == "from_csv":
        return from_csv(p, m)
    return getattr(schedules, name)(p, m, **({"chunks": v} if name in CHUNKED else {}))
