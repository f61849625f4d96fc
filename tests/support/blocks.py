"""Kernels against their meaning over a list of blocks, forward and gradient, bit for bit; and cases for them."""

import itertools
import math
from functools import partial
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import shardkit as sk

FLOATS = ("float32", "bfloat16")
AXES = [  # mesh and axis: sizes 1, 2, 3, 5, 8 and tuples in both orders
    ({"a": 1}, "a"),
    ({"a": 2, "b": 4}, "a"),
    ({"a": 3, "b": 2}, "a"),
    ({"a": 5}, "a"),
    ({"a": 8}, "a"),
    ({"a": 2, "b": 4}, ("a", "b")),
    ({"a": 3, "b": 2}, ("b", "a")),
]
DTYPES = [("float32", "bfloat16"), ("int32", "bool")]
SHAPE = (2, 3)


class Case(NamedTuple):
    """A mesh, the axis of the collective, the axes along which the blocks differ, and the two leaves of a pytree."""

    sizes: dict[str, int]
    axis: str | tuple[str, ...]
    differ: frozenset[str]
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    seed: int

    @property
    def names(self):
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @property
    def count(self):
        return math.prod(self.sizes[name] for name in self.names)

    def tree(self, shape, salt=0):
        """Blocks for every device: an array's first dims are the mesh, of size 1 where the blocks are equal."""
        rng = np.random.default_rng([self.seed, salt])
        lead = [size if name in self.differ else 1 for name, size in self.sizes.items()]

        def leaf(dtype):  # multiples of 6: a mean over 2, 3, 4, 6 or 8 devices is exact in every dtype
            return (6 * rng.integers(-2, 3, (*lead, *shape))).astype(jnp.dtype(dtype))

        return {"p": leaf(self.dtypes[0]), "q": [leaf(self.dtypes[1])]}


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
        np.testing.assert_array_equal(np.asarray(g), np.asarray(w))


def check(kernel, blockwise, case, shape, gradient=True):
    """Values, dtypes and, for floating-point leaves, the vector-Jacobian product agree in every bit."""
    tree, mapped = case.tree(shape), on_mesh(kernel, case)
    wanted = over_blocks(blockwise, case, np)(tree)
    if not gradient or not set(case.dtypes) <= set(FLOATS):
        assert_equal(jax.jit(mapped)(tree), wanted)
        return
    rng = np.random.default_rng(case.seed)
    cotangent = jax.tree.map(lambda y: (6 * rng.integers(-1, 2, y.shape)).astype(y.dtype), wanted)

    def both(f, tree, cotangent):
        out, back = jax.vjp(f, tree)
        return out, back(cotangent)[0]

    out, grad = jax.jit(partial(both, mapped))(tree, cotangent)
    assert_equal(out, wanted)
    assert_equal(grad, jax.jit(partial(both, over_blocks(blockwise, case, jnp)))(tree, cotangent)[1])


@st.composite
def cases(draw):
    sizes, axis = draw(st.sampled_from(AXES))
    differ = frozenset(sizes) if draw(st.booleans()) else frozenset(draw(st.sets(st.sampled_from(list(sizes)))))
    return Case(sizes, axis, differ, SHAPE, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9)))
