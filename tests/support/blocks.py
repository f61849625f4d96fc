"""Kernels against their meaning over a list of blocks, forward and gradient, bit for bit; and cases for them."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from support.tiers import covered

FLOATS = 2  # of a tree's leaves the first ones, float32 and bfloat16, have derivatives
SHAPE = (2, 3)


class Case(NamedTuple):
    """A mesh, the axis of the collective, the axes along which the blocks differ, and the shape of a block."""

    sizes: dict[str, int]
    axis: str | tuple[str, ...]
    differ: frozenset[str]
    shape: tuple[int, ...] = SHAPE
    seed: int = 0

    @property
    def names(self):
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @property
    def count(self):
        return math.prod(self.sizes[name] for name in self.names)

    @property
    def dims(self):
        return range(len(self.shape))

    def enlarged(self, dim):
        """The shape with dimension `dim` a multiple of the device count."""
        return tuple(size * self.count if i == dim else size for i, size in enumerate(self.shape))

    def tree(self, shape):
        """Blocks for every device: an array's first dims are the mesh, of size 1 where the blocks are equal."""
        rng = np.random.default_rng(self.seed)
        lead = [size if name in self.differ else 1 for name, size in self.sizes.items()]

        def leaf(dtype):  # multiples of 30: a mean over 2, 3, 4, 5, 6 or 8 is exact in every dtype
            return (30 * rng.integers(-2, 3, (*lead, *shape))).astype(jnp.dtype(dtype))

        return {"p": leaf("float32"), "q": [leaf(dtype) for dtype in ("bfloat16", "int32", "bool")]}


# Sizes 1 to 8, tuples in both orders and with an axis of size one, blocks that differ along all, some or no axes.
ROWS = [
    Case({"a": 8}, "a", frozenset("a")),
    Case({"a": 2, "b": 4}, "a", frozenset("ab")),
    Case({"a": 2, "b": 4}, ("a", "b"), frozenset("b")),
    Case({"a": 3, "b": 2, "c": 1}, ("b", "c", "a"), frozenset("ab")),
    Case({"a": 2, "b": 2, "c": 2}, ("c", "a"), frozenset("b")),
    Case({"a": 4, "b": 1, "c": 2}, ("a", "b"), frozenset("abc")),
    Case({"a": 5}, ("a",), frozenset()),
    Case({"a": 1}, "a", frozenset("a")),
]
# In the default tier six, eight cut along two of three axes, and one; testing/exact/test_kernels.py has most kernels.
FEW = pytest.mark.quick("3", "4", "7")


@st.composite
def cases(draw, shapes=(SHAPE,)):
    sizes = draw(st.sampled_from([row.sizes for row in ROWS]))
    order = draw(st.permutations(list(sizes)))
    axis = tuple(order[: draw(st.integers(1, len(order)))])
    axis = axis[0] if len(axis) == 1 and draw(st.booleans()) else axis
    differ = frozenset(sizes) if draw(st.booleans()) else frozenset(draw(st.sets(st.sampled_from(order))))
    return Case(sizes, axis, differ, draw(st.sampled_from(shapes)), draw(st.integers(0, 9)))


def on_cases(test):
    """A test of one case: the rows; whatever is drawn in the deep profile."""
    return FEW(covered([{"case": row} for row in ROWS], case=cases())(test))


class Kernel(NamedTuple):
    """A kernel, what it means for a list of blocks, the shape of its blocks, and whether it is linear."""

    run: Callable
    meaning: Callable
    shape: tuple[int, ...] = SHAPE
    linear: bool = True
    gradient: bool = True


def on_mesh(kernel, case):
    """The kernel on the devices, from and to arrays whose first dims are the mesh."""
    lead = len(case.sizes)
    mesh = sk.make_mesh(jax.devices()[: math.prod(case.sizes.values())], **case.sizes)

    def device(tree):
        out = kernel(jax.tree.map(lambda x: x.reshape(x.shape[lead:]), tree))
        return jax.tree.map(lambda y: y.reshape((1,) * lead + y.shape), out)

    spec = P(*(name if name in case.differ else None for name in case.sizes))
    return jax.shard_map(device, mesh=mesh, in_specs=spec, out_specs=P(*case.sizes))


def over_blocks(blockwise, case, xp):
    """The reference from and to the same arrays: one list of blocks for every place along the other axes."""
    names = tuple(case.sizes)
    others = [name for name in names if name not in case.names]

    def leaf(x):
        results = {}
        for fixed in itertools.product(*(range(case.sizes[name]) for name in others)):
            places = []
            for index in itertools.product(*(range(case.sizes[name]) for name in case.names)):
                at = dict(zip(others, fixed, strict=True)) | dict(zip(case.names, index, strict=True))
                places.append(tuple(at[name] for name in names))
            held = [x[tuple(i if name in case.differ else 0 for name, i in zip(names, p, strict=True))] for p in places]
            results.update(zip(places, blockwise(held, xp=xp), strict=True))
        rows = xp.stack([results[place] for place in np.ndindex(*case.sizes.values())])
        return rows.reshape(*case.sizes.values(), *rows.shape[1:])

    return lambda tree: jax.tree.map(leaf, tree)


def assert_equal(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        # Fractions come from means of booleans alone, whose division rounds.
        whole = w.dtype != np.float32 or np.array_equal(w, np.round(w))
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=0 if whole else 2e-7)


def check(case, *kernels):
    """Values, dtypes and the vector-Jacobian products of floating-point leaves agree in every bit; one program."""
    trees = [case.tree(kernel.shape) for kernel in kernels]
    wanted = [over_blocks(kernel.meaning, case, np)(tree) for kernel, tree in zip(kernels, trees, strict=True)]
    rng = np.random.default_rng(case.seed)
    # What is shared among equal values must not round otherwise than in the reference: small numbers there.
    unit = [30 if kernel.linear else 6 for kernel in kernels]
    # Sums of 17 units are exact in bfloat16. A device adds to a block of an input once for every block that is equal:
    # where many are, the cotangents of most devices are zero.
    devices = math.prod(case.sizes.values())
    equal = devices // math.prod(case.sizes[name] for name in case.differ)
    chosen = (rng.permutation(devices) < 16 // equal).reshape(*case.sizes.values())

    def cotangent(each, y):
        on = chosen.reshape(*chosen.shape, *[1] * (y.ndim - chosen.ndim))
        return (each * rng.integers(-1, 2, y.shape) * on).astype(y.dtype)

    drawn = [[cotangent(each, y) for y in floats_of(out)] for each, out in zip(unit, wanted, strict=True)]

    def both(f, tree, cotangents):
        def of_floats(floats):
            leaves, structure = jax.tree.flatten(tree)
            out = f(jax.tree.unflatten(structure, [*floats, *leaves[FLOATS:]]))
            return floats_of(out), out

        _, back, out = jax.vjp(of_floats, floats_of(tree), has_aux=True)
        return out, back(cotangents)[0]

    @jax.jit
    def everything(trees, drawn):
        mapped = [on_mesh(kernel.run, case) for kernel in kernels]
        return [
            both(*each) if kernel.gradient else (each[0](each[1]), None)
            for kernel, *each in zip(kernels, mapped, trees, drawn, strict=True)
        ]

    results = everything(trees, drawn)
    for kernel, tree, out, cotangents, (got, grads) in zip(kernels, trees, wanted, drawn, results, strict=True):
        assert_equal(got, out)
        if kernel.gradient and kernel.linear:
            assert_transposed(over_blocks(kernel.meaning, case, np), floats_of(tree), cotangents, grads)
        elif kernel.gradient:
            assert_equal(grads, jax.jit(partial(both, over_blocks(kernel.meaning, case, jnp)))(tree, cotangents)[1])


def floats_of(tree):
    return jax.tree.leaves(tree)[:FLOATS]


def assert_transposed(meaning, inputs, cotangents, grads):
    """<A z, y> is <z, A'y> for numbers z of which hardly any two sums are equal; float64 holds all of it exactly."""
    rng = np.random.default_rng(1)
    for x, y, grad in zip(inputs, cotangents, grads, strict=True):
        assert (grad.dtype, grad.shape) == (x.dtype, x.shape)
        z = 840.0 * rng.integers(-(2**20), 2**20, x.shape)  # every mean is a whole number
        assert np.sum(meaning(z) * y.astype(np.float64)) == np.sum(z * np.asarray(grad, np.float64))
