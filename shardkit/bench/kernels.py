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
        self.expected = expected
        self.bound = bound
        self.wrong = 0  # elements
        self.error = 0.0  # the largest difference, relative to the largest element; infinite for NaN
        self.first = ""  # the first wrong element, in words

    def __call__(self, carry: Any, value: Any) -> np.ndarray:
        """Compares the blocks [1, ...] of the second part of the carry; the number of wrong elements."""
        _, result = carry
        wrong = sum(self._compare_block(shard) for shard in result.addressable_shards)
        self.wrong = max(self.wrong, wrong)
        return np.array(wrong)

    def _compare_block(self, shard: Any) -> int:
        """The number of wrong elements of one device."""
        # A shard is [1, ...], so that it begins at the number of its device; of a single device at None.
        block = np.asarray(shard.data)[0]
        number = shard.index[0].start or 0
        expected = self.expected[number]
        is_right = block == expected
        # Most results are exact, and are spared the two copies in float64.
        if self.bound or not is_right.all():
            with np.errstate(invalid="ignore"):
                errors = np.abs(block.astype(np.float64) - expected.astype(np.float64))
            is_right |= errors <= self.bound
            scale = float(np.abs(expected.astype(np.float64)).max(initial=0)) or 1.0
            largest = float(np.where(np.isnan(errors), np.inf, errors).max(initial=0))
            self.error = max(self.error, largest / scale)
        if not is_right.all() and not self.first:
            index = tuple(map(int, np.argwhere(~is_right)[0]))
            self.first = f"device {shard.device.id} at {list(index)}: {block[index]} instead of {expected[index]}"
        return int(np.count_nonzero(~is_right))


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

    The carry is the operand and the result. Of an all_reduce over 8 devices of 4 elements, call by call on device 0:

        operand [1, 2, 3, 4]    result [nan, nan, nan, nan]
        operand [1, 2, 3, 4]    result [8, 16, 24, 32]
        operand [1, 2, 3, 4]    result [8, 16, 24, 32]

    The 1 is chosen between the operand's own and the 8, so that no compiler knows that the operand stays the same.

    `x` are the blocks of all devices, [devices, ...], split over all axes; `expected`, [devices, ...], is what results
    must be, and `poison` what they begin as. Refuses a kernel whose result has another shape or dtype.
    """
    axes = tuple(mesh.axis_names)
    spec = P(axes)

    @cache
    def repeat(calls: int) -> Callable[..., Any]:
        return _make_loop(kernel, calls, mesh, spec)

    def run_once(x: jax.Array) -> Any:
        result = kernel(x[0])
        return jax.tree.map(lambda leaf: vary(leaf, axes)[None], result)

    mapped = jax.shard_map(run_once, mesh=mesh, in_specs=spec, out_specs=spec)
    _check_result(name, jax.eval_shape(mapped, x), expected)
    carry = (x, place(np.broadcast_to(poison, expected.shape), mesh, spec))
    flag = place(np.zeros((), bool), mesh, P())
    # What is compared is the number of wrong elements, which should be 0.
    return Case(name, repeat(1), carry, (flag,), compared, np.zeros((), int), repeat)


def _make_loop(kernel: Callable[[jax.Array], Any], calls: int, mesh: Mesh, spec: P) -> Callable[..., Any]:
    """The jitted step of a case: so many calls of a kernel on every device, at least one."""

    def call(x: jax.Array, flag: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One call, and the operand of the next: the same one, if the compiler but knew that the flag is False."""
        result = vary(kernel(x), mesh.axis_names)
        first = jnp.where(flag, _first_element(result).astype(x.dtype), _first_element(x))
        return lax.dynamic_update_slice(x, first, (0,)), result

    def run_on_device(carry: Any, flag: jax.Array) -> Any:
        blocks_of_x, blocks_of_result = carry  # of one device: [1, ...]

        def call_again(_: Any, x_and_result: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, _ = x_and_result
            return call(x, flag)

        x, result = lax.fori_loop(0, calls, call_again, (blocks_of_x[0], blocks_of_result[0]))
        return x[None], result[None]

    mapped = jax.shard_map(run_on_device, mesh=mesh, in_specs=(spec, P()), out_specs=spec)

    def step(carry: Any, flag: jax.Array) -> tuple[Any, None]:
        return mapped(carry, flag), None

    return jax.jit(step, donate_argnums=(0,))


def place(x: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """An array that every process has, on the devices of all."""
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def of_all_processes(counts: Sequence[int]) -> list[int]:
    """The sums over all processes."""
    if jax.process_count() == 1:
        return list(counts)
    by_process = np.asarray(multihost_utils.process_allgather(np.array(counts)))
    return [int(total) for total in by_process.sum(0)]


def _first_element(x: jax.Array) -> jax.Array:
    return lax.slice(x.reshape(-1), (0,), (1,))


def _check_result(name: str, result: Any, expected: np.ndarray) -> None:
    rule = f"{expected.dtype}{list(expected.shape[1:])}"
    actual = type(result).__name__
    if isinstance(result, jax.ShapeDtypeStruct):
        actual = f"{result.dtype}{list(result.shape[1:])}"
    if actual != rule:
        raise ValueError(
            f"bench comm: on each device a kernel must return what its reference does, {rule}; {name!r} returns "
            f"{actual}. Return {rule} from it, or name another --op."
        )
