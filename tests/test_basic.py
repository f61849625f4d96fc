"""collectives/basic.py: every kernel against its meaning over a list of blocks, forward and gradient, bit for bit."""

import itertools
import math
from functools import partial
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import reference

MESHES = [{"a": 8}, {"a": 2, "b": 4}, {"a": 4, "b": 1, "c": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 2}, {"a": 1}]
SHAPES = [(2,), (3, 2), (1, 2, 3)]
DTYPES = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"), ("int32", "bool")]
FLOATS = ("float32", "bfloat16")


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


@st.composite
def cases(draw):
    sizes = draw(st.sampled_from(MESHES))
    order = draw(st.permutations(list(sizes)))
    axis = tuple(order[: draw(st.integers(1, len(order)))])
    return Case(
        sizes=sizes,
        axis=axis[0] if len(axis) == 1 and draw(st.booleans()) else axis,
        differ=frozenset(sizes) if draw(st.booleans()) else frozenset(draw(st.sets(st.sampled_from(order)))),
        shape=draw(st.sampled_from(SHAPES)),
        dtypes=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 9)),
    )


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


def enlarged(case, dim):
    """The case's shape with dimension `dim` a multiple of the device count."""
    return tuple(size * case.count if i == dim else size for i, size in enumerate(case.shape))


@given(cases(), st.sampled_from(["sum", "mean", "max", "min"]))
def test_all_reduce(case, op):  # proves S41, F8, F9, F73
    reduced = partial(reference.all_reduce, op=op)
    # max and min have no derivative in jax
    check(lambda x: sk.all_reduce(x, case.axis, op=op), reduced, case, case.shape, gradient=op in ("sum", "mean"))


@given(cases(), st.data(), st.booleans())
def test_all_gather(case, data, replicated):  # proves F11
    dim = data.draw(st.integers(-len(case.shape), len(case.shape) - 1))
    kernel = partial(sk.all_gather, axis=case.axis, dim=dim, replicated=replicated)
    check(kernel, partial(reference.all_gather, dim=dim), case, case.shape)


@given(cases(), st.data(), st.sampled_from(["sum", "mean"]))
def test_reduce_scatter(case, data, op):
    dim = data.draw(st.integers(0, len(case.shape) - 1))
    written = data.draw(st.sampled_from([dim, dim - len(case.shape)]))  # also counted from the end
    kernel = partial(sk.reduce_scatter, axis=case.axis, dim=written, op=op)
    check(kernel, partial(reference.reduce_scatter, dim=dim, op=op), case, enlarged(case, dim))


@given(cases(), st.data())
def test_all_to_all(case, data):
    split = data.draw(st.integers(0, len(case.shape) - 1))
    concat = data.draw(st.integers(0, len(case.shape) - 1))
    kernel = partial(sk.all_to_all, axis=case.axis, split_dim=split - len(case.shape), concat_dim=concat)
    check(kernel, partial(reference.all_to_all, split_dim=split, concat_dim=concat), case, enlarged(case, split))


@given(cases(), st.integers(-9, 9), st.booleans())
def test_shift(case, by, wrap):
    kernel = partial(sk.shift, axis=case.axis, by=by, wrap=wrap)
    check(kernel, partial(reference.shift, by=by, wrap=wrap), case, case.shape)


@given(cases(), st.data())
def test_broadcast(case, data):
    source = data.draw(st.integers(0, case.count - 1))
    kernel = partial(sk.broadcast, axis=case.axis, source=source)
    check(kernel, partial(reference.broadcast, source=source), case, case.shape)


@given(cases())
def test_vary_keeps_values_and_its_transpose_is_a_sum(case):
    check(lambda x: sk.vary(x, case.axis), lambda blocks, xp: blocks, case, case.shape)


@given(cases())
def test_index_and_size(case):
    def places(blocks, xp):
        return [xp.full_like(block, i * 100 + len(blocks)) for i, block in enumerate(blocks)]

    def kernel(tree):
        code = sk.axis_index(case.axis) * 100 + sk.axis_size(case.axis)
        return jax.tree.map(lambda x: sk.vary(jnp.zeros_like(x), case.axis) + code.astype(x.dtype), tree)

    case = case._replace(dtypes=("int32", "int32"))
    check(kernel, places, case, case.shape)
