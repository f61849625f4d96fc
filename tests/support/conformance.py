"""One list of plans and one of models; tests/laws/ holds them to the laws.

A new strategy is one row in PLANS. Rows whose name begins with "toy" use a strategy of a few lines, written here until
there is a real one of its kind (a leaf that stays sharded while it is seen).
"""

import dataclasses
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from shardkit.models import transformer
from shardkit.plans.plan import strategy
from shardkit.plans.splits import Leaf, Split

BATCH = 16


def toy_tp(axis: str) -> sk.Plan:
    """Row-parallel: the weight's dim 0 is sharded everywhere, and the loss sums over the axis itself."""

    def place(leaf: Leaf) -> Split | None:
        return Split(0) if leaf.path == "weight" else None

    return strategy("toy_tp", axis, rank=0, place=place)


def padding(ways: int) -> dict[str, Any]:
    """Options by which a plan splits, and pads, a dim that `ways` devices do not divide wherever there is one."""

    def uneven_dim(path: str, shape: tuple[int, ...]) -> int | None:
        dims = range(1 if path.startswith("layers") else 0, len(shape))
        return max(dims, key=lambda dim: shape[dim] % ways != 0, default=None)

    return {"min_size": 1, "uneven": "pad", "rules": uneven_dim}


class PlanRow(NamedTuple):
    """A mesh and a plan; `model_axis` is the axis over which the loss itself communicates, or a transformer's Axes."""

    name: str
    sizes: dict[str, int]
    plan: Callable[[], sk.Plan]
    model_axis: str | transformer.Axes | None = None


def three(zero: Callable[..., sk.Plan], **options: Any) -> sk.Plan:
    """dp, and a kind of zero and fsdp over axes of their own."""
    return sk.chain(sk.dp("data"), zero("zero", **options), sk.fsdp("fsdp", **options))


CUBE = {"zero": 2, "fsdp": 2, "data": 2}
PLANS = [
    PlanRow("dp1", {"data": 1}, lambda: sk.dp("data")),
    PlanRow("dp2", {"data": 2}, lambda: sk.dp("data")),
    PlanRow("dp4", {"data": 4}, lambda: sk.dp("data")),
    PlanRow("dp8", {"data": 8}, lambda: sk.dp("data")),
    PlanRow("dp over two axes", {"node": 2, "data": 4}, lambda: sk.dp(("node", "data"))),
    PlanRow("two dp", {"data": 2, "replica": 2}, lambda: sk.chain(sk.dp("replica"), sk.dp("data"))),
    PlanRow("dp beside an unused axis", {"data": 2, "spare": 2}, lambda: sk.dp("data")),
    PlanRow("zero1", {"data": 4}, lambda: sk.zero1("data", min_size=1)),
    PlanRow("zero1 layerwise", {"data": 4}, lambda: sk.zero1("data", min_size=1, layerwise=("layers",))),
    PlanRow("zero2", {"data": 4}, lambda: sk.zero2("data", min_size=1)),
    PlanRow("zero2 layerwise", {"data": 4}, lambda: sk.zero2("data", min_size=1, layerwise=("layers",))),
    PlanRow("fsdp", {"fsdp": 4}, lambda: sk.fsdp("fsdp", min_size=1)),
    PlanRow("fsdp layerwise", {"fsdp": 4}, lambda: sk.fsdp("fsdp", min_size=1, layerwise=("layers",))),
    PlanRow("fsdp of one device", {"fsdp": 1, "data": 2}, lambda: sk.chain(sk.dp("data"), sk.fsdp("fsdp", min_size=1))),
    PlanRow("small leaves whole", {"fsdp": 2}, lambda: sk.fsdp("fsdp", min_size=200)),
    PlanRow("zero1 pad", {"data": 8}, lambda: sk.zero1("data", **padding(8))),
    PlanRow("zero2 pad", {"data": 8}, lambda: sk.zero2("data", **padding(8))),
    PlanRow("zero2 layerwise pad", {"data": 8}, lambda: sk.zero2("data", layerwise=("layers",), **padding(8))),
    PlanRow("fsdp pad", {"fsdp": 8}, lambda: sk.fsdp("fsdp", **padding(8))),
    PlanRow("fsdp layerwise pad", {"fsdp": 8}, lambda: sk.fsdp("fsdp", layerwise=("layers",), **padding(8))),
    PlanRow("hsdp pad", {"replica": 2, "shard": 4}, lambda: sk.chain(sk.dp("replica"), sk.fsdp("shard", **padding(4)))),
    PlanRow(
        "fsdp pad x zero2 pad x dp",
        {"zero": 2, "fsdp": 2, "data": 2},
        lambda: sk.chain(
            sk.dp("data"),
            sk.zero2("zero", min_size=1, uneven="pad"),
            sk.fsdp("fsdp", layerwise=("layers",), **padding(2)),
        ),
    ),
    PlanRow("hsdp", {"replica": 2, "shard": 4}, lambda: sk.chain(sk.dp("replica"), sk.fsdp("shard", min_size=1))),
    PlanRow("fsdp x zero1 x dp", CUBE, lambda: three(sk.zero1, min_size=1)),
    PlanRow("fsdp x zero2 x dp", CUBE, lambda: three(sk.zero2, min_size=1)),
    PlanRow(
        "fsdp and zero2 layerwise x dp",
        {"zero": 2, "data": 2, "fsdp": 2},
        lambda: three(sk.zero2, min_size=1, layerwise=("layers",)),
    ),
    PlanRow(
        "two fsdp, one layerwise",
        {"a": 2, "b": 2},
        lambda: sk.chain(sk.fsdp("a", min_size=1), sk.fsdp("b", min_size=1, layerwise=("layers",))),
    ),
    PlanRow(
        "fsdp over two axes, one of one device", {"node": 1, "gpu": 4}, lambda: sk.fsdp(("node", "gpu"), min_size=1)
    ),
    PlanRow(
        "a secondary shard over one device",
        {"node": 2, "gpu": 1},
        lambda: sk.fsdp(("node", "gpu"), min_size=1, layerwise=("layers",), secondary="gpu"),
    ),
    PlanRow(
        "fsdp with a secondary shard",
        {"node": 2, "gpu": 4},
        lambda: sk.fsdp(("node", "gpu"), layerwise=("layers",), secondary="gpu", **padding(8)),
    ),
    PlanRow(
        "fsdp with a secondary shard and zero2 layerwise",
        {"slow": 2, "zero": 2, "fast": 2},
        lambda: sk.chain(
            sk.zero2("zero", min_size=1, layerwise=("layers",)),
            sk.fsdp(("slow", "fast"), min_size=1, layerwise=("layers",), secondary="fast"),
        ),
    ),
    PlanRow("toy tp x dp", {"data": 2, "model": 2}, lambda: sk.chain(toy_tp("model"), sk.dp("data")), "model"),
    PlanRow(
        "toy tp x fsdp x zero1",
        {"zero": 2, "model": 2, "fsdp": 2},
        lambda: sk.chain(sk.zero1("zero", min_size=1), sk.fsdp("fsdp", min_size=1), toy_tp("model")),
        "model",
    ),
    PlanRow(
        "toy tp x zero2",
        {"zero": 4, "model": 2},
        lambda: sk.chain(sk.zero2("zero", min_size=1), toy_tp("model")),
        "model",
    ),
]
TRANSFORMER = transformer.Config(vocabulary=32, layers=2, dim=16, heads=4, kv_heads=2, hidden=24, dropout=0.1)


class ModelRow(NamedTuple):
    """A model: parameters, batches, a loss that may be given the axis over which it communicates."""

    name: str
    params: Callable[[], Any]
    batch: Callable[[int], Any]
    loss: Callable[[Any], Callable[..., Any]]


def _softmax_params() -> Any:
    rng = np.random.default_rng(1)
    draw = lambda *shape: 0.5 * rng.normal(size=shape).astype("f")  # noqa: E731
    return {"layers": draw(2, 8), "weight": draw(8, 5), "bias": np.zeros(5, "f"), "shift": np.float32(0.3)}


def _softmax_batch(step: int) -> Any:
    rng = np.random.default_rng(step)
    return {
        "x": rng.normal(size=(BATCH, 8)).astype(np.float32),
        "label": rng.integers(0, 5, BATCH).astype(np.int32),
        # far from equal, some zero: a mean of means would be wrong by much
        "weight": (rng.integers(0, 4, BATCH) * rng.integers(0, 2, BATCH) + (np.arange(BATCH) == 3)).astype(np.float32),
    }


def _softmax_loss(model_axis: str | None) -> Callable[..., Any]:
    def loss(params: Any, batch: Any, keys: Any) -> Any:
        x = sk.dropout(batch["x"], keys, 0.25)
        x = sk.scan_layers(lambda gain, x: x + jnp.tanh(x * gain[None]), params["layers"], x)
        if model_axis:
            size = params["weight"].shape[0]
            x = jax.lax.dynamic_slice_in_dim(x, sk.axis_index(model_axis) * size, size, 1)
            logits = sk.all_reduce(x @ params["weight"], model_axis)
        else:
            logits = x @ params["weight"]
        logits = logits + params["bias"][None, :] + params["shift"]  # the shift changes no probability
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        hits = jnp.argmax(logits, -1) == batch["label"]
        return sk.Mean.of(nats, batch["weight"]), {"accuracy": sk.Mean.of(hits, batch["weight"])}

    return loss


@cache
def weights(config: transformer.Config, seed: int = 3) -> Any:
    """The reference transformer's in numpy: made op by op, and cut by jax, they compile for longer than a step runs."""
    return jax.tree.map(np.asarray, jax.jit(transformer.init, static_argnums=1)(jax.random.key(seed), config))


def text_batch(step: int, length: int = 8) -> Any:
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, 32, (BATCH, length + 1)).astype(np.int32)
    lengths = rng.integers(1, length + 1, BATCH)
    weights = (np.arange(length)[None, :] < lengths[:, None]).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


MODELS = [
    ModelRow("softmax", _softmax_params, _softmax_batch, _softmax_loss),
    ModelRow("transformer", lambda: weights(TRANSFORMER, 2), text_batch, lambda _: transformer.loss_fn(TRANSFORMER)),
]

# Models that every mesh of eight devices can split: eight heads, experts, columns, and sixteen tokens.
WIDE = transformer.Config(vocabulary=32, layers=2, dim=16, heads=8, kv_heads=2, hidden=32, dropout=0.1)
MESH_CONFIGS = {"dense": WIDE, "experts": dataclasses.replace(WIDE, experts=8, hidden=8, balance=0.1, router_z=0.01)}


def _mesh_model(name: str, config: transformer.Config) -> ModelRow:
    def loss(axes: transformer.Axes | None) -> Callable[..., Any]:
        return transformer.loss_fn(config, axes or transformer.ONE_DEVICE)

    return ModelRow(name, lambda: weights(config), lambda i: text_batch(i, 16), loss)


MESH_MODELS = [_mesh_model(*item) for item in MESH_CONFIGS.items()]


def mesh_rows(model: str, devices: int = 8) -> list[PlanRow]:
    """Every mesh of so many devices over the axes that a model can use, with every way to use `model`.

    The forms of the gathered matmuls take turns, so that each meets every other axis.
    """
    names = ["data", "fsdp", "context", "model"] + ["expert"] * (model == "experts")
    impls = itertools.cycle(("gather", "ring", "bidirectional"))
    rows = []
    for exponents in itertools.product(range(4), repeat=len(names)):
        sizes = {name: 2**e for name, e in zip(names, exponents, strict=True)}
        if 2 ** sum(exponents) != devices or (model == "experts" and sizes["expert"] == 1):
            continue
        for sequence in (False, True) if sizes["model"] > 1 else (False,):
            rows.append(
                _mesh_row({k: n for k, n in sizes.items() if n > 1}, MESH_CONFIGS[model], sequence, next(impls))
            )
    return rows


def one_form(rows: list[PlanRow]) -> list[PlanRow]:
    """Of each mesh one row: with sequence parallelism or without, in turn."""
    turn = itertools.cycle((-1, 0))
    forms = [list(each) for _, each in itertools.groupby(rows, lambda row: row.sizes)]
    return [each[next(turn) if len(each) > 1 else 0] for each in forms]


def _mesh_row(sizes: dict[str, int], config: transformer.Config, sequence: bool, impl: Any) -> PlanRow:
    has = lambda name: name if name in sizes else None  # noqa: E731
    axes = transformer.Axes(has("model"), sequence, has("context"), expert=has("expert"), impl=impl)

    def plan() -> sk.Plan:
        rules = transformer.tensor_rules(config, "model", sizes.get("model", 1))
        makes = {
            "data": sk.dp,
            "fsdp": lambda axis: sk.fsdp(axis, min_size=1, layerwise=("layers",)),
            "context": sk.cp,
            "model": lambda axis: sk.tp(axis, rules, sequence=sequence),
            "expert": sk.ep,
        }
        return sk.chain(*(makes[name](name) for name in sizes))

    name = " ".join(f"{k}={n}" for k, n in sizes.items()) + (f" sequence {impl}" if sequence else "")
    return PlanRow(name, sizes, plan, axes)
