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

from shardkit._arguments.checks import compiler_options, named, raised, sized
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
    parse_topology,
    topology_devices,
    tracing_for,
)
from shardkit.analysis.hlo.tuning import CompilerOptions, Option, Trial, Tuned, tried
from shardkit.analysis.jaxpr.census import census_of, mesh_sizes, traceable
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
    """Compiles one call of `step` with the compiler of chips that need not be present.

    Nothing runs and no array is created: `jax.ShapeDtypeStruct` arguments with shardings over an AbstractMesh suffice
    (`init.abstract(params)` of a train step returns the state's). The compiler shards arguments without a sharding.

    Args:
        step: any function that jax can trace, or a train step; donation is that of its jit.
        args: its positional arguments.
        topology: "v4", "v5e", "v5p", "v6e" or "tpu7x" with the torus, as "v5p:8x8x8"; "a100", "h100", "h200" or "b200"
            with slices x hosts x GPUs per host, as "h100:1x1x8". Chips beyond the mesh's size stay idle, where
            the compiler allows that.
        mesh: the mesh of the program; None: that of its shard_map or of the arguments' shardings, else one
            device.
        placement: the order of the devices, as `place` finds it; None: jax's.
        options: options of the compiler, for example `{"xla_tpu_enable_async_collective_fusion": False}`.
        timeout: time limit for the compiler, seconds.

    Returns:
        Report: print it, read its fields, `.to_json()`. A program that does not fit the memory of
        the chip gives a report too, with `fits` False and the compiler's number. `topology_devices` says how to keep
        the program.

    Raises:
        TypeError: args is not a tuple or list, topology not a string, mesh not a mesh, options not names with values.
        ValueError: an unknown topology, one smaller than the mesh or that its compiler takes only as a whole, a
            function that cannot be traced.
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
    """Which options of the compiler make a step faster, by the time that its report models.

    The step is compiled without options, then with each of `options` added to those that were kept before; they are
    kept if the step is faster, or, as long as it does not fit, if it needs less memory. So options that help only
    together belong in one mapping.

    Args:
        step, args, topology, mesh: as for `compile`.
        options: what to try, in this order: mappings of names of compiler options to values.
        timeout: time limit for each compilation, seconds.
        on_trial: called with each `Trial` as soon as it is compiled.

    Returns:
        Tuned: `.trials`, the fastest first, and `.options`, those of the fastest; print it. Options that the compiler
        refuses are a trial with its message.

    Raises:
        TypeError, ValueError: as for `compile`; options that are not a list or tuple of mappings.
        RuntimeError: as for `compile`, of the step without options.

    Cost: as many compilations as there are mappings, and one; the step is traced once.

    Example:
        together = {"xla_enable_async_all_gather": True, "xla_tpu_overlap_compute_collective_tc": True}
        tuned = sk.aot.tune(step, args, topology="v5p:8x8x8", options=[together], on_trial=print)
        print(tuned)
    """
    if not isinstance(options, list | tuple) or not all(isinstance(each, Mapping) for each in options):
        raise TypeError(
            f"aot.tune: options must be a list of mappings, tried one after the other; got {options!r}. Pass for "
            "example [{'xla_tpu_overlap_compute_collective_tc': True}]."
        )
    options = [compiler_options("aot.tune", each) for each in options]
    where = parse_topology(topology)
    traced = _trace_for(where, step, args)

    def compiled(chosen: CompilerOptions) -> Trial:
        try:
            built = build(traced, args, topology=topology, mesh=mesh, options=chosen, timeout=timeout)
            trial = Trial(chosen, built.report(where))
        except RuntimeError as error:
            if not chosen:
                raise
            trial = Trial(chosen, None, str(error))
        if on_trial is not None:
            on_trial(trial)
        return trial

    return tried(compiled, options)


def place(step: Any, args: Sequence[Any], *, topology: str, mesh: Any = None) -> DeviceOrder:
    """The order of devices in which a step loads the links of a machine least; no compiler is needed.

    Every collective of the step is mapped to the links of a torus with its wraps, of the chips that two devices share,
    or of hosts with a network adapter for each GPU, as `shardkit/meshes/network.py` says; the busiest link counts. What
    the compiler adds is not seen, and its own ways through a torus are not known: the seconds are loads over
    bandwidths, and no measurement.

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
    own = mesh_sizes(traced.jaxpr.jaxpr, args)
    sizes = own if mesh is None else dict(mesh.shape)
    if math.prod(sizes.values()) != where.devices or (own and own != sizes) or not sizes:
        raise ValueError(
            f"aot.place: the mesh must be that of the program, with as many devices as the topology; got "
            f"{sized(sizes.items())} for a program over {sized(own.items())} and the {where.devices} of "
            f"{str(where)!r}. Pass another topology or mesh."
        )
    sent: dict[tuple[str, tuple[str, ...], Moves], float] = {}
    for row in census_of(traced.jaxpr.jaxpr).rows:
        if row.n != math.prod(sizes[axis] for axis in row.axes):
            raise ValueError(
                f"aot.place: collectives must be over whole axes; got groups of {row.n} along {named(row.axes)} at "
                f"{row.source}. Give the groups an axis of their own."
            )
        axes = tuple(axis for axis in sizes if axis in row.axes)  # the order in which a ppermute counts devices
        key = (row.kind, axes, 1 if row.moves is None else row.moves)
        sent[key] = sent.get(key, 0.0) + float(row.total)
    found = order_devices(
        absent_devices(where), sizes, [Load(kind, axes, size, moves) for (kind, axes, moves), size in sent.items()]
    )
    assert found is not None, "the links of every topology's chip are known"
    return found


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
    options = compiler_options("aot.compile", {} if options is None else options)
    package = compiler_package(where)
    backends.leave_out_idle_tpu()
    started = time.monotonic()
    traced = _trace_for(where, step, args)
    sizes = dict(mesh.shape) if mesh is not None else mesh_sizes(traced.jaxpr.jaxpr, args)
    try:
        lowered = traced.lower(lowering_platforms=(where.platform,))
    except Exception as error:
        raise ValueError(f"aot.compile: the function cannot be lowered for this platform: {raised(error)}.") from error
    lowering = time.monotonic() - started
    inside, partitions = backends.lowered_mesh(lowered)
    sizes = sizes or inside  # a sharding constraint's, or that of the jit's own shardings
    devices = math.prod(sizes.values())
    if partitions not in (1, devices):
        raise ValueError(
            f"aot.compile: mesh= must have as many devices as the program; got {sized(sizes.items())} for a program of "
            f"{partitions} devices. Pass the program's mesh as mesh=, or omit it."
        )
    if devices > where.devices:
        raise _too_small(where, sizes, where.devices)
    check_kind("aot.compile", "placement", placement, kinds_of(DeviceOrder | None))
    if placement is not None and list(placement.axes.items()) != list(sizes.items()):
        raise ValueError(
            f"aot.compile: placement must be one for the program's mesh; got one of {sized(placement.axes.items())} "
            f"for {sized(sizes.items())}. Make another with aot.place."
        )
    if placement is not None:
        placement.grid(absent_devices(where))  # refused for another machine
    bytecode = BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(file=bytecode)
    request: dict[str, Any] = {"topology": description_of(where), "mesh": sizes, "options": options}
    request |= {"package": package, "places": None if placement is None else placement.places}
    answer, serialized = _in_child(request, bytecode.getvalue(), timeout, where, sizes)
    return Built(traced, sizes, serialized, answer, lowering)


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
        said = f"aot.compile: the function cannot be traced with these arguments: {raised(error)}."
        raise ValueError(said) from error


def _in_child(
    request: dict[str, Any], bytecode: bytes, timeout: float, where: Topology, sizes: Mapping[str, int]
) -> tuple[dict[str, Any], bytes | None]:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | ALONE
    environment["JAX_PLATFORMS"] = "cpu"
    # -P: files in the working directory must not shadow modules.
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory(prefix="shardkit-aot-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / "module.mlirbc").write_bytes(bytecode)
        command = [sys.executable, "-P", "-m", "shardkit.analysis.hlo.aot_child", name]
        try:
            child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"aot.compile: the compiler for {where} took longer than {timeout:g} s. Pass a longer timeout=, or a "
                "program whose layers are a scan."
            ) from None
        if not (folder / "answer.json").exists():
            lines = [line.strip() for line in child.stderr.splitlines() if line.strip()]
            fatal = [line.partition("] ")[2] for line in lines if re.match(r"F\d{4} ", line)]
            cause = (fatal or lines[-1:] or ["no message"])[0]  # that of a fatal check, else the last
            raise RuntimeError(
                f"aot.compile: the compiler for {where} ended with exit code {child.returncode}: {cause}"
            )
        answer = json.loads((folder / "answer.json").read_text()) | {"log": child.stderr.splitlines()}
        if "error" not in answer:
            return answer, (folder / "module.pb").read_bytes()
    message = answer.get("message", "").splitlines()[0] if answer.get("message") else ""
    if answer["error"] == "small":
        raise _too_small(where, sizes, answer["devices"])
    if answer["error"] == "topology":
        raise ValueError(f"aot.compile: the compiler knows no topology {str(where)!r}: {message}")
    if _OVER_MEMORY.search(answer["message"]) and not _ON_CHIP.search(message):
        return answer, None
    wanted = math.prod(sizes.values())
    if _PART.search(message) and wanted < where.devices:
        raise ValueError(
            f"aot.compile: the compiler for {where} cannot leave {where.devices - wanted} of its {where.devices} "
            f"devices idle, as {f'the mesh {sized(sizes.items())}' if sizes else 'a program of one device'} would. "
            f"Pass a topology of {wanted} devices, or a mesh of {where.devices}."
        )
    raise RuntimeError(f"aot.compile: the compiler for {where} refused the program: {message}")


# libtpu's messages for a program that must use the whole torus; which meshes may be smaller is undocumented.
_PART = re.compile("RET_CHECK failure.*(should include all slice devices|Unexpected device_id)")
_ON_CHIP = re.compile(r"\b[vs]mem\b", re.IGNORECASE)  # a kernel's scratch memory, not the device's, ran out
_OVER_MEMORY = re.compile("RESOURCE_EXHAUSTED|CompileTimeHbmOom|[Rr]an out of memory")


def _too_small(where: Topology, sizes: Mapping[str, int], devices: int) -> ValueError:
    return ValueError(
        f"aot.compile: topology {str(where)!r} has {devices} devices, fewer than the {math.prod(sizes.values())} of "
        f"the mesh {sized(sizes.items())}. Pass a larger topology or a smaller mesh."
    )
