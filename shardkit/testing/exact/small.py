"""Arguments of few elements for a proof, which holds for all values and says no more of large shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.checks import at_least, quote
from shardkit._arguments.typed import typed
from shardkit.testing.exact.arguments import describe_array

_MOST = 16  # multiples that are tried


@typed
def small(function: Callable[..., Any], args: tuple[Any, ...], *, multiple: int = 1) -> tuple[tuple[Any, ...], str]:
    """Makes every dim of the arguments as small as the function takes, for a proof, and says so in a sentence.

    Dims of equal size, of all arrays, keep an equal size, and different sizes stay different. If your function needs a
    size, it stays: `jax.eval_shape` tells, and nothing runs. A Python branch on a size goes the way of the small size.
    Values come from the first places. Integers from 0 on are taken modulo the smallest new size, so tokens and
    positions stay in range.

    Args:
        function: a loss or a reference for one device, called with `args`.
        args: its arguments at full size, a tuple of pytrees of arrays, keys or ShapeDtypeStructs.
        multiple: each new size is a multiple of this; pass the largest number of devices along a dim.

    Returns:
        The arguments, and the sentence.

    Raises:
        ValueError: a multiple below one; errors of `function` at full size.

    Cost: a few dozen traces on the host.

    Example:
        >>> loss = lambda w, x: jnp.sum((x @ w["up"]) @ w["down"])
        >>> w = {"up": np.ones((512, 2048)), "down": np.ones((2048, 512))}
        >>> (w, x), said = sk.testing.small(loss, (w, np.ones((32, 512))), multiple=4)
        >>> w["up"].shape, x.shape, said
        ((12, 16), (8, 12), 'small: dims of 32 are 8, of 512 are 12, of 2048 are 16')
    """
    at_least("small", 1, multiple=multiple)
    jax.eval_shape(function, *jax.tree.map(describe_array, args))
    lowest = 2 * multiple  # one element for a device would hide what happens among its own
    all_sizes: set[int] = set()
    for x in jax.tree.leaves(args):
        all_sizes.update(np.shape(x))
    large_sizes = sorted(size for size in all_sizes if size > lowest)
    sizes = [size for size in large_sizes if size % multiple == 0]
    new_sizes = _shrink_one_by_one(function, args, sizes, lowest, multiple)
    new_sizes = _shrink_together(function, args, sizes, lowest, new_sizes)
    smaller_sizes = {size: new_size for size, new_size in new_sizes.items() if new_size < size}
    unchanged_sizes = [size for size in large_sizes if size not in smaller_sizes]
    small_args = jax.tree.map(lambda x: _cut(x, smaller_sizes), args)
    return small_args, _summarize(smaller_sizes, unchanged_sizes)


def _shrink_one_by_one(
    function: Callable[..., Any], args: tuple[Any, ...], sizes: list[int], lowest: int, multiple: int
) -> dict[int, int]:
    """For each size the smallest one that the function takes and that no other has; itself where there is none.

    Worked example: 32, 512 and 2048 with multiple=4. At least 8 are left, two for each of 4 devices: 32 becomes 8. 512
    cannot become 8 too, and becomes 12; 2048 becomes 16.
    """
    new_sizes = {size: size for size in sizes}
    for size in sizes:
        end = min(size, (_MOST + 1) * multiple)
        for candidate in range(lowest, end, multiple):
            # Dims of one size could be mistaken for each other: a transposed matrix would be proved.
            if candidate in new_sizes.values():
                continue
            if _takes(function, args, {**new_sizes, size: candidate}):
                new_sizes[size] = candidate
                break
    return new_sizes


def _shrink_together(
    function: Callable[..., Any], args: tuple[Any, ...], sizes: list[int], lowest: int, new_sizes: dict[int, int]
) -> dict[int, int]:
    """Sizes of which one follows from the other, as 4096 and 3 * 4096, shrink together, by a power of two.

    One by one they cannot: a function that splits a projection [4096, 3 * 4096] in three takes no other size of one of
    both. The largest power comes first that leaves each of them a multiple of `lowest`: with multiple=4, 4096 and 12288
    become 8 and 24.
    """
    most_bits = max(sizes, default=1).bit_length()
    for power in range(most_bits, 0, -1):
        divided_sizes = {}
        for size in sizes:
            is_unchanged = new_sizes[size] == size
            if is_unchanged and size % (lowest << power) == 0:
                divided_sizes[size] = size >> power
        if not divided_sizes or not set(divided_sizes.values()).isdisjoint(new_sizes.values()):
            continue
        candidates = {**new_sizes, **divided_sizes}
        if _takes(function, args, candidates):
            new_sizes = candidates
    return new_sizes


def _takes(function: Callable[..., Any], args: tuple[Any, ...], new_sizes: Mapping[int, int]) -> bool:
    """Whether a function can be traced for arguments of other sizes."""
    try:
        jax.eval_shape(function, *jax.tree.map(lambda x: _describe_small(x, new_sizes), args))
    except Exception:  # of any kind: it is the function's own
        return False
    return True


def _summarize(smaller_sizes: Mapping[int, int], unchanged_sizes: list[int]) -> str:
    """What was done, in a sentence."""
    if not smaller_sizes:
        return "small: no dim could shrink"
    parts = [f"of {size} are {new_size}" for size, new_size in smaller_sizes.items()]
    sentence = f"small: dims {', '.join(parts)}"
    if unchanged_sizes:
        sentence += f"; {quote(unchanged_sizes)} stayed"
    return sentence


def _describe_small(x: Any, new_sizes: Mapping[int, int]) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an argument, with other sizes."""
    array = describe_array(x)
    shape = [new_sizes.get(size, size) for size in array.shape]
    return jax.ShapeDtypeStruct(shape, array.dtype)


def _cut(x: Any, new_sizes: Mapping[int, int]) -> Any:
    """The first elements of an argument along each dim that shrinks."""
    if not np.ndim(x):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return _describe_small(x, new_sizes)
    first_elements = tuple(slice(new_sizes.get(size, size)) for size in x.shape)
    x = x[first_elements]
    if new_sizes and jnp.issubdtype(x.dtype, jnp.integer):
        # A token of 30,000 would be out of the bounds of a vocabulary that shrank to 12.
        return jnp.where(x < 0, x, x % min(new_sizes.values()))
    return x
