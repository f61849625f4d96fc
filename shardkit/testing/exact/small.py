"""Arguments of few elements for a proof, which holds for all values and says no more of large shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardkit._arguments.checks import at_least, quoted
from shardkit._arguments.typed import typed
from shardkit.testing.exact.equality import described

_MOST = 16  # multiples that are tried


@typed
def small(function: Callable[..., Any], args: tuple[Any, ...], *, multiple: int = 1) -> tuple[tuple[Any, ...], str]:
    """Arguments with every dim as small as a function takes, for a proof, and a sentence of what was done.

    Dims of equal size, of all arrays, keep an equal size, and others get others. A size for which the function was
    written stays: `jax.eval_shape` says so, nothing is run. What a size decides in Python is decided as for the small
    one. Values are those at the first places; integers from 0 on are taken modulo the smallest new size, so that tokens
    and positions stay in range.

    Args:
        function: a loss or a reference for one device, called with `args`.
        args: its arguments at full size, a tuple of pytrees of arrays, keys or ShapeDtypeStructs.
        multiple: of how many each size stays a multiple: the devices over which a dim is split at most.

    Returns:
        The arguments, and the sentence.

    Raises:
        ValueError: a multiple below one; what `function` raises at full size.

    Cost: a few dozen traces on the host.

    Example:
        >>> loss = lambda w, x: jnp.sum((x @ w["up"]) @ w["down"])
        >>> w = {"up": np.ones((512, 2048)), "down": np.ones((2048, 512))}
        >>> (w, x), said = sk.testing.small(loss, (w, np.ones((32, 512))), multiple=4)
        >>> w["up"].shape, x.shape, said
        ((12, 16), (8, 12), 'small: dims of 32 are 8, of 512 are 12, of 2048 are 16')
    """
    at_least("small", 1, multiple=multiple)
    jax.eval_shape(function, *jax.tree.map(_shape, args))
    found = {n for x in jax.tree.leaves(args) for n in np.shape(x)}
    lowest = 2 * multiple  # one element for a device would hide what happens among its own
    sizes = sorted(n for n in found if n > lowest and n % multiple == 0)

    def takes(new: dict[int, int]) -> bool:
        try:
            jax.eval_shape(function, *jax.tree.map(lambda x: _shape(x, new), args))
        except Exception:  # of any kind: it is the function's own
            return False
        return True

    new = {n: n for n in sizes}
    for n in sizes:
        for less in range(lowest, min(n, (_MOST + 1) * multiple), multiple):
            if less not in new.values() and takes(new | {n: less}):
                new[n] = less
                break
    for power in range(max(sizes, default=1).bit_length(), 0, -1):
        # Sizes of which one follows from the other, as 4096 and 3 * 4096, shrink together.
        together = {n: n >> power for n in sizes if new[n] == n and n % (lowest << power) == 0}
        if together and not {*together.values()} & {*new.values()} and takes(new | together):
            new |= together
    shrunk = {n: less for n, less in new.items() if less < n}
    done = [f"of {n} are {less}" for n, less in shrunk.items()]
    kept = sorted(n for n in found if n > lowest and n not in shrunk)
    stayed = f"; {quoted(kept)} stayed" if kept and done else ""
    said = f"small: dims {', '.join(done)}{stayed}" if done else "small: no dim could shrink"
    return jax.tree.map(lambda x: _cut(x, shrunk), args), said


def _shape(x: Any, new: dict[int, int] | None = None) -> jax.ShapeDtypeStruct:
    x = described(x)
    return jax.ShapeDtypeStruct([(new or {}).get(n, n) for n in x.shape], x.dtype)


def _cut(x: Any, new: dict[int, int]) -> Any:
    if not np.ndim(x) or isinstance(x, jax.ShapeDtypeStruct):
        return _shape(x, new) if np.ndim(x) else x
    x = x[tuple(slice(new.get(n, n)) for n in x.shape)]
    return jnp.where(x < 0, x, x % min(new.values())) if new and jnp.issubdtype(x.dtype, jnp.integer) else x
