"""Collectives measured as nccl-tests does: sizes x implementations of operations over axes of a mesh, in tables.

`sweeps` checks what is asked and says what is measured, `comm` measures it. `operations.py` has the kernels and their
references, `kernels.py` the loop that is timed, `as_compiled.py` what is read from the compiled program.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardkit._arguments import checks
from shardkit.bench import as_compiled, operations
from shardkit.bench.fit import Fit, alpha_beta
from shardkit.bench.kernels import Compared, case, of_all_processes, place
from shardkit.bench.measure import MODES, Case, measure
from shardkit.bench.operations import DTYPES, OPERATIONS, Operation, Way
from shardkit.bench.records import Record
from shardkit.cost import bus_factor
from shardkit.meshes import layout
from shardkit.testing import reference

IMPLS = ("lax", "ring")
REDOPS = ("sum", "mean", "max", "min")
WHERE = "bench comm"
_OTHER_NAMES = {"sendrecv": "shift", "gather": "gather_to_one"}  # those of nccl-tests


class Sweep(NamedTuple):
    """One table of `comm`: an operation in one dtype over some axes, in several sizes.

    Attributes:
        operation: what is computed.
        ways: its implementations by name; the first is the baseline.
        redop: the reduction, or "none".
        dtype: of the array.
        counts: its elements, one for each size.
        mesh: the mesh.
        axes: those of the collective.
    """

    operation: Operation
    ways: Mapping[str, Way]
    redop: str
    dtype: str
    counts: tuple[int, ...]
    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(self.mesh.shape[axis] for axis in self.axes)

    @property
    def n(self) -> int:
        """Devices along the axes."""
        return math.prod(self.sizes)


def sweeps(
    mesh: Mesh,
    *,
    ops: Sequence[str] | None = None,
    impls: Sequence[str] | None = None,
    kernels: Mapping[str, Callable[..., Any]] | None = None,
    sizes: Sequence[int] | None = None,
    dtypes: Sequence[str] = ("float32",),
    redops: Sequence[str] = ("sum",),
    axis: checks.Axis | None = None,
) -> list[Sweep]:
    """Lists the measurements for `comm`: a table for each operation, reduction and dtype. It compiles nothing.

    Args:
        mesh: the mesh.
        ops: names from `OPERATIONS`; None: all.
        impls: names of implementations; None: "lax", and "ring" if there is one. If you name both an operation and an
            implementation that it lacks, you get an error; otherwise it is left out.
        kernels: your kernels by name, with the signature of the operation, `kernel(x, axis, **options)`.
        sizes: bytes of the whole array, as in nccl-tests; rounded down to a multiple of the devices if a device has a
            part of it. None: 1 KiB to 4 MiB in steps of 16 on CPUs, to 64 MiB in steps of 4 elsewhere.
        dtypes: dtypes of the array.
        redops: reductions, for the operations that reduce.
        axis: the axis or axes of the collective; None: all of the mesh.

    Raises:
        ValueError: an unknown operation, implementation, dtype, reduction or axis, a kernel without a reference, or a
            size that leaves a device without an element.

    Example:
        >>> [sweep] = sk.bench.sweeps(mesh, ops=["all_gather"], sizes=[1024, 4096], axis="model")
        >>> list(sweep.ways), sweep.counts, sweep.n
        (['lax', 'ring'], (256, 1024), 4)
    """
    if kernels is None:
        kernels = {}
    axes = _choose_axes(mesh, axis)
    chosen = _choose_operations(ops, tuple(kernels))
    _check_kinds(dtypes, redops)
    user_ways = {name: Way(kernel) for name, kernel in kernels.items()}
    names: tuple[str, ...] = IMPLS
    if impls is not None:
        names = tuple(impls)
    elif user_ways:
        names = ()
    # "all operations by ring" leaves out those that have none; "broadcast by ring" is a mistake.
    are_both_named = impls is not None and ops is not None
    result = []
    reasons: dict[str, str] = {}  # for each implementation, the first reason why an operation lacks it
    for operation, dtype in itertools.product(chosen, dtypes):
        for redop in _choose_redops(operation, redops, ops is not None):
            ways: dict[str, Way] = {}
            for name in names:
                reason = _why_lacking(operation, name, redop, dtype, axes)
                if not reason:
                    ways[name] = operation.ways[name]
                elif are_both_named:
                    raise ValueError(reason)
                else:
                    reasons.setdefault(name, reason)
            if ways or user_ways:
                _check_signatures(user_ways, operation, redop, axes)
                counts = _choose_counts(operation, mesh, axes, dtype, sizes)
                result.append(Sweep(operation, ways | user_ways, redop, dtype, counts, mesh, axes))
    for name in impls or ():
        if not any(name in sweep.ways for sweep in result):
            raise ValueError(reasons[name])
    return result


def _choose_axes(mesh: Mesh, axis: checks.Axis | None) -> tuple[str, ...]:
    if axis is None:
        return tuple(mesh.axis_names)
    axes = checks.axis_names(WHERE, axis)
    for name in axes:
        if name not in mesh.shape:
            raise ValueError(
                f"{WHERE}: --axis must name axes of the mesh, {checks.quoted(mesh.shape)}; got {name!r}. Add it to "
                f"the mesh, as in {name}=2, or name another."
            )
    return axes


def _check_kinds(dtypes: Sequence[str], redops: Sequence[str]) -> None:
    for dtype in dtypes:
        checks.one_of(WHERE, "dtype", dtype, DTYPES)
        if dtype == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError(f"{WHERE}: dtype 'float64' needs 64-bit jax, which is off. Set JAX_ENABLE_X64=1.")
    for redop in redops:
        checks.one_of(WHERE, "redop", redop, REDOPS)
    for dtype in dtypes:
        if jnp.issubdtype(jnp.dtype(dtype), jnp.integer) and "mean" in redops:
            raise ValueError(f"{WHERE}: a mean needs a floating-point dtype; got {dtype}. Pass another --redop.")


def _check_signatures(ways: Mapping[str, Way], operation: Operation, redop: str, axes: tuple[str, ...]) -> None:
    # The numbers of devices and elements do not matter here, only which keyword arguments there are.
    options = operation.arguments(redop, 2, 2)
    for name, way in ways.items():
        signature = inspect.signature(way.kernel)
        try:
            signature.bind(None, axes, **options)
        except TypeError:
            arguments = ", ".join(["x", "axis", *options])
            raise ValueError(
                f"{WHERE}: a kernel for {operation.name} must take ({arguments}); {name} takes {signature}. Write "
                "def kernel(x, axis, **options), and name the operation that it computes by --op."
            ) from None


def _choose_operations(ops: Sequence[str] | None, kernels: Sequence[str]) -> list[Operation]:
    if kernels and not ops:
        raise ValueError(
            f"{WHERE}: a kernel of your own must be compared with a reference, that of its operation; got "
            f"{kernels[0]} without --op. Pass for example --op all_reduce."
        )
    if ops is None:
        return list(OPERATIONS.values())
    try:
        names = [checks.spelled(WHERE, "op", name, tuple(OPERATIONS), _OTHER_NAMES) for name in ops]
    except ValueError:
        if not kernels:
            raise
        unknown = [name for name in ops if name not in {*OPERATIONS, *_OTHER_NAMES}]
        raise ValueError(
            f"{WHERE}: a kernel must have a reference to be compared with; there is none for {unknown[0]!r}, only for "
            f"{checks.quoted(OPERATIONS)}. Pass the operation that {kernels[0]} computes."
        ) from None
    return [OPERATIONS[name] for name in dict.fromkeys(names)]


def _choose_redops(operation: Operation, redops: Sequence[str], is_named: bool) -> list[str]:
    if not operation.redops:
        return ["none"]
    for redop in redops:
        if is_named and redop not in operation.redops:
            raise ValueError(
                f"{WHERE}: --redop of {operation.name} must be {checks.either(operation.redops)}; got {redop}. Pass "
                f"for example --redop {operation.redops[0]}, or another --op."
            )
    return [redop for redop in redops if redop in operation.redops]


def _why_lacking(operation: Operation, name: str, redop: str, dtype: str, axes: tuple[str, ...]) -> str:
    """Why an operation has no such implementation here, or nothing."""
    if name not in operation.ways:
        subject = operation.name
        choices = list(operation.ways)
        all_names = _list_implementations()
        if name not in all_names:
            subject = "an operation"
            choices = all_names
        return (
            f"{WHERE}: --impl of {subject} must be {checks.either(choices)}; got {name}. Pass for example --impl "
            f"{choices[0]}, or a kernel of your own, as in train.py:kernel."
        )
    way = operation.ways[name]
    if way.redops is not None and redop not in (*way.redops, "none"):
        return (
            f"{WHERE}: --redop of {operation.name} by {name} must be {checks.either(way.redops)}; got {redop}. Pass "
            f"for example --redop {way.redops[0]}, or another --impl."
        )
    if way.levels > len(axes):
        return (
            f"{WHERE}: --impl {name} needs two axes, of slow links and then of fast ones; got --axis "
            f"{' '.join(axes)}. Write for example --axis data model."
        )
    if way.floating and not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return f"{WHERE}: --impl {name} needs a floating-point dtype; got {dtype}. Pass for example --dtype float32."
    return ""


def _list_implementations() -> list[str]:
    """The names of the implementations of all operations, each once."""
    names: dict[str, None] = {}
    for operation in OPERATIONS.values():
        names |= dict.fromkeys(operation.ways)
    return list(names)


def _choose_counts(
    operation: Operation, mesh: Mesh, axes: tuple[str, ...], dtype: str, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    """The elements of the whole array for each size; sizes too small to give each device an element are left out."""
    n = math.prod(mesh.shape[axis] for axis in axes)
    itemsize = jnp.dtype(dtype).itemsize
    is_named = sizes is not None
    if sizes is None:
        exponents = range(10, 27, 2)  # 1 KiB to 64 MiB
        if mesh.devices.flat[0].platform == "cpu":
            exponents = range(10, 23, 4)
        sizes = [2**exponent for exponent in exponents]
    counts: dict[int, None] = {}  # each once: sizes are rounded down
    for size in sizes:
        count = operation.elements(size, n, itemsize)
        if count:
            counts[count] = None
        elif is_named:
            least = itemsize
            if operation.splits:
                least = itemsize * n
            raise ValueError(
                f"{WHERE}: a size must give each of {n} devices an element; got {size} bytes of {dtype} for "
                f"{operation.name}, which takes {least} or more. Begin --sizes at {least}."
            )
    return tuple(counts)


def comm(sweeps: Sequence[Sweep], *, mode: str = "inside", calls: int = 20, rounds: int = 20) -> list[Record]:
    """Measures collectives over axes of a mesh, and checks each result on every device.

    Args:
        sweeps: the list from `sweeps`.
        mode: "inside" (a loop inside one jit) or "dispatched" (calls from Python, dispatch included).
        calls: calls in each round; times are divided by it.
        rounds: timed rounds; medians and percentiles are over rounds.

    Returns:
        One record for each implementation and size: a record of `measure`, with "op", "size" (bytes), "count", "dtype",
        "redop", "axes", "physical", "algbw_GBps", "busbw_GBps" (None if nccl-tests has no such operation),
        "written_bytes" (sent by a device, by the census), "wire_bytes" (as compiled), "hops", "compiled",
        "compiled_groups", "chip_us" and "of_chip" (expected time by the chip's figures, and expected over measured;
        None for an unknown chip), "fit_us" and "of_fit" (by `alpha_beta` of the sizes of this implementation; None for
        a single size). "wrong" counts elements of all devices.

    Raises:
        ValueError: an unknown mode, or a number below 1.

    Example:
        >>> sweeps = sk.bench.sweeps(mesh, ops=["all_reduce"], impls=["lax"], sizes=[1024])
        >>> [record] = sk.bench.comm(sweeps, calls=2, rounds=2)
        >>> record["wrong"], record["count"], record["written_bytes"], record["compiled"]
        (0, 256, 1792.0, 'all_reduce {0-7}')

    Source: nccl-tests, doc/PERFORMANCE.md, for size, algorithm bandwidth and bus bandwidth.
    """
    checks.one_of(WHERE, "mode", mode, MODES)
    calls, rounds = checks.whole(WHERE, calls=calls, rounds=rounds)
    records = []
    for sweep in sweeps:
        records += _measure_sweep(sweep, mode, calls, rounds)
    return records


def _measure_sweep(sweep: Sweep, mode: str, calls: int, rounds: int) -> list[Record]:
    """The records of one table: of each implementation, all sizes."""
    records: dict[str, list[Record]] = {name: [] for name in sweep.ways}
    for count in sweep.counts:
        for record in _measure_size(sweep, count, mode, calls, rounds):
            records[record["case"]].append(record)
    result = []
    for way_records in records.values():
        _add_fit(way_records)
        result += way_records
    return result


def _measure_size(sweep: Sweep, count: int, mode: str, calls: int, rounds: int) -> list[Record]:
    """The records of all implementations for one size."""
    operation = sweep.operation
    mesh = sweep.mesh
    n = sweep.n
    options = operation.arguments(sweep.redop, n, count)
    # Every device begins with other numbers. The reference sees them as blocks along the mesh's axes.
    block = operations.values(sweep.dtype, mesh.size, n, operation.block(n, count))
    by_axes = block.reshape(*mesh.devices.shape, -1)
    expected = reference.over_mesh(partial(operation.reference, **options), by_axes, dict(mesh.shape), sweep.axes)
    expected = expected.reshape(mesh.size, -1)
    x = place(block, mesh, P(tuple(mesh.axis_names)))
    poison = operations.poison(sweep.dtype)
    axis: checks.Axis = sweep.axes
    if len(sweep.axes) == 1:
        axis = sweep.axes[0]
    shared = _describe_sweep(sweep, count)
    compared: dict[str, Compared] = {}
    cases = []
    for name, way in sweep.ways.items():
        bound = operations.bound(way, sweep.dtype, sweep.redop, block, sweep.sizes)
        compared[name] = Compared(expected, bound)
        kernel = _bind(way.kernel, axis, options)
        timed = case(name, kernel, x, poison, expected, mesh, compared[name])
        hops = None
        if way.hops is not None:
            hops = way.hops(n)
        fields = {"impl": name} | shared | _read_program(timed, mesh, mode, calls, hops)
        cases.append(timed._replace(fields=fields))
    along = f"{', '.join(sweep.axes)} of {checks.sized(mesh.shape.items())}"
    row = f"{operation.name} {sweep.redop}, {shared['size']} bytes of {sweep.dtype}, {along}"
    records = measure(WHERE, row, cases, mode=mode, calls=calls, rounds=rounds, tolerance=0.0, refuse=False)
    # Each process has compared the blocks of its own devices.
    wrong = of_all_processes([compared[record["case"]].wrong for record in records])
    result = []
    for record, elements in zip(records, wrong, strict=True):
        result.append(_add_bandwidth(record, compared[record["case"]], elements))
    return result


def _bind(kernel: Callable[..., Any], axis: checks.Axis, options: Mapping[str, Any]) -> Callable[..., Any]:
    return lambda x: kernel(x, axis, **options)


def _describe_sweep(sweep: Sweep, count: int) -> Record:
    return {
        "op": sweep.operation.name,
        "size": count * jnp.dtype(sweep.dtype).itemsize,
        "count": count,
        "dtype": sweep.dtype,
        "redop": sweep.redop,
        "mesh": dict(sweep.mesh.shape),
        "axes": ", ".join(sweep.axes),
        "n": sweep.n,
        "physical": as_compiled.physical(sweep.mesh, sweep.axes),
    }


def _read_program(case: Case, mesh: Mesh, mode: str, calls: int, hops: int | None) -> Record:
    if mode != "inside":
        calls = 1
    assert case.repeated is not None, "the case of a kernel has loops of its own"
    program: Any = case.repeated(calls)
    traced = program.trace(case.carry, *case.args)
    return as_compiled.reading(traced, traced.lower().compile(), mesh, calls, hops)


def _add_bandwidth(record: Record, compared: Compared, wrong: int) -> Record:
    """The record with its bandwidths and what was wrong; samples and environment stay last."""
    algbw = record["size"] / (record["wall_us_median"] / 1e6) / 1e9
    busbw = None
    bus = OPERATIONS[record["op"]].bus
    if bus is not None:
        busbw = algbw * bus_factor(bus, record["n"])
    of_chip = None
    if record["chip_us"] is not None:
        of_chip = record["chip_us"] / record["wall_us_median"]
    figures = {
        "disagreement_relative_max": compared.error,
        "wrong": wrong,
        "wrong_first": compared.first,
        "algbw_GBps": algbw,
        "busbw_GBps": busbw,
        "of_chip": of_chip,
    }
    # The long ones stay last, for whoever reads a line of the file.
    last = {key: record.pop(key) for key in ("samples", "environment")}
    return record | figures | last


def _add_fit(records: list[Record]) -> None:
    """Adds to the records of one implementation the time that all its sizes together let one expect."""
    try:
        fit = alpha_beta(records)
    except ValueError:  # a single size
        for record in records:
            record |= {"fit": None, "fit_us": None, "of_fit": None}
        return
    for record in records:
        microseconds = 1e6 * fit.seconds(record["hops"], record["written_bytes"])
        record["fit"] = fit._asdict()
        record["fit_us"] = microseconds
        record["of_fit"] = microseconds / record["wall_us_median"]


def table(records: Sequence[Record]) -> str:
    """The records of one table of `comm` as text.

    Args:
        records: of one operation, reduction and dtype over one group of axes.

    Returns:
        Lines of text; docs/benchmarks/collectives.md says what the columns are.
    """
    columns = dict(_COLUMNS)
    if records[0]["chip"] is None:
        del columns["chip us"]
        del columns["of chip"]
    rows = [tuple(columns)]
    for record in records:
        rows.append(tuple(format_cell(record) for format_cell in columns.values()))
    lines = [_title(records[0]), layout.table(rows), *_describe_fits(records)]
    for record in records:
        if record["wrong"]:
            place = record["wrong_first"] or "on others"
            lines.append(f"wrong: {record['impl']}, {record['size']} B: {place}")
    return "\n".join(lines)


def _title(record: Record) -> str:
    """As "all_reduce sum over data (mesh data=4, model=2, along x)"."""
    title = record["op"]
    if record["redop"] != "none":
        title += f" {record['redop']}"
    title += f" over {record['axes']} (mesh {checks.sized(record['mesh'].items())}"
    if record["physical"]:
        title += f", along {record['physical']}"
    return f"{title})"


def _describe_fits(records: Sequence[Record]) -> list[str]:
    """A line for the fit of each implementation, with the number of sizes whose results are right."""
    sizes: dict[str, set[int]] = {}
    fits: dict[str, Fit] = {}
    for record in records:
        impl = record["impl"]
        if not record["wrong"]:
            sizes.setdefault(impl, set()).add(record["size"])
        if record["fit"]:
            fits[impl] = Fit(**record["fit"])
    lines = []
    for impl, fit in fits.items():
        lines.append(f"fit of {impl}: {describe_fit(fit, len(sizes.get(impl, ())))}")
    return lines


def describe_fit(fit: Fit, sizes: int) -> str:
    """A fit to so many sizes in a line; two sizes are met exactly, which says nothing of how good it is."""
    precision = "from two sizes only"
    if sizes > 2:
        precision = f"within {fit.residual:.0%}"
    return f"{fit.latency * 1e6:.5g} us a hop, {fit.bandwidth / 1e9:.5g} GB/s, {precision}"


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}"


_COLUMNS: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("impl", lambda r: r["impl"]),
    ("size B", lambda r: f"{r['size']}"),
    ("count", lambda r: f"{r['count']}"),
    ("type", lambda r: r["dtype"]),
    ("redop", lambda r: r["redop"]),
    ("time us", lambda r: _number(r["wall_us_median"], 1)),
    ("algbw GB/s", lambda r: _number(r["algbw_GBps"], 3)),
    ("busbw GB/s", lambda r: _number(r["busbw_GBps"], 3)),
    ("#wrong", lambda r: f"{r['wrong']}"),
    ("sent B", lambda r: f"{r['written_bytes']:.10g}"),
    ("wire B", lambda r: f"{r['wire_bytes']:.10g}"),
    ("hops", lambda r: f"{r['hops']}"),
    ("p50", lambda r: _number(r["wall_us_median"], 1)),
    ("p90", lambda r: _number(r["wall_us_p90"], 1)),
    ("p99", lambda r: _number(r["wall_us_p99"], 1)),
    ("min", lambda r: _number(r["wall_us_min"], 1)),
    ("max", lambda r: _number(r["wall_us_max"], 1)),
    ("chip us", lambda r: _number(r["chip_us"], 1)),
    ("of chip", lambda r: _number(r["of_chip"], 2)),
    ("fit us", lambda r: _number(r["fit_us"], 1)),
    ("of fit", lambda r: _number(r["of_fit"], 2)),
    ("as compiled", lambda r: r["compiled"]),
)
