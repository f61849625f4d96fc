"""The covering list: every two options of a training step meet in one row of the reference transformer at least."""

import dataclasses
import math
import sys
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from shardkit import schedules
from shardkit.models import parameters, transformer
from shardkit.testing import Row, covering, one_device, prove
from shardkit.testing.program import Program
from shardkit.testing.prove import choose_relative
from support.conformance import weights
from support.pipelines import pipelined_grad
from support.training import OPTIMIZERS, lenient

KEY = jax.random.key(7)
BATCH, TOKENS, LAYERS, MICROBATCHES, STEPS = 48, 16, 4, 4, 3
LAYERWISE: Any = {"min_size": 1, "layerwise": ("layers",)}
# A fixed scale: the first steps of a dynamic one are skipped, and have nothing to compare.
FP16 = sk.Precision(compute=jnp.float16, loss_scale=256.0)
MASTER = sk.Precision(param=jnp.bfloat16, compute=jnp.bfloat16, master=jnp.float32)
CONFIG = transformer.Config(vocabulary=32, layers=LAYERS, dim=16, heads=8, kv_heads=2, hidden=32, dropout=0.1)

# In this order of the values the list has 36 rows; in most others two or three more.
FACTORS: dict[str, list[Any]] = {
    "shard": [None, "zero2", "fsdp by layer", "zero1", "dp", "fsdp", "zero2 by layer"],
    "stage": [None, "1f1b in branches", "lockstep"],
    "model": [None, "gather", "ring"],
    "context": [None, "zigzag", "ulysses"],
    "experts": [None, "whole", "split"],
    "optimizer": ["adamw", "sgd", "adafactor", "muon"],
    "accumulate": [1, 2],
    "precision": [None, "fp16", "master"],
    "uneven": [False, True],
    "prefetch": [False, True],
    "nonfinite": ["keep", "skip"],
}
# What the deep tier draws besides: forms of the above, and schedules whose programs take long to compile.
DEEP_FACTORS = FACTORS | {
    "shard": [*FACTORS["shard"], "hsdp"],
    "precision": [*FACTORS["precision"], "bf16"],
    "stage": [*FACTORS["stage"], "interleaved, saved", "zb-h1"],
    "model": [*FACTORS["model"], "bidirectional"],
    "context": [*FACTORS["context"], "contiguous"],
    "accumulate": [1, 2, 4],
}
SCHEDULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lockstep": (schedules.lockstep(2, MICROBATCHES), {}),
    "1f1b in branches": (schedules.one_f_one_b(2, MICROBATCHES), {"mode": "branch", "recompute": False}),
    "interleaved, saved": (schedules.interleaved(2, MICROBATCHES, 2), {"recompute": False}),
    "zb-h1": (schedules.zero_bubble_h1(2, MICROBATCHES), {}),
}


def sizes_of(choice: dict[str, Any]) -> dict[str, int]:
    """The mesh: two devices along each axis that the choice uses, three where leaves must not divide."""
    sizes = {}
    if choice.get("shard"):
        sizes["shard"] = 2
        if choice.get("uneven"):
            sizes["shard"] = 3
    for name in ("stage", "model", "context"):
        if choice.get(name):
            sizes[name] = 2
    if choice.get("experts") == "split":
        sizes["expert"] = 2
    if choice.get("shard") == "hsdp":
        sizes["replica"] = 2
    return sizes


def ways_of(choice: dict[str, Any]) -> int:
    """The devices that share the examples."""
    return math.prod(sizes_of(choice).get(name, 1) for name in ("shard", "replica", "expert"))


def allowed(choice: dict[str, Any]) -> bool:
    """What eight devices can hold, and what means something: each line says why the rest does not."""
    get = choice.get
    shard, stage, branch = get("shard"), get("stage"), get("stage") == "1f1b in branches"
    low = get("precision") is not None
    return (
        math.prod(sizes_of(choice).values()) <= 8
        and not (get("uneven") and "shard" in choice and shard in (None, "dp"))  # nothing is split that could be padded
        and not (get("prefetch") and "shard" in choice and shard not in ("zero2 by layer", "fsdp by layer"))
        and not (get("prefetch") and stage)  # a stage has two layers
        and not (low and get("experts"))  # rounding decides which expert a token goes to
        and not (stage and get("accumulate", 1) > 1)  # it warns: more microbatches do the same
        and not (branch and (get("model") in ("ring", "bidirectional") or get("context") or get("experts") == "split"))
        and BATCH % (ways_of(choice) * get("accumulate", 1)) == 0
    )


class Case(NamedTuple):
    """A row and the training on one device that it must equal."""

    choice: dict[str, Any]
    row: Row
    config: transformer.Config

    @property
    def name(self) -> str:
        """The options that are not the first of their factor."""
        words = []  # "zero1", which says what it is of
        settings = []
        for name, value in self.choice.items():
            if value == FACTORS[name][0]:
                continue
            if isinstance(value, str):
                words.append(value)
            elif value is True:
                settings.append(name)
            else:
                settings.append(f"{name}={value}")
        return ", ".join(words + settings) or "one device"


def case_of(choice: dict[str, Any], turn: int = 0) -> Case:
    """The row of a choice; the order of the mesh's axes takes turns."""
    sizes = sizes_of(choice)
    names = list(sizes) or ["shard"]
    order = names[turn % len(names) :] + names[: turn % len(names)]
    mesh = {name: sizes.get(name, 1) for name in order}
    config = dataclasses.replace(CONFIG, prefetch=choice["prefetch"])
    if choice["experts"]:
        # A router's losses are those of a microbatch: without them accumulation changes no number, and pipelines on
        # many meshes share one device's training.
        losses = {"balance": 0.1, "router_z": 0.01}
        if choice["accumulate"] > 1 or (choice["stage"] and ways_of(choice) > 2):
            losses = {"balance": 0.0, "router_z": 0.0}
        config = dataclasses.replace(config, experts=8, hidden=8, **losses)
    has = lambda name: name if name in sizes else None  # noqa: E731
    context = choice["context"]
    axes = transformer.Axes(
        has("model"),
        sequence=choice["model"] in ("ring", "bidirectional"),
        context="context" if context in ("zigzag", "contiguous") else None,
        ulysses="context" if context == "ulysses" else None,
        order=context if context in ("zigzag", "contiguous") else "zigzag",
        expert=has("expert"),
        impl=choice["model"] or "gather",
        stage=has("stage"),
    )
    plan = sk.chain(*_plans(choice, sizes, config))
    row = Row(
        mesh,
        plan,
        _grad_fn(choice, config, axes),
        choice["accumulate"],
        {"master": MASTER, "fp16": FP16}.get(choice["precision"], choice["precision"]),
        choice["nonfinite"],
        optimizer_of(choice["optimizer"], config, mesh, plan),
    )
    case = Case(choice, row, config)
    return case._replace(row=row._replace(label=case.name))


def _plans(choice: dict[str, Any], sizes: dict[str, int], config: transformer.Config) -> list[sk.Plan]:
    shard, sequence = choice["shard"], choice["model"] in ("ring", "bidirectional")
    options: dict[str, Any] = {} if shard in (None, "dp") else {"min_size": 1}
    if choice["uneven"]:
        options["uneven"] = "pad"
    if shard in ("zero2 by layer", "fsdp by layer"):
        options |= LAYERWISE
    makes = {
        "shard": lambda: getattr(sk, "fsdp" if shard == "hsdp" else shard.split()[0])("shard", **options),
        "replica": lambda: sk.dp("replica"),
        "model": lambda: sk.tp("model", transformer.tensor_rules(config, "model", 2), sequence=sequence),
        "context": lambda: sk.cp("context"),
        "expert": lambda: sk.ep("expert"),
        "stage": lambda: sk.pp("stage"),
    }
    return [makes[name]() for name in sizes] or [sk.dp("shard")]


def optimizer_of(name: str, config: transformer.Config, mesh: Any = None, plan: Any = None) -> Any:
    """An optimizer on a mesh, or on one device."""
    if name != "muon":
        return OPTIMIZERS[name]
    how = {"muon_weight_dimension_numbers": parameters.muon_dims(config)}
    if mesh is None:
        return lenient(optax.contrib.muon(0.01, **how))
    return lenient(sk.muon(0.01, mesh=sk.abstract_mesh(**mesh), plan=plan, **how))


def _grad_fn(choice: dict[str, Any], config: transformer.Config, axes: transformer.Axes) -> Any:
    if not choice["stage"]:
        return sk.value_and_grad(transformer.loss_fn(config, axes))
    schedule, how = SCHEDULES[choice["stage"]]
    pieces = transformer.pieces(config, axes)
    grad_fn = pipelined_grad(*pieces, schedule, "stage", layer_numbers=True, **how)
    return transformer.in_order(grad_fn, axes)


@cache
def _alone(config: transformer.Config, ways: int) -> Any:
    """The GradFn of one device; in a pipeline's microbatches with experts, because a router's losses are theirs."""
    plain = transformer.loss_fn(config)
    order = np.arange(BATCH).reshape(ways, MICROBATCHES, -1).swapaxes(0, 1).ravel()

    def loss(params: Any, batch: Any, keys: Any) -> Any:
        return plain(params, {name: x[order] for name, x in batch.items()}, keys[order])

    return sk.value_and_grad(loss if config.microbatches > 1 else plain)


@cache
def batch(step: int) -> Any:
    """Tokens with weights that are far from equal: a quarter of the examples has none at all."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, CONFIG.vocabulary, (BATCH, TOKENS + 1)).astype(np.int32)
    lengths = rng.integers(1, TOKENS + 1, BATCH) * (np.arange(BATCH) % 16 > 3)
    weights = (np.arange(TOKENS)[None, :] < lengths[:, None]).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def shrink(monkeypatch: Any, batch_size: int = 24) -> None:
    """Makes the cases of a test of two layers and few tokens, which prove as much as many for all inputs."""
    small = {"CONFIG": dataclasses.replace(CONFIG, layers=2), "LAYERS": 2, "TOKENS": 4, "BATCH": batch_size}
    for name, value in small.items():
        monkeypatch.setattr(sys.modules[__name__], name, value)
    monkeypatch.setattr(sys.modules[__name__], "batch", cache(batch.__wrapped__))


def shrink_case(monkeypatch: Any, number: int) -> Case:
    """A row of the covering list with two layers, few tokens and few examples."""
    choice = cases()[number].choice
    # On four devices a pipeline splits the examples of each into microbatches.
    in_four = choice["stage"] and ways_of(choice) == 4
    shrink(monkeypatch, 48 if in_four else 24)
    return case_of(choice, number)


def _settings(case: Case) -> tuple[transformer.Config, int]:
    """The configuration of the one device, and in how many ways the batch is split for its microbatches."""
    piped = bool(case.choice["stage"] and case.config.balance)
    config = dataclasses.replace(case.config, prefetch=False, microbatches=MICROBATCHES if piped else 1)
    return config, ways_of(case.choice) if piped else 1


def alone(case: Case) -> Any:
    """The GradFn of one device that a case must equal."""
    return _alone(*_settings(case))


def expected(case: Case) -> Any:
    """The training on one device that a case must equal, run once for all cases that share it."""
    return _expected(*_settings(case), case.choice["optimizer"], choose_relative(case.row.precision))


@cache
def _expected(config: transformer.Config, ways: int, optimizer: str, relative: float) -> Any:
    batches, alone = [batch(step) for step in range(STEPS)], optimizer_of(optimizer, config)
    return one_device(_alone(config, ways), alone, weights(config), batches, key=KEY, relative=relative)


def assert_every_law(case: Case, laws: Any) -> None:
    """These laws on a row."""
    batches = [batch(step) for step in range(STEPS)]
    options = {"rows": [case.row], "batches": batches, "laws": laws, "key": KEY}
    prove(case.row.grad_fn, expected(case), params=weights(case.config), **options)


def program_of(case: Case) -> Program:
    """The step of a row, on its mesh."""
    batches = [batch(step) for step in range(STEPS)]
    return Program.of(case.row, case.row.grad_fn, optax.sgd(0.1), weights(case.config), batches, KEY)


def cases() -> list[Case]:
    """The covering list."""
    return [case_of(choice, turn) for turn, choice in enumerate(covering(FACTORS, allowed))]
