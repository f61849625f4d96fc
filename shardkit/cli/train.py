"""`shardkit train data=8`: a byte-level transformer on text, with the same numbers on every mesh."""

from __future__ import annotations

import json as json_lib
import math
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console

import shardkit as sk
from shardkit.cli.curve import picture
from shardkit.cli.loop import Trained, loop
from shardkit.cli.pipelines import plain_loss
from shardkit.cli.plans import mesh_words
from shardkit.cli.resuming import Change, Resumed, first_state, resumed
from shardkit.cli.run import CommandRun, config_of, mesh_of, plain, settings_of
from shardkit.cli.verify import Differences, verify


@dataclass(frozen=True)
class Options:
    """Options of `shardkit train`."""

    mesh: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[AXIS=SIZE ...]")] = ("data=-1",)
    """Mesh axes, such as data=2 fsdp=4; one size may be -1, for all remaining devices.
    Without an accelerator, that many CPU devices are simulated. What each axis splits:
    data, fsdp, zero1, zero2: examples (fsdp and zero2 gather layer by layer);
    model: heads, hidden width and vocabulary;
    context, ulysses: tokens, with ring attention or all-to-all over heads;
    expert: experts; stage: layers, as a pipeline."""
    data: tuple[Path, ...] = ()
    """Text files or directories of them; by default the source of the Python standard library."""
    steps: int = 300
    """Optimizer steps."""
    batch: int = 32
    """Global batch size: examples per step, over all devices and microbatches."""
    length: int = 128
    """Sequence length: tokens (bytes) per example."""
    accumulate: int = 1
    """Gradient accumulation: microbatches per step, of the same global batch."""
    layers: int = 4
    """Transformer layers."""
    dim: int = 128
    """Model width."""
    heads: int = 4
    """Attention heads."""
    kv_heads: int | None = None
    """Key/value heads (grouped-query attention); by default as many as heads."""
    hidden: int | None = None
    """Feed-forward width; by default 8/3 of the model width."""
    dropout: float = 0.0
    """Dropout rate of each block's output."""
    tied: bool = False
    """Tie the output head to the embedding."""
    experts: int | None = None
    """Experts per feed-forward layer; by default twice the size of axis expert, none without that axis."""
    top_k: int = 2
    """Experts per token."""
    capacity: float | None = None
    """Expert capacity factor, relative to balanced routing; by default no token is dropped."""
    sequence: bool = False
    """Sequence parallelism: between the blocks, split tokens over axis model."""
    impl: Literal["auto", "gather", "ring", "bidirectional"] = "auto"
    """With --sequence: how all_gather and reduce_scatter overlap with the matmuls."""
    schedule: str | None = None
    """Pipeline schedule, with axis stage: gpipe, one_f_one_b, interleaved, breadth_first, lockstep (the default),
    zero_bubble_h1, zero_bubble_v, dualpipe_v, or a .csv file from `shardkit draw --to-csv`."""
    microbatches: int | None = None
    """Pipeline microbatches; by default 4 per stage, or the most that divide the examples of a device."""
    chunks: int | None = None
    """Model chunks (virtual stages) per device, for interleaved, breadth_first and lockstep."""
    mode: Literal["masked", "branch"] = "masked"
    """In a tick of the schedule, mask the work of other stages or skip it by a branch."""
    recompute: bool = True
    """Recompute a stage in its backward pass, or save the residuals of every microbatch in flight."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision: none, bfloat16, or float16 with dynamic loss scaling."""
    optimizer: Literal["adamw", "adafactor", "sgd"] = "adamw"
    """The optax optimizer."""
    learning_rate: float = 3e-3
    """Peak learning rate: linear warmup over a tenth of the steps, then cosine decay to a tenth of the peak."""
    weight_decay: float = 0.1
    """Weight decay of adamw."""
    clip: float = 1.0
    """Clip gradients to this global norm; 0 turns clipping off."""
    nonfinite: Literal["keep", "skip", "stop"] = "stop"
    """If the loss or a gradient is not finite: take the step, skip it, or stop."""
    seed: int = 0
    """Seed of the parameters, dropout and batches."""
    evaluate_every: int = 50
    """Steps between evaluations of the validation loss."""
    compare_replicas: int = 0
    """Steps between bitwise comparisons of all replicas of the state, which stop the run on a difference. 0: never."""
    verify: int = 0
    """Train this many steps on one device with plain jax too, and print the largest differences."""
    checkpoint: Path | None = None
    """Directory of checkpoints to save to; the run resumes from the newest one there, on any mesh."""
    change: tuple[Change, ...] = ()
    """Options that may differ from those of the run that is resumed. Another optimizer begins with a new state."""
    init_from: Path | None = None
    """Parameters to start from: another run's checkpoints, or .safetensors or .npz files, also of a Llama."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step is saved too, and on SIGTERM the current one (exit code 75)."""
    damaged: Literal["stop", "older"] = "stop"
    """Stop at a damaged newest checkpoint, or take the next older one, as under launch --restarts."""
    keep: int = 3
    """Newest checkpoints to keep, besides the one with the lowest validation loss."""
    deadline: float = 300.0
    """With several processes: seconds for a step, or for its data, after which all stop and name the late ones."""
    flight: Path | None = None
    """With several processes: directory for each process's flight record, written when one fails."""
    json: Path | None = None
    """Write the results to this JSON file."""


def train(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Train a byte-level transformer on text, with the same numbers on every mesh."""
    _check_numbers(options)
    cluster = sk.runtime.initialize()
    many = cluster.processes > 1
    console = Console(soft_wrap=True, highlight=False, quiet=not cluster.is_master)
    mesh = mesh_of("train", options.mesh, many=many)
    config = config_of(options, mesh.shape)
    with _checkpoints(options) as checkpoints:
        resume = resumed(settings_of(options, config), options, checkpoints)
        run = CommandRun(options, mesh, config, resume.began if resume else 0)
        state, resume = first_state(run, checkpoints, resume)
        first = resume.first if resume else 0
        guard = _guard(run, first) if many else None
        differences = _introduce(run, state, resume, console)
        if first < options.steps:
            trained = loop(run, state, first, guard, checkpoints, console)
        else:
            trained = Trained(state, validation_loss=_result(run, state, resume))
    return _summary(run, trained, differences, console, writes=cluster.is_master)


def _result(run: CommandRun, state: sk.TrainState, resume: Resumed | None) -> float:
    """The validation loss of a finished run: the saved one, computed if none was saved."""
    found = resume.saved.metrics.get("validation_loss") if resume else None
    return run.validation(state.params)["loss"] if found is None else found


# The smallest value of each option.
_AT_LEAST = {
    **dict.fromkeys(("steps", "batch", "length", "accumulate", "layers", "dim", "heads", "kv_heads", "hidden"), 1),
    **dict.fromkeys(("top_k", "microbatches", "chunks", "evaluate_every", "checkpoint_every", "keep"), 1),
    **dict.fromkeys(("experts", "seed", "verify", "compare_replicas", "clip", "weight_decay", "dropout"), 0),
}
_ABOVE_ZERO = ("learning_rate", "deadline", "capacity")


def _check_numbers(options: Options) -> None:
    for name, least in _AT_LEAST.items():
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"train: {_word(name)} must be at least {least}; got {value}. Pass {least} or more.")
    for name in _ABOVE_ZERO:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"train: {_word(name)} must be above 0; got {value}. Pass a positive number.")
    if options.dropout >= 1:
        raise ValueError(f"train: --dropout must be below 1; got {options.dropout}. Pass for example 0.1.")
    if options.json is not None and options.json.is_dir():
        raise ValueError(
            f"train: --json must be a file; got the directory {options.json}. Pass for example {options.json}/run.json."
        )


def _word(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _guard(run: CommandRun, first: int) -> sk.runtime.Guard:
    o = run.options
    deadlines = sk.runtime.Deadlines(step=o.deadline, data=o.deadline)
    return sk.runtime.guard(
        mesh=run.mesh, config=run.settings(), deadlines=deadlines, flight=o.flight, first_step=first
    )


def _checkpoints(options: Options) -> Any:
    if options.checkpoint is None:
        return nullcontext()
    try:  # before training, not at the first save
        options.checkpoint.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=options.checkpoint).close()
    except OSError as error:
        raise ValueError(
            f"--checkpoint: the directory must be writable; {options.checkpoint} is not ({error.strerror}). Pass "
            "another directory."
        ) from None
    return sk.runtime.Checkpoints(options.checkpoint, keep=options.keep, best="validation_loss")


def _introduce(run: CommandRun, state: sk.TrainState, resume: Resumed | None, console: Console) -> Differences | None:
    """Prints the mesh, plan and data; with --verify, compares the first steps with one device."""
    options, mesh = run.options, run.mesh
    size = sum(x.size for x in jax.tree.leaves(state.params))
    console.print(sk.describe(mesh))
    if mesh.devices.flat[0].platform == "cpu":
        console.print(
            "[dim]simulated CPU devices share this machine's cores: the speed means nothing, the numbers do.[/dim]"
        )
    held = sk.bytes_per_device(state)
    whole = sum(x.nbytes for x in jax.tree.leaves(state) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))
    beside = f" (data parallelism: {whole:,})" if held < 0.99 * whole else ""
    console.print(f"plan: {run.plan}; {size:,} parameters; {held:,} bytes of state on each device{beside}")
    if run.pipeline:
        console.print(f"pipeline: {run.pipeline}")
    text = run.text
    console.print(f"text: {text.source}, {text.train.size:,} bytes to train on, {text.validation.size:,} held out")
    if resume:
        then = "already finished"
        if resume.first < options.steps:
            changes = f" with {', '.join(resume.changes)}" if resume.changes else ""
            anew = "; the optimizer's state begins anew" if resume.anew else ""
            then = f"resuming{changes}{anew}"
        console.print(f"checkpoint: step {resume.first} of {options.checkpoint}; {then}")
    elif options.init_from:
        console.print(f"parameters: those of {options.init_from}; the optimizer starts from step 0")

    if not options.verify:
        return None
    if resume:
        console.print("verify: skipped, because a resumed run does not start from step 0")
        return None
    one_device = plain_loss(run.config, options, mesh.shape, run.pipeline)
    differences = verify(one_device, run, state, options.verify)
    console.print(f"verify: {differences}")
    return differences


def _summary(
    run: CommandRun, trained: Trained, differences: Differences | None, console: Console, *, writes: bool
) -> int:
    o = run.options
    curve, steps = trained.curve, int(trained.state.step)
    validations = [p.validation_loss for p in curve if p.validation_loss is not None]
    validations += [] if trained.validation_loss is None else [trained.validation_loss]
    speed = run.tokens_per_second(trained.steps, trained.seconds)
    results: dict[str, Any] = {
        "train_loss": curve[-1].train_loss if curve else None,
        "validation_loss": validations[-1] if validations else None,
        "steps": steps,
        "ended": trained.end.reason,
        "tokens_per_second": speed,
        "held_bytes_per_device": sk.bytes_per_device(trained.state),
        "verify_loss_difference": differences.loss if differences else None,
        "verify_parameter_difference": differences.parameters if differences else None,
        "mesh": mesh_words(o.mesh),
        "pipeline": str(run.pipeline) if run.pipeline else None,
        "options": {name: plain(value) for name, value in asdict(o).items()},
        "curve": [p._asdict() for p in curve],
    }
    if o.json and writes and (curve or not o.json.exists()):  # a finished run keeps its results
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json_lib.dumps(results, indent=1) + "\n")
    if len(curve) > 1:
        console.print(picture(curve, color=console.color_system is not None))
    time = f", {trained.seconds:.0f} s, {speed:,.0f} tokens/s" if curve else ""
    console.print(f"{trained.end.reason}: {steps} steps{time}")
    if validations:
        console.print(f"validation loss {validations[-1]:.3f} nats per byte on held-out text")
    if differences:
        console.print(f"verify: {differences}")
    return trained.end.code
