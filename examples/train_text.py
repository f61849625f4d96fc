"""A transformer on text, on any mesh, with the numbers of one device: one file to copy and to change.

    python examples/train_text.py data=8 --simulate --verify 3
    python examples/train_text.py data=2 fsdp=2 model=2 --simulate --checkpoint runs/a   # the same again goes on
    python examples/train_text.py data=2 stage=4 --simulate
    shardkit launch -n 2 --devices 2 -- examples/train_text.py data=2 fsdp=-1

Axes that split the examples of a batch: data, fsdp (with the state, gathered layer by layer). Axes that split a layer:
model (heads, hidden width and vocabulary), context (tokens, with ring attention). stage: the layers, as a pipeline.
Without --simulate the devices are the real ones, and one size may be -1. `restarting.py`, beside this file, has what
ends a job of several processes that hangs.
"""

import argparse
import math
import sys
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax

import shardkit as sk
from shardkit.models import transformer

SEED = 0
LOG_EVERY = 10  # steps


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mesh", nargs="+", metavar="AXIS=SIZE")
    parser.add_argument("--simulate", action="store_true", help="CPU devices, as many as the mesh needs")
    parser.add_argument("--text", type=Path, help="a file; by default the source of Python's standard library")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=32, help="examples per step, over all devices")
    parser.add_argument("--length", type=int, default=128, help="bytes per example")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--checkpoint", type=Path, help="a directory to save to, and to go on from, on any mesh")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--verify", type=int, default=0, help="compare so many steps with one device first")
    return parser.parse_args()


def parse_sizes(words):
    """The sizes of the mesh axes: {"data": 2, "fsdp": -1} of ["data=2", "fsdp=-1"]."""
    sizes = {}
    for word in words:
        axis, size = word.split("=")
        sizes[axis] = int(size)
    return sizes


def say(text):
    if sk.runtime.is_main():  # one process of the job
        print(text, flush=True)


def read_text(path):
    """The bytes to train on, and those held out: the last tenth."""
    if path is None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    else:
        paths = [path]
    contents = [path.read_bytes() for path in paths]
    text = np.frombuffer(b"\n".join(contents), np.uint8)
    held_out = len(text) // 10
    return text[:-held_out], text[-held_out:]


def make_batch(text, starts, length):
    """Windows of the text, [B, length], and as targets the same one byte later."""
    windows = text[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def draw_batch(text, step, batch, length):
    """The batch of a step follows from its number alone: the same on every mesh, and after a restart."""
    bits = np.random.Philox(key=np.array([SEED, step], np.uint64)).random_raw(batch)
    starts = (bits % np.uint64(len(text) - length)).astype(np.int64)
    return make_batch(text, starts, length)


def make_model(config, sizes, batch):
    """What each device computes, the loss for evaluation, and how the axes of the mesh are used."""
    # An axis has two readers: a plan, which says what its devices hold, and the model, whose layers communicate over
    # it. Over data and fsdp a layer sends nothing: only the plan has them.
    plans = []
    axes = transformer.Axes()
    if "data" in sizes:
        plans.append(sk.dp("data"))
    if "fsdp" in sizes:
        plans.append(sk.fsdp("fsdp", layerwise=("layers",)))
    if "context" in sizes:
        plans.append(sk.cp("context"))
        axes = replace(axes, context="context")
    if "model" in sizes:
        rules = transformer.tensor_rules(config, "model", sizes["model"])
        plans.append(sk.tp("model", rules, sequence=True))
        axes = replace(axes, model="model", sequence=True)
    if "stage" not in sizes:
        loss_fn = transformer.loss_fn(config, axes)
        return sk.value_and_grad(loss_fn), loss_fn, sk.chain(*plans)

    # As many microbatches as divide a device's examples, up to four for each stage: they keep the pipeline full.
    axes = replace(axes, stage="stage")
    stages = sizes["stage"]
    examples = batch // (sizes.get("data", 1) * sizes.get("fsdp", 1))
    microbatches = math.gcd(4 * stages, examples)
    pipe = sk.pipeline(sk.schedules.one_f_one_b(stages, microbatches), "stage")
    pieces = transformer.pieces(config, axes)
    grad_fn = transformer.in_order(pipe.value_and_grad(*pieces, layer_numbers=True), axes)
    loss_fn = transformer.in_order(pipe.loss(*pieces, layer_numbers=True), axes)
    return grad_fn, loss_fn, sk.chain(*plans, pipe.plan)


def verify(config, grad_fn, optimizer, mesh, plan, batches):
    """Compares loss, gradients and parameters of each step with one device, and ends the program if they differ."""
    reference = sk.value_and_grad(transformer.loss_fn(config))
    params = transformer.init(jax.random.key(SEED), config)
    try:
        sk.testing.assert_same_training(
            grad_fn, reference, optimizer, mesh=mesh, plan=plan, params=params, batches=batches
        )
    except AssertionError as difference:
        sys.exit(f"verify: {difference}")
    say(f"verify: loss, gradients and parameters of {len(batches)} steps are those of one device")


def first_state(init, config, checkpoints):
    """The newest state that is saved and intact, whatever mesh it is from; else a new one."""

    def init_params(key):
        return transformer.init(key, config)

    if checkpoints is None or checkpoints.latest_step() is None:
        return init(init_params, jax.random.key(SEED))
    state, saved = checkpoints.restore(init.abstract(init_params), damaged="older")
    say(f"goes on after step {saved.step}")
    return state


def make_optimizer(steps):
    # The schedule ends a step after the run: a cosine needs a step after the warm-up, in a run of one step too.
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, max(1, steps // 10), steps + 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def open_checkpoints(directory):
    """The checkpoints of a directory; None for none."""
    if directory is None:
        return nullcontext()
    sk.runtime.watch_preemption()
    return sk.runtime.Checkpoints(directory)


def main():
    options = parse_options()
    sizes = parse_sizes(options.mesh)
    if options.simulate:
        sk.simulate_devices(math.prod(sizes.values()))
    sk.runtime.initialize()  # one job of all processes, if there are several
    mesh = sk.make_mesh(**sizes)
    say(sk.describe(mesh))

    config = transformer.Config(layers=options.layers, dim=options.dim, heads=4)
    grad_fn, loss_fn, plan = make_model(config, dict(mesh.shape), options.batch)
    optimizer = make_optimizer(options.steps)
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan)
    evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=plan)
    spec = plan.batch_spec(mesh)
    text, held_out = read_text(options.text)
    say(f"plan: {plan}; {len(text):,} bytes to train on, {len(held_out):,} held out")

    def batch_at(number):
        return draw_batch(text, number, options.batch, options.length)

    if options.verify:
        batches = [batch_at(number) for number in range(1, options.verify + 1)]
        verify(config, grad_fn, optimizer, mesh, plan, batches)

    with open_checkpoints(options.checkpoint) as checkpoints:
        state = first_state(init, config, checkpoints)
        start = time.perf_counter()
        for number in range(int(state.step) + 1, options.steps + 1):
            batch = sk.runtime.from_full(batch_at(number), mesh, spec)
            state, metrics = step(state, batch)
            preempted = checkpoints is not None and sk.runtime.preempted(number)
            is_last = preempted or number == options.steps
            if is_last or number % LOG_EVERY == 0:  # reading the loss waits for the steps in flight
                loss = float(metrics["loss"])
                seconds = time.perf_counter() - start
                say(f"step {number}: loss {loss:.4f} after {seconds:.1f} s")
            if checkpoints is None:
                continue
            if is_last or number % options.save_every == 0:
                checkpoints.save(state, position=number)
            if preempted:
                checkpoints.wait()
                sk.runtime.finish(sk.runtime.PREEMPTED)  # a scheduler may start it again: it goes on from here

        # One batch of windows that lie evenly in the text held out, the same for every run.
        starts = np.linspace(0, len(held_out) - options.length - 1, options.batch).astype(np.int64)
        batch = sk.runtime.from_full(make_batch(held_out, starts, options.length), mesh, spec)
        loss = float(evaluate(state.params, batch)["loss"])
        say(f"held-out loss {loss:.4f} nats per byte after {int(state.step)} steps")


if __name__ == "__main__":
    main()
