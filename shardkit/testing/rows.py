"""Rows: the ways to run a training step; and covering lists, in place of the product of all options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import AxisType

from shardkit._arguments.checks import sized
from shardkit._arguments.typed import typed
from shardkit.on_device.gradient import GradFn
from shardkit.on_device.precision import Precision
from shardkit.plans.plan import Plan

Choice = dict[str, Any]
Pair = tuple[tuple[str, int], tuple[str, int]]


class Row(NamedTuple):
    """One way to run a training step; None means the argument of `prove`.

    Attributes:
        mesh: axis name and size, in the mesh's order.
        plan: how the axes are used.
        grad_fn: what each device computes, if it depends on the row's axes or schedule.
        accumulate: microbatches, as for `make_train_step`.
        precision: as for `make_train_step`.
        nonfinite: as for `make_train_step`.
        optimizer: an optax GradientTransformation.
        relative: the allowed error, relative to the largest magnitude in a leaf.
        label: the row's name; by default its mesh and plan.
        devices: the devices in row-major order of the axes; by default the first of `jax.devices()`.
        deterministic: as for `make_train_step`.
        manual: as for `make_train_step`.
        axis_types: as for `make_mesh`.
        steps: steps per call, as for `make_train_step`; the batches of a call are stacked.
    """

    mesh: Mapping[str, int]
    plan: Plan
    grad_fn: GradFn | None = None
    accumulate: int = 1
    precision: Precision | str | None = None
    nonfinite: str = "keep"
    optimizer: Any = None
    relative: float | None = None
    label: str = ""
    devices: Sequence[Any] | None = None
    deterministic: int | None = None
    manual: tuple[str, ...] | None = None
    axis_types: AxisType | Sequence[AxisType] = AxisType.Auto
    steps: int | None = None

    def __str__(self) -> str:
        options = [f"accumulate={self.accumulate}"] * (self.accumulate > 1)
        options += [f"precision={self.precision}"] * (self.precision is not None)
        options += [f"deterministic={self.deterministic}"] * (self.deterministic is not None)
        options += [f"steps={self.steps}"] * (self.steps is not None)
        return self.label or ", ".join([f"{sized(self.mesh.items())}: {self.plan}", *options])


@typed
def covering(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Choice], bool] = lambda choice: True
) -> list[Choice]:
    """Lists choices in which every two values of different factors occur together at least once.

    Most faults show with one or two values; a covering list finds them with dozens of rows, where the product of all
    factors has thousands. The list is deterministic.

    Args:
        factors: the values of each factor by its name, for example `{"plan": ["dp", "fsdp"], "accumulate": [1, 2]}`.
        allowed: whether a choice is valid. It is called with partial choices too, and must not refuse one that can be
            completed: read them with `choice.get(name)`.

    Returns:
        One dict for each row, with a value for every factor. Pairs without an allowed row are omitted.

    Raises:
        ValueError: a factor without values.

    Example:
        >>> options = {"plan": ["dp", "fsdp"], "accumulate": [1, 2], "precision": ["no", "bf16"]}
        >>> len(sk.testing.covering(options))  # their product has 8
        4

    Source: Cohen et al., The AETG System (IEEE Transactions on Software Engineering 23, 1997).
    """
    for name, values in factors.items():
        if not values:
            raise ValueError(
                f"covering: factor {name!r} must have one or more values; got none. Add a value, or drop the factor."
            )
    sizes = {name: len(values) for name, values in factors.items()}

    def fits(row: Mapping[str, int]) -> bool:
        return allowed({name: factors[name][index] for name, index in row.items()})

    left = _pairs(sizes)
    rows: list[dict[str, int]] = []
    while left:
        first = next(iter(left))
        row = _completed(dict(first), sizes, left, fits)
        if row is None:
            del left[first]
            continue
        rows.append(row)
        for pair in itertools.combinations(sorted(row.items()), 2):
            left.pop(pair, None)
    return [{name: factors[name][row[name]] for name in factors} for row in rows]


def _pairs(sizes: Mapping[str, int]) -> dict[Pair, None]:
    """Every two values of different factors, as indices; a dict keeps their order."""
    return {
        ((a, i), (b, j)): None
        for a, b in itertools.combinations(sorted(sizes), 2)
        for i, j in itertools.product(range(sizes[a]), range(sizes[b]))
    }


def _completed(
    row: dict[str, int], sizes: Mapping[str, int], left: Mapping[Pair, None], fits: Callable[[dict[str, int]], bool]
) -> dict[str, int] | None:
    """The row with every factor chosen, each to cover the most new pairs; None if nothing fits."""
    if not fits(row):
        return None
    if len(row) == len(sizes):
        return row
    # A factor without a valid value ends the search now, not after all others have been tried.
    open_values = {
        name: [i for i in range(size) if fits({**row, name: i})] for name, size in sizes.items() if name not in row
    }
    if not all(open_values.values()):
        return None

    def new(name: str, index: int) -> int:
        return sum(tuple(sorted([(name, index), other])) in left for other in row.items())

    gains = {name: max(new(name, index) for index in values) for name, values in open_values.items()}
    forced = [name for name, values in open_values.items() if len(values) == 1]
    name = forced[0] if forced else max(gains, key=lambda name: (gains[name], name))
    for index in sorted(open_values[name], key=lambda index: -new(name, index)):
        done = _completed({**row, name: index}, sizes, left, fits)
        if done is not None:
            return done
    return None
