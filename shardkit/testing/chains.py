"""Small programs of collectives as data: they print, run as a kernel, and run on the reference.

Worked example, on a mesh a=2 with a block int32[2] on each device. The first op leaves [2], the second makes [4]:

    x = all_reduce(x, 'a', op='sum')     blocks [1, 2] and [3, 4] become [4, 6] on both
    x = all_gather(x, 'a', dim=0)        [4, 6, 4, 6] on both

A chain is legal if all shapes divide, and exact if all integers fit the dtype: whole numbers from -3 to 3 have 2 bits,
and each sum over n devices adds log2(n), up to 8 bits in bfloat16.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardkit import collectives
from shardkit._arguments.checks import format_sizes
from shardkit.testing import reference

DTYPES = ("float32", "bfloat16", "float16", "int32", "bool")
# Bits of the integers that a dtype represents exactly.
_BITS = {"float32": 24, "bfloat16": 8, "float16": 11, "int32": 31, "bool": 1}
# Elements. Without a limit, a few all_gathers in a row would take most of the time of a test.
_LARGEST_BLOCK = 512


class Op(NamedTuple):
    """One collective: the kernel's name, the axes, and its other options."""

    kernel: str
    axes: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        axes: Any = self.axes
        if len(axes) == 1:
            (axes,) = axes
        arguments = ["x", repr(axes)]
        for name, value in self.options:
            arguments.append(f"{name}={value!r}")
        return f"{self.kernel}({', '.join(arguments)})"


class BlockState(NamedTuple):
    """The block of a device: its shape, its dtype, and the bits of its largest integer."""

    shape: tuple[int, ...]
    dtype: str
    bits: float


class Chain(NamedTuple):
    """A chain of collectives on one block per device.

    Attributes:
        sizes: the mesh, axis name and size.
        shape: shape of each device's block.
        dtype: its dtype.
        ops: the collectives, one after the other.
        seed: of the blocks' values.
    """

    sizes: dict[str, int]
    shape: tuple[int, ...]
    dtype: str
    ops: tuple[Op, ...]
    seed: int

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        lines = [
            f"mesh {format_sizes(self.sizes.items())}",
            f"x: {self.dtype}[{shape}] on each device, seed {self.seed}",
        ]
        for op in self.ops:
            lines.append(f"x = {op}")
        return "\n".join(lines)

    @property
    def spec(self) -> PartitionSpec:
        """The layout of argument and result: their first dims are the mesh."""
        return PartitionSpec(*self.sizes)

    def blocks(self) -> np.ndarray:
        """The argument: whole numbers from -3 to 3, shape [*sizes, *shape]."""
        rng = np.random.default_rng(self.seed)
        shape = (*self.sizes.values(), *self.shape)
        if self.dtype == "bool":
            values = rng.integers(0, 2, shape)
        else:
            values = rng.integers(-3, 4, shape)
        return np.asarray(values).astype(jnp.dtype(self.dtype))

    def kernel(self, x: Any) -> Any:
        """The function of one device, inside shard_map or emulate: from a block of shape [1, .., *shape] to another."""
        mesh_dims = len(self.sizes)
        x = x.reshape(x.shape[mesh_dims:])
        for op in self.ops:
            kernel = getattr(collectives, op.kernel)
            x = kernel(x, op.axes, **dict(op.options))
        x = collectives.vary(x, tuple(self.sizes))
        return x.reshape((1,) * mesh_dims + x.shape)

    def reference(self, x: Any, *, xp: Any = np) -> Any:
        """The same over lists of blocks: arrays of shape [*sizes, ...]; with `xp=jax.numpy` differentiable."""
        for op in self.ops:
            blockwise = partial(getattr(reference, op.kernel), **dict(op.options))
            x = reference.over_mesh(blockwise, x, self.sizes, op.axes, xp=xp)
        return x


def state_of(program: Chain) -> BlockState:
    """The block of a device after a program."""
    bits = 1.0 if program.dtype == "bool" else 2.0
    state = BlockState(program.shape, program.dtype, bits)
    for op in program.ops:
        devices = math.prod(program.sizes[name] for name in op.axes)
        state = _apply_op(state, op, devices)
    return state


def legal_ops(state: BlockState, axes: tuple[str, ...], sizes: Mapping[str, int]) -> list[Op]:
    """Every collective over `axes` whose shapes fit and whose results are exact; first `vary`, which always fits."""
    n = math.prod(sizes[name] for name in axes)
    dims = range(len(state.shape))
    ops: list[tuple[str, dict[str, Any]]] = [("vary", {})]
    for op in ("sum", "mean", "max", "min"):
        ops.append(("all_reduce", {"op": op}))
    if state.dtype == "bool":
        ops.append(("all_reduce", {"op": "any"}))
        ops.append(("all_reduce", {"op": "all"}))
    for dim in dims:
        ops.append(("all_gather", {"dim": dim}))
    for by, wrap in itertools.product((1, -1, 2), (True, False)):
        ops.append(("shift", {"by": by, "wrap": wrap}))
    for source in sorted({0, n - 1}):
        ops.append(("broadcast", {"source": source}))
    for op, exclusive in itertools.product(("sum", "max"), (False, True)):
        ops.append(("prefix_scan", {"op": op, "exclusive": exclusive}))
    for dim, wrap in itertools.product(dims, (True, False)):
        ops.append(("halo_exchange", {"dim": dim, "wrap": wrap}))
    for dim in dims:
        ops.append(("gather_to_one", {"dim": dim, "target": n - 1}))
    # Last, because they do not always fit: the others keep their index while an example shrinks.
    for dim, op in itertools.product(dims, ("sum", "mean")):
        ops.append(("reduce_scatter", {"dim": dim, "op": op}))
    for split_dim, concat_dim in itertools.product(dims, dims):
        ops.append(("all_to_all", {"split_dim": split_dim, "concat_dim": concat_dim}))
    legal = []
    for kernel, options in ops:
        collective = Op(kernel, axes, tuple(options.items()))
        if _fits(state, collective, n):
            legal.append(collective)
    return legal


def _fits(state: BlockState, op: Op, n: int) -> bool:
    """Whether a collective over n devices divides the block, and gives a small block of exact numbers."""
    options = dict(op.options)
    if op.kernel == "reduce_scatter" and state.shape[options["dim"]] % n:
        return False
    if op.kernel == "all_to_all" and state.shape[options["split_dim"]] % n:
        return False
    if options.get("op") == "mean" and n & (n - 1):
        return False  # 1/3 is not exact
    if op.kernel == "prefix_scan" and options == {"op": "max", "exclusive": True}:
        return False  # starts from minus infinity
    result = _apply_op(state, op, n)
    is_small = math.prod(result.shape) <= _LARGEST_BLOCK
    is_exact = result.bits <= _BITS[result.dtype]
    return is_small and is_exact


def _apply_op(state: BlockState, op: Op, n: int) -> BlockState:
    """The block of a device after one collective over n devices."""
    # For example an all_gather of int32[3] with 2 bits along dim 0 over 4 devices: int32[12], with the same 2 bits; a
    # sum instead: int32[3], with 4 bits, since four integers up to 3 add up to 12.
    options = dict(op.options)
    shape = list(state.shape)
    dtype = state.dtype
    bits = state.bits
    if op.kernel in ("all_gather", "gather_to_one"):
        shape[options["dim"]] *= n
    elif op.kernel == "reduce_scatter":
        shape[options["dim"]] //= n
    elif op.kernel == "all_to_all":
        shape[options["split_dim"]] //= n
        shape[options["concat_dim"]] *= n
    elif op.kernel == "halo_exchange":
        # One row before and one behind, as `halo_exchange` has by default.
        shape[options["dim"]] += 2
    if options.get("op") in ("sum", "mean"):
        # A mean too: of integers up to 3 over 4 devices it is a multiple of 1/4, and has as many bits as the sum.
        bits += math.log2(n)
        if dtype == "bool":  # a sum counts the True ones
            dtype = "int32"
        if options["op"] == "mean" and dtype == "int32":
            dtype = "float32"
    return BlockState(tuple(shape), dtype, bits)
