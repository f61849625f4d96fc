"""The options of a training run: `shardkit train --steps 100` is `TrainOptions(steps=100)`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

# Options that may change when a run is resumed, where that is meant.
Change = Literal["steps", "learning-rate"]
# Options that determine the numbers, which a run that resumes must keep; all others change them by rounding at most.
_OF_NUMBERS = (
    *("data", "steps", "batch", "length", "layers", "dim", "heads", "dropout", "experts"),
    *("precision", "learning_rate", "init_from", "seed"),
)


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training run."""

    mesh: tuple[str, ...] = ("data=-1",)
    """Mesh axes, such as data=2 fsdp=4; one size may be -1, for all remaining devices. Without an accelerator, that
    many CPU devices are simulated. What each axis splits:

    data, fsdp, zero1, zero2: examples (fsdp and zero2 gather layer by layer)

    model: heads, hidden width and vocabulary

    context, ulysses: tokens, with ring attention or all-to-all over heads

    expert: experts; stage: layers, as a pipeline."""
    data: tuple[Path, ...] = ()
    """Text files or directories of them; by default the source of the Python standard library."""
    steps: int = 150
    """Optimizer steps, of adamw on gradients clipped to the global norm 1."""
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
    dropout: float = 0.0
    """Dropout rate of each block's output."""
    experts: int | None = None
    """Experts per feed-forward layer; by default twice the size of axis expert, none without that axis."""
    sequence: bool = False
    """Sequence parallelism: between the blocks, split tokens over axis model."""
    schedule: str | None = None
    """Pipeline schedule, with axis stage: gpipe, one_f_one_b, interleaved, breadth_first, lockstep (the default),
    zero_bubble_h1, zero_bubble_v, dualpipe_v, search (the fastest found), or a .csv file of `Schedule.to_csv()`."""
    microbatches: int | None = None
    """Pipeline microbatches; by default 4 per stage, or the most that divide the examples of a device."""
    chunks: int | None = None
    """Model chunks (virtual stages) per device, for interleaved, breadth_first, lockstep and search."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision: none, bfloat16, or float16 with dynamic loss scaling."""
    learning_rate: float = 3e-3
    """Peak learning rate: linear warmup over a tenth of the steps, then cosine decay to a tenth of the peak."""
    nonfinite: Literal["keep", "skip", "stop"] = "stop"
    """If the loss or a gradient is not finite: take the step, skip it, or stop."""
    seed: int = 0
    """Seed of the parameters, dropout and batches."""
    log_every: int = 10
    """Steps between logged steps."""
    evaluate_every: int = 50
    """Steps between evaluations of the validation loss."""
    compare_replicas: int = 0
    """Steps between bitwise comparisons of all replicas of the state, which stop the run on a difference. 0: never."""
    verify: int = 0
    """Train this many steps on one device with plain jax too, and print the largest differences."""
    checkpoint: Path | None = None
    """Directory of checkpoints to save to: the three newest, and the best. The run resumes from the newest one there
    that is intact, on any mesh."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step is saved too, and on SIGTERM the current one (exit code 75)."""
    change: tuple[Change, ...] = ()
    """Options that may differ from those of the run that is resumed."""
    init_from: Path | None = None
    """Parameters to start from: another run's checkpoints."""
    deadline: float = 300.0
    """With several processes: seconds for a step, or for its data, after which all stop and name the late ones."""


_AT_LEAST = dict.fromkeys(("steps", "batch", "length", "accumulate", "layers", "dim", "heads", "microbatches"), 1)
_AT_LEAST |= dict.fromkeys(("chunks", "log_every", "evaluate_every", "checkpoint_every"), 1)
_AT_LEAST |= dict.fromkeys(("experts", "seed", "verify", "compare_replicas", "dropout"), 0)
_AT_MOST = 2**31 - 1  # of a whole number: sizes and steps are int32 in the programs
_LARGEST_SEED = 2**63 - 1  # of jax.random.key


def check(options: TrainOptions) -> None:
    """Refuses numbers that no run can have."""
    for name, least in _AT_LEAST.items():
        value = getattr(options, name)
        if value is not None and not least <= value < math.inf:
            raise ValueError(f"train: {_word(name)} must be at least {least}; got {value}. Pass {least} or more.")
        most = _LARGEST_SEED if name == "seed" else _AT_MOST
        if value is not None and value > most:
            raise ValueError(f"train: {_word(name)} must be at most {most:,}; got {value}. Pass a smaller number.")
    for name in ("learning_rate", "deadline"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise ValueError(f"train: {_word(name)} must be above 0; got {value}. Pass a positive number.")
    if options.batch % options.accumulate:
        raise ValueError(
            f"train: --accumulate must divide --batch; got {options.accumulate} microbatches of {options.batch} "
            "examples. Change one of them."
        )
    if options.dropout >= 1:
        raise ValueError(f"train: --dropout must be below 1; got {options.dropout}. Pass for example 0.1.")


def settings_of(options: TrainOptions, experts: int) -> dict[str, Any]:
    """The options that determine the numbers, as JSON values, with the number of experts that they come to."""
    values = {name: getattr(options, name) for name in _OF_NUMBERS}
    values["data"] = [str(path) for path in options.data]
    values["init_from"] = None if options.init_from is None else str(options.init_from)
    return values | {"experts": experts or None}


def changes(options: TrainOptions, settings: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """What differs from the saved settings from which a run resumes, as `--steps 12 (was 6)`; refuses what must not."""
    found = []
    for name, value in settings.items():
        was, option = saved.get(name), name.replace("_", "-")
        if was == value:
            continue
        if option not in options.change:
            meant = f" --change {option} if that is meant," if option in get_args(Change) else ""
            raise ValueError(
                f"--checkpoint: a run must be resumed with the same options; {name} was {was} and is {value}. Pass the "
                f"same value,{meant} or another directory."
            )
        found.append(f"--{option} {value} (was {was})")
    return found


def _word(name: str) -> str:
    return f"--{name.replace('_', '-')}"
