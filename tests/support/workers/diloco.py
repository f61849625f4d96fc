"""A guarded DiLoCo run of a worker in each process, which resumes: `diloco.py DIRECTORY --fault kill`."""

import argparse
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk

EVERY = 2  # steps to an exchange, and to a checkpoint after it


def batch_of(index, worker):
    """A worker's examples of a step."""
    return np.random.default_rng(10 * index + worker).normal(size=(4, 6)).astype(np.float32)


def loss_fn(params, batch, keys):
    """Draws, so that a key which is not restored shows."""
    noise = jax.vmap(lambda key: jax.random.normal(key, (6,)))(keys)
    return jnp.mean((jnp.tanh((batch + 0.1 * noise) @ params["w"]) @ params["out"] - 1) ** 2)


def run_on(mesh):
    """Padded leaves, a momentum in each worker, and one of the outer optimizer."""
    plan = sk.fsdp("data", min_size=1, uneven="pad")
    grad_fn = sk.value_and_grad(loss_fn)

    def make(mesh):
        return sk.make_train_step(grad_fn, optax.sgd(0.05, momentum=0.9), mesh=mesh, plan=plan)

    return sk.diloco(make, optax.sgd(0.7, momentum=0.9, nesterov=True), mesh=mesh, axis="pod")


def begin(run):
    """The first state."""
    return run.init({"w": jnp.ones((6, 5)) / 6, "out": jnp.ones(5) / 5}, jax.random.key(3))


def digest(state):
    """A number that depends on all parameters of the last exchange."""
    return sum(float(jnp.sum(x * x)) for x in jax.tree.leaves(state.params))


def main():
    """Trains, and prints the digest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--fault", choices=["", "kill", "sleep", "shape", "turns"], default="", help="of process 1, before step 3"
    )
    parser.add_argument("--deadline", type=float, default=60.0)
    given = parser.parse_args()
    cluster = sk.runtime.initialize(timeout=300)
    mesh = sk.make_mesh(pod=cluster.processes, data=-1)
    deadlines = sk.runtime.Deadlines(compile=120, step=given.deadline, save=given.deadline)
    run = run_on(mesh)
    state = begin(run)
    with sk.runtime.Checkpoints(given.directory) as checkpoints:
        first = checkpoints.latest_step()
        if first is not None:
            state, _ = checkpoints.restore(state)
            print("resumed at", first, flush=True)
        guard = sk.runtime.guard(mesh=mesh, deadlines=deadlines, first_step=first or 0)
        step = guard.watch(run.step)
        for index in range(first or 0, given.steps):
            if index == 3 and cluster.rank == 1:
                if given.fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if given.fault == "sleep":
                    time.sleep(3600)
            short = given.fault == "shape" and cluster.rank == 1 and index == 3
            # Workers train alone: shapes that all have compared may come to each in an order of its own.
            turns = given.fault == "turns" and (index == 0 or (index > 1 and index % 2 == cluster.rank))
            rows = 2 if short or turns else 4
            batches = [None] * cluster.processes
            batches[cluster.rank] = batch_of(index, cluster.rank)[:rows]
            state, _ = step(state, batches)
            if index % EVERY == EVERY - 1:
                with guard.phase("step"):
                    state = run.exchange(state)
                with guard.phase("save"):
                    checkpoints.save(state)
                    checkpoints.wait()
    print(f"digest {digest(state):.5f}", flush=True)
    sk.runtime.finish()


if __name__ == "__main__":
    main()
