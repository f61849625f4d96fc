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


def train(given):
    """What each worker runs. Losses go to a file, as a run that starts again has those before."""
    runtime.initialize()  # jax has joined the workers already: only their monitors meet
    folder = Path(given["folder"])
    try:
        mesh, plan = sk.make_mesh(data=-1), sk.fsdp("data")
        init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.adam(0.1), mesh=mesh, plan=plan)
        params, mine = {"w": jnp.ones(4)}, runtime.local_rows(8, mesh, plan.batch_spec(mesh))
        guard = runtime.guard(mesh=mesh, deadlines=runtime.Deadlines(step=60))
        step = guard.watch(step)
        with runtime.Checkpoints(folder / "saved") as checkpoints:
            state, first = init(params, jax.random.key(0)), 0
            if checkpoints.latest_step() is not None:
                state, saved = checkpoints.restore(init.abstract(params))
                first = saved.position
            for index in range(first, STEPS):
                if index == given["lose"] and jax.process_index() == 1 and not (folder / "lost").exists():
                    (folder / "lost").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                rows = np.random.default_rng(index).normal(size=(8, 4)).astype(np.float32)
                batch = runtime.from_process_local(rows[mine], mesh, plan.batch_spec(mesh), batch=8)
                state, metrics = step(state, batch)
                if runtime.is_main():
                    row = {"from": first, "step": index, "loss": round(float(metrics["loss"]), 5)}
                    with open(folder / "losses.jsonl", "a") as losses:
                        losses.write(json.dumps(row) + "\n")
                if index % 2:
                    with guard.phase("save"):
                        checkpoints.save(state, position=index + 1)
                        checkpoints.wait()
    finally:
        runtime.leave()  # Ray ends the worker later


def on_ray(given, workers):
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
        train_loop_config=given,
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=given["folder"], failure_config=FailureConfig(max_failures=2)),
    )
    trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("workers", type=int)
    parser.add_argument("--lose", type=int)
    options = parser.parse_args()
    given = {"folder": str(options.folder.resolve()), "lose": options.lose}
    options.folder.mkdir(exist_ok=True)
    if options.workers:
        on_ray(given, options.workers)
    else:
        train(given)
    sys.stdout.write((options.folder / "losses.jsonl").read_text())
