"""What a rule is given and gives back: numbers of the field, or arrays that are known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from shardkit.testing.exact.field import Field, UnsupportedError
from shardkit.testing.exact.values import Exact

# Arrays of integers and booleans, of floats that follow from no input, and of keys, a word each.
Known = np.ndarray
Operand = Any  # Exact or Known


class MeshRules(Protocol):
    """What a rule needs of `Rules`."""

    field: Field
    rank: int

    def exact(self, *operands: Operand) -> list[Exact]:
        """Operands in the field."""

    def decide(self, equation: Any, truth: np.ndarray, x: Exact, y: Exact) -> np.ndarray:
        """The truth of a comparison, noted."""


def deciding(x: Operand, what: str) -> Known:
    """An operand that says which elements or which branch; it must not follow from a float."""
    if isinstance(x, Exact):
        raise UnsupportedError(f"{what} that a float decides")
    return x


def joined(parts: Sequence[np.ndarray], dim: int, new: bool, behind: int = 0) -> np.ndarray:
    """Arrays stacked or concatenated along a dim, behind others; their other dims broadcast."""
    own = [x.shape[behind:] for x in parts]
    shape = np.broadcast_shapes(*(each if new else (*each[:dim], 1, *each[dim + 1 :]) for each in own))
    whole = []
    for part, each in zip(parts, own, strict=True):
        full = shape if new else (*shape[:dim], each[dim], *shape[dim + 1 :])
        whole.append(np.broadcast_to(part, (*part.shape[:behind], *full)))
    return np.stack(whole, behind + dim) if new else np.concatenate(whole, behind + dim)


def stacked(field: Field, rows: Sequence[Operand], dim: int, new: bool = False) -> Operand:
    """Operands joined along a dim, `new` or their own."""
    if not any(isinstance(x, Exact) for x in rows):
        return joined(rows, dim, new)
    exact = [x if isinstance(x, Exact) else field.lifted(x) for x in rows]
    factor = None
    if any(x.factor is not None for x in exact):
        factor = joined([np.ones_like(x.number) if x.factor is None else x.factor for x in exact], dim, new, 1)
    degree = exact[0].degree.plus(*(x.degree for x in exact))
    number = joined([x.number for x in exact], dim, new, 1)
    known = joined([x.facts for x in exact], dim, new, 1)
    real = joined([x.real for x in exact], dim, new, 1)
    return Exact(number, known, real, factor, degree)


def elements_at(source: np.ndarray, at: np.ndarray, rank: int) -> np.ndarray:
    """Elements of [components, *lead, n] at places [*lead, ...]."""
    lead, own = source.shape[1:-1], at.shape[rank:]
    flat = at.reshape(*at.shape[:rank], -1)
    if math.prod(at.shape[:rank]) == 1:
        return source[..., flat.reshape(-1)].reshape(*source.shape[:-1], *own)
    over = np.broadcast_shapes(lead, at.shape[:rank])
    components = source.shape[0]
    source = np.broadcast_to(source, (components, *over, source.shape[-1]))
    flat = np.broadcast_to(flat, (components, *over, flat.shape[-1]))
    return np.take_along_axis(source, flat, -1).reshape(components, *over, *own)
