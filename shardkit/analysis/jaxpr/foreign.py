"""What a foreign call or kernel sends, said by its writer: its program text does not tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import jax

from shardkit._arguments.checks import Axis, at_least_zero, one_of
from shardkit._arguments.typed import typed
from shardkit._jax.compat import bound
from shardkit._jax.jaxprs import Site
from shardkit.cost.collectives import COLLECTIVE_KINDS

# A claim is the name of a scope, as shardkit_sends["all_to_all", ["data"], 64]; equations keep it in the jaxpr.
_SCOPE = "shardkit_sends"
CALLS = ("ffi_call", "pallas_call")
"""The primitives of which a writer must say what they send."""


class Claim(NamedTuple):
    """What a call sends, as its writer says."""

    kind: str
    axes: tuple[str, ...]
    sent: Fraction  # bytes per device


@typed
def sends(kind: str, axis: Axis, sent: int) -> Any:
    """Tells the census how many bytes each foreign call (`jax.ffi`) or Pallas kernel in a block sends.

    The census reads the remote copies of a Pallas kernel. It refuses a foreign call, and a kernel whose copies depend
    on data: these have no collective in the program. In this block each gets a row with the bytes that you pass.
    Nobody checks them.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "ppermute".
        axis: axis name or tuple of names, over which it sends.
        sent: bytes that a device sends in one call; for a ragged exchange, at most.

    Returns:
        A context manager, for code inside shard_map.

    Raises:
        ValueError: another kind, negative bytes, or an unbound axis.

    Cost: nothing is sent.

    Example:
        >>> def exchange(x):
        ...     with sk.analysis.sends("all_to_all", "data", sent=x.nbytes // 2):
        ...         return jax.ffi.ffi_call("exchange", jax.typeof(x), has_side_effect=True)(x)
        >>> f = jax.shard_map(exchange, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        >>> float(sk.census(f, jnp.ones((8, 4))).sent(axis="data"))
        32.0
    """
    one_of("sends", "kind", kind, COLLECTIVE_KINDS)
    at_least_zero("sends", sent=sent)
    return jax.named_scope(_SCOPE + json.dumps([kind, bound("sends", axis), sent]))


def find_claim(site: Site) -> Claim | None:
    """What its writer says that a foreign call sends; None of other equations, and where nothing is said."""
    if site.name not in CALLS:
        return None
    for holder in sites_around(site):
        # Of blocks inside each other, the innermost counts.
        for scope in reversed(holder.equation.source_info.name_stack.stack):
            if scope.name.startswith(_SCOPE):
                kind, axes, sent = json.loads(scope.name.removeprefix(_SCOPE))
                return Claim(kind, tuple(axes), Fraction(sent))
    return None


def sites_around(site: Site) -> Iterator[Site]:
    """A site and those that hold it, innermost first."""
    holder: Site | None = site
    while holder is not None:
        yield holder
        holder = holder.outer
