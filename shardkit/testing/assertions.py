"""Compares a kernel with a plain function of the global arrays: values and gradients, under jit and eagerly."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardkit._arguments.checks import mesh_in_context
from shardkit._arguments.typed import Specs, typed
from shardkit.meshes.layout import path_name
from shardkit.testing._compare import (
    describe_kinds,
    describe_mesh,
    describe_shapes,
    find_unequal_replicas,
    find_worst_gap,
    is_float,
    is_spec_or_none,
    list_leaves,
    magnitude,
)
from shardkit.testing._interpreter import restrict_to_floats
from shardkit.testing._kernels import (
    check_args,
    check_arity,
    check_axes_of_specs,
    wrap_kernel,
    wrap_reference,
)

# So that coarse dtypes and long sums do not hide a wrong factor or sign.
LARGEST_RELATIVE = 0.25
_WHERE = "assert_matches_reference"


@typed
def assert_matches_reference(
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    mesh: Mesh | None = None,
    in_specs: Specs | None,
    out_specs: Specs,
    args: Sequence[Any],
    grad: bool = True,
    eager: bool = True,
    summands: int | None = None,
    check_vma: bool = True,
) -> None:
    """Proves a kernel against a plain function: the same values and the same gradients on this mesh.

    The kernel runs inside `jax.shard_map` under jit, and then eagerly. Gradients of all floating-point arguments are
    compared by a VJP with a fixed random cotangent (complex for a complex result): it shows errors that the gradient of
    a sum would hide. Replicas of a result or gradient must have the same bits.

    The tolerance of a floating-point leaf is `eps * ((4 + sqrt(n)) * a + 4 * g)`, at most 1/4 of the larger of a and g:
    eps belongs to the coarsest floating-point dtype among arguments and results, n is the number of summands, a the
    largest magnitude in this leaf of the reference and g the largest in all leaves (if the true value of a leaf is
    zero, it contains rounding only). Integers and booleans must be equal. For bitwise comparisons use integer-valued
    floats (`sharded_arrays`): their sums are exact in any order.

    Args:
        kernel: the function that each device runs.
        reference: the same as a function of the global arrays, without collectives; in jax if `grad`.
        mesh: the mesh; by default the mesh of `jax.set_mesh`.
        in_specs: as for `jax.shard_map`.
        out_specs: as for `jax.shard_map`.
        args: the global arguments, a tuple of pytrees.
        grad: compare gradients too.
        eager: run without jit too, which takes a few seconds the first time.
        summands: the number of terms in the longest sum; by default the number of elements of the largest argument
            or result.
        check_vma: as for `jax.shard_map`. Pass False for a foreign kernel without varying types.

    Raises:
        AssertionError: a difference. The message names the mesh, the result or argument, the difference and its place,
            the tolerance, and the factor if it is the same everywhere.
        TypeError: args that is not a tuple, or a reference in numpy when gradients are compared.
        ValueError: a mesh without devices.
        TypeError, ValueError: errors of tracing the kernel, for example by check_vma.

    Example:
        >>> sk.testing.assert_matches_reference(
        ...     lambda x: sk.all_reduce(x, "data"), lambda x: x[:2] + x[2:],
        ...     mesh=mesh, in_specs=P("data"), out_specs=P(), args=(np.arange(4, dtype="f"),),
        ... )
    """
    __tracebackhide__ = True
    mesh = mesh_in_context(_WHERE, mesh, devices=True)
    if kernel.__hash__ is None:  # an instance of a class with its own __eq__
        kernel = partial(kernel)
    check_axes_of_specs(_WHERE, mesh, in_specs, out_specs)
    check_args(_WHERE, mesh, in_specs, args)
    check_arity(_WHERE, "kernel", kernel, args)
    check_arity(_WHERE, "reference", reference, args)
    mapped = _map_kernel(kernel, mesh, _HashableSpecs.of(in_specs), _HashableSpecs.of(out_specs), check_vma)
    results = wrap_reference(_WHERE, reference)(*args)
    expected = jax.tree.map(_as_array, results)
    comparison = _choose_tolerance(mesh, args, expected, summands)
    modes = ["under jit"]
    if eager:
        modes.append("eagerly")
    for mode in modes:
        results = _choose_mode(mapped, mode)(*args)
        comparison.check(results, expected, f"{mode}, the result")
    if not grad:
        return
    leaves, structure = jax.tree.flatten(tuple(args))
    cotangents = _draw_cotangents(expected)
    try:
        gradients = _make_vjp(reference, structure)(leaves, cotangents)
    except jax.errors.TracerArrayConversionError:
        raise TypeError(
            "assert_matches_reference: the reference must be written in jax when gradients are compared; it converts "
            "its arguments to numpy arrays. Use jax.numpy in it, or pass grad=False."
        ) from None
    backward = _make_vjp(mapped, structure)
    for mode in modes:
        results = _choose_mode(backward, mode)(leaves, cotangents)
        comparison.check(results, gradients, f"{mode}, the gradient of argument")


def _as_array(x: Any) -> Any:
    """Numbers as jax's arrays; arrays, of NumPy too, as they are, since jax would make float64 float32."""
    if hasattr(x, "dtype"):
        return x
    return jnp.asarray(x)


class _Comparison(NamedTuple):
    """How results on a mesh are compared with the reference's."""

    mesh: Mesh
    eps: float  # that of the coarsest floating-point dtype
    summands: int  # the number of terms in the longest sum

    def allow(self, index: int, leaf: np.ndarray, overall: float) -> float:
        """By how much leaf number `index` may differ, given the largest magnitude in all leaves.

        The errors of a sum of n terms that are rounded at random add up to about sqrt(n) times one of them. For example
        a float32 sum of 10,000 terms with results up to 50: 1.2e-7 * (104 * 50 + 4 * 50) = 6.4e-4.
        """
        largest = magnitude(leaf)
        bound = self.eps * ((4 + self.summands**0.5) * largest + 4 * overall)
        return min(bound, LARGEST_RELATIVE * max(largest, overall))

    def check(self, actual: Any, expected: Any, what: str) -> None:
        """Refuses what differs in structure, shape, kind of dtype, between replicas, or by more than is allowed."""
        __tracebackhide__ = True
        where = f"assert_matches_reference: {describe_mesh(self.mesh)}, {what}"
        difference = describe_shapes(actual, expected)
        if difference:
            raise AssertionError(
                f"{where} must have the reference's structure and shapes; {difference}. Check out_specs and the "
                "gathers."
            )
        difference = describe_kinds(actual, expected)
        if difference:
            raise AssertionError(
                f"{where} must have a dtype of the reference's kind; {difference}. Cast the kernel's or the "
                "reference's."
            )
        # The comparison of values below fetches one replica of each shard, so that another one could be wrong unseen.
        for path, x in jax.tree_util.tree_leaves_with_path(actual):
            devices = find_unequal_replicas(x)
            if devices:
                leaf = f" {path_name(path)}" if path else ""
                raise AssertionError(
                    f"{where}{leaf} must have the same bits on all devices that hold it; devices {devices[0]} and "
                    f"{devices[1]} differ. Look for an assume_replicated of a value, or a cond with a predicate, that "
                    "differs."
                )
        gap = find_worst_gap(actual, expected, self.allow)
        if gap:
            raise AssertionError(
                f"{where}{gap.where} must equal the reference; {gap}. Look for a missing or repeated reduction, or "
                "shards in the wrong order."
            )


def _choose_tolerance(mesh: Mesh, args: Any, expected: Any, summands: int | None) -> _Comparison:
    if summands is not None and summands < 1:
        raise ValueError(
            f"assert_matches_reference: summands must be a whole number of terms, 1 or more; got {summands!r}. Leave "
            "it out, or pass the length of the longest sum."
        )
    arrays = [x for _, x in list_leaves((list(args), expected))]
    # A sum over elements of one array has no more terms than the largest array has elements.
    if summands is None:
        element_counts = [x.size for x in arrays]
        summands = max(element_counts, default=1)
    coarsest = 0.0
    for x in arrays:
        if is_float(x):
            coarsest = max(coarsest, float(jnp.finfo(x.dtype).eps))
    return _Comparison(mesh, coarsest, summands)


def _draw_cotangents(expected: Any) -> list[Any]:
    """A random cotangent for each floating-point leaf, complex where the leaf is complex."""
    rng = np.random.default_rng(zlib.crc32(b"cotangent"))  # not a seed that the caller is likely to use
    cotangents = []
    for y in jax.tree.leaves(expected):
        # Also for an integer leaf, whose draw is not used: so the others' do not depend on it.
        draw = rng.normal(size=np.shape(y))
        if jnp.iscomplexobj(y):  # a real one is its own conjugate
            draw = draw + 1j * rng.normal(size=np.shape(y))
        if is_float(y):
            cotangents.append(draw.astype(jnp.result_type(y)))
    return cotangents


class _HashableSpecs(NamedTuple):
    """Specs as an argument of a cached function: a pytree of them may hold dicts and lists, which have no hash."""

    leaves: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, specs: Any) -> _HashableSpecs:
        """The specs, taken apart."""
        leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec_or_none)
        return cls(tuple(leaves), structure)

    def restore(self) -> Any:
        """The specs as they were."""
        return jax.tree.unflatten(self.structure, self.leaves)


# Cached, because a property test calls this for every example: the same kernel on the same shapes compiles once.
@lru_cache(maxsize=64)
def _map_kernel(
    kernel: Any, mesh: Mesh, hashable_in_specs: _HashableSpecs, hashable_out_specs: _HashableSpecs, check_vma: bool
) -> Callable[..., Any]:
    in_specs = hashable_in_specs.restore()
    out_specs = hashable_out_specs.restore()
    kernel = wrap_kernel(_WHERE, kernel, mesh, out_specs, check_vma)
    return jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


@lru_cache(maxsize=64)
def _jit(fn: Any) -> Callable[..., Any]:
    return jax.jit(fn)


def _choose_mode(fn: Callable[..., Any], mode: str) -> Callable[..., Any]:
    if mode == "under jit":
        return _jit(fn)
    return fn


@lru_cache(maxsize=64)
def _make_vjp(fn: Any, structure: Any) -> Callable[..., Any]:
    """The VJP of `fn` for the floating-point leaves of its arguments: (leaves, cotangents) -> gradients."""

    def call_flat(*leaves: Any) -> list[Any]:
        args = jax.tree.unflatten(structure, leaves)
        out = fn(*args)
        return [jnp.asarray(y) for y in jax.tree.leaves(out)]

    def compute_gradients(leaves: list[Any], cotangents: list[Any]) -> Any:
        floats = [jnp.asarray(x) for x in leaves if is_float(x)]
        out, vjp = jax.vjp(restrict_to_floats(call_flat, leaves), floats)
        # A kernel in a narrower dtype than the reference gets its cotangents in that dtype.
        cotangents_of_out = []
        for cotangent, y in zip(cotangents, out, strict=True):
            cotangents_of_out.append(cotangent.astype(y.dtype))
        (grads_of_floats,) = vjp(cotangents_of_out)
        remaining = iter(grads_of_floats)
        grads = []
        for x in leaves:
            # None is an empty subtree: an integer argument has no leaf among the gradients that are compared.
            grad = None
            if is_float(x):
                grad = next(remaining)
            grads.append(grad)
        return jax.tree.unflatten(structure, grads)

    return compute_gradients
