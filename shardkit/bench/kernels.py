"""A kernel in a loop that a compiler cannot shorten, and its result compared on every device.

The loop stands inside the shard_map, where its arrays are not copied at a boundary. Every call's operand depends on the
result of the call before it, by one element that is chosen by a value known only at run time; otherwise the compiler
takes a collective of an unchanged operand out of the loop. The result begins as NaN, in a donated buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardkit.bench.measure import Case
from shardkit.collectives import vary

_Carry = list[jax.Array]


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
        _, result, *_ = carry
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


class Neighbor(NamedTuple):
    """What every device runs in the same loop as a kernel.

    Attributes:
        run: of this device's block, a flat array.
        x: the blocks of all devices, [devices, ...].
        comes_first: whether the kernel waits for its result; otherwise neither needs the other.
    """

    run: Callable[[jax.Array], jax.Array]
    x: jax.Array
    comes_first: bool


def case(
    name: str,
    kernel: Callable[[jax.Array], Any],
    x: jax.Array,
    poison: Any,
    expected: np.ndarray,
    mesh: Mesh,
    compared: Compared,
    neighbor: Neighbor | None = None,
) -> Case:
    """A kernel as a case: `kernel(x)` of this device's block, again and again.

    The carry is the operand and the result. Of an all_reduce over 8 devices of 4 elements, call by call on device 0:

        operand [1, 2, 3, 4]    result [nan, nan, nan, nan]
        operand [1, 2, 3, 4]    result [8, 16, 24, 32]
        operand [1, 2, 3, 4]    result [8, 16, 24, 32]

    The 1 is chosen between the operand's own and the 8, so that no compiler knows that the operand stays the same.

    `x` are the blocks of all devices, [devices, ...], split over all axes; `expected`, [devices, ...], is what results
    must be, and `poison` what they begin as. Each call of a case with a `neighbor` runs that too; its operand and its
    result follow in the carry. Refuses a kernel whose result has another shape or dtype.
    """
    spec = P(tuple(mesh.axis_names))
    _check_result(name, _eval_result(kernel, x, mesh), expected)
    carry = [x, place(np.broadcast_to(poison, expected.shape), mesh, spec)]
    if neighbor is not None:
        carry += _make_carry_of_neighbor(neighbor, mesh)

    def call(carry: _Carry, flag: jax.Array) -> _Carry:
        x, _, *carry_of_neighbor = carry
        if neighbor is None:
            result = vary(kernel(x), mesh.axis_names)
            return [_depend(x, result, flag), result]
        y, _ = carry_of_neighbor
        if neighbor.comes_first:
            # The kernel waits for the neighbor, and the next neighbor for the kernel.
            result_of_neighbor = vary(neighbor.run(y), mesh.axis_names)
            x = _depend(x, result_of_neighbor, flag)
            result = vary(kernel(x), mesh.axis_names)
            return [x, result, _depend(y, result, flag), result_of_neighbor]
        result = vary(kernel(x), mesh.axis_names)
        result_of_neighbor = vary(neighbor.run(y), mesh.axis_names)
        return [_depend(x, result, flag), result, _depend(y, result_of_neighbor, flag), result_of_neighbor]

    # What is compared is the number of wrong elements, which should be 0.
    return _make_case(name, call, carry, mesh, compared)


def case_of_neighbor(name: str, neighbor: Neighbor, mesh: Mesh) -> Case:
    """A neighbor alone as a case, whose result is not compared."""

    def call(carry: _Carry, flag: jax.Array) -> _Carry:
        y, _ = carry
        result = vary(neighbor.run(y), mesh.axis_names)
        return [_depend(y, result, flag), result]

    def check_nothing(carry: Any, value: Any) -> np.ndarray:
        return np.zeros((), int)

    return _make_case(name, call, _make_carry_of_neighbor(neighbor, mesh), mesh, check_nothing)


def _make_case(
    name: str,
    call: Callable[[_Carry, jax.Array], _Carry],
    carry: _Carry,
    mesh: Mesh,
    checked: Callable[[Any, Any], np.ndarray],
) -> Case:
    @cache
    def repeat(calls: int) -> Callable[..., Any]:
        return _make_loop(call, calls, mesh)

    flag = place(np.zeros((), bool), mesh, P())
    return Case(name, repeat(1), tuple(carry), (flag,), checked, np.zeros((), int), repeat)


def _make_carry_of_neighbor(neighbor: Neighbor, mesh: Mesh) -> _Carry:
    """The operand of a neighbor, and zeros for its result."""
    result = _eval_result(neighbor.run, neighbor.x, mesh)
    zeros = np.broadcast_to(np.zeros((), result.dtype), result.shape)
    return [neighbor.x, place(zeros, mesh, P(tuple(mesh.axis_names)))]


def _eval_result(kernel: Callable[[jax.Array], Any], x: jax.Array, mesh: Mesh) -> Any:
    """The shapes of a kernel's results on all devices, [devices, ...]."""
    axes = tuple(mesh.axis_names)

    def run_once(x: jax.Array) -> Any:
        return jax.tree.map(lambda leaf: vary(leaf, axes)[None], kernel(x[0]))

    return jax.eval_shape(jax.shard_map(run_once, mesh=mesh, in_specs=P(axes), out_specs=P(axes)), x)


def _make_loop(call: Callable[[_Carry, jax.Array], _Carry], calls: int, mesh: Mesh) -> Callable[..., Any]:
    """The jitted step of a case: so many calls on every device, at least one."""
    spec = P(tuple(mesh.axis_names))

    def run_on_device(blocks: Any, flag: jax.Array) -> Any:
        # The blocks of one device are [1, ...].
        carry = [block[0] for block in blocks]
        carry = lax.fori_loop(0, calls, lambda _, carry: call(carry, flag), carry)
        return tuple(leaf[None] for leaf in carry)

    mapped = jax.shard_map(run_on_device, mesh=mesh, in_specs=(spec, P()), out_specs=spec)

    def step(carry: Any, flag: jax.Array) -> tuple[Any, None]:
        return mapped(carry, flag), None

    return jax.jit(step, donate_argnums=(0,))


def _depend(x: jax.Array, result: jax.Array, flag: jax.Array) -> jax.Array:
    """The operand as it is, which a compiler takes to depend on a result: it does not know that the flag is False."""
    first = jnp.where(flag, _first_element(result).astype(x.dtype), _first_element(x))
    return lax.dynamic_update_slice(x, first, (0,))


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
