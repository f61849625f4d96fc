"""Training steps that nobody chose: everything about one is drawn from its seed, and it must equal one device.

What `rows.py` draws from are chosen values, two devices along each axis; here the sizes are drawn too: models, meshes
of one to eight devices in any order, batches, schedules. Little that is drawn is refused, and that is counted.
"""

import dataclasses
import random
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import shardkit as sk
from shardkit.models import transformer
from shardkit.on_device.pipelines import PipelineGradFn
from shardkit.testing import Row, laws, prove
from support import pipelines
from support.conformance import weights
from support.drawn_meshes import SPLIT_THE_BATCH, USES, Mesh, draw_mesh, draw_plans, draw_row, draw_schedule, draw_sizes
from support.pipelines import pipelined_grad
from support.training import KEY

STEPS = 3


class Drawn(NamedTuple):
    """A row, the GradFn of one device, parameters and batches."""

    row: Row
    alone: Any
    params: Any
    batches: list[Any]


def drawn(seed: int | str) -> Drawn:
    """The configuration of a seed."""
    draw = random.Random(f"strategies {seed}")
    kind = draw.choices(["transformer", "pieces", "softmax"], [6, 2, 2])[0]
    return {"transformer": _transformer, "pieces": _pieces, "softmax": _softmax}[kind](draw)


def assert_as_one_device(case: Drawn, every: Any) -> None:
    """These laws on a drawn row."""
    # Before the update, layers of unequal stages go back to their own order, and the compiler moves them.
    sizes = case.row.grad_fn.stages.layers_per_stage if isinstance(case.row.grad_fn, PipelineGradFn) else None
    left_out = {laws.compiled_as_written} if sizes and len(set(sizes)) > 1 else set()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "make_train_step: accumulate=")  # slower in a pipeline, and right
        options = {"rows": [case.row], "params": case.params, "batches": case.batches, "key": KEY}
        prove(case.row.grad_fn or case.alone, case.alone, laws=[law for law in every if law not in left_out], **options)


def _weights(draw: random.Random, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Far from equal, and some examples without any; the first has some, so that there is something to learn."""
    share = draw.choice([0.0, 0.3, 0.7])
    counted = (rng.random(shape[0]) >= share) | (np.arange(shape[0]) == 0)
    return (rng.integers(1, 4, shape) * counted.reshape(-1, *[1] * (len(shape) - 1))).astype(np.float32)


def _softmax(draw: random.Random) -> Drawn:
    """Layers of gains, a matrix whose rows may be split, and odd sizes."""
    mesh = draw_mesh(draw, ("data", "zero", "fsdp", "model"), {"model": 4})
    accumulate, features = draw.choice([1, 1, 2, 3]), mesh.ways("model") * draw.randint(1, 5)
    layers, classes, rate = draw.randint(1, 5), draw.randint(2, 9), draw.choice([0.0, 0.25])
    rows = mesh.ways(*SPLIT_THE_BATCH) * accumulate * draw.randint(1, 3)

    def loss_on(axis: Any) -> Any:
        def loss(params: Any, batch: Any, keys: Any) -> Any:
            x = sk.dropout(batch["x"], keys, rate)
            x = sk.scan_layers(lambda gain, x: x + jax.numpy.tanh(x * gain[None]), params["layers"], x)
            if axis:
                size = params["weight"].shape[0]
                x = jax.lax.dynamic_slice_in_dim(x, sk.axis_index(axis) * size, size, 1)
            logits = x @ params["weight"]
            logits = (sk.all_reduce(logits, axis) if axis else logits) + params["bias"][None]
            nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return sk.Mean.of(nats, batch["weight"]), {"accuracy": sk.Mean.of(nats < 1, batch["weight"])}

        return sk.value_and_grad(loss)

    rng = np.random.default_rng(draw.randrange(1000))
    normal = lambda *shape: 0.5 * rng.normal(size=shape).astype(np.float32)  # noqa: E731
    batches = [
        {
            "x": normal(rows, features),
            "label": rng.integers(0, classes, rows).astype(np.int32),
            "weight": _weights(draw, rng, rows),
        }
        for _ in range(STEPS)
    ]
    rules = lambda path, shape: 0 if path == "weight" else None  # noqa: E731
    plans, said = draw_plans(draw, mesh, rules, False)
    label = f"softmax features={features} layers={layers} classes={classes} dropout={rate} examples={rows}; {said}"
    grad_fn = loss_on(mesh.axis("model")) if "model" in mesh.axes else loss_on(None)
    row = draw_row(draw, mesh, plans, grad_fn, label, accumulate=accumulate)
    params = {"layers": normal(layers, features), "weight": normal(features, classes), "bias": normal(classes)}
    return Drawn(row, loss_on(None), params, batches)


def _pieces(draw: random.Random) -> Drawn:
    """A small model in pieces, by any schedule, with stages of any sizes."""
    mesh = draw_mesh(draw, ("stage", "data", "zero", "fsdp"))
    mesh = mesh if "stage" in mesh.axes else Mesh(mesh.axes | {"stage": ("stage",)}, {"stage": 1} | mesh.sizes)
    name, schedule = draw_schedule(draw, mesh)
    sizes = draw_sizes(draw, schedule, 3)
    layers = sum(sizes) if sizes else schedule.devices * schedule.chunks * draw.randint(1, 2)
    dim, rows = draw.randint(5, 9), mesh.ways(*SPLIT_THE_BATCH) * schedule.microbatches * draw.randint(1, 2)
    plans, said = draw_plans(draw, mesh, None, False)
    how = {"layers_per_stage": sizes, "recompute": draw.random() < 0.6, "mode": draw.choice(["masked", "branch"])}
    label = f"pieces dim={dim} layers={layers} examples={rows}; {name} of {schedule.microbatches} {how}; {said}"
    grad_fn = pipelined_grad(*pipelines.PIECES, schedule, "stage", layer_numbers=True, **how)
    batches = [pipelines.make_batch(rows, seed) for seed in range(STEPS)]
    alone = sk.value_and_grad(pipelines.unpipelined(pipelines.PIECES))
    return Drawn(draw_row(draw, mesh, plans, grad_fn, label), alone, pipelines.make_params(layers, dim), batches)


def _transformer(draw: random.Random) -> Drawn:
    """The reference transformer with odd sizes."""
    uses = [use for use in USES if use not in ("expert", "stage") or draw.random() < 0.5]
    mesh = draw_mesh(draw, tuple(uses), {"stage": 4, "ulysses": 4})
    model, context, ulysses = (mesh.ways(use) for use in ("model", "context", "ulysses"))
    experts = mesh.ways("expert") * draw.randint(1, 2) if "expert" in uses else 0
    experts = experts if experts > 1 else 0
    if not experts and "expert" in mesh.axes:
        experts = 4 * mesh.ways("expert")
    name, schedule = draw_schedule(draw, mesh)
    in_branches = schedule is not None and draw.random() < 0.3
    sizes = draw_sizes(draw, schedule, 2) if schedule else None
    pieces = schedule.devices * schedule.chunks if schedule else 1
    sequence = "model" in mesh.axes and not in_branches and draw.random() < 0.5
    if in_branches:
        in_branches = not (set(mesh.axes) & {"context", "ulysses", "expert"})
    accumulate = draw.choice([1, 1, 2, 3])
    together = draw.choice([1, 1, 2]) if schedule is None else 1  # microbatches by layer
    heads = model * ulysses * draw.randint(1, 2)
    config = transformer.Config(
        vocabulary=model * draw.randint(3, 11),
        layers=sum(sizes) if sizes else pieces * draw.randint(1, 2) if schedule else draw.randint(1, 4),
        dim=heads * draw.choice([2, 4]),
        heads=heads,
        kv_heads=draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        hidden=model * draw.randint(2, 9),
        dropout=draw.choice([0.0, 0.1, 0.3]),
        tied=draw.random() < 0.3,
        experts=experts,
        top_k=draw.randint(1, 2),
        # A router's losses are those of a microbatch: without them no number depends on how the batch is cut.
        balance=0.1 if experts and not schedule and accumulate * together == 1 else 0.0,
        router_z=0.01 if experts and not schedule and accumulate * together == 1 else 0.0,
        remat=draw.choice([None, "full", "dots", "dots_without_batch"]),
        microbatches=together,
    )
    order = draw.choice(["zigzag", "contiguous"])
    split = context * ulysses * (model if sequence else 1)
    tokens = split * draw.randint(1, 3) * (2 if order == "zigzag" and context > 1 else 1)
    if tokens == 1:
        tokens = 3
    rows = mesh.ways(*SPLIT_THE_BATCH) * accumulate * together * draw.randint(1, 2)
    rows *= schedule.microbatches if schedule else 1
    has = lambda use: mesh.axis(use) if use in mesh.axes else None  # noqa: E731
    axes = transformer.Axes(
        has("model"),
        sequence=sequence,
        context=has("context"),
        ulysses=has("ulysses"),
        order=order,
        expert=has("expert"),
        impl=draw.choice(["auto", "gather", "ring", "bidirectional"]),
        stage=has("stage"),
    )
    rules = transformer.tensor_rules(config, has("model"), model) if has("model") else None
    plans, said = draw_plans(draw, mesh, rules, sequence)
    config = dataclasses.replace(config, prefetch=schedule is None and "by layer" in said and draw.random() < 0.4)
    how = {"mode": "branch" if in_branches else "masked", "recompute": draw.random() < 0.6, "layers_per_stage": sizes}
    if schedule:
        grad_fn = pipelined_grad(*transformer.pieces(config, axes), schedule, "stage", layer_numbers=True, **how)
        grad_fn = transformer.in_order(grad_fn, axes)
        said += f"; {name} of {schedule.microbatches} {how}"
    else:
        grad_fn = sk.value_and_grad(transformer.loss_fn(config, axes))
    low = draw.choice(["no", "no", "bf16", "fp16", "master"]) if not experts else "no"
    label = f"{config} {axes} tokens={tokens} examples={rows}; {said}"
    plain = dataclasses.replace(config, prefetch=False, microbatches=1, remat=None)
    alone = sk.value_and_grad(transformer.loss_fn(plain))
    if low != "no":  # rounding decides which of two tokens is the likelier
        alone, grad_fn = _without_accuracy(alone), _without_accuracy(grad_fn)
    row = draw_row(draw, mesh, plans, grad_fn, label, accumulate=accumulate, precision=low)
    batches = [_text(draw, config.vocabulary, rows, tokens, step) for step in range(STEPS)]
    return Drawn(row, alone, weights(config, draw.randrange(99)), batches)


def _without_accuracy(grad_fn: Any) -> Any:
    """The same, less the share of tokens that were predicted right; a pipeline's GradFn stays one."""
    if isinstance(grad_fn, PipelineGradFn):
        return dataclasses.replace(grad_fn, function=_without_accuracy(grad_fn.function))

    def less(params: Any, batch: Any, keys: Any, *, scale: Any = 1) -> Any:
        mean, aux, grads = grad_fn(params, batch, keys, scale=scale)
        return mean, {name: value for name, value in aux.items() if name != "accuracy"}, grads

    return less


def _text(draw: random.Random, vocabulary: int, rows: int, length: int, step: int) -> Any:
    """Tokens; weights, packed documents and targets to leave out."""
    draw = random.Random(f"{draw.getstate()[1][0]}")  # every batch has the same entries
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, vocabulary, (rows, length + 1)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    if draw.random() < 0.7:
        batch["weights"] = _weights(draw, rng, rows, length)
    if draw.random() < 0.3:
        batch["segments"] = np.cumsum(rng.integers(0, 4, (rows, length)) == 0, axis=1).astype(np.int32)
    if draw.random() < 0.3:
        batch["targets"] = np.where(rng.random((rows, length)) < 0.2, -1, batch["targets"]).astype(np.int32)
    return batch
