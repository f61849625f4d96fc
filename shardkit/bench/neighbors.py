"""What runs beside a collective while it is measured: a collective over another axis, a matmul, or a late device.

On a machine whose links and cores are independent, a collective takes as long beside them as alone. How far a machine
is from that is what `bench comm --beside` measures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardkit.bench.kernels import Neighbor, case_of_neighbor, place
from shardkit.bench.measure import Case, measure
from shardkit.bench.operations import make_values
from shardkit.bench.sweep import COMPUTE, LATE, WHERE, Sweep
from shardkit.collectives import axis_index, vary

_STEP = 128  # rows of a matrix come in multiples of it: the matrix units of TPUs and GPUs have at most as many
_LARGEST_SIDE = 16384  # 512 MiB in bfloat16
_ROUNDS = 3  # to choose the size of a matmul


class _Matmul(NamedTuple):
    """The product of a square matrix [side, side] with itself."""

    side: int
    dtype: Any

    def make_operand(self, mesh: Mesh) -> jax.Array:
        """The matrices of all devices, [devices, side * side]: of a product that is the matrix again."""
        block = np.full((mesh.size, self.side**2), 1 / self.side, self.dtype)
        return place(block, mesh, P(tuple(mesh.axis_names)))

    def run(self, block: jax.Array) -> jax.Array:
        """The product of one device's matrix, flat as the operand."""
        matrix = block.reshape(self.side, self.side)
        return (matrix @ matrix).reshape(-1)

    def run_late(self, axes: tuple[str, ...], block: jax.Array) -> jax.Array:
        """The product on the first device of each group, and the operand as it is on all others."""
        is_late = axis_index(axes) == 0
        return lax.cond(is_late, self.run, lambda block: block, vary(block, axes))


def make_neighbor(name: str, sweep: Sweep, count: int, alone: Case, calls: int) -> Neighbor:
    """The neighbor of a name in `Sweep.beside`, for a size of `count` elements.

    Compute, and lateness, are a matmul that takes about as long as the collective does alone: shorter ones would have
    nothing to hide, and longer ones would hide anything.
    """
    if name not in (COMPUTE, LATE):
        return _make_collective(name, sweep, count)
    matmul = _choose_matmul(sweep.mesh, alone, calls)
    run: Callable[[jax.Array], jax.Array] = matmul.run
    if name == LATE:
        run = partial(matmul.run_late, sweep.axes)
    return Neighbor(run, matmul.make_operand(sweep.mesh), comes_first=name == LATE)


def _make_collective(axis: str, sweep: Sweep, count: int) -> Neighbor:
    """The same operation by `lax` over another axis, of the same size."""
    operation = sweep.operation
    n = sweep.mesh.shape[axis]
    itemsize = jnp.dtype(sweep.dtype).itemsize
    # A size that does not divide by this axis is rounded down as any other; one too small gives each device an element.
    count = operation.elements(count * itemsize, n, itemsize) or n
    options = operation.arguments(sweep.redop, n, count)
    _, way = next(iter(operation.ways.items()))
    block = make_values(sweep.dtype, sweep.mesh.size, n, operation.block(n, count))

    def run(x: jax.Array) -> jax.Array:
        return way.kernel(x, axis, **options)

    return Neighbor(run, place(block, sweep.mesh, P(tuple(sweep.mesh.axis_names))), comes_first=False)


def _choose_matmul(mesh: Mesh, alone: Case, calls: int) -> _Matmul:
    """The matmul that takes about as long as a case.

    Worked example: a product of matrices [2048, 2048] takes 100 us, and the collective 800 us. Compute grows with the
    cube of the side, so twice the side takes as long.
    """
    trial = _Matmul(2048, jnp.bfloat16)
    if mesh.devices.flat[0].platform == "cpu":
        trial = _Matmul(256, jnp.float32)
    trial_case = case_of_neighbor("matmul", Neighbor(trial.run, trial.make_operand(mesh), comes_first=False), mesh)
    records = measure(WHERE, "to choose a matmul", [alone, trial_case], calls=calls, rounds=_ROUNDS, refuse=False)
    collective_time, trial_time = (record["wall_us_min"] for record in records)
    side = trial.side * (collective_time / trial_time) ** (1 / 3)
    steps = max(1, round(side / _STEP))
    if jax.process_count() > 1:
        # Processes measure other times, and must compile one program: that of process 0.
        steps = int(multihost_utils.broadcast_one_to_all(np.array(steps)))
    return trial._replace(side=min(_LARGEST_SIDE, steps * _STEP))


def share_hidden(alone: float, neighbor: float, together: float) -> float:
    """How much of the shorter one is hidden: 1 where both take as long as the longer one, 0 where as long as their sum.

    Below 0 they hinder each other. The three are times of one round.
    """
    return (alone + neighbor - together) / min(alone, neighbor)
