"""Proves that a function may be the `combine` of a prefix scan: associative, with this identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardkit._arguments.checks import quote
from shardkit._arguments.typed import Arrays, typed
from shardkit.collectives.shapes import broadcast_identity, check_combine
from shardkit.meshes.mesh import abstract_mesh
from shardkit.testing.exact.certificate import Equality
from shardkit.testing.exact.equality import assert_equal_for_all_inputs

_ATTEMPTS = 20  # draws, of which one shows a difference
_TRIPLES = 8  # of integers and booleans, for each of which the floats are proved


@typed
def assert_associative(combine: Callable[[Any, Any], Any], identity: Arrays, x: Arrays) -> Equality:
    """Proves for all inputs that `combine` is associative and `identity` its identity, as `prefix_scan` assumes.

    A scan of devices combines values in another order than a loop does: over 4 devices (a b)(c d) instead of
    ((a b) c) d. If these differ, the result depends on the number of devices.

    A proof is for all floats. Integers and booleans keep their values in one, so that it is made for eight triples of
    them; of single booleans these are all.

    Args:
        combine: `combine(earlier, later)` of two pytrees like x.
        identity: as for `prefix_scan`.
        x: a pytree of arrays or ShapeDtypeStructs, floats among them: the shapes to prove it for. Small shapes prove as
            much.

    Returns:
        The proof, the last one of several; print it.

    Raises:
        AssertionError: a difference. The message has numbers a, b and c for which the two orders differ, where a few
            draws show one.
        TypeError: a `combine` that returns another tree, shape or dtype.
        ValueError: no verdict, as from `assert_equal_for_all_inputs`; an x without floats, or an identity unlike x.

    Cost: a second on the host, or a few with integers.

    Example:
        >>> def follow(earlier, later):
        ...     (a, b), (later_a, later_b) = earlier, later
        ...     return later_a * a, later_a * b + later_b
        >>> pair = (jnp.ones(1), jnp.ones(1))
        >>> sk.testing.assert_associative(follow, (1.0, 0.0), pair).points
        3
        >>> sk.testing.assert_associative(lambda earlier, later: earlier - later, 0.0, jnp.ones(1))
        Traceback (most recent call last):
        AssertionError: assert_associative: combine must be associative: of a=[3.], b=[1.], c=[1.] ...
    """
    where = "assert_associative"
    x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), x)
    check_combine(where, combine, x)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), x)
    neutral = broadcast_identity(where, identity, zeros)
    are_floats = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(x)]
    if not any(are_floats):
        raise ValueError(
            f"{where}: x must have an array of floats, for all of which a proof holds; got "
            f"{quote(str(leaf.dtype) for leaf in jax.tree.leaves(x))}. Compare integers that you draw."
        )

    def combine_left(a: Any, b: Any, c: Any) -> Any:
        return combine(combine(a, b), c), combine(neutral, a), combine(a, neutral)

    def combine_right(a: Any, b: Any, c: Any) -> Any:
        return combine(a, combine(b, c)), a, a

    triples = 1 if all(are_floats) else _TRIPLES
    for number in range(triples):
        args = tuple(_draw_integers(x, number, place) for place in range(3))
        try:
            proof = assert_equal_for_all_inputs(
                combine_left,
                combine_right,
                mesh=abstract_mesh(device=1),
                in_specs=P(),
                out_specs=P(),
                args=args,
                grad=False,
            )
        except AssertionError as error:
            raise AssertionError(_describe_difference(combine_left, combine_right, x)) from error
    return proof


def _draw_integers(x: Any, number: int, place: int) -> Any:
    """The arguments of one proof: integers and booleans as values, floats as unknowns.

    Worked example: a single boolean of a, b and c, `place` 0, 1 and 2, has the bits of `number` 0 to 7: all eight
    triples.
    """
    generator = np.random.default_rng([number, place])

    def draw(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if leaf.dtype != bool:
            return _draw(generator, leaf)
        bits = generator.integers(0, 2, leaf.shape).astype(bool)
        bits.reshape(-1)[:1] = bool(number >> place & 1)
        return bits

    return jax.tree.map(draw, x)


def _describe_difference(combine_left: Callable[..., Any], combine_right: Callable[..., Any], x: Any) -> str:
    """The error, with numbers for which both orders differ."""
    rules = (
        "combine must be associative",
        "identity, combined with a value that follows, must leave it as it is",
        "identity, combined with a value before it, must leave it as it is",
    )
    names = ("combine(combine(a, b), c)", "combine(identity, a)", "combine(a, identity)")
    others = ("combine(a, combine(b, c))", "a", "a")
    generator = np.random.default_rng(0)
    for _ in range(_ATTEMPTS):
        a, b, c = (jax.tree.map(lambda leaf: _draw(generator, leaf), x) for _ in range(3))
        results = zip(rules, names, others, combine_left(a, b, c), combine_right(a, b, c), strict=True)
        for rule, name, other, left, right in results:
            if not _are_near(left, right):
                inputs = f"of a={_format(a)}, b={_format(b)}, c={_format(c)}"
                if other == "a":
                    inputs = f"of a={_format(a)}"
                return (
                    f"assert_associative: {rule}: {inputs} {name} is {_format(left)} and {other} is {_format(right)}. "
                    "Pass a combine and an identity for which they are equal."
                )
    return (
        "assert_associative: combine must be associative, with this identity; it is not for all inputs, though it is "
        f"for {_ATTEMPTS} drawn ones. Read the difference above, and pass a combine and an identity without one."
    )


def _draw(generator: np.random.Generator, like: Any) -> np.ndarray:
    """Small whole numbers, which a reader can check."""
    lowest = 0 if jnp.issubdtype(like.dtype, jnp.unsignedinteger) or like.dtype == bool else -2
    return generator.integers(lowest, 4, like.shape).astype(like.dtype)


def _are_near(left: Any, right: Any) -> bool:
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if not np.allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), 1e-3, 1e-3, equal_nan=True):
            return False
    return True


def _format(tree: Any) -> str:
    leaves = [np.array2string(np.asarray(leaf), precision=3, threshold=8) for leaf in jax.tree.leaves(tree)]
    return " ".join(" ".join(leaves).split())
