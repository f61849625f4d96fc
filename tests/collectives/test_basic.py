"""collectives/basic.py: every kernel against its meaning over a list of blocks, forward and gradient, bit for bit."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
from hypothesis import given

import shardkit as sk
from shardkit.testing import reference
from support.blocks import Case, check

MESHES = [{"a": 8}, {"a": 2, "b": 4}, {"a": 4, "b": 1, "c": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 2}, {"a": 1}]
SHAPES = [(2,), (3, 2), (1, 2, 3)]
DTYPES = [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"), ("int32", "bool")]


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
