"""What `shardkit bench comm` measures: operations, implementations, dtypes and sizes over axes of a mesh.

`sweeps` checks what is asked for, and lists it; nothing is compiled or measured here.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardkit._arguments import checks
from shardkit.bench.operations import DTYPES, OPERATIONS, Operation, Way

IMPLS = ("lax", "ring")
REDOPS = ("sum", "mean", "max", "min")
WHERE = "bench comm"
COMPUTE = "compute"
LATE = "late"
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
        beside: what each implementation is measured beside, in addition to alone: names of other axes, "compute",
            "late".
    """

    operation: Operation
    ways: Mapping[str, Way]
    redop: str
    dtype: str
    counts: tuple[int, ...]
    mesh: Mesh
    axes: tuple[str, ...]
    beside: tuple[str, ...] = ()

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
    beside: Sequence[str] = (),
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
        beside: what runs at the same time, in rows of their own: an axis of the mesh (the same operation over it),
            "compute" (a matmul that takes about as long), or "late" (the first device of each group arrives later, by
            about as long).

    Raises:
        ValueError: an unknown operation, implementation, dtype, reduction or axis, a kernel without a reference, a
            size that leaves a device without an element, or a `beside` that is an axis of the collective itself.

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
    _check_beside(mesh, axes, beside)
    user_ways = {name: Way(kernel) for name, kernel in kernels.items()}
    names: tuple[str, ...] = IMPLS
    if impls is not None:
        names = tuple(impls)
    elif user_ways:
        # A user's kernels are measured alone, unless `impls` names others to stand beside them.
        names = ()
    result = []
    first_reasons: dict[str, str] = {}  # for each implementation, the first reason why an operation lacks it
    for operation, dtype in itertools.product(chosen, dtypes):
        for redop in _choose_redops(operation, redops, ops is not None):
            ways, reasons = _choose_ways(operation, names, redop, dtype, axes)
            # "all operations by ring" leaves out those that have none; "broadcast by ring" is a mistake.
            if reasons and impls is not None and ops is not None:
                raise ValueError(next(iter(reasons.values())))
            first_reasons = reasons | first_reasons
            if ways or user_ways:
                _check_signatures(user_ways, operation, redop, axes)
                counts = _choose_counts(operation, mesh, axes, dtype, sizes)
                result.append(Sweep(operation, ways | user_ways, redop, dtype, counts, mesh, axes, tuple(beside)))
    # An implementation that was named and is in no table is a mistake, even if there are other tables.
    for name in impls or ():
        is_measured = any(name in sweep.ways for sweep in result)
        if not is_measured:
            raise ValueError(first_reasons[name])
    return result


def _choose_ways(
    operation: Operation, names: Sequence[str], redop: str, dtype: str, axes: tuple[str, ...]
) -> tuple[dict[str, Way], dict[str, str]]:
    """The implementations of these names that an operation has, and of all others why it lacks them."""
    ways = {}
    reasons = {}
    for name in names:
        reason = _explain_lack(operation, name, redop, dtype, axes)
        if reason:
            reasons[name] = reason
        else:
            ways[name] = operation.ways[name]
    return ways, reasons


def _choose_axes(mesh: Mesh, axis: checks.Axis | None) -> tuple[str, ...]:
    if axis is None:
        return tuple(mesh.axis_names)
    axes = checks.axis_names(WHERE, axis)
    for name in axes:
        if name not in mesh.shape:
            raise ValueError(
                f"{WHERE}: --axis must name axes of the mesh, {checks.quote(mesh.shape)}; got {name!r}. Add it to "
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


def _check_beside(mesh: Mesh, axes: tuple[str, ...], beside: Sequence[str]) -> None:
    others = [name for name in mesh.shape if name not in axes]
    for name in beside:
        if name in (COMPUTE, LATE) and name in mesh.shape:
            raise ValueError(
                f"{WHERE}: --beside {name} is no axis, so that no axis of the mesh may have this name; got a mesh "
                f"{checks.format_sizes(mesh.shape.items())}. Give the axis another name."
            )
        if name in axes:
            raise ValueError(
                f"{WHERE}: --beside must name an axis that the collective is not over; got {name}, of a collective "
                f"over {', '.join(axes)}. Name one of the others by --axis."
            )
        checks.one_of(WHERE, "beside", name, (COMPUTE, LATE, *others))


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
    known_names = tuple(OPERATIONS)
    try:
        names = [checks.spelled(WHERE, "op", name, known_names, _OTHER_NAMES) for name in ops]
    except ValueError:
        if not kernels:
            raise
        unknown = [name for name in ops if name not in (*known_names, *_OTHER_NAMES)]
        raise ValueError(
            f"{WHERE}: a kernel must have a reference to be compared with; there is none for {unknown[0]!r}, only for "
            f"{checks.quote(OPERATIONS)}. Pass the operation that {kernels[0]} computes."
        ) from None
    return [OPERATIONS[name] for name in dict.fromkeys(names)]


def _choose_redops(operation: Operation, redops: Sequence[str], is_named: bool) -> list[str]:
    if not operation.redops:
        return ["none"]
    for redop in redops:
        if is_named and redop not in operation.redops:
            raise ValueError(
                f"{WHERE}: --redop of {operation.name} must be {checks.join_alternatives(operation.redops)}; got "
                f"{redop}. Pass for example --redop {operation.redops[0]}, or another --op."
            )
    return [redop for redop in redops if redop in operation.redops]


def _explain_lack(operation: Operation, name: str, redop: str, dtype: str, axes: tuple[str, ...]) -> str:
    """Why an operation has no such implementation here, or nothing."""
    if name not in operation.ways:
        subject = operation.name
        choices = list(operation.ways)
        all_names = _list_implementations()
        if name not in all_names:
            subject = "an operation"
            choices = all_names
        return (
            f"{WHERE}: --impl of {subject} must be {checks.join_alternatives(choices)}; got {name}. Pass for example "
            f"--impl {choices[0]}, or a kernel of your own, as in train.py:kernel."
        )
    way = operation.ways[name]
    if way.redops is not None and redop not in (*way.redops, "none"):
        return (
            f"{WHERE}: --redop of {operation.name} by {name} must be {checks.join_alternatives(way.redops)}; got "
            f"{redop}. Pass for example --redop {way.redops[0]}, or another --impl."
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
