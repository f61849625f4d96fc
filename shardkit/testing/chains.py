"""Small programs of collectives as data: they print, run as a kernel, and run on the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardkit import collectives
from shardkit._arguments.checks import sized
from shardkit.testing import reference

DTYPES = ("float32", "bfloat16", "float16", "int32", "bool")
# Bits of the integers that a dtype represents exactly.
_BITS = {"float32": 24, "bfloat16": 8, "float16": 11, "int32": 31, "bool": 1}
_LARGEST_BLOCK = 512


class Op(NamedTuple):
    """One collective: the kernel's name, the axes, and its other options."""

    kernel: str
    axes: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        axes = repr(self.axes[0]) if len(self.axes) == 1 else repr(self.axes)
        return ", ".join([f"{self.kernel}(x", axes, *(f"{name}={value!r}" for name, value in self.options)]) + ")"


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
        mesh = sized(self.sizes.items())
        block = f"x: {self.dtype}[{', '.join(map(str, self.shape))}] on each device, seed {self.seed}"
        return "\n".join([f"mesh {mesh}", block, *(f"x = {op}" for op in self.ops)])

    @property
    def spec(self) -> PartitionSpec:
        """The layout of argument and result: their first dims are the mesh."""
        return PartitionSpec(*self.sizes)

    def blocks(self) -> np.ndarray:
        """The argument: whole numbers from -3 to 3, shape [*sizes, *shape]."""
        rng = np.random.default_rng(self.seed)
        shape = (*self.sizes.values(), *self.shape)
        values = rng.integers(0, 2, shape) if self.dtype == "bool" else rng.integers(-3, 4, shape)
        return np.asarray(values).astype(jnp.dtype(self.dtype))

    def kernel(self, x: Any) -> Any:
        """What each device runs, inside shard_map or emulate: a block of shape [1, .., *shape] in, one out."""
        lead = len(self.sizes)
        x = x.reshape(x.shape[lead:])
        for op in self.ops:
            x = getattr(collectives, op.kernel)(x, op.axes, **dict(op.options))
        x = collectives.vary(x, tuple(self.sizes))
        return x.reshape((1,) * lead + x.shape)

    def reference(self, x: Any, *, xp: Any = np) -> Any:
        """The same over lists of blocks: arrays of shape [*sizes, ...]; with `xp=jax.numpy` differentiable."""
        for op in self.ops:
            blockwise = partial(getattr(reference, op.kernel), **dict(op.options))
            x = reference.over_mesh(blockwise, x, self.sizes, op.axes, xp=xp)
        return x


def state_of(program: Chain) -> BlockState:
    """The block of a device after a program."""
    state = BlockState(program.shape, program.dtype, 1.0 if program.dtype == "bool" else 2.0)
    for op in program.ops:
        state = _after(state, op, math.prod(program.sizes[name] for name in op.axes))
    return state


def legal_ops(state: BlockState, axes: tuple[str, ...], sizes: Mapping[str, int]) -> list[Op]:
    """Every collective over `axes` whose shapes fit and whose results are exact; first `vary`, which always fits."""
    n, dims = math.prod(sizes[name] for name in axes), range(len(state.shape))
    ops: list[tuple[str, dict[str, Any]]] = [("vary", {})]
    ops += [("all_reduce", {"op": op}) for op in ("sum", "mean", "max", "min")]
    ops += [("all_reduce", {"op": op}) for op in ("any", "all") if state.dtype == "bool"]
    ops += [("all_gather", {"dim": dim}) for dim in dims]
    ops += [("shift", {"by": by, "wrap": wrap}) for by in (1, -1, 2) for wrap in (True, False)]
    ops += [("broadcast", {"source": source}) for source in sorted({0, n - 1})]
    ops += [("prefix_scan", {"op": op, "exclusive": before}) for op in ("sum", "max") for before in (False, True)]
    ops += [("halo_exchange", {"dim": dim, "wrap": wrap}) for dim in dims for wrap in (True, False)]
    ops += [("gather_to_one", {"dim": dim, "target": n - 1}) for dim in dims]
    # last, because they do not always fit: the others keep their index while an example shrinks
    ops += [("reduce_scatter", {"dim": dim, "op": op}) for dim in dims for op in ("sum", "mean")]
    ops += [("all_to_all", {"split_dim": i, "concat_dim": j}) for i in dims for j in dims]
    every = [Op(kernel, axes, tuple(options.items())) for kernel, options in ops]
    return [op for op in every if _fits(state, op, n)]


def _fits(state: BlockState, op: Op, n: int) -> bool:
    options = dict(op.options)
    if op.kernel == "reduce_scatter" and state.shape[options["dim"]] % n:
        return False
    if op.kernel == "all_to_all" and state.shape[options["split_dim"]] % n:
        return False
    if options.get("op") == "mean" and n & (n - 1):
        return False  # 1/3 is not exact
    if op.kernel == "prefix_scan" and options == {"op": "max", "exclusive": True}:
        return False  # starts from minus infinity
    after = _after(state, op, n)
    return math.prod(after.shape) <= _LARGEST_BLOCK and after.bits <= _BITS[after.dtype]


def _after(state: BlockState, op: Op, n: int) -> BlockState:
    """The block of a device after one collective over n devices."""
    options = dict(op.options)
    shape, dtype, bits = list(state.shape), state.dtype, state.bits
    if op.kernel in ("all_gather", "gather_to_one"):
        shape[options["dim"]] *= n
    elif op.kernel == "reduce_scatter":
        shape[options["dim"]] //= n
    elif op.kernel == "all_to_all":
        shape[options["split_dim"]] //= n
        shape[options["concat_dim"]] *= n
    elif op.kernel == "halo_exchange":
        shape[options["dim"]] += 2
    if options.get("op") in ("sum", "mean"):
        bits += math.log2(n)
        dtype = "int32" if dtype == "bool" else dtype
        if options["op"] == "mean" and dtype == "int32":
            dtype = "float32"
    return BlockState(tuple(shape), dtype, bits)
