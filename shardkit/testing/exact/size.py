"""How long a proof takes, from the traced programs. Too large ones are refused, with the array that should shrink."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from shardkit._jax import compat
from shardkit._jax.jaxprs import Site, walk
from shardkit.testing._compare import is_float
from shardkit.testing.exact.evidence import UnprovableError
from shardkit.testing.exact.numbers.tower import LEVELS
from shardkit.testing.exact.rules.primitive_rules import ORDERED

# Measured on one core, about. An element of a result is computed modulo LEVELS primes at each point; an element of a
# matmul or convolution takes a product, modulo each of them, for every term of its sum.
_SECONDS_PER_EQUATION = 2e-4
_SECONDS_PER_COMPONENT = 4e-8
_SECONDS_PER_PRODUCT = 4e-9


def check_size(where: str, programs: Sequence[Any], points: int, draws: int, longest: float = 600.0) -> float:
    """Refuses programs that would take more than `longest` seconds; returns how many seconds one run of them takes.

    Programs that compare floats are run `draws` times, because one run shows one branch of each comparison.

    For example, `x @ w` with x [64, 512] and w [512, 256] on each of 4 devices, at 3 points: 4 * 64 * 256 elements of
    3 * 8 components, and 512 products for each of these, take 3.3 seconds.
    """
    seconds = 0.0
    runs = 1
    # The largest array is named in the message: its line takes longer to find than all else here.
    largest: Any = None
    largest_size = -1
    for site in _list_sites(programs):
        sizes = [math.prod(shape) for shape in _list_shapes(site.equation)]
        size = max(sizes, default=0)
        if size > largest_size:
            largest_size = size
            largest = site
        if site.name in ORDERED and is_float(site.equation.invars[0].aval):
            runs = draws
        seconds += _estimate_seconds(site, size, points)
    if seconds * runs <= longest:
        return seconds
    minutes = seconds * runs / 60
    shape = max(_list_shapes(largest.equation), key=math.prod)
    raise UnprovableError(
        f"{where}: shapes must be small, because a proof holds for all values and not for more shapes; these would "
        f"take about {minutes:,.0f} minutes, the largest array is {list(shape)} at {largest.source}. "
        "Shrink batch, sequence, widths and layers to a few elements per device, as testing.small does."
    )


def _list_sites(programs: Sequence[Any]) -> Iterator[Site]:
    """The equations of all programs, but for those that hold others, which are walked too."""
    for program in programs:
        for site in walk(program.jaxpr):
            if not compat.inner_jaxprs(site.equation):
                yield site


def _estimate_seconds(site: Site, size: int, points: int) -> float:
    """The seconds of one equation with `size` results, in all rounds of its loops and on all devices."""
    rounds = site.times or 1  # None where a loop ends by a number
    devices = math.prod(site.sizes.values())
    components = rounds * devices * size * LEVELS * points
    seconds_per_component = _SECONDS_PER_COMPONENT + _count_products(site.equation) * _SECONDS_PER_PRODUCT
    return rounds * _SECONDS_PER_EQUATION + components * seconds_per_component


def _list_shapes(equation: Any) -> list[tuple[int, ...]]:
    """The shapes of the results of an equation."""
    avals = [variable.aval for variable in equation.outvars]
    return [aval.shape for aval in avals if hasattr(aval, "shape")]  # a token has none


def _count_products(equation: Any) -> int:
    """How many products, or elements of a window, are added up in one element of the result."""
    name = equation.primitive.name
    params = equation.params
    if name == "dot_general":
        (contracted_dims, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return math.prod(shape[dim] for dim in contracted_dims)
    if name == "conv_general_dilated":
        kernel_shape = equation.invars[1].aval.shape
        _, *summed_dims = params["dimension_numbers"].rhs_spec  # output features, input features, window
        return math.prod(kernel_shape[dim] for dim in summed_dims)
    if name.startswith("reduce_window"):
        return math.prod(params["window_dimensions"])
    return 1
