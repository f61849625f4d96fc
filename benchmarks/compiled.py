"""What the benchmarks share that compile for absent chips: arrays as shapes, and figures of a report as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import Report


def describe_array(mesh: Mesh | AbstractMesh, spec: P, dims: Sequence[int], dtype: Any = jnp.bfloat16) -> Any:
    """An argument of a program that is only compiled: the shape of a global array, and how it is split."""
    return jax.ShapeDtypeStruct(tuple(dims), dtype, sharding=NamedSharding(mesh, spec))


def get_memory(report: Report) -> Memory:
    """The memory of a program that must fit."""
    assert report.memory is not None, f"the program needs {report.needed} bytes, and there are {report.available}"
    return report.memory


def count_asynchronous(report: Report) -> int:
    """The collectives that the compiler starts before it waits for them, so that compute may run beside them."""
    return sum(row.times for row in report.rows if row.asynchronous)


def format_milliseconds(*seconds: float, digits: int = 2) -> tuple[str, ...]:
    """Seconds as text, in milliseconds."""
    cells = []
    for duration in seconds:
        cells.append(f"{1e3 * duration:.{digits}f}")
    return tuple(cells)
