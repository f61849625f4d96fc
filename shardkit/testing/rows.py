"""Rows: the ways to run a training step; and covering lists, in place of the product of all options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jax.sharding import AxisType

from shardkit._arguments.checks import format_sizes
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
        grad_fn: the computation of each device, if it depends on the row's axes or schedule.
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
        if self.label:
            return self.label
        parts = [f"{format_sizes(self.mesh.items())}: {self.plan}"]
        if self.accumulate > 1:
            parts.append(f"accumulate={self.accumulate}")
        if self.precision is not None:
            parts.append(f"precision={self.precision}")
        if self.deterministic is not None:
            parts.append(f"deterministic={self.deterministic}")
        if self.steps is not None:
            parts.append(f"steps={self.steps}")
        return ", ".join(parts)


@typed
def covering(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Choice], bool] = lambda choice: True
) -> list[Choice]:
    """Lists rows so that every pair of values, of two different factors, occurs at least once.

    Most faults need one or two values. A covering list finds them with dozens of rows; the product of all factors has
    thousands. You always get the same list.

    Args:
        factors: the values of each factor by its name, for example `{"plan": ["dp", "fsdp"], "accumulate": [1, 2]}`.
        allowed: whether a choice is valid. It gets partial choices too, and must allow a partial choice that can still
            be completed: read it with `choice.get(name)`.

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
        choice = {name: factors[name][index] for name, index in row.items()}
        return allowed(choice)

    # A row is a number of a value for each factor. With plan, accumulate and precision of two values each there are 12
    # pairs. The first row completes the first pair, accumulate 0 with plan 0, by the precision 0, and covers three
    # pairs. The next row begins with the first pair that no row covers yet, and takes for each other factor the value
    # that covers most.
    uncovered = _list_pairs(sizes)
    rows: list[dict[str, int]] = []
    while uncovered:
        pair = next(iter(uncovered))
        row = _complete(dict(pair), sizes, uncovered, fits)
        if row is None:  # no row with this pair is allowed
            del uncovered[pair]
            continue
        rows.append(row)
        # Sorted by name, as the pairs of `_list_pairs` are.
        for pair_of_row in itertools.combinations(sorted(row.items()), 2):
            uncovered.pop(pair_of_row, None)
    # The factors in the caller's order.
    choices = []
    for row in rows:
        choices.append({name: values[row[name]] for name, values in factors.items()})
    return choices


def _list_pairs(sizes: Mapping[str, int]) -> dict[Pair, None]:
    """Every two values of different factors, as indices; a dict keeps their order."""
    pairs: dict[Pair, None] = {}
    for a, b in itertools.combinations(sorted(sizes), 2):
        for i, j in itertools.product(range(sizes[a]), range(sizes[b])):
            pairs[(a, i), (b, j)] = None
    return pairs


def _complete(
    row: dict[str, int],
    sizes: Mapping[str, int],
    uncovered: Mapping[Pair, None],
    fits: Callable[[dict[str, int]], bool],
) -> dict[str, int] | None:
    """The row with every factor chosen, each to cover the most new pairs; None if nothing fits.

    By backtracking: a factor gets its best value, the rest of the row is completed, and if that is impossible the
    factor gets its next best value.
    """
    if not fits(row):
        return None
    if len(row) == len(sizes):
        return row
    valid_values: dict[str, list[int]] = {}
    for name, size in sizes.items():
        if name in row:
            continue
        valid_values[name] = [index for index in range(size) if fits({**row, name: index})]
        # A factor without a valid value ends the search now, not after all others have been tried.
        if not valid_values[name]:
            return None

    # Of a factor not chosen yet, with each factor that is: these pairs the row would cover.
    def count_new_pairs(name: str, index: int) -> int:
        count = 0
        for choice in row.items():
            pair = tuple(sorted([(name, index), choice]))
            count += pair in uncovered
        return count

    def find_best_gain(name: str) -> tuple[int, str]:
        gains = [count_new_pairs(name, index) for index in valid_values[name]]
        return max(gains), name

    # A factor with one valid value leaves no choice: first, because it restricts the others.
    forced = [name for name, values in valid_values.items() if len(values) == 1]
    if forced:
        name = forced[0]
    else:
        name = max(valid_values, key=find_best_gain)
    # Of values that cover as many new pairs, the first one of the caller's list comes first.
    best_first = sorted(valid_values[name], key=partial(count_new_pairs, name), reverse=True)
    for index in best_first:
        complete = _complete({**row, name: index}, sizes, uncovered, fits)
        if complete is not None:
            return complete
    return None
