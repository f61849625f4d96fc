"""What a run starts from: new parameters, those of another run or file, or its own newest checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

import shardkit as sk
from shardkit.cli.run import CommandRun
from shardkit.jobs.restarts import RESTARTS
from shardkit.runtime.weights.load import tensor_names

# Options that may change where that is meant.
Change = Literal["steps", "learning-rate", "weight-decay", "clip", "optimizer"]
_OF_LLAMA = "model.embed_tokens.weight"


class Resumed(NamedTuple):
    """A checkpoint from which a run resumes.

    Attributes:
        saved: what was saved with it.
        memory: whether it is a snapshot in memory, not a checkpoint.
        first: the index of the next step.
        began: the step from which the optimizer counts.
        anew: whether the optimizer begins with a new state, because it is another optimizer.
        changes: the options that differ, as `--steps 12 (was 6)`.
    """

    saved: sk.runtime.Run
    first: int
    began: int = 0
    anew: bool = False
    changes: tuple[str, ...] = ()
    memory: bool = False


def resumed(settings: Mapping[str, Any], options: Any, checkpoints: Any, snapshots: Any = None) -> Resumed | None:
    """The newest checkpoint, or a snapshot of the same options that is as new; None to start from step 0.

    Raises:
        ValueError: it was saved with other options, and they are not among those that may change.
    """
    newest = None if checkpoints is None else checkpoints.latest_step()
    kept = None if snapshots is None else snapshots.run()
    if kept and kept.step >= (newest or 0) and all(kept.config.get(name) == settings[name] for name in settings):
        return Resumed(kept, kept.position // options.batch, kept.config["optimizer_began"], memory=True)
    if newest is None:
        return None
    saved = checkpoints.run(damaged=_damaged(options))
    changes = []
    for name, value in settings.items():
        was, option = saved.config.get(name), name.replace("_", "-")
        if was == value:
            continue
        if option not in options.change:
            meant = f" --change {option} if that is meant," if option in get_args(Change) else ""
            raise ValueError(
                f"--checkpoint: a run must be resumed with the same options; {name} was {was} and is {value}. Pass the "
                f"same value,{meant} or another directory."
            )
        changes.append(f"--{option} {value} (was {was})")
    first = saved.position // options.batch
    kinds = [(each.get("optimizer"), each.get("clip", 0) > 0) for each in (saved.config, settings)]
    anew = kinds[0] != kinds[1]
    began = first if anew else saved.config.get("optimizer_began", 0)
    return Resumed(saved, first, began, anew, tuple(changes))


def _damaged(options: Any) -> Literal["stop", "older"]:
    """Under `shardkit launch --restarts` nobody is there who could choose an older step."""
    return "older" if RESTARTS in os.environ else options.damaged


def first_state(
    run: CommandRun, checkpoints: Any, resume: Resumed | None, snapshots: Any = None
) -> tuple[sk.TrainState, Resumed | None]:
    """The state to start from, and the checkpoint that it is of: an older one, if the newest was damaged."""
    o = run.options
    key = jax.random.key(o.seed)
    if resume is None:
        return run.init(run.params if o.init_from is None else _weights(run, o.init_from), key), None
    target = run.init.abstract(run.params)  # type: ignore[attr-defined]
    if resume.memory:
        return snapshots.restore(target)[0], resume
    if not resume.anew:
        state, saved = checkpoints.restore(target, resume.saved.step, damaged=_damaged(o))
        return state, resume._replace(saved=saved, first=saved.position // o.batch)
    params = sk.runtime.load_params(o.checkpoint, target.params, step=resume.saved.step)
    state = run.init(params, key)
    return state._replace(step=jax.device_put(jnp.int32(resume.saved.step), state.step.sharding)), resume


def _weights(run: CommandRun, path: Path) -> Any:
    """The parameters of a run or a file, by shardkit's names or Hugging Face's of Llama."""
    like = run.init.abstract(run.params).params  # type: ignore[attr-defined]
    names = sk.runtime.llama_names(run.config) if _OF_LLAMA in tensor_names(path) else None
    return sk.runtime.load_params(path, like, names=names, cast=True)
