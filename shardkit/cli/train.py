"""`shardkit train data=8`: a byte-level transformer on text, with the same numbers on every mesh."""

from __future__ import annotations

import json as json_lib
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console

import shardkit as sk
from shardkit import viz
from shardkit.cli.curve import losses, picture
from shardkit.cli.loop import Trained, loop
from shardkit.cli.pictures import check_picture
from shardkit.cli.pipelines import plain_loss
from shardkit.cli.plans import mesh_words
from shardkit.cli.resuming import Resumed, first_state, resumed
from shardkit.cli.run import CommandRun, config_of, mesh_of, plain, settings_of
from shardkit.cli.train_options import Options, check
from shardkit.cli.verify import Differences, verify


def train(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Train a byte-level transformer on text, with the same numbers on every mesh."""
    check(options)
    check_picture("train", options.output)
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
    if o.output and writes and curve:
        viz.losses(losses(curve), output=o.output)
    if len(curve) > 1:
        console.print(picture(curve, color=console.color_system is not None))
    time = f", {trained.seconds:.0f} s, {speed:,.0f} tokens/s" if curve else ""
    console.print(f"{trained.end.reason}: {steps} steps{time}")
    if validations:
        console.print(f"validation loss {validations[-1]:.3f} nats per byte on held-out text")
    if differences:
        console.print(f"verify: {differences}")
    return trained.end.code
