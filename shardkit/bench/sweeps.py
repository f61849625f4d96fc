"""What `shardkit bench comm` is asked to measure, checked and in tables: nothing is compiled here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardkit import _check
from shardkit.bench.operations import DTYPES, OPERATIONS, Operation, Way

IMPLS = ("lax", "ring")
REDOPS = ("sum", "mean", "max", "min")
WHERE = "bench comm"
_OTHER_NAMES = {"sendrecv": "shift", "gather": "gather_to_one"}  # those of nccl-tests


class Sweep(NamedTuple):
    """One table: an operation in one dtype over some axes, in several sizes.

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
    axis: _check.Axis | None = None,
) -> list[Sweep]:
    """The tables of `comm`, with its arguments checked; nothing is compiled."""
    axes = _axes(mesh, axis)
    chosen = _operations(ops, tuple(kernels or ()))
    _check_kinds(dtypes, redops)
    own = {name: Way(kernel) for name, kernel in (kernels or {}).items()}
    names = tuple(impls) if impls is not None else () if own else IMPLS
    found, lacking = [], dict.fromkeys(names, "")
    for operation, dtype in itertools.product(chosen, dtypes):
        for redop in _redops(operation, redops, ops is not None):
            ways: dict[str, Way] = {}
            for name in names:
                why = _lacks(operation, name, redop, dtype, axes)
                if why and impls is not None and ops is not None:
                    raise ValueError(why)
                lacking[name] = lacking[name] or why
                if not why:
                    ways[name] = operation.ways[name]
            if ways or own:
                counts = _counts(operation, mesh, axes, dtype, sizes)
                found.append(Sweep(operation, ways | own, redop, dtype, counts, mesh, axes))
    unused = [name for name in names if impls is not None and not any(name in each.ways for each in found)]
    if unused:
        raise ValueError(lacking[unused[0]])
    return found


def _axes(mesh: Mesh, axis: _check.Axis | None) -> tuple[str, ...]:
    axes = tuple(mesh.axis_names) if axis is None else _check.axis_names(WHERE, axis)
    for each in axes:
        if each not in mesh.shape:
            raise ValueError(
                f"{WHERE}: --axis must name axes of the mesh, {_check.quoted(mesh.shape)}; got {each!r}. Add it to "
                f"the mesh, as in {each}=2, or name another."
            )
    return axes


def _check_kinds(dtypes: Sequence[str], redops: Sequence[str]) -> None:
    for dtype in dtypes:
        _check.one_of(WHERE, "dtype", dtype, DTYPES)
        if dtype == "float64" and not jax.config.read("jax_enable_x64"):
            raise ValueError(f"{WHERE}: dtype 'float64' needs 64-bit jax, which is off. Set JAX_ENABLE_X64=1.")
    for redop in redops:
        _check.one_of(WHERE, "redop", redop, REDOPS)
    whole = [dtype for dtype in dtypes if jnp.issubdtype(jnp.dtype(dtype), jnp.integer)]
    if whole and "mean" in redops:
        raise ValueError(f"{WHERE}: a mean needs a floating-point dtype; got {whole[0]}. Pass another --redop.")


def _operations(ops: Sequence[str] | None, kernels: Sequence[str]) -> list[Operation]:
    if kernels and not ops:
        raise ValueError(
            f"{WHERE}: a kernel of your own must be compared with a reference, that of its operation; got "
            f"{kernels[0]} without --op. Pass for example --op all_reduce."
        )
    if ops is None:
        return list(OPERATIONS.values())
    try:
        names = [_check.spelled(WHERE, "op", each, tuple(OPERATIONS), _OTHER_NAMES) for each in ops]
    except ValueError:
        if not kernels:
            raise
        unknown = next(each for each in ops if each not in {*OPERATIONS, *_OTHER_NAMES})
        raise ValueError(
            f"{WHERE}: a kernel must have a reference to be compared with; there is none for {unknown!r}, only for "
            f"{_check.quoted(OPERATIONS)}. Pass the operation that {kernels[0]} computes."
        ) from None
    return [OPERATIONS[name] for name in dict.fromkeys(names)]


def _redops(operation: Operation, redops: Sequence[str], named: bool) -> list[str]:
    if not operation.redops:
        return ["none"]
    for redop in redops:
        if named and redop not in operation.redops:
            raise ValueError(
                f"{WHERE}: --redop of {operation.name} must be {_check.either(operation.redops)}; got {redop}. Pass "
                f"for example --redop {operation.redops[0]}, or another --op."
            )
    return [redop for redop in redops if redop in operation.redops]


def _lacks(operation: Operation, name: str, redop: str, dtype: str, axes: tuple[str, ...]) -> str:
    """Why an operation has no such implementation here, or nothing."""
    if name not in operation.ways:
        everywhere = dict.fromkeys(way for each in OPERATIONS.values() for way in each.ways)
        of, choices = (operation.name, operation.ways) if name in everywhere else ("an operation", everywhere)
        return (
            f"{WHERE}: --impl of {of} must be {_check.either(list(choices))}; got {name}. Pass for example --impl "
            f"{next(iter(choices))}, or a kernel of your own, as in train.py:kernel."
        )
    way = operation.ways[name]
    if way.redops is not None and redop not in (*way.redops, "none"):
        return (
            f"{WHERE}: --redop of {operation.name} by {name} must be {_check.either(way.redops)}; got {redop}. Pass "
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


def _counts(
    operation: Operation, mesh: Mesh, axes: tuple[str, ...], dtype: str, sizes: Sequence[int] | None
) -> tuple[int, ...]:
    n, itemsize = math.prod(mesh.shape[axis] for axis in axes), jnp.dtype(dtype).itemsize
    cpu = mesh.devices.flat[0].platform == "cpu"
    given = sizes if sizes is not None else [2**k for k in (range(10, 23, 4) if cpu else range(10, 27, 2))]
    counts = {size: operation.elements(size, n, itemsize) for size in given}
    for size, count in counts.items():
        if not count and sizes is not None:
            least = itemsize * (n if operation.splits else 1)
            raise ValueError(
                f"{WHERE}: a size must give each of {n} devices an element; got {size} bytes of {dtype} for "
                f"{operation.name}, which takes {least} or more. Begin --sizes at {least}."
            )
    return tuple(dict.fromkeys(count for count in counts.values() if count))
