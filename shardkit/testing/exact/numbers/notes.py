"""What a run notes beside its results: certificates and further draws read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from shardkit.testing.exact.numbers.folded import Constant
from shardkit.testing.exact.numbers.values import Exact

ROUNDING = {"round", "floor", "ceil", "to an integer"}


@dataclass
class Notes:
    """The notes of one run in a field.

    Attributes:
        inputs: the inputs that were drawn, by name.
        uninterpreted: the functions that were applied without a law, by name.
        rounded: the functions of constants that were computed in floats, as log(2), in words.
        rounded_values: their values, by the side of the comparison that computed them.
        constants: by side, the constants that became numbers of the field, by value and dtype.
        stored: by side, the float constants of a compiled program and of its trace, with the dtypes in which they are
            stored: a bfloat16 becomes a float32 before it is a number of the field.
        compared: how many arrays were put in order.
        divisions: how many arrays of divisors that may be zero for some inputs there were; each has this number.
        allocations: how often memory was read to which nothing was written.
        deepest: the most primes that exps used up, on the way to a number that was compared.
        exps: whether an exp was taken.
        logs: whether a logarithm became a number, after which the components of the highest prime have no meaning.
        domains: whether a logarithm, or a root, was taken of a number that may be outside of its domain for other
            inputs.
        outside: the line where a value was first outside of the domain of a function.
        chances: whether random bits of keys were used, which differ from draw to draw.
        lost: whether float64 had zero for a number that is not zero, and whose place in the order was asked for.
    """

    inputs: dict[str, Exact] = field(default_factory=dict)
    uninterpreted: set[str] = field(default_factory=set)
    rounded: set[str] = field(default_factory=set)
    rounded_values: dict[int, set[float]] = field(default_factory=dict)
    constants: dict[int, set[Constant]] = field(default_factory=dict)
    stored: dict[int, set[Constant]] = field(default_factory=dict)
    compared: int = 0
    divisions: int = 0
    allocations: int = 0
    deepest: int = 0
    exps: bool = False
    logs: bool = False
    domains: bool = False
    outside: str = ""
    chances: bool = False
    lost: bool = False

    @property
    def rounds(self) -> bool:
        """Whether floats were rounded to integers."""
        return bool(self.uninterpreted & ROUNDING)

    @property
    def divides(self) -> bool:
        """Whether there was a divisor, or the argument of a logarithm, that may be zero for some inputs."""
        return self.divisions > 0 or self.domains

    def add_rounded(self, name: str, values: np.ndarray, side: int | None) -> None:
        """Notes that a function of constants was computed in floats, and its values, for the side that runs."""
        self.rounded.add(name)
        if side is not None:
            self.rounded_values.setdefault(side, set()).update(np.unique(values).tolist())

    def add_constants(self, constants: Sequence[Constant], side: int | None) -> None:
        """Notes constants that became numbers of the field, for the side that runs."""
        if side is not None:
            self.constants.setdefault(side, set()).update(constants)

    def add_stored(self, x: np.ndarray, side: int | None) -> None:
        """Notes the values and the dtype of a constant, as the program of the side that runs stores it."""
        if side is not None and jnp.issubdtype(x.dtype, jnp.floating):
            stored = self.stored.setdefault(side, set())
            for value in np.unique(x.astype(np.float64)).tolist():
                stored.add((value, str(x.dtype)))

    def merge(self, other: Notes, sides: Sequence[int]) -> None:
        """Adds the notes of some sides in another field of like settings, as if they had run in this one."""
        self.uninterpreted |= other.uninterpreted
        self.rounded |= other.rounded
        for side in sides:
            # Copies, because `other` is added elsewhere too.
            self.rounded_values[side] = set(other.rounded_values.get(side, ()))
            self.constants[side] = set(other.constants.get(side, ()))
        self.domains |= other.domains
        self.chances |= other.chances
        self.logs |= other.logs
        self.exps |= other.exps
        self.compared += other.compared
        self.deepest = max(self.deepest, other.deepest)
        self.outside = self.outside or other.outside
