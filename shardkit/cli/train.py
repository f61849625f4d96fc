"""`shardkit train data=8`: a byte-level transformer on text, with the same numbers on every mesh."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console

import shardkit as sk
from shardkit import viz
from shardkit._check import counted
from shardkit.cli.curve import losses, picture
from shardkit.cli.display import Display
from shardkit.cli.loop import DONE, Trained, loop
from shardkit.cli.output import console
from shardkit.cli.pictures import check_picture
from shardkit.cli.pipelines import plain_loss
from shardkit.cli.plans import mesh_words
from shardkit.cli.resuming import Resumed, first_state, resumed
from shardkit.cli.run import CommandRun, config_of, mesh_of, settings_of
from shardkit.cli.train_options import Options, check
from shardkit.cli.trainlog import TrainLog, train_log
from shardkit.cli.verify import Differences, verify

_POINTS = 8  # of a loss curve, for a picture that shows more than its numbers


def train(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Train a byte-level transformer on text, with the same numbers on every mesh."""
    check(options)
    check_picture("train", options.output)
    cluster = sk.runtime.initialize()
    many, writes = cluster.processes > 1, cluster.is_master
    here = console(quiet=not writes)
    mesh = mesh_of("train", options.mesh, many=many)
    here.print(sk.describe(mesh))
    config = config_of(options, mesh.shape)
    with _checkpoints(options) as checkpoints, _snapshots(options) as snapshots:
        resume = resumed(settings_of(options, config), options, checkpoints, snapshots)
        with Display(here, resume.first if resume else 0, options.steps) as display:
            with display.building("text and initial state") if display.moves else nullcontext():
                run = CommandRun(options, mesh, config, resume.began if resume else 0)
                state, resume = first_state(run, checkpoints, resume, snapshots)
            first = resume.first if resume else 0
            ended = first >= options.steps
            file = None if ended and options.json and options.json.exists() else options.json  # it keeps its results
            guard = _guard(run, first) if many else None
            with train_log(file, options.tensorboard, writes=writes, resumes=resume is not None) as log:
                log.begin(**_description(run, state, first))
                try:
                    differences = _introduce(run, state, resume, display, log)
                    if not ended:
                        trained = loop(run, state, first, guard, checkpoints, display, log, snapshots)
                    else:
                        trained = Trained(state, validation_loss=_result(run, state, resume))
                except KeyboardInterrupt:
                    here.print(_kept(options, checkpoints))
                    raise
                log.row("end", **_results(run, trained, differences))
            if snapshots is not None and trained.end is DONE:
                snapshots.clear()
        return _summary(run, trained, differences, here, checkpoints)


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


def _snapshots(options: Options) -> Any:
    return sk.runtime.Snapshots(every=options.snapshot_every) if options.snapshot_every else nullcontext()


def _description(run: CommandRun, state: sk.TrainState, first: int) -> dict[str, Any]:
    return {
        "first_step": first + 1,
        "mesh": mesh_words(run.options.mesh),
        "plan": run.plan,
        "pipeline": run.pipeline,
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "held_bytes_per_device": sk.bytes_per_device(state),
        "options": asdict(run.options),
    }


def _introduce(
    run: CommandRun, state: sk.TrainState, resume: Resumed | None, display: Display, log: TrainLog
) -> Differences | None:
    """Prints the mesh, plan and data; with --verify, compares the first steps with one device."""
    options, mesh, tell = run.options, run.mesh, display.console.print
    size = sum(x.size for x in jax.tree.leaves(state.params))
    if mesh.devices.flat[0].platform == "cpu":
        said = "simulated CPU devices share this machine's cores: the speed means nothing, the numbers do."
        tell(said, style="dim")
    held = sk.bytes_per_device(state)
    whole = sum(x.nbytes for x in jax.tree.leaves(state) if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))
    beside = f" (data parallelism: {whole:,})" if held < 0.99 * whole else ""
    tell(f"plan: {run.plan}; {size:,} parameters; {held:,} bytes of state on each device{beside}")
    if run.pipeline:
        tell(f"pipeline: {run.pipeline}")
    text = run.text
    tell(f"text: {text.source}, {text.train.size:,} bytes to train on, {text.validation.size:,} held out")
    if resume:
        then = "already finished"
        if resume.first < options.steps:
            changes = f" with {', '.join(resume.changes)}" if resume.changes else ""
            anew = "; the optimizer's state begins anew" if resume.anew else ""
            then = f"resuming{changes}{anew}"
        where = "snapshot: step {}, in memory" if resume.memory else f"checkpoint: step {{}} of {options.checkpoint}"
        tell(f"{where.format(resume.first)}; {then}")
    elif options.init_from:
        tell(f"parameters: those of {options.init_from}; the optimizer starts from step 0")

    if not options.verify:
        return None
    if resume:
        tell("verify: skipped, because a resumed run does not start from step 0")
        return None
    one_device = plain_loss(run.config, options, mesh.shape, run.pipeline)
    with display.building(f"verify, {counted(options.verify, 'step')} on the mesh and on one device"):
        differences = verify(one_device, run, state, options.verify)
    tell(f"verify: {differences}")
    log.row("verify", **differences._asdict())
    return differences


def _results(run: CommandRun, trained: Trained, differences: Differences | None) -> dict[str, Any]:
    curve, held = trained.curve, _validations(trained)
    return {
        "step": int(trained.state.step),
        "ended": trained.end.reason,
        "exit_code": trained.end.code,
        "train_loss": curve[-1].train_loss if curve else None,
        "validation_loss": held[-1] if held else None,
        "tokens_per_second": run.tokens_per_second(trained.steps, trained.seconds) or None,
        "held_bytes_per_device": sk.bytes_per_device(trained.state),
        "verify_loss_difference": differences.loss if differences else None,
        "verify_parameter_difference": differences.parameters if differences else None,
    }


def _validations(trained: Trained) -> list[float]:
    held = [p.validation_loss for p in trained.curve if p.validation_loss is not None]
    return held + ([] if trained.validation_loss is None else [trained.validation_loss])


def _summary(
    run: CommandRun, trained: Trained, differences: Differences | None, here: Console, checkpoints: Any
) -> int:
    curve, held, steps = trained.curve, _validations(trained), int(trained.state.step)
    if run.options.output and curve and not here.quiet:
        viz.losses(losses(curve), output=run.options.output)
    if len(curve) >= _POINTS:
        here.print(picture(curve, color=here.color_system is not None))
    time = f", {trained.seconds:.0f} s" if trained.steps else ""
    time += f", {run.tokens_per_second(trained.steps, trained.seconds):,.0f} tokens/s" if trained.seconds else ""
    here.print(f"{trained.end.reason}: {counted(steps, 'step')}{time}")
    if trained.end.code:
        here.print(_kept(run.options, checkpoints))
    if held:
        here.print(f"validation loss {held[-1]:.3f} nats per byte on held-out text")
    if differences:
        here.print(f"verify: {differences}")
    return trained.end.code


def _kept(options: Options, checkpoints: Any) -> str:
    """What is left of a run that ended early, and how to go on with it."""
    if checkpoints is None:
        return "nothing was saved; with --checkpoint DIRECTORY a run is saved, and the same command resumes it"
    step = checkpoints.latest_step()
    if step is None:
        return f"nothing was saved yet in {options.checkpoint}; the same command starts from step 0"
    return f"step {step} is saved in {options.checkpoint}; the same command resumes from there"
