"""Ring and two-level collectives: against their plain forms, in the order of their sums, and in what they send."""

from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis import census
from shardkit.collectives import hierarchical, ring
from shardkit.testing import reference
from support.blocks import Case, Kernel, check, on_cases
from support.refusals import value_error

SIZES = [1, 2, 3, 4, 5, 8]
BOTH = pytest.mark.parametrize("bidirectional", [False, True], ids=["one way", "both ways"])


def line(n):
    return sk.make_mesh(jax.devices()[:n], a=n)


def on(mesh, kernel, spec=None):
    spec = P(tuple(mesh.axis_names)) if spec is None else spec
    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec))


def blocks(n, rows, seed=0, whole=False, columns=3):
    rng = np.random.default_rng(seed)
    shape = (n * rows, columns)
    x = rng.integers(-8, 9, shape) if whole else rng.normal(size=shape)
    return x.astype(np.float32)


def model_reduce_scatter(parts, bidirectional):
    """The order in which a ring sums: piece d from device d+1 round to d, or from both sides, d itself below."""
    n = len(parts)

    def chain(d, sources):
        total = parts[sources[0]][d]
        for source in sources[1:]:
            total = total + parts[source][d]
        return total

    if not bidirectional or n < 3:
        return [chain(d, [(d + 1 + k) % n for k in range(n)]) for d in range(n)]
    below, above = n // 2, (n - 1) // 2
    return [
        chain(d, [(d - below + k) % n for k in range(below + 1)])
        + chain(d, [(d + above - k) % n for k in range(above)])
        for d in range(n)
    ]


# proves S49
# proves F10 in part: no chunks
@pytest.mark.parametrize("n", SIZES)
def test_ring_reduce_scatter_sums_in_the_order_of_its_model(n):
    x = blocks(n, n)
    ways = (False, True)
    both = on(line(n), lambda x: [ring.reduce_scatter(x, "a", bidirectional=way) for way in ways])(x)
    parts = [np.split(block, n) for block in np.split(x, n)]
    for way, got in zip(ways, both, strict=True):
        np.testing.assert_array_equal(got, np.concatenate(model_reduce_scatter(parts, way)))


# proves S49
# proves F10 in part: no chunks
@on_cases
def test_rings_mean_what_the_plain_kernels_mean(case):
    def kernels(dim, both):
        options = {"axis": case.axis, "bidirectional": both}
        scatter = partial(reference.reduce_scatter, dim=dim)
        yield Kernel(partial(ring.all_gather, dim=dim, **options), partial(reference.all_gather, dim=dim))
        yield Kernel(partial(ring.reduce_scatter, dim=dim, **options), scatter, case.enlarged(dim))
        yield Kernel(partial(ring.all_reduce, **options), reference.all_reduce)  # its blocks do not divide

    pairs = [(0, False), (1, True)] if case.count % 3 else [(0, True), (1, False)]
    check(case, *[kernel for pair in pairs for kernel in kernels(*pair)])


def test_means():
    x = blocks(4, 4, whole=True)
    for kernel in (ring.reduce_scatter, ring.all_reduce):
        total, mean = (on(line(4), lambda x, op=op, k=kernel: k(x, "a", op=op))(x) for op in ("sum", "mean"))
        np.testing.assert_array_equal(mean, total / 4)


# proves F76: the closed forms of the docstrings
@pytest.mark.quick("1-one way", "3-one way", "4-both ways", "5-both ways")
@BOTH
@pytest.mark.parametrize("n", SIZES)
def test_what_a_ring_sends(n, bidirectional):
    mesh, x = line(n), jax.ShapeDtypeStruct((n * n, 4), jnp.float32)
    piece, whole = 4 * n * 4, 4 * n * 4
    steps = (n - 1) if not bidirectional else n // 2
    for kernel, sent, hops in [
        (lambda x: ring.all_gather(x, "a", bidirectional=bidirectional), piece * (n - 1), steps),
        (lambda x: ring.reduce_scatter(x, "a", bidirectional=bidirectional), Fraction(whole * (n - 1), n), steps),
        (lambda x: ring.all_reduce(x, "a", bidirectional=bidirectional), Fraction(2 * whole * (n - 1), n), 2 * steps),
    ]:
        forward = census(on(mesh, kernel), x)
        assert forward.sent() == sent
        assert {r.kind for r in forward.rows} <= {"ppermute"}
        messages = forward.count()
        assert messages == (n - 1) * (hops // steps if steps else 1)
        both = census(jax.grad(lambda x, k=kernel: jnp.sum(on(mesh, k)(x) ** 2)), x)
        # a gather's transpose scatters what it gathered, a scatter's gathers its piece: the same bytes
        assert sum(r.total for r in both.rows if r.backward) == sent


# Catches a replicated result that out_specs refuse, and a derivative that is n times too large or that communicates.
# proves F11
def test_replicated_results():
    x, specs = blocks(4, 2, whole=True), {"mesh": line(4), "in_specs": P("a")}

    def kernel(x, both, replicated=True):
        options = {"bidirectional": both, "replicated": replicated}
        mean = ring.all_reduce(x[:1], "a", op="mean", **options)  # 3 elements, padded
        return ring.all_reduce(x, "a", **options), mean, ring.all_gather(x, "a", dim=1, **options)

    def meaning(x):
        parts = jnp.split(x, 4)
        return sum(parts), sum(parts)[:1] / 4, jnp.concatenate(parts, 1)

    ways = lambda x: [kernel(x, both) for both in (False, True)]  # noqa: E731
    sk.testing.assert_matches_reference(
        ways, lambda x: [meaning(x)] * 2, args=(x,), eager=False, out_specs=P(), **specs
    )

    def gradient(x, replicated=True):
        return jax.grad(lambda x: sum(jnp.sum(y**2) for y in sk.vary(kernel(x, True, replicated), "a")))(x)

    rows = census(jax.shard_map(gradient, out_specs=P("a"), **specs), x)
    assert not [row for row in rows.rows if row.backward and row.kind == "ppermute"]  # the sums of `vary` alone
    under = [
        str(jax.make_jaxpr(jax.vmap(partial(gradient, replicated=r), axis_name="a"))(x.reshape(4, 2, 3)))
        for r in (False, True)
    ]
    assert under[0] == under[1]  # vmap tracks no types


# proves F12
@pytest.mark.quick("b-a")
@pytest.mark.parametrize(("inner", "outer"), [("a", "b"), ("b", "a"), (("a", "c"), "b")])
def test_two_levels_equal_one(inner, outer):
    levels = lambda axis: (axis,) if isinstance(axis, str) else axis  # noqa: E731
    case = Case({"a": 2, "b": 2, "c": 2}, (*levels(outer), *levels(inner)), frozenset("abc"))

    def kernel(name):
        two = getattr(hierarchical, name)
        return Kernel(lambda x: two(x, inner, outer), getattr(reference, name), case.enlarged(0))

    check(case, *map(kernel, ("all_gather", "reduce_scatter", "all_reduce")))


def test_two_levels_are_typed_as_equal_and_pad():
    mesh, x = sk.make_mesh(a=2, b=4), blocks(8, 1, whole=True)

    def kernel(x):
        return hierarchical.all_reduce(x, "b", "a", op="mean"), hierarchical.all_gather(x, "b", "a", replicated=True)

    mapped = jax.shard_map(kernel, mesh=mesh, in_specs=P(("a", "b")), out_specs=P())
    reduced, gathered = jax.jit(mapped)(x)
    np.testing.assert_array_equal(reduced, x.mean(0, keepdims=True))
    np.testing.assert_array_equal(gathered, x)


# proves F12, F76: the slow links carry 1/I of the bytes
def test_what_two_levels_send():
    mesh, x = sk.make_mesh(slow=2, fast=4), jax.ShapeDtypeStruct((64, 4), jnp.float32)
    size = 8 * 4 * 4
    of = lambda kernel: census(on(mesh, lambda x: sk.vary(kernel(x, "fast", "slow"), ("slow", "fast"))), x)  # noqa: E731
    reduced, gathered, scattered = map(
        of, [hierarchical.all_reduce, hierarchical.all_gather, hierarchical.reduce_scatter]
    )
    assert reduced.sent(axis="fast") == Fraction(2 * size * 3, 4)
    assert reduced.sent(axis="slow") == Fraction(2 * size, 4) * Fraction(1, 2)
    assert gathered.sent(axis="slow") == size and gathered.sent(axis="fast") == size * 2 * 3
    assert scattered.sent(axis="fast") == Fraction(size * 3, 4) and scattered.sent(axis="slow") == Fraction(size, 8)


ERRORS = {
    "ring.all_gather: dim must name a dimension of the array; got 2 for an array of rank 2. Choose 0 to 1.": lambda x: (
        ring.all_gather(x, "a", dim=2)
    ),
    "ring.reduce_scatter: dim 1 must be divisible by axis 'a'; got size 3 over 4 devices. "
    "Pad dim 1 or choose another dim.": lambda x: ring.reduce_scatter(x, "a", dim=1),
}


@pytest.mark.parametrize("message, kernel", ERRORS.items())
def test_bad_input(kernel, message):
    with value_error(message):
        on(line(4), kernel)(blocks(4, 4))
