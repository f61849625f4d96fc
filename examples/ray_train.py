"""Training on a cluster of Ray: its JaxTrainer starts the workers and joins them by jax, shardkit's guard watches the
steps, and Ray starts all workers again when one is lost; they resume from the newest checkpoint.

`ray_train.py FOLDER 2` runs two workers with one CPU device each, on a Ray that it starts here; `ray_train.py FOLDER 0`
takes the same steps without Ray. `--lose 5` kills a worker before step 5, once. It prints the loss of each step."""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from shardkit import runtime

STEPS = 8


def loss_fn(params, batch, keys):
    return sk.Mean.of((batch @ params["w"] - 1) ** 2)


def make_batch(number, rows, mesh, spec):
    """The batch of a step, of which this process makes its rows: a function of the step's number alone."""
    examples = np.random.default_rng(number).normal(size=(8, 4)).astype(np.float32)
    return runtime.from_process_local(examples[rows], mesh, spec, batch=8)


def log_loss(folder, first, number, loss):
    """Adds a line to a file: a run that starts again has the losses of the run before too."""
    row = {"from": first, "step": number, "loss": round(float(loss), 5)}
    with open(folder / "losses.jsonl", "a") as losses:
        losses.write(json.dumps(row) + "\n")


def train(config):
    """What each worker runs."""
    runtime.initialize()  # jax has joined the workers already: only their monitors meet
    folder = Path(config["folder"])
    lost = folder / "lost"
    try:
        mesh = sk.make_mesh(data=-1)
        plan = sk.fsdp("data")
        spec = plan.batch_spec(mesh)
        rows = runtime.local_rows(8, mesh, spec)
        params = {"w": jnp.ones(4)}
        init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.adam(0.1), mesh=mesh, plan=plan)
        guard = runtime.guard(mesh=mesh, deadlines=runtime.Deadlines(step=60))
        step = guard.watch(step)
        with runtime.Checkpoints(folder / "saved") as checkpoints:
            if checkpoints.latest_step() is None:
                state = init(params, jax.random.key(0))
                first = 0
            else:
                state, saved = checkpoints.restore(init.abstract(params))
                first = saved.position
            for number in range(first, STEPS):
                if number == config["lose"] and jax.process_index() == 1 and not lost.exists():
                    lost.touch()  # once, and not after the restart
                    os.kill(os.getpid(), signal.SIGKILL)
                state, metrics = step(state, make_batch(number, rows, mesh, spec))
                if runtime.is_main():
                    log_loss(folder, first, number, metrics["loss"])
                if number % 2 == 1:
                    with guard.phase("save"):
                        checkpoints.save(state, position=number + 1)
                        checkpoints.wait()
    finally:
        runtime.leave()  # Ray ends the worker later


def train_on_ray(config, workers):
    """Runs `train` in that many workers of a Ray that is started here."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer
    from ray.train.v2.jax.config import JaxConfig

    # On a cluster: ray.init(), ScalingConfig(use_gpu=True, ...), and neither the variable nor jax_config. They make
    # JaxTrainer join the workers on CPUs too.
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    ray.init(num_cpus=workers + 1, include_dashboard=False, runtime_env={"env_vars": variables})
    trainer = JaxTrainer(
        train,
        train_loop_config=config,
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=config["folder"], failure_config=FailureConfig(max_failures=2)),
    )
    trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("workers", type=int)
    parser.add_argument("--lose", type=int)
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    config = {"folder": str(options.folder.resolve()), "lose": options.lose}
    if options.workers > 0:
        train_on_ray(config, options.workers)
    else:
        train(config)
    sys.stdout.write((options.folder / "losses.jsonl").read_text())
