"""Hypothesis strategies: meshes, layouts, sharded arrays, programs. All shrink to the smallest mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardkit._arguments.checks import at_least
from shardkit._arguments.typed import typed
from shardkit.meshes.layout import canonical, spec_axes
from shardkit.testing.certify import factorizations
from shardkit.testing.chains import DTYPES, Chain, Op, legal_ops, state_of

NAMES = ("a", "b", "c")
_Draw = Any


class ShardedArray(NamedTuple):
    """A global array, its layout, and the mesh.

    Attributes:
        value: numpy array of global shape.
        spec: its PartitionSpec; every dim is divisible.
        sizes: the mesh, axis name and size.
    """

    value: np.ndarray
    spec: PartitionSpec
    sizes: dict[str, int]


@typed
def meshes(*, devices: int = 8, names: Sequence[str] = NAMES) -> st.SearchStrategy[dict[str, int]]:
    """Meshes of up to `devices` devices: every number of devices, factored into one or more axes in every order.

    Args:
        devices: the largest number of devices.
        names: names of the axes; a mesh has one to `len(names)` of them.

    Returns:
        Strategy of `{axis: size}` for `make_mesh` and `emulate`; shrinks to `{names[0]: 1}`.

    Raises:
        ValueError: no device or no name.

    Example:
        >>> from hypothesis import given
        >>> @given(sk.testing.meshes(devices=8))
        ... def test_mesh(sizes):
        ...     assert 1 <= np.prod(list(sizes.values())) <= 8
        >>> test_mesh()
    """
    if devices < 1 or not names:
        raise ValueError(
            f"meshes: there must be at least one device and one name; got {devices} devices and names {tuple(names)}. "
            "Pass for example devices=8, names=('data', 'model')."
        )
    all_sizes: list[tuple[int, ...]] = []
    for axes in range(1, len(names) + 1):
        all_sizes += factorizations(devices, axes)

    def simplicity(sizes: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        return math.prod(sizes), len(sizes), sizes

    # sampled_from shrinks towards the front of its list: to few devices, and then to few axes.
    all_sizes.sort(key=simplicity)
    choices = [dict(zip(names, sizes, strict=False)) for sizes in all_sizes]
    return st.sampled_from(choices)


def _composite(fn: Callable[..., Any]) -> Callable[..., st.SearchStrategy[Any]]:
    """`st.composite`, with arguments checked when the strategy is built, not when an example is drawn.

    hypothesis hides the first parameter, `draw`, from callers. `typed` checks all parameters of the function that it
    wraps, so the check goes through `build_with_draw`, which takes a `draw` that it does not use.
    """
    build = st.composite(fn)

    @wraps(fn)
    def build_with_draw(draw: Any, *args: Any, **kwargs: Any) -> Any:
        return build(*args, **kwargs)

    build_checked = typed(build_with_draw)

    @wraps(build)
    def strategy(*args: Any, **kwargs: Any) -> st.SearchStrategy[Any]:
        result = build_checked(None, *args, **kwargs)
        arguments = signature(fn).bind(None, *args, **kwargs).arguments
        # Each strategy has some of these parameters; None of one that is missing or not passed is not checked.
        for name, least in (("rank", 0), ("length", 0), ("largest", 1)):
            at_least(fn.__name__, least, **{name: arguments.get(name)})
        at_least(fn.__name__, 0, shape=min(arguments.get("shape", ()), default=0))
        if not arguments.get("dtypes", DTYPES):
            raise ValueError(
                f"{fn.__name__}: dtypes must name one or more dtypes; got (). Pass for example ('float32',)."
            )
        return result

    return strategy


@_composite
def specs(draw: _Draw, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """Layouts of an array of a shape on a mesh: each axis splits one dim that it divides, or none.

    Args:
        draw: given by hypothesis.
        shape: global shape.
        sizes: the mesh, axis name and size.

    Returns:
        Strategy of canonical PartitionSpecs; shrinks to `P()`.

    Example:
        >>> from hypothesis import given
        >>> from shardkit.testing.strategies import specs
        >>> @given(specs((4, 6), {"data": 2, "model": 2}))
        ... def test_spec(spec):
        ...     sk.local_shape((4, 6), spec, sk.abstract_mesh(data=2, model=2))
        >>> test_spec()
    """
    # Each axis in a random order: of a=2, b=2 a dim of 4 may be split over b and then a, which P(("b", "a")) says.
    order = draw(st.permutations(list(sizes)))
    entries: list[tuple[str, ...]] = [()] * len(shape)
    local = list(shape)
    for name in order:
        divisible_dims = [dim for dim, size in enumerate(local) if size % sizes[name] == 0]
        dim = draw(st.sampled_from([None, *divisible_dims]))
        if dim is not None:
            entries[dim] += (name,)
            local[dim] //= sizes[name]
    return canonical(PartitionSpec(*entries))


@_composite
def sharded_arrays(
    draw: _Draw,
    sizes: Mapping[str, int] | None = None,
    *,
    dtypes: Sequence[str] = DTYPES,
    integer_valued: bool = True,
    rank: int = 3,
    largest: int = 3,
) -> ShardedArray:
    """Global arrays with a layout that divides them.

    Args:
        draw: given by hypothesis.
        sizes: the mesh; by default any of `meshes()`.
        dtypes: names of the dtypes to choose from.
        integer_valued: floats are whole numbers from -3 to 3, whose sums are exact in any order, so that results can be
            compared bitwise; otherwise they are drawn from a normal distribution.
        rank: the largest number of dims.
        largest: the largest size of a dim on one device.

    Returns:
        Strategy of ShardedArray.

    Example:
        >>> from hypothesis import given
        >>> @given(sk.testing.sharded_arrays())
        ... def test_array(array):
        ...     sk.local_shape(array.value.shape, array.spec, sk.abstract_mesh(**array.sizes))
        >>> test_array()
    """
    if sizes is None:
        sizes = draw(meshes())
    sizes = dict(sizes)
    # From the shape on a device up to the global one: so every dim divides, and no example is thrown away.
    local = draw(st.lists(st.integers(1, largest), max_size=rank))
    entries: list[tuple[str, ...]] = [()] * len(local)
    if local:
        choices = [None, *range(len(local))]
        for name in draw(st.permutations(list(sizes))):
            dim = draw(st.sampled_from(choices))
            if dim is not None:
                entries[dim] += (name,)
    spec = canonical(PartitionSpec(*entries))
    shape = list(local)
    for dim, axes in enumerate(spec_axes(spec)):
        shape[dim] *= math.prod(sizes[axis] for axis in axes)
    dtype = draw(st.sampled_from(list(dtypes)))
    # Values come from a seed. If hypothesis drew each of them, it would try to shrink each of them too.
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    if jnp.issubdtype(dtype, jnp.floating) and not integer_valued:
        return ShardedArray(rng.normal(size=shape).astype(jnp.dtype(dtype)), spec, sizes)
    if dtype == "bool":
        values = rng.integers(0, 2, shape)
    else:
        values = rng.integers(-3, 4, shape)
    return ShardedArray(np.asarray(values).astype(jnp.dtype(dtype)), spec, sizes)


@_composite
def programs(
    draw: _Draw, sizes: Mapping[str, int] | None = None, *, dtypes: Sequence[str] = DTYPES, length: int = 4
) -> Chain:
    """Chains of collectives with legal shapes, as data: print one, run it as a kernel, run it on the reference.

    Values are whole numbers (after a mean, divided by a power of two) that every dtype in the chain represents exactly,
    so kernel and reference must be bitwise equal.

    Args:
        draw: given by hypothesis.
        sizes: the mesh; by default any of `meshes()`.
        dtypes: names of the dtypes to begin with.
        length: the largest number of collectives.

    Returns:
        Strategy of Chain; shrinks to one device, one element and no collective.

    Example:
        >>> from hypothesis import given
        >>> @given(sk.testing.programs())
        ... def test_program(program):
        ...     run = sk.testing.emulate(program.kernel, program.sizes, program.spec, program.spec)
        ...     np.testing.assert_array_equal(run(program.blocks()), program.reference(program.blocks()))
    """
    if sizes is None:
        sizes = draw(meshes())
    sizes = dict(sizes)
    dtype = draw(st.sampled_from(list(dtypes)))
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    seed = draw(st.integers(0, 9))
    ops: list[Op] = []
    for _ in range(draw(st.integers(0, length))):
        order = draw(st.permutations(list(sizes)))
        # One axis, or several in any order: of a=2, b=2 these are "a", "b", ("a", "b") and ("b", "a").
        count = draw(st.integers(1, len(order)))
        axes = tuple(order[:count])
        state = state_of(Chain(sizes, shape, dtype, tuple(ops), seed))
        legal = legal_ops(state, axes, sizes)
        # The kernel first, then its options: else the one with the most options would be drawn most often.
        kernels = list(dict.fromkeys(op.kernel for op in legal))
        kernel = draw(st.sampled_from(kernels))
        ops_of_kernel = [op for op in legal if op.kernel == kernel]
        ops.append(draw(st.sampled_from(ops_of_kernel)))
    return Chain(sizes, shape, dtype, tuple(ops), seed)
