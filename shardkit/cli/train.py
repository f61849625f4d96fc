"""`shardkit train data=8`: a byte-level transformer on text, with the same numbers on every mesh."""

from __future__ import annotations

import json as json_lib
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import jax
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import shardkit as sk
from shardkit.cli.curve import Point, picture
from shardkit.cli.pipelines import functions, pipeline_of, plain_loss
from shardkit.cli.plans import mesh_words, plan_of
from shardkit.cli.verify import Differences, verify
from shardkit.mesh import offer_cpu_devices
from shardkit.models import transformer
from shardkit.runtime import data as text_data

_VALIDATION_EXAMPLES = 512
_LOG_EVERY = 10


@dataclass(frozen=True)
class Options:
    """Train a transformer on bytes of text. The mesh is given as words: data=8, or data=2 fsdp=4.

    The axes are data, fsdp, zero1 and zero2 (fsdp and zero2 work layer by layer), model (heads, hidden width and
    vocabulary), context (tokens, ring attention), ulysses (tokens, attention by heads), expert, and stage (a pipeline).
    """

    mesh: tyro.conf.Positional[tuple[str, ...]] = ("data=-1",)
    """Mesh axes as AXIS=SIZE; one size may be -1 (what is left). On a CPU that many devices are simulated."""
    data: tuple[Path, ...] = ()
    """Files or directories of text; by default the Python standard library's source on this machine."""
    steps: int = 300
    """Optimizer steps."""
    batch: int = 32
    """Examples a step, over all devices and microbatches."""
    length: int = 128
    """Tokens (bytes) in an example."""
    accumulate: int = 1
    """Microbatches a step; the effective batch stays the same."""
    layers: int = 4
    """Transformer layers."""
    dim: int = 128
    """Model width."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int | None = None
    """Key/value heads; by default as many as heads."""
    hidden: int | None = None
    """Feed-forward width; by default 8/3 of the model width."""
    dropout: float = 0.0
    """Share of each block's output dropped in training."""
    tied: bool = False
    """Use the embedding as the output head."""
    experts: int | None = None
    """Experts of each feed-forward layer; by default twice the expert axis, and none without it."""
    top_k: int = 2
    """Experts a token goes to."""
    capacity: float | None = None
    """Places in the experts over those that balanced tokens need; by default no token is dropped."""
    sequence: bool = False
    """Split tokens over the axis model too, between the blocks."""
    impl: Literal["auto", "gather", "ring", "bidirectional"] = "auto"
    """Form of the gathered matmuls, with --sequence."""
    schedule: str | None = None
    """With an axis stage: gpipe, one_f_one_b, interleaved, breadth_first, lockstep (the default), zero_bubble_h1,
    zero_bubble_v, dualpipe_v, or a .csv file such as `shardkit draw --to-csv` writes."""
    microbatches: int | None = None
    """Of the pipeline, in a step; by default 4 a stage, or as many of them as divide the examples of a device."""
    chunks: int | None = None
    """Stages of the model on each device, for interleaved, breadth_first and lockstep."""
    mode: Literal["masked", "branch"] = "masked"
    """Whether devices mask or branch around what is not their own in a tick of the schedule."""
    recompute: bool = True
    """Begin a stage's backward pass with its input alone, or hold what it saved for every microbatch in flight."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Compute dtype: float32, bfloat16, or float16 with dynamic loss scaling."""
    optimizer: Literal["adamw", "adafactor", "sgd"] = "adamw"
    """The optax optimizer."""
    learning_rate: float = 3e-3
    """Highest learning rate; it is warmed up over the first tenth and falls to a tenth along a cosine."""
    weight_decay: float = 0.1
    """Weight decay of adamw."""
    clip: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    nonfinite: Literal["keep", "skip", "stop"] = "stop"
    """What to do when the loss or a gradient is not finite."""
    seed: int = 0
    """Seed of parameters, dropout and sample order."""
    evaluate_every: int = 50
    """Steps between validations."""
    verify: int = 0
    """Train so many steps on one device with plain jax as well, and print the largest differences."""
    json: Path | None = None
    """Write the results to this file as one JSON object."""


def train(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Train a transformer on text."""
    console = Console(soft_wrap=True, highlight=False)
    sizes = mesh_words(options.mesh)
    if all(size > 0 for size in sizes.values()):
        offer_cpu_devices(math.prod(sizes.values()))
    mesh = sk.make_mesh(**sizes)  # type: ignore[arg-type]
    text = text_data.read_text(options.data) if options.data else text_data.standard_library()
    config = transformer.Config(
        layers=options.layers,
        dim=options.dim,
        heads=options.heads,
        kv_heads=options.kv_heads,
        hidden=options.hidden,
        dropout=options.dropout,
        tied=options.tied,
        experts=2 * mesh.shape.get("expert", 0) if options.experts is None else options.experts,
        top_k=options.top_k,
        capacity=options.capacity,
    )
    plan, axes = plan_of(mesh.shape, config, sequence=options.sequence, impl=options.impl)
    run = Run(options, mesh, plan, axes, config, text)
    state = run.init(lambda key: transformer.init(key, config), jax.random.key(options.seed))

    size = sum(x.size for x in jax.tree.leaves(state.params))
    console.print(sk.describe(mesh))
    if mesh.devices.flat[0].platform == "cpu":
        console.print("[dim]CPU devices share this machine's cores: the numbers are real, the speed is not.[/dim]")
    held = sk.bytes_per_device(state)
    whole = sum(x.nbytes for x in jax.tree.leaves(state) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))
    beside = f" (data parallelism: {whole:,})" if held < 0.99 * whole else ""
    console.print(f"plan: {plan}; {size:,} parameters; {held:,} bytes of state on each device{beside}")
    if run.pipeline:
        console.print(f"pipeline: {run.pipeline}")
    console.print(f"text: {text.source}, {text.train.size:,} bytes to train on, {text.validation.size:,} held out")

    differences = None
    if options.verify:
        one_device = plain_loss(config, options, mesh.shape, run.pipeline)
        differences = verify(one_device, run.optimizer, run, state, options.verify, options.precision)
        console.print(f"verify: {differences}")
    curve, state, seconds, why = _loop(run, state, console)
    return _summary(run, state, curve, seconds, why, differences, console)


class Run:
    """What a training run is made of: batches by step, the step, and the validation loss."""

    def __init__(
        self,
        options: Options,
        mesh: jax.sharding.Mesh,
        plan: sk.Plan,
        axes: transformer.Axes,
        config: transformer.Config,
        text: text_data.Text,
    ):
        self.options, self.text = options, text
        self.pipeline = pipeline_of(options, mesh.shape)
        grad_fn, loss_fn = functions(config, axes, self.pipeline)
        self.optimizer = _optimizer(options)
        self.init, self.step = sk.make_train_step(
            grad_fn,
            self.optimizer,
            mesh=mesh,
            plan=plan,
            accumulate=options.accumulate,
            precision=options.precision,
            nonfinite=options.nonfinite,
        )
        self._evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=plan, precision=options.precision)
        shape = {"batch": options.batch, "length": options.length}
        count = max(1, _VALIDATION_EXAMPLES // options.batch)
        self._held_out = text_data.validation_batches(text.validation, count=count, **shape)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step; a function of the seed and the step alone."""
        o = self.options
        return text_data.batch_at(self.text.train, seed=o.seed, step=step, batch=o.batch, length=o.length)

    def validation_loss(self, state: sk.TrainState) -> float:
        """Mean loss over the held-out batches, nats per byte."""
        return float(np.mean([self._evaluate(state.params, batch)["loss"] for batch in self._held_out]))


def _optimizer(o: Options) -> Any:
    rate = optax.warmup_cosine_decay_schedule(
        0.0, o.learning_rate, max(1, o.steps // 10), max(2, o.steps), o.learning_rate / 10
    )
    optimizers = {
        "adamw": lambda: optax.adamw(rate, b2=0.95, weight_decay=o.weight_decay),
        "adafactor": lambda: optax.adafactor(rate),
        "sgd": lambda: optax.sgd(rate, momentum=0.9),
    }
    chosen = optimizers[o.optimizer]()
    return optax.chain(optax.clip_by_global_norm(o.clip), chosen) if o.clip > 0 else chosen


def _loop(run: Run, state: sk.TrainState, console: Console) -> tuple[list[Point], sk.TrainState, float, str]:
    """Trains; returns the curve, the last state, the seconds spent in steps after the first, and why it ended."""
    o = run.options
    curve: list[Point] = []
    seconds, why = 0.0, "done"
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  validation {task.fields[validation]:.3f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    nan = float("nan")
    with Progress(*columns, console=console) as progress, _interruptible() as stop:
        task = progress.add_task("train", total=o.steps, loss=nan, validation=nan, speed=0.0)
        mark = time.perf_counter()
        for index in range(o.steps):
            try:
                state, metrics = run.step(state, run.batch(index))
            except sk.NonFiniteError as error:
                state, why = error.state, str(error)
                break
            last = index + 1 == o.steps or bool(stop)
            if index == 0 or last or (index + 1) % _LOG_EVERY == 0 or (index + 1) % o.evaluate_every == 0:
                loss = float(metrics["loss"])  # waits for the steps in flight
                if index:  # the first step compiles
                    seconds += time.perf_counter() - mark
                validation = None
                if last or (index + 1) % o.evaluate_every == 0:
                    validation = run.validation_loss(state)
                    progress.update(task, validation=validation)
                    console.print(f"step {index + 1}: loss {loss:.3f}, validation {validation:.3f} nats per byte")
                curve.append(Point(index + 1, loss, validation))
                speed = index * o.batch * o.length / seconds if seconds else 0.0
                progress.update(task, completed=index + 1, loss=loss, speed=speed)
                mark = time.perf_counter()
            if stop:
                why = f"interrupted after step {index + 1}"
                break
    return curve, state, seconds, why


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Collects Ctrl-C (and SIGTERM) so that the loop can end after the step; a second one ends at once."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _summary(
    run: Run,
    state: sk.TrainState,
    curve: list[Point],
    seconds: float,
    why: str,
    differences: Differences | None,
    console: Console,
) -> int:
    o = run.options
    steps = int(state.step)
    validations = [p.validation_loss for p in curve if p.validation_loss is not None]
    speed = (steps - 1) * o.batch * o.length / seconds if seconds else 0.0
    results: dict[str, Any] = {
        "train_loss": curve[-1].train_loss if curve else None,
        "validation_loss": validations[-1] if validations else None,
        "steps": steps,
        "ended": why,
        "tokens_per_second": speed,
        "held_bytes_per_device": sk.bytes_per_device(state),
        "verify_loss_difference": differences.loss if differences else None,
        "verify_parameter_difference": differences.parameters if differences else None,
        "mesh": mesh_words(o.mesh),
        "pipeline": str(run.pipeline) if run.pipeline else None,
        "options": {name: _plain(value) for name, value in asdict(o).items()},
        "curve": [p._asdict() for p in curve],
    }
    if o.json:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json_lib.dumps(results, indent=1) + "\n")
    if len(curve) > 1:
        console.print(picture(curve, color=console.color_system is not None))
    console.print(f"{why}: {steps} steps, {seconds:.0f} s, {speed:,.0f} tokens/s")
    if validations:
        console.print(f"validation loss {validations[-1]:.3f} nats per byte on text it has not seen")
    if differences:
        console.print(f"verify: {differences}")
    return 0 if why == "done" else 130 if why.startswith("interrupted") else 3


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value
