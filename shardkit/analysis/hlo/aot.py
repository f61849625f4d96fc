"""Ahead-of-time compilation for absent chips: memory, collectives and overlap of a step.

`compile` lowers a step without any device and hands the program to the real compiler, TPU (extra [aot]) or GPU (extra
[aot-gpu]), in a separate process, so that a compiler that aborts is an error and not the end of the session. It
returns the scheduled program, from which the `Report` is read.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import jax

from shardkit._arguments.checks import compiler_options, describe_error, format_sizes, name_axes
from shardkit._arguments.typed import check_kind, kinds_of
from shardkit._jax import backends
from shardkit.analysis.hlo.report import Built, Report
from shardkit.analysis.hlo.saved import load
from shardkit.analysis.hlo.topology import (
    ALONE,
    Topology,
    absent_devices,
    compiler_package,
    description_of,
    lowering_for,
    parse_topology,
    topology_devices,
    tracing_for,
)
from shardkit.analysis.hlo.tuning import CompilerOptions, Option, Trial, Tuned, try_options
from shardkit.analysis.jaxpr.census import Census, census_of, mesh_sizes, traceable
from shardkit.meshes.device_order import DeviceOrder, order_devices
from shardkit.meshes.network import Load, Moves

__all__ = [
    "compile",
    "load",
    "place",
    "topology_devices",
    "tune",
]


def compile(
    step: Any,
    args: Sequence[Any],
    *,
    topology: str,
    mesh: Any = None,
    placement: DeviceOrder | None = None,
    options: Mapping[str, Any] | None = None,
    timeout: float = 1800.0,
) -> Report:
    """Compiles one call of `step` for chips you do not need to have.

    Nothing runs, and no array is created. Pass `jax.ShapeDtypeStruct` arguments with shardings over an AbstractMesh;
    for a train step, `init.abstract(params)` returns the state. If an argument has no sharding, the compiler chooses
    one.

    Args:
        step: any function that jax can trace, or a train step; it donates as its jit does.
        args: its positional arguments.
        topology: "v4", "v5e", "v5p", "v6e" or "tpu7x" with the torus, as "v5p:8x8x8"; "a100", "h100", "h200" or "b200"
            with slices x hosts x GPUs per host, as "h100:1x1x8". Chips beyond the mesh's size stay idle, if the
            compiler allows this.
        mesh: the mesh of the program; None: that of its shard_map or of the arguments' shardings, else one
            device.
        placement: the order of the devices, as `place` finds it; None: jax's.
        options: compiler options, for example `{"xla_tpu_enable_async_collective_fusion": False}`.
        timeout: time limit for the compiler, seconds.

    Returns:
        Report: print it, read its fields, `.to_json()`. If the program does not fit the chip's memory, you get a report
            too, with `fits` False and the compiler's number. `topology_devices` says how to keep the program.

    Raises:
        TypeError: args is not a tuple or list, topology not a string, mesh not a mesh, options not names with values.
        ValueError: an unknown topology, a topology smaller than the mesh or one that its compiler takes only as a
            whole, or a function that jax cannot trace.
        RuntimeError: the compiler's package is missing; it aborted, refused the program or exceeded the timeout.

    Cost: tracing does not grow with the number of chips; the compiler takes seconds to minutes, in one process.

    Example:
        mesh = sk.abstract_mesh(data=64, model=8)
        report = sk.aot.compile(step, (init.abstract(params), batch), topology="v5p:8x8x8", mesh=mesh)
        print(report)  # memory, collectives, overlap
    """
    built = build(step, args, topology=topology, mesh=mesh, placement=placement, options=options, timeout=timeout)
    return built.report(parse_topology(topology))


def tune(
    step: Any,
    args: Sequence[Any],
    *,
    topology: str,
    options: Sequence[Mapping[str, Option]],
    mesh: Any = None,
    timeout: float = 1800.0,
    on_trial: Callable[[Trial], Any] | None = None,
) -> Tuned:
    """Finds compiler options that make a step faster, by the time in its report.

    It compiles the step without options, and then adds each of `options` in turn. It keeps an addition if the step
    becomes faster, or, as long as the step does not fit, if it needs less memory. If two options help only together,
    put them in one mapping.

    Args:
        step, args, topology, mesh: as for `compile`.
        options: a list of mappings to try, in this order, from names of compiler options to values.
        timeout: time limit for each compilation, seconds.
        on_trial: called with each `Trial` as soon as it is compiled.

    Returns:
        Tuned: `.trials`, the fastest first, and `.options`, the options of the fastest; print it. If the compiler
            refuses options, the trial has its message.

    Raises:
        TypeError, ValueError: as for `compile`; options other than a list or tuple of mappings.
        RuntimeError: as for `compile`, of the step without options.

    Cost: one compilation for each mapping, and one without; the step is traced once.

    Example:
        together = {"xla_enable_async_all_gather": True, "xla_tpu_overlap_compute_collective_tc": True}
        tuned = sk.aot.tune(step, args, topology="v5p:8x8x8", options=[together], on_trial=print)
        print(tuned)
    """
    if not isinstance(options, list | tuple) or not all(isinstance(mapping, Mapping) for mapping in options):
        raise TypeError(
            f"aot.tune: options must be a list of mappings, tried one after the other; got {options!r}. Pass for "
            "example [{'xla_tpu_overlap_compute_collective_tc': True}]."
        )
    options = [compiler_options("aot.tune", mapping) for mapping in options]
    where = parse_topology(topology)
    traced = _trace_for(where, step, args)

    def compile_with(chosen: CompilerOptions) -> Trial:
        try:
            built = build(traced, args, topology=topology, mesh=mesh, options=chosen, timeout=timeout)
            trial = Trial(chosen, built.report(where))
        except RuntimeError as error:
            if not chosen:  # not the fault of options
                raise
            trial = Trial(chosen, None, str(error))
        if on_trial is not None:
            on_trial(trial)
        return trial

    return try_options(compile_with, options)


def place(step: Any, args: Sequence[Any], *, topology: str, mesh: Any = None) -> DeviceOrder:
    """Finds the order of devices in which a step loads the links of a machine least. It needs no compiler.

    It maps every collective of the step to the links of the machine: a torus with its wraps, chips with two devices
    each, or hosts with a network adapter for each GPU (see `shardkit/meshes/network.py`). The busiest link counts. It
    does not see the compiler's own collectives, and does not know the compiler's ways through a torus. So its
    seconds are loads divided by bandwidths, and no measurement.

    Args:
        step, args: as for `compile`.
        topology: as for `compile`; the mesh has as many devices.
        mesh: the mesh of the program; None: that of its shard_map or of the arguments' shardings.

    Returns:
        DeviceOrder: print it; `make_mesh(placement=...)` and `compile(placement=...)` take it.

    Raises:
        TypeError, ValueError: as for `compile`; a mesh of another size than the topology, or collectives over groups
            along a part of an axis.

    Example:
        >>> pod = sk.abstract_mesh(data=2, fsdp=32)
        >>> def gathered(x):
        ...     return sk.all_gather(x, "fsdp")
        >>> step = jax.shard_map(gathered, mesh=pod, in_specs=P("fsdp"), out_specs=P("fsdp"))
        >>> found = sk.aot.place(step, (jnp.ones((2**20, 8)),), topology="tpu7x:2x4x4")
        >>> print(found)
        mesh data=2, fsdp=32 on tpu7x x=2 x y=4 x z=4 x core=2, ms of the busiest link
        ...

    Cost: up to 2 s for 512 devices and three axes.
    """
    where = parse_topology(topology)
    _check_arguments("aot.place", args, mesh)
    traced = _trace_for(where, step, args)
    sizes = _mesh_to_place(traced, args, where, mesh)
    order = order_devices(absent_devices(where), sizes, _find_loads(census_of(traced.jaxpr.jaxpr), sizes))
    assert order is not None, "the links of every topology's chip are known"
    return order


def _mesh_to_place(traced: Any, args: Sequence[Any], where: Topology, mesh: Any) -> dict[str, int]:
    """The sizes of the mesh that `place` gives an order: the program's, if it has one, on all of the devices."""
    program_sizes = mesh_sizes(traced.jaxpr.jaxpr, args)
    sizes = program_sizes
    if mesh is not None:
        sizes = dict(mesh.shape)
    differs = bool(program_sizes) and program_sizes != sizes
    if not sizes or differs or math.prod(sizes.values()) != where.devices:
        raise ValueError(
            "aot.place: the mesh must be that of the program, with as many devices as the topology; got "
            f"{format_sizes(sizes.items())} for a program over {format_sizes(program_sizes.items())} and the "
            f"{where.devices} of {str(where)!r}. Pass another topology or mesh."
        )
    return sizes


def _find_loads(census: Census, sizes: Mapping[str, int]) -> list[Load]:
    """The bytes that a device sends in a call, for each kind of collective over the same axes.

    For example twelve layers that gather 2 MB each over "fsdp" are one Load of 24 MB.
    """
    sent: dict[tuple[str, tuple[str, ...], Moves], float] = {}
    for row in census.rows:
        if row.n != math.prod(sizes[axis] for axis in row.axes):
            raise ValueError(
                f"aot.place: collectives must be over whole axes; got groups of {row.n} along {name_axes(row.axes)} at "
                f"{row.source}. Give the groups an axis of their own."
            )
        axes = tuple(axis for axis in sizes if axis in row.axes)  # the order in which a ppermute counts devices
        moves: Moves = 1
        if row.moves is not None:
            moves = row.moves
        key = (row.kind, axes, moves)
        sent[key] = sent.get(key, 0.0) + float(row.total)
    loads = []
    for (kind, axes, moves), size in sent.items():
        loads.append(Load(kind, axes, size, moves))
    return loads


def build(
    step: Any,
    args: Sequence[Any],
    *,
    topology: str,
    mesh: Any = None,
    placement: DeviceOrder | None = None,
    options: Mapping[str, Any] | None = None,
    timeout: float = 1800.0,
) -> Built:
    """The program that `compile` reports on, with its arguments; `step` may be a `jax.stages.Traced` too.

    Example:
        module = build(step, args, topology="v5e:2x4").module
    """
    check_kind("aot.compile", "timeout", timeout, (float,))
    if not 0 < timeout < math.inf:
        raise ValueError(
            f"aot.compile: timeout must be above 0 and finite; got {timeout}. Pass seconds, as timeout=1800."
        )
    where = parse_topology(topology)
    _check_arguments("aot.compile", args, mesh)
    if options is None:
        options = {}
    options = compiler_options("aot.compile", options)
    package = compiler_package(where)
    backends.leave_out_idle_tpu()  # else the trace would start libtpu, slowly and with errors

    started = time.monotonic()
    traced = _trace_for(where, step, args)
    lowered = _lower_for(where, traced)
    lowering_seconds = time.monotonic() - started
    sizes = _find_mesh(traced, lowered, args, mesh)
    if math.prod(sizes.values()) > where.devices:
        raise _too_small(where, sizes, where.devices)
    _check_placement(where, sizes, placement)

    request: dict[str, Any] = {
        "topology": description_of(where),
        "mesh": sizes,
        "options": options,
        "package": package,
        "places": None,
    }
    if placement is not None:
        request["places"] = placement.places
    # The other process needs the program alone: no jaxpr, no Python function.
    bytecode = BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(file=bytecode)
    answer, module = _compile_in_child(where, request, bytecode.getvalue(), timeout)
    # A program that is too large is a result, with the compiler's figure; all else is an error.
    if "error" in answer and not _is_over_memory(answer):
        raise _refusal(where, sizes, answer)
    return Built(traced, sizes, module, answer, lowering_seconds)


def _check_arguments(where: str, args: Any, mesh: Any) -> None:
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"{where}: args must be a tuple of the step's positional arguments; got {type(args).__name__}. Write (x,) "
            "for a single argument."
        )
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(
            f"{where}: mesh must be a Mesh or an AbstractMesh; got {type(mesh).__name__}. Pass "
            "sk.abstract_mesh(data=8), or omit it."
        )


def _trace_for(where: Topology, step: Any, args: Sequence[Any]) -> Any:
    """The step, traced for the chips that it is compiled for: a mesh of them would trace the same."""
    if isinstance(step, jax.stages.Traced):
        return step
    if not callable(step) and not hasattr(step, "trace"):
        raise TypeError(f"aot.compile: step must be a function; got {step!r}. Pass a function or a train step.")
    try:
        with tracing_for(where):
            return traceable(step).trace(*args)
    except Exception as error:
        raise ValueError(
            f"aot.compile: the function cannot be traced with these arguments: {describe_error(error)}."
        ) from error


def _lower_for(where: Topology, traced: Any) -> Any:
    try:
        with lowering_for(where):
            return traced.lower(lowering_platforms=(where.platform,))
    except Exception as error:
        raise ValueError(
            f"aot.compile: the function cannot be lowered for this platform: {describe_error(error)}."
        ) from error


def _find_mesh(traced: Any, lowered: Any, args: Sequence[Any], mesh: Any) -> dict[str, int]:
    """The sizes of the program's mesh axes: of `mesh`, else of what the trace or the lowered program names.

    Only the lowered program has the mesh of a sharding constraint, and of the jit's own shardings.
    """
    lowered_sizes, partitions = backends.lowered_mesh(lowered)
    sizes = mesh_sizes(traced.jaxpr.jaxpr, args)
    if mesh is not None:
        sizes = dict(mesh.shape)
    if not sizes:
        sizes = lowered_sizes
    # A program of one partition splits nothing, and may be compiled for any mesh.
    if partitions not in (1, math.prod(sizes.values())):
        raise ValueError(
            f"aot.compile: mesh= must have as many devices as the program; got {format_sizes(sizes.items())} for a "
            f"program of {partitions} devices. Pass the program's mesh as mesh=, or omit it."
        )
    return sizes


def _check_placement(where: Topology, sizes: Mapping[str, int], placement: DeviceOrder | None) -> None:
    check_kind("aot.compile", "placement", placement, kinds_of(DeviceOrder | None))
    if placement is None:
        return
    if list(placement.axes.items()) != list(sizes.items()):
        raise ValueError(
            "aot.compile: placement must be one for the program's mesh; got one of "
            f"{format_sizes(placement.axes.items())} for {format_sizes(sizes.items())}. Make another with aot.place."
        )
    placement.grid(absent_devices(where))  # refuses one for another machine


def _compile_in_child(
    where: Topology, request: Mapping[str, Any], bytecode: bytes, timeout: float
) -> tuple[dict[str, Any], bytes | None]:
    """The answer of a process that compiles the program, and the module; None where its compiler refused it.

    `aot_child.py` says what is in the folder that the two processes share.
    """
    with tempfile.TemporaryDirectory(prefix="shardkit-aot-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "module.mlirbc").write_bytes(bytecode)
        # -P: files in the working directory must not shadow modules.
        command = [sys.executable, "-P", "-m", "shardkit.analysis.hlo.aot_child", name]
        try:
            child = subprocess.run(command, env=_make_environment(), capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"aot.compile: the compiler for {where} took longer than {timeout:g} s. Pass a longer timeout=, or a "
                "program with its layers in a scan."
            ) from None
        if not (folder / "answer.json").exists():
            raise RuntimeError(
                f"aot.compile: the compiler for {where} ended with exit code {child.returncode}: "
                f"{_find_cause(child.stderr)}"
            )
        answer = json.loads((folder / "answer.json").read_text())
        answer["log"] = child.stderr.splitlines()
        module = None
        if "error" not in answer:
            module = (folder / "module.pb").read_bytes()
        return answer, module


def _make_environment() -> dict[str, str]:
    """The environment of the compiler's process: only CPUs, and this copy of shardkit."""
    environment = dict(os.environ)
    environment.pop("XLA_FLAGS", None)  # simulated devices, and flags that the other compiler may refuse
    environment |= ALONE
    environment["JAX_PLATFORMS"] = "cpu"
    paths = [str(Path(__file__).parents[3])]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _find_cause(log: str) -> str:
    """Why a compiler ended its process: the first fatal check in its log, else the last line.

    A fatal check is a line as "F1121 12:00:00 1 t.cc:1] Check failed: z == 1 (9 vs. 1)".
    """
    last_line = "no message"
    for line in log.splitlines():
        line = line.strip()
        if re.match(r"F\d{4} ", line):
            _, _, cause = line.partition("] ")
            return cause
        if line:
            last_line = line
    return last_line


# Refusals are known by their text, against the rule of the house that nothing is: they have nothing else to go by.
# jax raises one class, JaxRuntimeError, for everything that XLA refuses. Of the status behind it only the text is left,
# which begins with the status code ("RESOURCE_EXHAUSTED"), and the numbers of bytes stand nowhere but in the sentence
# after it (`report.py`). A text that none of these knows is passed on as it is, as the compiler's refusal.
#
# libtpu's messages for a program that must use the whole torus; which meshes may be smaller is undocumented.
_PART = re.compile("RET_CHECK failure.*(should include all slice devices|Unexpected device_id)")
_ON_CHIP = re.compile(r"\b[vs]mem\b", re.IGNORECASE)  # a kernel's scratch memory, not the device's, ran out
_OVER_MEMORY = re.compile("RESOURCE_EXHAUSTED|CompileTimeHbmOom|[Rr]an out of memory")


def _is_over_memory(answer: Mapping[str, Any]) -> bool:
    """Whether a compiler refused a program because it does not fit the memory of a device."""
    if answer["error"] != "compile" or not _OVER_MEMORY.search(answer["message"]):
        return False
    return not _ON_CHIP.search(_first_line(answer))


def _refusal(where: Topology, sizes: Mapping[str, int], answer: Mapping[str, Any]) -> ValueError | RuntimeError:
    """The error for what the compiler's process refused; `aot_child.py` lists the kinds."""
    if answer["error"] == "small":
        return _too_small(where, sizes, answer["devices"])
    message = _first_line(answer)
    if answer["error"] == "topology":
        return ValueError(f"aot.compile: the compiler knows no topology {str(where)!r}: {message}")
    devices = math.prod(sizes.values())
    if _PART.search(message) and devices < where.devices:
        program = "a program of one device"
        if sizes:
            program = f"the mesh {format_sizes(sizes.items())}"
        return ValueError(
            f"aot.compile: the compiler for {where} cannot leave {where.devices - devices} of its {where.devices} "
            f"devices idle, as {program} would. Pass a topology of {devices} devices, or a mesh of {where.devices}."
        )
    return RuntimeError(f"aot.compile: the compiler for {where} refused the program: {message}")


def _first_line(answer: Mapping[str, Any]) -> str:
    lines = answer["message"].splitlines()
    if not lines:
        return ""
    line: str = lines[0]
    return line


def _too_small(where: Topology, sizes: Mapping[str, int], devices: int) -> ValueError:
    return ValueError(
        f"aot.compile: topology {str(where)!r} has {devices} devices, fewer than the {math.prod(sizes.values())} of "
        f"the mesh {format_sizes(sizes.items())}. Pass a larger topology or a smaller mesh."
    )
