"""The collectives of a run: times, waiting and bandwidth.

The program runs under jax's profiler, whose events are matched to the collectives of the compiled program by the
name of the instruction.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
from jax.profiler import ProfileData

from shardkit._arguments.checks import whole
from shardkit._arguments.typed import typed
from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import CompiledRow, collectives_of
from shardkit.analysis.jaxpr.census import mesh_sizes, traceable
from shardkit.analysis.profiling.timings import Machine, Profile, Span, Spans, profile_of


@typed
@contextmanager
def trace(folder: str | Path, *, python: bool = False) -> Iterator[Path]:
    """Records what runs inside the `with` block, for TensorBoard's profile plugin and Perfetto.

    Wait for the results inside the block (`jax.block_until_ready`): what still runs at its end is cut off.

    Args:
        folder: where the trace is written; created if missing. `tensorboard --logdir folder` shows it, and
            https://ui.perfetto.dev opens the `perfetto_trace.json.gz` in it. Nothing is uploaded.
        python: also record every Python call, which is large and slow.

    Yields:
        The folder as a Path; each run is a subfolder of `plugins/profile`.

    Raises:
        RuntimeError: another trace is running.

    Example:
        with sk.analysis.trace("/tmp/run") as folder:
            jax.block_until_ready(step(state, batch))
    """
    with _recording("trace", Path(folder), python=python, perfetto=True) as where:
        yield where


@contextmanager
def _recording(name: str, folder: Path, *, python: bool, perfetto: bool) -> Iterator[Path]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(python)
    try:
        jax.profiler.start_trace(folder, create_perfetto_trace=perfetto, profiler_options=options)
    except RuntimeError as error:
        if "already" not in str(error):  # jax has no class of its own for it, only the text
            raise
        raise RuntimeError(
            f"{name}: jax records one trace at a time, and another one is running. Stop that one first."
        ) from error
    try:
        yield folder
    finally:
        jax.profiler.stop_trace()


@typed
def profile(fn: Callable[..., Any], *args: Any, calls: int = 3, folder: str | Path | None = None) -> Profile:
    """Runs `fn` under jax's profiler and reports the time, the bytes and the bandwidth of each of its collectives.

    The program is compiled and called once before the timed calls. Arguments that `fn` donates, as a train step's
    state, are copied before each call, outside the time: the caller's stay valid, and memory must hold them twice.
    Each call is timed from dispatch until its results are ready.

    Args:
        fn: a jitted function, a train step, or any function that jax can trace.
        *args: its arguments, arrays.
        calls: timed calls, at least 1.
        folder: where the trace is kept, as by `trace`; by default it is deleted.

    Returns:
        Profile: a row for every collective of the compiled program with its time (mean over devices and calls, the
        wait for slower devices included), the time of the fastest device, its share of the call, and bandwidths in
        bytes/s over the fastest device's time. Prints as a table, the slowest first; `.to_json()`.

    Raises:
        ValueError: calls is not a whole number of at least 1.
        TypeError: an argument is a ShapeDtypeStruct.
        RuntimeError: another trace is running.

    Example:
        >>> f = jax.shard_map(lambda x: sk.all_reduce(x, "model"), mesh=mesh, in_specs=P(None, "model"), out_specs=P())
        >>> found = sk.analysis.profile(f, jnp.ones((8, 4)), calls=2)
        >>> [(row.kind, row.axes, row.bytes) for row in found.rows]
        [('all_reduce', ('model',), 32)]

    Source: nccl-tests, doc/PERFORMANCE.md, for the size of a collective and both bandwidths.
    """
    whole("profile", calls=calls)
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                "profile: arguments must be arrays, because the program runs; got a ShapeDtypeStruct at "
                f"args{jax.tree_util.keystr(path)}. Pass arrays, or use aot.compile, which runs nothing."
            )
    run = traceable(fn)
    traced = run.trace(*args)
    executable = traced.lower().compile().runtime_executable()
    module = proto.read(executable.hlo_modules()[0].as_serialized_hlo_module_proto())
    rows = collectives_of(module, mesh_sizes(traced.jaxpr.jaxpr, args))
    prepare = _repeatable(run, args)
    first = jax.devices()[0]
    # The cores that a container grants, where the system can say it.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = Machine(jax.__version__, first.platform, first.device_kind, jax.device_count(), cores)
    steps = []
    with TemporaryDirectory(prefix="shardkit-profile-") if folder is None else nullcontext(folder) as kept:
        with _recording("profile", Path(kept), python=False, perfetto=folder is not None):
            for number in range(calls):
                call = prepare()
                with jax.profiler.StepTraceAnnotation("call", step_num=number):
                    started = time.perf_counter()
                    call()
                    steps.append(time.perf_counter() - started)
        recorded = max(Path(kept).rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
        data = ProfileData.from_file(str(recorded))
        spans = read_spans(data, module, rows, here.platform)
    return profile_of(rows, spans, steps, here)


def _repeatable(fn: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Callable[[], Any]]:
    """Calls `fn` once, on copies, which compiles it and shows what it donates; then `prepare() -> call`.

    `prepare` copies what is donated, so that the caller's arrays stay valid, and waits: only `call()` need be timed.
    """
    leaves, tree = jax.tree.flatten(tuple(args))
    first = [_copy(leaf) for leaf in leaves]
    jax.block_until_ready(fn(*jax.tree.unflatten(tree, jax.block_until_ready(first))))
    donated = [isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in first]

    def prepare() -> Callable[[], Any]:
        fresh = [_copy(leaf) if gone else leaf for leaf, gone in zip(leaves, donated, strict=True)]
        ready = jax.tree.unflatten(tree, jax.block_until_ready(fresh))
        return lambda: jax.block_until_ready(fn(*ready))

    return prepare


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def read_spans(data: Any, module: proto.Module, rows: Iterable[CompiledRow], platform: str) -> Spans:
    """When each device ran each collective, by a trace (a jax.profiler.ProfileData).

    An event's statistics name its instruction (`hlo_op`). On CPU and GPU it lasts as long as the
    collective; on TPU an asynchronous one is two instructions and lasts from the start of one to the end of the other.
    """
    aliases = {row.name: _aliases(module, row.name) for row in rows}
    starts = {alias: name for name, (each, _) in aliases.items() for alias in each}
    ends = {alias: name for name, (_, each) in aliases.items() for alias in each} if platform == "tpu" else {}
    begun = _events(data, module.name, starts, platform)
    done = _events(data, module.name, ends, platform)
    spans: dict[str, dict[object, list[Span]]] = {}
    for row in rows:
        spans[row.name] = begun[row.name]
        if platform == "tpu" and (row.asynchronous or aliases[row.name][1]):
            # A start without an end does not show how long the collective took.
            pairs = {d: (each, done[row.name].get(d, [])) for d, each in begun[row.name].items()}
            whole_ones = {d: each for d, each in pairs.items() if len(each[0]) == len(each[1])}
            spans[row.name] = {
                d: [Span(s.start, e.end) for s, e in zip(*each, strict=True)] for d, each in whole_ones.items()
            }
    return spans


def _events(
    data: Any, module: str, names: Mapping[str, str], platform: str
) -> defaultdict[str, dict[object, list[Span]]]:
    """The events of some instructions of a module, by the value in `names`, then by device, in time order."""
    found: defaultdict[str, dict[object, list[Span]]] = defaultdict(dict)
    with warnings.catch_warnings():
        # In jax 0.12 reading an event's statistics warns of jaxlib's own types; as an error that warning aborts
        # the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in data.planes:
            if plane.name.startswith("/host:") != (platform == "cpu"):  # a host only dispatches to an accelerator
                continue
            for line in plane.lines:
                if line.name == "Async XLA Ops":  # repeats the pairs of "XLA Ops"
                    continue
                for event in line.events:
                    if platform == "cpu" and event.name not in names:  # spares the statistics of most events
                        continue
                    said = dict(event.stats)
                    name = names.get(said.get("hlo_op", ""))
                    if name is not None and said.get("hlo_module", module) == module:
                        device = said.get("device_ordinal", plane.name)
                        found[name].setdefault(device, []).append(Span(event.start_ns, event.end_ns))
    for devices in found.values():
        for spans in devices.values():
            spans.sort()
    return found


def _aliases(module: proto.Module, name: str) -> tuple[set[str], set[str]]:
    """The collective with the instructions that run it as a computation, and the -done of either."""
    holders = {c.id for c in module.computations.values() if any(i.name == name for i in c.instructions.values())}
    starts, ends = {name}, set[str]()
    for computation in module.computations.values():
        carriers = {
            i.id
            for i in computation.instructions.values()
            if i.name == name or (i.opcode in ("fusion", "async-start") and holders & set(i.calls))
        }
        starts |= {computation.instructions[at].name for at in carriers}
        dones = (i for i in computation.instructions.values() if i.opcode.endswith("-done"))
        ends |= {i.name for i in dones if carriers & set(i.operands)}
    return starts, ends
