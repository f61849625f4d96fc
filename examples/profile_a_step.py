"""The time and bytes of each collective of a run: a trace by jax's profiler, whose events have the names of the
instructions that `sk.analysis.compiled` lists.

TensorBoard with XProf shows the folder (`tensorboard --logdir FOLDER`), https://ui.perfetto.dev opens the
`perfetto_trace.json.gz` in it, and `pprof` the snapshot of memory. On a TPU an asynchronous collective is two events;
XProf joins them.
"""

import sys
import warnings
from collections import defaultdict
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax.profiler import ProfileData

import shardkit as sk


def record(step, args, folder):
    """Runs the step once under the profiler, and keeps a snapshot of the memory of all devices."""
    jax.block_until_ready(step(*args))  # compiles; what follows is a run
    with jax.profiler.trace(folder, create_perfetto_trace=True):
        jax.block_until_ready(step(*args))
    jax.profiler.save_device_memory_profile(Path(folder) / "memory.prof")


def read_times(folder):
    """Seconds of each instruction, summed over the devices of this process and the executions."""
    newest = max(Path(folder).rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    seconds: defaultdict[str, float] = defaultdict(float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jax 0.12 warns of jaxlib's own types
        for plane in ProfileData.from_file(str(newest)).planes:
            for line in plane.lines:
                for event in line.events:
                    instruction = dict(event.stats).get("hlo_op")
                    if instruction is not None:
                        seconds[instruction] += event.duration_ns / 1e9
    return seconds


def collectives(step, args, folder):
    """What each collective of a step sends, and how long it took on a device, with waiting for others."""
    record(step, args, folder)
    seconds = read_times(folder)
    for row in sk.analysis.compiled(step, *args).rows:
        yield row, seconds[row.name] / jax.local_device_count()


if __name__ == "__main__":
    sk.simulate_devices(8)  # threads that wait for each other: bytes mean something here, times do not
    mesh = sk.make_mesh(data=2, fsdp=4)
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", min_size=1))
    loss_fn = lambda params, batch, keys: sk.Mean.of((batch @ params["w"]) ** 2)
    made = sk.make_train_step(sk.value_and_grad(loss_fn), optax.adam(1e-3), mesh=mesh, plan=plan, donate=False)
    state = made.init({"w": jnp.ones((64, 8))}, jax.random.key(0))
    for row, seconds in collectives(made.step, (state, jnp.ones((32, 64))), sys.argv[1]):
        print(f"{row.kind} over {','.join(row.axes)}: {row.times} x {int(row.sent)} bytes, {1e3 * seconds:.3f} ms")
