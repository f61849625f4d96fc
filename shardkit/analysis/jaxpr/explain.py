"""Where the collectives of the backward pass come from: for each, the forward line that causes it, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from shardkit._arguments.checks import named, quoted
from shardkit._arguments.typed import typed
from shardkit._jax import compat
from shardkit._jax.jaxprs import Site, kind_of, mesh_axes, source_line, walk
from shardkit._jax.primitives import VIEWS, registered
from shardkit.analysis.jaxpr.census import census_of, row_of
from shardkit.analysis.jaxpr.dataflow import short
from shardkit.analysis.jaxpr.step import trace_step

# A value made by these, or by a cast, has the name of their operand.
_SAME_NAME = VIEWS | {"slice"}


@dataclass(frozen=True)
class Reason:
    """One collective of the backward pass, and the operation whose gradient it is.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute".
        axes: the mesh axes, in order.
        n: devices along them.
        count: executions per call; None inside a `while`.
        bytes_in: bytes of the operand per device.
        sent: bytes sent per device and execution.
        source: the forward line that causes it, "file.py:12 (function)".
        value: the value on that line whose gradient is communicated: a name such as "params['w']", else its type.
        why: one sentence.
    """

    kind: str
    axes: tuple[str, ...]
    n: int
    count: int | None
    bytes_in: int
    sent: Fraction
    source: str
    value: str
    why: str

    def __str__(self) -> str:
        times = "" if self.count == 1 else f", {'an unknown number of' if self.count is None else self.count} times"
        return f"{self.kind} over {quoted(self.axes)} of {self.bytes_in:,} bytes{times}, at {self.source}: {self.why}"


@dataclass(frozen=True)
class Explanation:
    """Why a backward pass communicates; `print` it, or iterate over the rows.

    Attributes:
        rows: one for each collective of the backward pass.
        after: collectives of gradients after it, as the all_reduce of data parallelism; `census` lists them.
    """

    rows: tuple[Reason, ...]
    after: int = 0

    def __iter__(self) -> Iterator[Reason]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        lines = [*map(str, self.rows)] or ["the backward pass sends nothing"]
        if self.after:
            plural = "s" * (self.after > 1)
            lines.append(
                f"{self.after} collective{plural} after it take{'' if plural else 's'} its gradients: see census"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """The rows as a JSON list; bytes sent as numbers."""
        return json.dumps([{**asdict(r), "sent": float(r.sent)} for r in self.rows], indent=1)


@typed
def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Names, for each collective of the backward pass, the forward line that causes it and the reason.

    Args:
        fn: a function that differentiates, as a gradient or a training step; it is traced and not run.
        *args: its arguments; `jax.ShapeDtypeStruct` is enough.
        **kwargs: its keyword arguments.

    Returns:
        Explanation: a row for each collective of the backward pass, in the order in which they run.

    Example:
        >>> specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        >>> loss = lambda w, x: jnp.sum(jax.shard_map(lambda w, x: x * w, mesh=mesh, **specs)(w, x))
        >>> [reason] = sk.explain(jax.grad(loss), jnp.float32(2), jnp.ones((8, 4)))
        >>> reason.kind, reason.axes, reason.value
        ('all_reduce', ('data',), 'w')
        >>> reason.why
        "w is invariant over 'data' and is used with x, which varies over it; the gradient of the cast is a sum."
    """
    jaxpr = trace_step(fn, args, kwargs).jaxpr
    after = sum(row.times for row in census_of(jaxpr).rows if row.update)
    return Explanation(tuple(_reason(site, found) for site, found in with_origins(jaxpr)), after)


def with_origins(jaxpr: Any) -> list[tuple[Site, Sequence[Site]]]:
    """Each collective of the backward pass, and those of the forward pass and casts that it may come from."""
    sites = [site for site in walk(jaxpr) if kind_of(site.equation) or registered(site.name).gradient]
    forward: dict[Any, list[Site]] = {}
    for site in {id(each.equation): each for each in sites if not each.backward or each.recomputed}.values():
        if kind := registered(site.name).gradient:
            key = _key(site.equation, kind)
            for each in (key, key[:-1]):
                forward.setdefault(each, []).append(site)
    backward = [site for site in sites if site.backward and kind_of(site.equation)]
    transposes: dict[Any, list[Site]] = {}
    for site in backward:
        if not site.recomputed:
            transposes.setdefault(_key(site.equation), []).append(site)
    origins: dict[int, list[Site]] = {}
    for key, group in transposes.items():
        found = forward.get(key) or forward.get(key[:-1], [])  # vmap batches a sum, and not a constant that was cast
        found = [each for each in found if not each.recomputed] or found  # what jax.checkpoint repeats is there twice
        for number, site in enumerate(group):
            # Transposing runs a program backwards: the last one of a line comes first.
            origins[id(site)] = [found[-1 - number]] if len(found) == len(group) else found
    return [(site, origins.get(id(site), [])) for site in backward]


def _key(equation: Any, made: str | None = None) -> tuple[Any, ...]:
    """What a collective has in common with its origin, which `made` one of that kind: kind, lines, axes, shapes."""
    shapes = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    ends = shapes[::-1] if made is None else shapes
    return made or kind_of(equation), tuple(compat.user_frames(equation)), frozenset(mesh_axes(equation)), ends


def _reason(site: Site, found: Sequence[Site]) -> Reason:
    row = row_of(site)
    values = list(dict.fromkeys(_name(each.equation.invars[0], each) for each in found))
    value = " or ".join(values) or _name(site.equation.invars[0], site)
    why = _why(site, row.axes, value, found)
    return Reason(row.kind, row.axes, row.n, row.count, row.bytes_in, row.sent, row.source, value, why)


def _why(site: Site, axes: tuple[str, ...], value: str, found: Sequence[Site]) -> str:
    over, it = quoted(axes), "it" if len(axes) == 1 else "them"
    if site.recomputed:
        return "jax.checkpoint runs this collective of the forward pass again instead of saving its result."
    if not found:
        return "a custom_vjp backward rule calls it there."
    origin = registered(found[0].name)
    if origin.why:
        return origin.why.format(value=value, over=over, along=named(axes))
    beside = _beside(found[0], axes)
    cause = f"is used where a value must vary over {it}"
    if found[0].within(compat.ASKED) or origin.asked:
        cause = f"is cast there to vary over {it}"
    elif beside:
        cause = f"is used with {beside}, which varies over {it}"
    return f"{value} is invariant over {over} and {cause}; the gradient of the cast is a sum."


def _beside(site: Site, axes: tuple[str, ...]) -> str:
    """The name of the value that a value was cast to match: the other operand of its first use."""
    cast = site.equation.outvars[0]
    for equation in site.jaxpr.eqns:
        if any(v is cast for v in equation.invars):
            for other in equation.invars:
                if other is not cast and set(axes) <= compat.varying_axes(other.aval):
                    return _name(other, site)
    return ""


def _name(value: Any, site: Site) -> str:
    """What the user calls a value at a site: an argument's name, else its type and the line that made it."""
    if hasattr(value, "val"):
        return f"the constant {value.val}"
    root, made = _root(value, site)
    known = _argument(root, site)
    if known:
        return known
    return f"a {short(value)}" if made is None else f"the {short(value)} of {source_line(made).split(' ')[0]}"


def _root(value: Any, site: Site) -> tuple[Any, Any]:
    """What a value was made from by casts and reshapes alone, and the equation that made that."""
    made = next((e for e in site.jaxpr.eqns if any(out is value for out in e.outvars)), None)
    if made is None or hasattr(made.invars[0], "val"):
        return value, made
    name = made.primitive.name
    return _root(made.invars[0], site) if name in _SAME_NAME or registered(name).cast else (value, made)


def _argument(value: Any, site: Site) -> str:
    """The name of the argument that a value is, in the jaxpr of `site` or of those around it; "" if it is none."""
    place = next((i for i, v in enumerate(site.jaxpr.invars) if v is value), None)
    if place is None:
        return ""
    names = site.jaxpr.debug_info.arg_names or ()
    if place < len(names) and names[place]:
        return str(names[place])
    if site.outer is None or site.outer.name == "while":
        return ""
    operands = site.outer.equation.invars
    offset = len(operands) - len(site.jaxpr.invars)  # a cond's predicate comes first
    outer = operands[place + offset] if offset >= 0 else None
    if outer is None or hasattr(outer, "val"):
        return ""
    return _argument(_root(outer, site.outer)[0], site.outer)
