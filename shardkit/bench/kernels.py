"""A kernel in a loop that a compiler cannot shorten, and its result compared on every device.

The loop stands inside the shard_map, where its arrays are not copied at a boundary. Every call's operand depends on the
result of the call before it, by one element that is chosen by a value known only at run time; otherwise the compiler
takes a collective of an unchanged operand out of the loop. The result begins as NaN, in a donated buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardkit.bench.measure import Case
from shardkit.collectives import vary


class Compared:
    """Counts the elements of a result that are wrong, on all devices of this process; the worst call counts."""

    def __init__(self, expected: np.ndarray, bound: float):
        self.expected, self.bound = expected, bound
        # Elements; the largest difference, relative to the largest element (infinite for NaN); the first, in words.
        self.wrong, self.error, self.first = 0, 0.0, ""

    def __call__(self, carry: Any, value: Any) -> np.ndarray:
        """Compares the blocks [1, ...] of the second part of the carry; the number of wrong elements."""
        counts = [self._block(shard) for shard in carry[1].addressable_shards]
        self.wrong = max(self.wrong, sum(counts))
        return np.array(sum(counts))

    def _block(self, shard: Any) -> int:
        got, want = np.asarray(shard.data)[0], self.expected[shard.index[0].start or 0]
        same = got == want
        if self.bound or not same.all():
            with np.errstate(invalid="ignore"):
                errors = np.abs(got.astype(np.float64) - want.astype(np.float64))
            same |= errors <= self.bound
            largest = float(np.abs(want.astype(np.float64)).max(initial=0)) or 1.0
            self.error = max(self.error, float(np.where(np.isnan(errors), np.inf, errors).max(initial=0)) / largest)
            if not same.all() and not self.first:
                at = tuple(map(int, np.argwhere(~same)[0]))
                self.first = f"device {shard.device.id} at {list(at)}: {got[at]} instead of {want[at]}"
        return int(same.size - same.sum())


def case(
    name: str,
    kernel: Callable[[jax.Array], Any],
    x: jax.Array,
    poison: Any,
    expected: np.ndarray,
    mesh: Mesh,
    compared: Compared,
) -> Case:
    """A kernel as a case: `kernel(x)` of this device's block, again and again.

    `x` are the blocks of all devices, [devices, ...], split over all axes; `expected`, [devices, ...], is what results
    must be, and `poison` what they begin as. Refuses a kernel whose result has another shape or dtype.
    """
    spec = P(tuple(mesh.axis_names))

    def once(x: jax.Array, flag: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = vary(kernel(x), tuple(mesh.axis_names))
        first = jnp.where(flag, _first(out).astype(x.dtype), _first(x))
        return lax.dynamic_update_slice(x, first, (0,)), out

    @cache
    def times(calls: int) -> Callable[..., Any]:
        def device(carry: Any, flag: jax.Array) -> Any:
            here = (carry[0][0], carry[1][0])
            x, out = (
                lax.fori_loop(0, calls, lambda _, both: once(both[0], flag), here) if calls else once(here[0], flag)
            )
            return x[None], out[None]

        whole = jax.shard_map(device, mesh=mesh, in_specs=(spec, P()), out_specs=spec)
        return jax.jit(lambda carry, flag: (whole(carry, flag), None), donate_argnums=(0,))

    result = jax.shard_map(lambda x: _block(kernel(x[0]), mesh), mesh=mesh, in_specs=spec, out_specs=spec)
    made = jax.eval_shape(result, x)
    _check(name, made, expected)
    carry = (x, placed(np.broadcast_to(poison, expected.shape), mesh, spec))
    no = placed(np.zeros((), bool), mesh, P())
    return Case(name, times(1), carry, (no,), compared, np.zeros((), int), times)


def placed(x: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """An array that every process has, on the devices of all."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda at: x[at])


def of_all_processes(counts: Sequence[int]) -> list[int]:
    """The sums over all processes."""
    if jax.process_count() == 1:
        return list(counts)
    return [int(n) for n in np.asarray(multihost_utils.process_allgather(np.array(counts))).sum(0)]


def _first(x: jax.Array) -> jax.Array:
    return lax.slice(x.reshape(-1), (0,), (1,))


def _block(out: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda leaf: vary(leaf, tuple(mesh.axis_names))[None], out)


def _check(name: str, made: Any, expected: np.ndarray) -> None:
    want = f"{expected.dtype}{list(expected.shape[1:])}"
    got = f"{made.dtype}{list(made.shape[1:])}" if isinstance(made, jax.ShapeDtypeStruct) else type(made).__name__
    if got != want:
        raise ValueError(
            f"bench comm: on each device a kernel must return what its reference does, {want}; {name!r} returns {got}. "
            f"Return {want} from it, or name another --op."
        )
