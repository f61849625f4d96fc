"""A small training loop under the guard, with a fault planted in one process: `loop.py --fault kill --rank 1`."""

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
parser.add_argument("--at", type=int, default=5)
parser.add_argument("--rank", type=int, default=1)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--short", type=int, nargs="*", default=(), help="the steps whose batch is half as long everywhere")
parser.add_argument("--pace", type=float, default=0.02)
parser.add_argument("--deadline", type=float, default=3.0)
parser.add_argument("--allowed", type=float, help="the deadline of a save; by default that of the rest")
parser.add_argument("--lasts", type=float, default=3600.0, help="how long the save takes")
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--evaluation", type=float, default=1800.0, help="the deadline of an evaluation")
parser.add_argument("--linger", type=float, default=0.0)
parser.add_argument("--flight", default="")
parser.add_argument("--mark", default="", help="a file to write once the second step has ended")
parser.add_argument("--unwaited", action="store_true", help="end with steps in flight")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--joined", action="store_true", help="as an engine does: jax joins the processes first")
parser.add_argument("--timeout", type=float, default=30.0)
parser.add_argument("--alone", type=int, help="the one process that then calls initialize")
given = parser.parse_args()
rank = int(os.environ["JAX_PROCESS_ID"])
here = rank == given.rank
if here and given.fault == "flag":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_min_max=true"


def planted():
    """Says when the fault was planted, on the clock of the machine."""
    print(f"planted at {time.monotonic():.3f}", flush=True)


import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

import shardkit as sk

if here and given.fault == "setting":
    jax.config.update("jax_default_matmul_precision", "highest")
if given.joined:
    number = int(os.environ["JAX_NUM_PROCESSES"])
    jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], number, rank, heartbeat_timeout_seconds=20)
if given.alone not in (None, rank):
    time.sleep(6)
    os._exit(9)
try:
    cluster = sk.runtime.initialize(timeout=given.timeout)
except RuntimeError as error:
    print(error, flush=True)
    time.sleep(1.5 if rank == 0 else 0)  # with it ends jax's service: that aborts the others
    os._exit(9)
if here and given.fault == "early":
    planted()
    raise ValueError("nothing to train on")
devices = jax.devices()
if here and given.fault == "order":
    devices = devices[::-1]
mesh = sk.make_mesh(devices, data=len(devices))
seconds = given.deadline
deadlines = sk.runtime.Deadlines(
    compile=60,
    step=seconds,
    save=given.allowed or seconds,
    data=seconds,
    silence=max(10.0, seconds),
    evaluate=given.evaluation,
)
config = {"learning rate": 0.2 if here and given.fault == "config" else 0.1}
guard = sk.runtime.guard(mesh=mesh, config=config, deadlines=deadlines, flight=given.flight or None)
factor = 2.5 if here and given.fault == "constant" else 2.0


def loss_fn(params, batch, keys):
    y = batch["x"] @ params["w"]
    if here and given.fault == "psum":
        y = y + 0.0 * jax.lax.psum(jax.lax.stop_gradient(y), "data")
    return jnp.mean(factor * y**2)


init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
state = init(lambda key: {"w": jnp.ones((4, 3))}, jax.random.key(given.seed))
layout = NamedSharding(mesh, sk.dp("data").batch_spec(mesh))


def wait_here(index):
    if not here or index != given.at:
        return
    planted()
    match given.fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "group":
            os.killpg(os.getpgid(0), signal.SIGKILL)
        case "stop":
            metrics["loss"].block_until_ready()  # the first steps take long to connect: the devices may lag behind
            os.kill(os.getpid(), signal.SIGSTOP)
        case "abort":
            os.abort()
        case "straggle":
            time.sleep(3600)
        case "raise":
            raise ValueError(f"sample {index} is broken")
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(3600)
        case "hook":
            sys.excepthook = lambda *error: print("my own:", error[1])
            raise ValueError(f"sample {index} is broken")
        case "exit":
            sys.exit(3)
        case "thread":
            threading.Thread(target=lambda: os._exit(4)).start()
            time.sleep(3600)


def batches():
    for index in range(given.steps):
        if here and index == given.at and given.fault == "data":
            planted()
            time.sleep(3600)
        if here and index == given.at and given.fault == "iterator":
            planted()
            raise OSError("no such file")
        rng = np.random.default_rng(index)
        short = here and index == given.at and given.fault == "shape"
        rows = len(devices) if short or index in given.short else 2 * len(devices)
        x = rng.normal(size=(rows, 4)).astype(np.float32)
        yield {"x": jax.make_array_from_callback(x.shape, layout, lambda where, x=x: x[where])}


step = guard.watch(step)
evaluate = guard.watch(jax.jit(lambda state, batch: jnp.mean(batch["x"] @ state.params["w"])))
for index, batch in enumerate(guard.data(batches())):
    wait_here(index)
    state, metrics = step(state, batch)
    time.sleep(given.pace)
    if given.evaluate:
        with guard.phase("evaluate"):
            float(evaluate(state, batch))
    if given.mark and index == 1:
        metrics["loss"].block_until_ready()
        Path(f"{given.mark}.{rank}").touch()
    if here and index == given.at and given.fault == "save":
        with guard.phase("save"):
            time.sleep(given.lasts)
if given.unwaited:
    sys.exit()
if here and given.fault == "last":
    planted()
    time.sleep(60)
if here and given.fault == "busy":
    planted()
    threading.Thread(target=time.sleep, args=(60,)).start()
print(f"finished at loss {float(metrics['loss']):.6f}", flush=True)
time.sleep(given.linger if here else 0)
