"""The options of `shardkit train`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from shardkit.cli.output import Json
from shardkit.cli.resuming import Change

EXAMPLES = {
    "shardkit train data=8 --verify 3": "data parallelism, compared with one device",
    "shardkit train data=2 fsdp=4 --json run.jsonl": "sharded state; every logged step as a JSON line",
    "shardkit train data=2 model=4 --sequence": "tensor and sequence parallelism",
    "shardkit train data=2 stage=4 --schedule one_f_one_b": "a pipeline",
    "shardkit train fsdp=8 --checkpoint runs/a": "saves; the same command again resumes",
}
GROUPS = {
    "run": ("data", "steps", "batch", "length", "accumulate", "precision", "seed"),
    "model": ("layers", "dim", "heads", "kv_heads", "hidden", "dropout", "tied", "experts", "top_k", "capacity"),
    "tensor parallelism": ("sequence", "impl"),
    "pipeline": ("schedule", "microbatches", "chunks", "mode", "recompute"),
    "optimizer": ("optimizer", "learning_rate", "weight_decay", "clip", "nonfinite"),
    "what is measured": (
        *("log_every", "json", "tensorboard", "output", "evaluate_every"),
        *("compare_replicas", "replay_every", "verify"),
    ),
    "checkpoints": ("checkpoint", "checkpoint_every", "snapshot_every", "keep", "damaged", "change", "init_from"),
    "several processes": ("deadline", "flight"),
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit train`."""

    mesh: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="AXIS=SIZE ...")] = ("data=-1",)
    """Mesh axes, such as data=2 fsdp=4; one size may be -1, for all remaining devices. Without an accelerator, that
    many CPU devices are simulated. What each axis splits:

    data, fsdp, zero1, zero2: examples (fsdp and zero2 gather layer by layer)

    model: heads, hidden width and vocabulary

    context, ulysses: tokens, with ring attention or all-to-all over heads

    expert: experts; stage: layers, as a pipeline."""
    data: tuple[Path, ...] = ()
    """Text files or directories of them; by default the source of the Python standard library."""
    steps: int = 150
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
    """By default the backward pass recomputes its stage; --no-recompute saves the residuals of all microbatches."""
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
    log_every: int = 10
    """Steps between rows of --json and --tensorboard, and between lines in a pipe."""
    evaluate_every: int = 50
    """Steps between evaluations of the validation loss."""
    compare_replicas: int = 0
    """Steps between bitwise comparisons of all replicas of the state, which stop the run on a difference. 0: never."""
    replay_every: int = 0
    """Steps between those that are repeated on exchanged devices, to stop the run at silent corruption. 0: never."""
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
    snapshot_every: int = 0
    """Steps between copies of the state in the hosts' memory, from which launch --restarts resumes. 0: none."""
    damaged: Literal["stop", "older"] = "stop"
    """Stop at a damaged newest checkpoint, or take the next older one, as under launch --restarts."""
    keep: int = 3
    """Newest checkpoints to keep, besides the one with the lowest validation loss."""
    deadline: float = 300.0
    """With several processes: seconds for a step, or for its data, after which all stop and name the late ones."""
    flight: Path | None = None
    """With several processes: directory for each process's flight record, written when one fails."""
    output: Path | None = None
    """Write the picture of the losses to this .png or .svg file; needs the extra [viz]."""
    json: Json = None
    """Write a JSON line for each logged step, and for what else happens, as it happens; with - to standard output."""
    tensorboard: Path | None = None
    """Directory for TensorBoard's files; needs the extra [tensorboard]."""


# The smallest value of each option.
_AT_LEAST = {
    **dict.fromkeys(("steps", "batch", "length", "accumulate", "layers", "dim", "heads", "kv_heads", "hidden"), 1),
    **dict.fromkeys(("top_k", "microbatches", "chunks", "log_every", "evaluate_every", "checkpoint_every", "keep"), 1),
    **dict.fromkeys(("experts", "seed", "verify", "compare_replicas", "replay_every", "snapshot_every"), 0),
    **dict.fromkeys(("clip", "weight_decay", "dropout"), 0),
}
_ABOVE_ZERO = ("learning_rate", "deadline", "capacity")


def check(options: Options) -> None:
    """Refuses numbers that no run can have."""
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
