"""How two trees are compared, at the edges: NaN and infinity, empty leaves, the worst leaf, factors and their words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardkit.testing._compare import (
    UnequalError,
    check_conclusive,
    constant_factor,
    describe_kinds,
    describe_mesh,
    describe_shapes,
    distance,
    find_other_bits,
    find_worst_gap,
    format_factor,
    list_leaves,
    magnitude,
)
from support.refusals import value_error

pytestmark = pytest.mark.check

NAN, INF = np.nan, np.inf


def test_distances_and_magnitudes_of_what_is_not_finite():
    x = np.array([1.0, -2, NAN, INF, -INF, INF, NAN, 0])
    y = np.array([1.5, 2, NAN, INF, INF, 1.0, 3.0, -0.0])
    assert distance(x, y).tolist() == [0.5, 4, 0, 0, INF, INF, INF, 0]
    assert distance(np.uint8([3]), np.uint8([5])).tolist() == [2]
    assert distance(np.array([True]), np.array([False])).tolist() == [1]
    assert distance(np.complex64([3 + 4j]), np.complex64([0])).tolist() == [5]
    assert [magnitude(v) for v in (x, -x, np.zeros(0), np.array([NAN]), np.array([3 - 4j]))] == [2, 2, 0, 0, 5]
    big = np.array([3e38], jnp.bfloat16)
    assert distance(big, -big).tolist() == [2 * float(big[0])]


def gap(got, wanted, allowed=0.5):
    return find_worst_gap(got, wanted, (lambda *_: allowed) if not callable(allowed) else allowed)


def test_the_gap_is_that_of_the_leaf_that_exceeds_its_bound_most():
    wanted = {"a": np.array([1.0, 2.0]), "b": np.array([10.0]), "c": np.array([3, 4]), "none": np.zeros(0)}
    assert gap(wanted, wanted, 0.0) is None
    assert gap(wanted | {"a": np.array([1.5, 2.5])}, wanted) is None  # just within
    found = gap(wanted | {"a": np.array([1.0, 2.75]), "b": np.array([12.0])}, wanted)
    assert found[:6] == ("b", 2.0, 0.5, (0,), 12.0, 10.0) and found.factor == pytest.approx(1.2)
    found = gap(wanted | {"a": np.array([1.75, 2.0]), "b": np.array([12.0])}, wanted, lambda at, *_: (0.1, 1)[at])
    assert (found.path, found.worst, found.allowed) == ("a", (0,), 0.1)  # 7.5 times its bound, b only twice
    # of one leaf the element that exceeds its own bound most, whatever the others differ by
    found = gap(np.array([5.0, 1.0]), np.array([1.0, 0.0]), np.array([4.5, 0.5]))
    assert (found.worst, found.largest, found.allowed, found.where) == ((1,), 1.0, 0.5, "")
    found = gap(wanted | {"c": np.array([3, 5])}, wanted, 9.0)  # integers must be equal
    assert (found.path, found.worst, found.actual, found.expected, found.allowed) == ("c", (1,), 5, 4, 0.0)
    both = wanted | {"c": np.array([3, 5]), "b": np.array([99.0])}
    assert gap(both, wanted).path == "c"  # more than nothing is infinitely more
    seen = []
    gap(wanted, wanted, lambda at, leaf, overall: seen.append((at, leaf.tolist(), overall)) or 0.0)
    assert seen == [(0, [1, 2], 10.0), (1, [10], 10.0)]


def test_the_words_of_a_gap():
    assert str(gap(np.array([[1.0, 2.0]]), np.array([[1.0, 4.0]]))) == (
        "the largest difference is 2 at [0, 1], where it is 2 and the reference 4; allowed is 0.5"
    )
    assert str(gap({"x": np.float32(3)}, {"x": np.float32(-1)})) == (
        "the largest difference is 4, where it is 3 and the reference -1 (everywhere -3x the reference); allowed is 0.5"
    )
    assert str(gap(np.array([True]), np.array([False]))) == (
        "the largest difference is 1 at [0], where it is True and the reference False; allowed is 0"
    )
    assert gap({"x": np.float32(3)}, {"x": np.float32(-1)}).where == " x"


def test_factors():
    y = np.array([1.0, -2.0, 0.0])
    assert [constant_factor(f * y, y) for f in (2, -1, 0.5, 0, 1.02)] == pytest.approx([2, -1, 0.5, 0, 1.02])
    for x in (y, 1.009 * y, y + np.array([0, 0, 1]), np.array([2, -4, NAN]), 2 * y + np.array([0.1, 0, 0])):
        assert constant_factor(x, y) is None
    assert constant_factor(2 * y + np.array([0.03, 0, 0]), y) == pytest.approx(2, rel=0.01)  # within a percent
    assert constant_factor(y, 0 * y) is None and constant_factor(y, np.array([INF, 1, 1])) is None
    assert constant_factor(3j * y, 1j * y) == pytest.approx(3) and constant_factor(1j * y, y) is None
    words = {4: "4x", 0.25: "1/4 of", -1: "-1x", 0: "0x", 1.5: "1.5x", -0.5: "-1/2 of", 0.7: "0.7x", 3.01: "3x"}
    words |= {
        0.99: "0.99x",
        0.985: "0.985x",
        1.018: "1.02x",
        -0.985: "-1x",
        1 / 3: "1/3 of",
        -7: "-7x",
        0.003: "1/333 of",
        12.3: "12.3x",
        2.05: "2.05x",
        100.9: "101x",
    }
    assert {f: format_factor(f) for f in words} == words


def test_structures_shapes_and_kinds():
    x, y = np.zeros((2, 3), np.float32), np.zeros((3,), np.float32)
    assert describe_shapes({"a": x, "b": y}, {"a": x, "b": y}) == ""
    assert describe_shapes({"a": x, "b": x}, {"a": x, "b": y}) == "b has shape (2, 3) and the reference (3,)"
    assert describe_shapes(x, [x]) == "it is one array and the reference [*]"
    struct = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    assert describe_shapes(struct, y) == describe_kinds(struct, y) == ""
    for a, b, differ in (
        (np.float32, np.float16, False),
        (np.int32, np.int8, False),
        (np.int32, bool, False),
        (np.float32, np.int32, True),
        (np.complex64, np.float32, True),
        (np.int32, np.complex64, True),
    ):
        said = describe_kinds({"a": np.zeros(1, a)}, {"a": np.zeros(1, b)})
        assert said == (f"a is {np.dtype(a)} and the reference {np.dtype(b)}" if differ else "")


def test_bits_of_copies():
    one = np.float32([1, 0])
    assert find_other_bits([one, one, one.copy()]) == 0
    assert find_other_bits([one, one, np.float32([1, -0.0]), one]) == 2  # another bit, though equal
    nan = np.float32([NAN])
    assert find_other_bits([nan, nan]) == 0


def test_a_reference_that_tells_nothing():
    check_conclusive("f", {"w": np.array([0.0, 1e-30])}, 1.0)
    for grads, loss, found in (
        ({"w": np.zeros(2)}, 1.0, "all gradients are zero"),
        ({"w": np.array([1, NAN])}, 1.0, "'w' is not finite"),
        ({"w": np.array([1, INF]), "b": np.ones(1)}, NAN, "'the loss', 'w' are not finite"),
    ):
        with value_error(
            "f: the reference must be finite and have a nonzero gradient, or nothing is proved; "
            f"{found}. Pass other parameters or another batch."
        ):
            check_conclusive("f", grads, loss)


def test_what_an_error_says_differs():
    assert UnequalError("all of it").differs == ("all of it",)
    assert UnequalError("all of it", ["one", "two"]).differs == ("one", "two")
    assert describe_mesh(jax.sharding.AbstractMesh((2, 4), ("data", "model"))) == "on mesh data=2, model=4"
    assert [path for path, _ in list_leaves({"b": [np.ones(1)], "a": 2})] == ["a", "b.0"]
