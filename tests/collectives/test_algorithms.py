"""Algorithms of a strategy: what is refused, by its full wording; tests/laws/test_laws.py holds the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit._jax.compat import varying_axes
from shardkit.plans.traffic import plan_traffic
from support.refusals import type_error, value_error

pytestmark = pytest.mark.check
A = sk.algorithms
GATHERS = sk.algorithms.Algorithm("gathers", all_gather=sk.all_gather)


@pytest.mark.parametrize(
    "message, make",
    {
        "dp: reduce= must be an Algorithm with all_reduce; got gathers, which has 'all_gather'. Pass for example "
        "sk.algorithms.ring().": lambda: sk.dp("a", reduce=GATHERS),
        "zero1: gather= must be an Algorithm with all_gather; got bucket(33,554,432 bytes), which has "
        "'all_reduce'. Pass for example sk.algorithms.ring().": lambda: sk.zero1("a", gather=A.bucket()),
        "zero2: reduce= must be an Algorithm with reduce_scatter; got bucket(1 bytes), which has 'all_reduce'. "
        "Pass for example sk.algorithms.ring().": lambda: sk.zero2("a", reduce=A.bucket(bucket_bytes=1)),
        "fsdp: reduce= must be an Algorithm with reduce_scatter; got nothing, which has none. Pass for example "
        "sk.algorithms.ring().": lambda: sk.fsdp("a", reduce=sk.algorithms.Algorithm("nothing")),
        "dp: hierarchical('gpu') needs the axes of slow links, then axis 'gpu'; got 'gpu'. Pass for example "
        "axis=('node', 'gpu').": lambda: sk.dp("gpu", reduce=A.hierarchical("gpu")),
        "fsdp: hierarchical('gpu') needs the axes of slow links, then axis 'gpu'; got 'gpu', 'node'. Pass for "
        "example axis=('node', 'gpu').": lambda: sk.fsdp(("gpu", "node"), gather=A.hierarchical("gpu")),
        "zero1: compressed(int4, inner='gpu' in int8) needs the axes of slow links, then axis 'gpu'; got 'gpu'. "
        "Pass for example axis=('node', 'gpu').": lambda: sk.zero1(
            "gpu", reduce=A.compressed(jnp.int4, inner="gpu", inner_dtype=jnp.int8)
        ),
        "own: compressed(int8, inner='c', 'b') needs the axes of slow links, then axes 'c', 'b'; got 'a', 'b'. "
        "Pass for example axis=('node', 'c', 'b').": lambda: sk.strategy(
            "own", ("a", "b"), reduce=A.compressed(jnp.int8, inner=("c", "b"))
        ),
        "compressed: mxfp4 must have blocks of 32 elements; got block=256. Leave out block=, or pass another dtype, "
        "such as jnp.int8.": lambda: A.compressed("mxfp4", block=256),
        "compressed: nvfp4 must have blocks of 16 elements; got block=64. Leave out block=, or pass another dtype, "
        "such as jnp.int8.": lambda: A.compressed(jnp.int4, block=64, inner="b", inner_dtype="nvfp4"),
        "compressed: inner_dtype=int8 needs an inner axis, over which it is sent; got inner=None. Pass inner=, the "
        "axis of the fast links, or leave out inner_dtype.": lambda: A.compressed(jnp.int4, inner_dtype=jnp.int8),
    }.items(),
)
def test_an_algorithm_that_cannot_serve_is_refused(make, message):
    with value_error(message):
        make()


# What alone finds a format that the collectives take and a plan does not, or whose bytes a plan counts otherwise.
def test_formats_of_blocks_in_a_plan():  # proves N70
    two_levels = A.compressed("nvfp4", inner="b", inner_dtype="mxfp8", feedback=True)
    assert str(two_levels) == "compressed(nvfp4, inner='b' in mxfp8) with feedback"
    sent = two_levels.cost("reduce_scatter", [8 * 100, 8 * 3], 4, {"a": 2, "b": 4})
    # Inside, a quarter of each leaf: 200 elements in 7 blocks, and 6 in one; then an eighth, 100 in 7 blocks and 3 in
    # one, each with the scale of its message.
    assert sent == {("b",): 3 * (7 * 33 + 7), ("a",): 7 * 9 + 4 + 2 + 1 + 4}
    for dtype, message in {"mxfp8": 33, "mxfp4": 17, "nvfp4": 22}.items():
        assert A.compressed(dtype).cost("all_gather", [32], 4, {"a": 8}) == {("a",): 7 * message}


# Catches a cast of whole numbers to float32 on the wire, which rounds them above 2^24.
def test_weights_that_are_whole_numbers_are_not_compressed():
    plan = sk.fsdp("a", min_size=1, gather=A.compressed(jnp.int8))
    loss = sk.value_and_grad(lambda params, x, keys: jnp.sum(x) * jnp.sum(params["w"]))
    init, step = sk.make_train_step(loss, optax.sgd(0.1), mesh=sk.abstract_mesh(a=4), plan=plan)
    state = init.abstract({"w": np.ones(4, "f")})
    ints = state._replace(params=jax.tree.map(lambda x: x.update(dtype=jnp.int32), state.params))
    with type_error("compressed.all_gather: every leaf must be floating-point; got int32. Use all_gather for it."):
        step.trace(ints, jax.ShapeDtypeStruct((8, 2), jnp.float32))


def test_the_closed_form_needs_the_cost_of_an_algorithm():
    own = sk.algorithms.Algorithm("own", all_reduce=lambda leaves, axes: sk.all_reduce(leaves, axes))
    plan, mesh = sk.dp("a", reduce=own), sk.abstract_mesh(a=4)
    with value_error(
        "plan_traffic: the algorithm own must have a cost, to be compared with the census; it has none. Pass "
        "Algorithm(..., cost=...)."
    ):
        plan_traffic(plan, {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}, mesh)


def own(**kernels):
    return A.Algorithm("own", **kernels)


def row(x, *_, **__):
    return x[:1]


def rows(xs, axes):
    return [row(x) for x in xs]


# Catches a gradient or weight of one row that is broadcast to all of them, which trains with wrong numbers.
@pytest.mark.parametrize(
    ("plan", "kernel", "wanted", "got"),
    [
        (sk.fsdp("a", min_size=1, gather=own(all_gather=row)), "all_gather", (4, 2), (1, 2)),
        (sk.fsdp("a", min_size=1, reduce=own(reduce_scatter=row)), "reduce_scatter", (2, 2), (1, 2)),
        (sk.dp("a", reduce=own(all_reduce=rows)), "all_reduce", (4, 2), (1, 2)),
        (
            sk.dp("a", reduce=own(all_reduce=lambda xs, axes: (xs, rows(xs, axes)), feedback=True)),
            "all_reduce",
            (4, 2),
            (1, 2),
        ),
        (
            sk.zero1("a", min_size=1, reduce=own(reduce_scatter=lambda x, *_, **__: (x, x), feedback=True)),
            "reduce_scatter",
            (2, 2),
            (4, 2),
        ),
        (
            sk.zero1("a", min_size=1, reduce=own(reduce_scatter=lambda x, *_, **__: (x, row(x)), feedback=True)),
            "reduce_scatter",
            (4, 2),
            (1, 2),
        ),
    ],
)
def test_results_of_another_shape_are_refused(plan, kernel, wanted, got):
    loss = sk.value_and_grad(lambda params, x, keys: sk.Mean.of(x @ params["w"]))
    init, step = sk.make_train_step(loss, optax.sgd(0.1), mesh=sk.abstract_mesh(a=2), plan=plan)
    state = init.abstract({"w": np.ones((4, 2), "f")})
    with value_error(
        f"own: the result of {kernel} must have shape {wanted}; got {got}. Return the shape of sk.{kernel}, and the "
        "operand's shape for the feedback."
    ):
        step.trace(state, jax.ShapeDtypeStruct((8, 4), jnp.float32))


# Catches an algorithm that gets partial sums along "model" and complete ones in one call: what it concatenates is
# partial as a whole, and is summed over "model" once more.
def test_an_algorithm_gets_leaves_that_vary_over_the_same_axes():
    seen = []

    def all_reduce(leaves, axes):
        seen.append((axes, sorted(tuple(sorted(varying_axes(x))) for x in leaves)))
        return sk.all_reduce(leaves, axes)

    own = sk.algorithms.Algorithm("own", all_reduce=all_reduce)
    split = lambda leaf: sk.Split(0) if leaf.path == "w" else None  # noqa: E731
    plan = sk.chain(sk.strategy("rows", "model", rank=0, place=split), sk.dp("data", reduce=own))
    loss = lambda p, x, keys: sk.all_reduce(jnp.sum(p["w"]), "model") * jnp.sum(x) + p["b"] + p["c"]  # noqa: E731
    mesh = sk.abstract_mesh(data=2, model=2)
    init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=plan)
    state = init.abstract({"w": np.ones(4, "f"), "b": np.float32(1), "c": np.float32(1)})
    step.trace(state, jax.ShapeDtypeStruct((4, 2), jnp.float32))
    assert sorted(seen) == [(("data",), [("data",), ("data",)]), (("data",), [("data", "model")])]
