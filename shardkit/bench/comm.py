"""Collectives measured as nccl-tests does, in tables.

`sweep.py` says what is measured, `operations.py` has the kernels and their references, `kernels.py` the loop that is
timed, `as_compiled.py` what is read from the compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardkit._arguments import checks
from shardkit.bench import as_compiled, operations
from shardkit.bench.fit import Fit, alpha_beta
from shardkit.bench.kernels import Compared, Neighbor, case, case_of_neighbor, of_all_processes, place
from shardkit.bench.measure import MODES, Case, measure
from shardkit.bench.neighbors import make_neighbor, share_hidden
from shardkit.bench.operations import OPERATIONS, Way
from shardkit.bench.records import Record
from shardkit.bench.sweep import WHERE, Sweep
from shardkit.cost import bus_factor
from shardkit.meshes import layout
from shardkit.testing import reference


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
        a single size). "wrong" counts elements of all devices. For each name in a sweep's `beside` there is a further
        record, whose times are of both together: it has "beside" (the name), "alone_us", "neighbor_us", and "hidden",
        (alone + neighbor - together) / min(alone, neighbor), in the median of rounds. Its bytes are those of both.

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
    calls, rounds = checks.integers_from_one(WHERE, calls=calls, rounds=rounds)
    records = []
    for sweep in sweeps:
        records += _measure_sweep(sweep, mode, calls, rounds)
    return records


def _measure_sweep(sweep: Sweep, mode: str, calls: int, rounds: int) -> list[Record]:
    """The records of one table: of each implementation, all sizes."""
    records: dict[str, list[Record]] = {}
    # All implementations of a size together, so that they are timed in the same rounds.
    for count in sweep.counts:
        for record in _measure_size(sweep, count, mode, calls, rounds):
            records.setdefault(record["case"], []).append(record)
    result = []
    for case_records in records.values():
        _add_fit(case_records)
        result += case_records
    return result


def _measure_size(sweep: Sweep, count: int, mode: str, calls: int, rounds: int) -> list[Record]:
    """The records of all implementations for one size."""
    operation = sweep.operation
    mesh = sweep.mesh
    n = sweep.n
    options = operation.arguments(sweep.redop, n, count)
    # Every device begins with other numbers. The reference sees them as blocks along the mesh's axes: of data=4,
    # model=2 and 100 elements a device, [8, 100] as [4, 2, 100].
    block = operations.make_values(sweep.dtype, mesh.size, n, operation.block(n, count))
    by_axes = block.reshape(*mesh.devices.shape, -1)
    compute = partial(operation.reference, **options)
    expected = reference.over_mesh(compute, by_axes, dict(mesh.shape), sweep.axes).reshape(mesh.size, -1)
    x = place(block, mesh, P(tuple(mesh.axis_names)))
    poison = operations.make_poison(sweep.dtype)
    axis: checks.Axis = sweep.axes
    if len(sweep.axes) == 1:
        axis = sweep.axes[0]
    shared = _describe_sweep(sweep, count)
    compared: dict[str, Compared] = {}

    def make_case(impl: str, way: Way, neighbor_name: str = "", neighbor: Neighbor | None = None) -> Case:
        name = impl
        if neighbor_name:
            name = f"{impl} beside {neighbor_name}"
        bound = operations.bound_error(way, sweep.dtype, sweep.redop, block, sweep.sizes)
        compared[name] = Compared(expected, bound)
        kernel = _bind(way.kernel, axis, options)
        timed = case(name, kernel, x, poison, expected, mesh, compared[name], neighbor)
        hops = None
        if way.hops is not None and neighbor is None:
            hops = way.hops(n)
        fields = {"impl": impl, "beside": neighbor_name} | shared | _read_program(timed, mesh, mode, calls, hops)
        return timed._replace(fields=fields)

    cases = [make_case(impl, way) for impl, way in sweep.ways.items()]
    alone = cases[0]
    for neighbor_name in sweep.beside:
        neighbor = make_neighbor(neighbor_name, sweep, count, alone, calls)
        cases.append(case_of_neighbor(neighbor_name, neighbor, mesh))
        cases += [make_case(impl, way, neighbor_name, neighbor) for impl, way in sweep.ways.items()]
    along = f"{', '.join(sweep.axes)} of {checks.format_sizes(mesh.shape.items())}"
    row = f"{operation.name} {sweep.redop}, {shared['size']} bytes of {sweep.dtype}, {along}"
    # What `measure` compares is the number of wrong elements, with 0. A wrong implementation is a row of the table and
    # does not end it, since the others still tell something.
    records = measure(WHERE, row, cases, mode=mode, calls=calls, rounds=rounds, tolerance=0.0, refuse=False)
    by_case = {record["case"]: record for record in records}
    # The neighbors alone are no collectives of this table: their times stand in the rows beside them.
    records = [record for record in records if record["case"] in compared]
    # Each process has compared the blocks of its own devices.
    wrong = of_all_processes([compared[record["case"]].wrong for record in records])
    result = []
    for record, elements in zip(records, wrong, strict=True):
        contention = _measure_contention(record, by_case)
        result.append(_add_bandwidth(record | contention, compared[record["case"]], elements))
    return result


def _measure_contention(record: Record, by_case: Mapping[str, Record]) -> Record:
    """Fields of a record beside a neighbor: its own time alone, the neighbor's alone, and how much of them is hidden.

    None of a record that has no neighbor.
    """
    if not record["beside"]:
        return {"alone_us": None, "neighbor_us": None, "hidden": None}
    alone = by_case[record["impl"]]
    neighbor = by_case[record["beside"]]
    shares = []
    times_by_round = zip(
        alone["samples"]["wall_us"], neighbor["samples"]["wall_us"], record["samples"]["wall_us"], strict=True
    )
    for times in times_by_round:
        shares.append(share_hidden(*times))
    return {
        "alone_us": alone["wall_us_median"],
        "neighbor_us": neighbor["wall_us_median"],
        "hidden": float(np.median(shares)),
    }


def _bind(kernel: Callable[..., Any], axis: checks.Axis, options: Mapping[str, Any]) -> Callable[..., Any]:
    """A kernel of an array alone."""

    def run(x: jax.Array) -> Any:
        return kernel(x, axis, **options)

    return run


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
        "physical": as_compiled.describe_dims(sweep.mesh, sweep.axes),
    }


def _read_program(case: Case, mesh: Mesh, mode: str, calls: int, hops: int | None) -> Record:
    if mode != "inside":
        calls = 1
    assert case.repeated is not None, "the case of a kernel has loops of its own"
    # `repeated` is cached, so that this is the very function that is timed, in either mode.
    program: Any = case.repeated(calls)
    traced = program.trace(case.carry, *case.args)
    return as_compiled.read_program(traced, traced.lower().compile(), mesh, calls, hops)


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
    samples = record.pop("samples")
    where = record.pop("environment")
    return record | figures | {"samples": samples, "environment": where}


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
    columns = list(_COLUMNS)
    # Simulated devices are no chip, and would leave these columns empty.
    if records[0]["chip"] is None:
        columns = [column for column in columns if column.field not in ("chip_us", "of_chip")]
    # Files of earlier versions have no "beside".
    alone = [record for record in records if not record.get("beside")]
    beside = [record for record in records if record.get("beside")]
    lines = [_format_title(records[0]), _format_rows(alone, columns)]
    lines += _describe_fits(alone)
    if beside:
        lines += ["at the same time as others: hidden is 1 where both take as long as the longer, 0 where as their sum"]
        lines += [_format_rows(beside, _COLUMNS_BESIDE)]
    for record in records:
        if record["wrong"]:
            # Each process keeps the first wrong element of its own devices; only numbers are added up over processes.
            place = record["wrong_first"] or "on others"
            lines.append(f"wrong: {record['case']}, {record['size']} B: {place}")
    return "\n".join(lines)


def _format_rows(records: Sequence[Record], columns: Sequence[_Column]) -> str:
    rows = [tuple(column.heading for column in columns)]
    for record in records:
        rows.append(tuple(_format_cell(record, column) for column in columns))
    return layout.table(rows)


def _format_title(record: Record) -> str:
    """As "all_reduce sum over data (mesh data=4, model=2, along x)"."""
    title = record["op"]
    if record["redop"] != "none":
        title += f" {record['redop']}"
    title += f" over {record['axes']} (mesh {checks.format_sizes(record['mesh'].items())}"
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


class _Column(NamedTuple):
    """A column of the table: its heading, the field of the records that it shows, and how `format` writes it."""

    heading: str
    field: str
    form: str = ""


_COLUMNS = (
    _Column("impl", "impl"),
    _Column("size B", "size"),
    _Column("count", "count"),
    _Column("type", "dtype"),
    _Column("redop", "redop"),
    _Column("time us", "wall_us_median", ".1f"),
    _Column("algbw GB/s", "algbw_GBps", ".3f"),
    _Column("busbw GB/s", "busbw_GBps", ".3f"),
    _Column("#wrong", "wrong"),
    _Column("sent B", "written_bytes", ".10g"),
    _Column("wire B", "wire_bytes", ".10g"),
    _Column("hops", "hops"),
    _Column("p50", "wall_us_median", ".1f"),
    _Column("p90", "wall_us_p90", ".1f"),
    _Column("p99", "wall_us_p99", ".1f"),
    _Column("min", "wall_us_min", ".1f"),
    _Column("max", "wall_us_max", ".1f"),
    _Column("chip us", "chip_us", ".1f"),
    _Column("of chip", "of_chip", ".2f"),
    _Column("fit us", "fit_us", ".1f"),
    _Column("of fit", "of_fit", ".2f"),
    _Column("as compiled", "compiled"),
)

_COLUMNS_BESIDE = (
    _Column("impl", "impl"),
    _Column("beside", "beside"),
    _Column("size B", "size"),
    _Column("alone us", "alone_us", ".1f"),
    _Column("other us", "neighbor_us", ".1f"),
    _Column("together us", "wall_us_median", ".1f"),
    _Column("hidden", "hidden", ".2f"),
    _Column("#wrong", "wrong"),
)


def _format_cell(record: Record, column: _Column) -> str:
    value = record[column.field]
    if value is None:  # as the bus bandwidth of what nccl-tests does not have
        return "-"
    return format(value, column.form)
