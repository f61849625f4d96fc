"""collectives/basic.py: every kernel against its meaning over a list of blocks, forward and gradient, bit for bit."""

from functools import partial

import jax
import jax.numpy as jnp

import shardkit as sk
from shardkit.testing import reference
from support.blocks import FEW, ROWS, Kernel, cases, check
from support.tiers import covered

SHAPES = [(2,), (3, 2), (1, 2, 3)]
SHAPED = [{"case": row._replace(shape=SHAPES[i // 2 % 3])} for i, row in enumerate(ROWS)]


def on_cases(test):
    return FEW(covered(SHAPED, case=cases(shapes=SHAPES))(test))


@on_cases
def test_all_reduce(case):  # proves S41, F8, F9, F73
    def kernel(op):  # max and min are differentiated in test_shapes.py
        means = partial(reference.all_reduce, op=op)
        return Kernel(partial(sk.all_reduce, axis=case.axis, op=op), means, case.shape, gradient=op in ("sum", "mean"))

    check(case, *map(kernel, ("sum", "mean", "max", "min")))


@on_cases
def test_all_gather(case):  # proves F11
    def kernel(dim, replicated):
        gather = partial(sk.all_gather, axis=case.axis, dim=dim, replicated=replicated)
        return Kernel(gather, partial(reference.all_gather, dim=dim), case.shape)

    check(case, *[kernel(dim, each) for dim in (*case.dims, -1) for each in (False, True)])


@on_cases
def test_reduce_scatter(case):
    def kernel(dim, written, op):
        scatter = partial(sk.reduce_scatter, axis=case.axis, dim=written, op=op)
        return Kernel(scatter, partial(reference.reduce_scatter, dim=dim, op=op), case.enlarged(dim))

    last = case.dims[-1]
    check(case, *[kernel(dim, dim, "sum") for dim in case.dims], kernel(last, -1, "mean"))


@on_cases
def test_all_to_all(case):
    def kernel(split, concat):
        exchange = partial(sk.all_to_all, axis=case.axis, split_dim=split - len(case.shape), concat_dim=concat)
        return Kernel(exchange, partial(reference.all_to_all, split_dim=split, concat_dim=concat), case.enlarged(split))

    check(case, *[kernel(split, concat) for split in case.dims for concat in case.dims])


@on_cases
def test_shift(case):
    def kernel(by, wrap):
        shift = partial(sk.shift, axis=case.axis, by=by, wrap=wrap)
        return Kernel(shift, partial(reference.shift, by=by, wrap=wrap), case.shape)

    check(case, *[kernel(by, wrap) for by in (-9, -1, 0, 1, 2, case.count, 9) for wrap in (False, True)])


@on_cases
def test_broadcast(case):
    def kernel(source):
        return Kernel(
            partial(sk.broadcast, axis=case.axis, source=source),
            partial(reference.broadcast, source=source),
            case.shape,
        )

    check(case, *map(kernel, {0, 1 % case.count, case.count - 1}))


@on_cases
def test_index_and_size_and_vary(case):  # proves S50
    """Casting keeps values, and its transpose is a sum."""

    def places(blocks, xp):
        return [xp.full_like(block, i * 100 + len(blocks)) for i, block in enumerate(blocks)]

    def kernel(tree):
        code = sk.axis_index(case.axis) * 100 + sk.axis_size(case.axis)
        return jax.tree.map(lambda x: sk.vary(jnp.zeros_like(x), case.axis) + code.astype(x.dtype), tree)

    varied = Kernel(partial(sk.vary, axes=case.axis), lambda blocks, xp: blocks, case.shape)
    check(case, Kernel(kernel, places, case.shape, gradient=False), varied)
