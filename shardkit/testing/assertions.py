"""A kernel against a plain function of the global arrays: values and gradients, under jit and eagerly."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardkit.testing._compare import first_gap, is_float, magnitude, on, shapes_differ

# A wrong factor or sign must never hide behind coarse dtypes and long sums.
LARGEST_RELATIVE = 0.25


def assert_matches_reference(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    args: Sequence[Any],
    grad: bool = True,
    eager: bool = True,
    summands: int | None = None,
) -> None:
    """Proves a kernel against a plain function: the same values and the same gradients on this mesh.

    The kernel runs inside `jax.shard_map` (check_vma on) under jit, and then eagerly. Gradients are those of all
    floating-point arguments, by VJP with a fixed random cotangent for every floating-point result, which tells apart
    what a sum of all elements would not.

    What is allowed in a leaf of floating-point numbers is
    `eps * ((4 + sqrt(n)) * a + 4 * g)`, at most 1/4 of the larger of a and g: eps is that of the coarsest
    floating-point dtype among arguments and results, n the number of summands, a the largest magnitude in that leaf of
    the reference and g the largest in all of them (a leaf whose true value is zero holds rounding only). Integers and
    booleans must be equal. For comparisons in every bit use integer-valued floats (`sharded_arrays`), whose sums are
    exact in any order.

    Args:
        kernel: the function that each device runs.
        reference: the same as a function of the global arrays, without collectives; in jax if `grad`.
        mesh: the mesh.
        in_specs: as for `jax.shard_map`.
        out_specs: as for `jax.shard_map`.
        args: the global arguments, a pytree for each.
        grad: compare gradients too.
        eager: run without jit too, which takes a few seconds where nothing is compiled yet.
        summands: the number of terms in the longest sum that either side takes; by default the number of elements of
            the largest argument or result.

    Raises:
        AssertionError: a difference; names the mesh, the result or argument, how far it is off, what is allowed, where,
            and the factor if it is the same everywhere.
        TypeError, ValueError: what tracing the kernel raises, for example by check_vma.
    """
    mapped = jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    wanted = reference(*args)
    everything = [np.asarray(x) for x in jax.tree.leaves((list(args), wanted))]
    n = summands if summands is not None else max((x.size for x in everything), default=1)
    eps = max((float(jnp.finfo(x.dtype).eps) for x in everything if is_float(x)), default=0.0)

    def allowed(path: str, leaf: np.ndarray, overall: float) -> float:
        largest = magnitude(leaf)
        bound = eps * ((4 + n**0.5) * largest + 4 * overall)
        return min(bound, LARGEST_RELATIVE * max(largest, overall))

    def compare(got: Any, wanted: Any, what: str, mode: str) -> None:
        where = f"assert_matches_reference: {on(mesh)}, {mode}, {what}"
        wrong = shapes_differ(got, wanted)
        if wrong:
            raise AssertionError(
                f"{where} must be of the reference's structure and shapes; {wrong}. Compare out_specs and the gathers."
            )
        gap = first_gap(got, wanted, allowed)
        if gap:
            path = "" if gap.path == "(the whole tree)" else f" {gap.path}"
            raise AssertionError(
                f"{where}{path} must equal the reference; {gap}. Look for a reduction that is missing or done twice, "
                "or pieces in another order."
            )

    modes: list[tuple[str, Callable[[Any], Any]]] = [("under jit", jax.jit)]
    if eager:
        modes.append(("eagerly", lambda f: f))
    for mode, wrap in modes:
        compare(wrap(mapped)(*args), wanted, "the result", mode)
    if not grad:
        return
    backward, inputs = _vjp_of(mapped, args, wanted)
    expected, _ = _vjp_of(reference, args, wanted)
    gradients = expected(inputs)
    for mode, wrap in modes:
        compare(wrap(backward)(inputs), gradients, "the gradient of argument", mode)


def _vjp_of(fn: Callable[..., Any], args: Sequence[Any], wanted: Any) -> tuple[Callable[[Any], Any], Any]:
    """The VJP of `fn` as a function of its floating-point arguments, and those arguments.

    The cotangents are random, and the same for every function with the results `wanted`.
    """
    leaves, structure = jax.tree.flatten(tuple(args))
    floats = [i for i, x in enumerate(leaves) if is_float(x)]
    rng = np.random.default_rng(zlib.crc32(b"cotangent"))  # a seed that the caller's arguments hardly share
    draws = [rng.normal(size=np.shape(y)) for y in jax.tree.leaves(wanted)]

    def floating(inputs: list[Any]) -> list[Any]:
        every = list(leaves)
        for i, x in zip(floats, inputs, strict=True):
            every[i] = x
        return [y for y in jax.tree.leaves(fn(*jax.tree.unflatten(structure, every))) if is_float(y)]

    def backward(inputs: list[Any]) -> Any:
        out, vjp = jax.vjp(floating, inputs)
        used = [d for d, y in zip(draws, jax.tree.leaves(wanted), strict=True) if is_float(y)]
        (grads,) = vjp([jnp.asarray(d, y.dtype) for d, y in zip(used, out, strict=True)])
        by_leaf = dict(zip(floats, grads, strict=True))
        return jax.tree.unflatten(structure, [by_leaf.get(i) for i in range(len(leaves))])

    return backward, [jnp.asarray(leaves[i]) for i in floats]
