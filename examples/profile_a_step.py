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
    """Seconds of each instruction, summed over the devices of this process and the executions.

    A profile has planes, one for each device or host, of lines, one for each thread, of events. An event of a compiled
    program has the statistic "hlo_op", the name of its instruction; all others, such as Python's, do not.
    """
    profiles = Path(folder).rglob("*.xplane.pb")
    newest = max(profiles, key=lambda profile: profile.stat().st_mtime)
    seconds: defaultdict[str, float] = defaultdict(float)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jax 0.12 warns of jaxlib's own types
        for plane in ProfileData.from_file(str(newest)).planes:
            for line in plane.lines:
                for event in line.events:
                    statistics = dict(event.stats)
                    instruction = statistics.get("hlo_op")
                    if instruction is not None:
                        seconds[instruction] += event.duration_ns / 1e9
    return seconds


def collectives(step, args, folder):
    """What each collective of a step sends, and how long it took on a device, with waiting for others."""
    record(step, args, folder)
    seconds = read_times(folder)
    # The compiled program has the bytes of an instruction, the trace its time; both know it by the same name.
    for row in sk.analysis.compiled(step, *args).rows:
        yield row, seconds[row.name] / jax.local_device_count()


def loss_fn(params, batch, keys):
    return sk.Mean.of((batch @ params["w"]) ** 2)


if __name__ == "__main__":
    folder = sys.argv[1]
    sk.simulate_devices(8)  # threads that wait for each other: bytes mean something here, times do not
    mesh = sk.make_mesh(data=2, fsdp=4)
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", min_size=1))
    grad_fn = sk.value_and_grad(loss_fn)
    # The step runs twice on one state, which a step that donates its state would have used up.
    train = sk.make_train_step(grad_fn, optax.adam(1e-3), mesh=mesh, plan=plan, donate=False)
    state = train.init({"w": jnp.ones((64, 8))}, jax.random.key(0))
    batch = jnp.ones((32, 64))
    for row, seconds in collectives(train.step, (state, batch), folder):
        axes = ",".join(row.axes)
        milliseconds = 1e3 * seconds
        print(f"{row.kind} over {axes}: {row.times} x {int(row.sent)} bytes, {milliseconds:.3f} ms")
