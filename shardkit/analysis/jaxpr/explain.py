"""Where the collectives of the backward pass come from: for each, the forward line that causes it, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from shardkit._arguments.checks import name_axes, quote
from shardkit._arguments.typed import typed
from shardkit._jax import compat
from shardkit._jax.jaxprs import Site, kind_of, mesh_axes, source_line, walk
from shardkit._jax.primitives import VIEWS, registered
from shardkit.analysis.jaxpr.census import census_of, row_of
from shardkit.analysis.jaxpr.dataflow import format_type
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
        times = ""
        if self.count is None:
            times = ", an unknown number of times"
        elif self.count != 1:
            times = f", {self.count} times"
        return f"{self.kind} over {quote(self.axes)} of {self.bytes_in:,} bytes{times}, at {self.source}: {self.why}"


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
        lines = [str(row) for row in self.rows]
        if not lines:
            lines.append("the backward pass sends nothing")
        if self.after == 1:
            lines.append("1 collective after it takes its gradients: see census")
        elif self.after:
            lines.append(f"{self.after} collectives after it take its gradients: see census")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The rows as a JSON list; bytes sent as numbers."""
        rows = []
        for row in self.rows:
            rows.append({**asdict(row), "sent": float(row.sent)})
        return json.dumps(rows, indent=1)


@typed
def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explains each collective of the backward pass: the forward line behind it, and the reason.

    Args:
        fn: a function that differentiates, such as a gradient or a training step. It is traced, and does not run.
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
    after_update = 0
    for row in census_of(jaxpr).rows:
        if row.update:
            after_update += row.times
    collectives = []
    for site, origins in with_origins(jaxpr):
        collectives.append(_explain_site(site, origins))
    return Explanation(tuple(collectives), after_update)


# Worked example: `loss = sum(psum(x * w, "data"))` of a w that is invariant over "data", and its gradient.
#
#     forward    pvary w over "data"    x * w varies, so w is cast: its transpose is a sum   (all_reduce, line, "data")
#     forward    psum x * w             sends nothing in the backward pass: its transpose is a cast
#     backward   psum of the gradient   (all_reduce, line, "data"): the same key, so the cast of w is its origin
def with_origins(jaxpr: Any) -> list[tuple[Site, Sequence[Site]]]:
    """Each collective of the backward pass, and those of the forward pass and casts that it may come from."""
    sites = [site for site in walk(jaxpr) if kind_of(site.equation) or registered(site.name).gradient]
    forward = _group_forward(sites)
    backward = [site for site in sites if site.backward and kind_of(site.equation)]
    transposes: dict[_Key, list[Site]] = {}
    for site in backward:
        if not site.recomputed:
            transposes.setdefault(_make_key(site.equation), []).append(site)
    origins: dict[int, list[Site]] = {}
    for key, group in transposes.items():
        candidates = _find_candidates(forward, key)
        is_paired = len(candidates) == len(group)
        for number, site in enumerate(group):
            origins[id(site)] = candidates
            if is_paired:
                # Transposing runs a program backwards: the last one of a line comes first.
                origins[id(site)] = [candidates[-1 - number]]
    return [(site, origins.get(id(site), [])) for site in backward]


# Kind, lines, axes, and shapes before and after, without which it is the key of what vmap may have batched.
_Key = tuple[Any, ...]


def _group_forward(sites: Sequence[Site]) -> dict[_Key, list[Site]]:
    """What has a collective as its transpose, by the key of that collective, with and without its shapes."""
    forward: dict[_Key, list[Site]] = {}
    # An equation of a function that is called twice is one equation.
    by_equation = {}
    for site in sites:
        if not site.backward or site.recomputed:
            by_equation[id(site.equation)] = site
    for site in by_equation.values():
        kind = registered(site.name).gradient
        if kind:
            key = _make_key(site.equation, kind)
            forward.setdefault(key, []).append(site)
            forward.setdefault(key[:-1], []).append(site)
    return forward


def _find_candidates(forward: dict[_Key, list[Site]], key: _Key) -> list[Site]:
    """What a collective of this key may be the transpose of."""
    sites = forward.get(key) or forward.get(key[:-1], [])  # vmap batches a sum, and not a constant that was cast
    # What jax.checkpoint repeats is there twice.
    return [site for site in sites if not site.recomputed] or sites


def _make_key(equation: Any, transpose: str | None = None) -> _Key:
    """What a collective has in common with its origin; of an origin with `transpose`, the kind of that collective."""
    operand = equation.invars[0].aval.shape
    result = equation.outvars[0].aval.shape
    kind = transpose
    shapes = (operand, result)
    if transpose is None:
        kind = kind_of(equation)
        shapes = (result, operand)
    return kind, tuple(compat.user_frames(equation)), frozenset(mesh_axes(equation)), shapes


def _explain_site(site: Site, origins: Sequence[Site]) -> Reason:
    row = row_of(site)
    # Of several origins, as in a function that is called twice, each name once.
    names: dict[str, None] = {}
    for origin in origins:
        names[_name_value(origin.equation.invars[0], origin)] = None
    if not names:
        names[_name_value(site.equation.invars[0], site)] = None
    value = " or ".join(names)
    return Reason(
        kind=row.kind,
        axes=row.axes,
        n=row.n,
        count=row.count,
        bytes_in=row.bytes_in,
        sent=row.sent,
        source=row.source,
        value=value,
        why=_say_why(site, row.axes, value, origins),
    )


def _say_why(site: Site, axes: tuple[str, ...], value: str, origins: Sequence[Site]) -> str:
    if site.recomputed:
        return "jax.checkpoint runs this collective of the forward pass again instead of saving its result."
    if not origins:
        return "a custom_vjp backward rule calls it there."
    origin = origins[0]
    row = registered(origin.name)
    if row.why:
        return row.why.format(value=value, over=quote(axes), along=name_axes(axes))
    pronoun = "them"
    if len(axes) == 1:
        pronoun = "it"
    operand = _name_other_operand(origin, axes)
    if origin.within(compat.ASKED) or row.asked:
        cause = f"is cast there to vary over {pronoun}"
    elif operand:
        cause = f"is used with {operand}, which varies over {pronoun}"
    else:
        cause = f"is used where a value must vary over {pronoun}"
    return f"{value} is invariant over {quote(axes)} and {cause}; the gradient of the cast is a sum."


def _name_other_operand(site: Site, axes: tuple[str, ...]) -> str:
    """The name of the value that a value was cast to match: the other operand of its first use."""
    cast = site.equation.outvars[0]
    for equation in site.jaxpr.eqns:
        uses_cast = any(operand is cast for operand in equation.invars)
        if not uses_cast:
            continue
        for operand in equation.invars:
            if operand is not cast and set(axes) <= compat.varying_axes(operand.aval):
                return _name_value(operand, site)
    return ""


def _name_value(value: Any, site: Site) -> str:
    """What the user calls a value at a site: an argument's name, else its type and the line that made it."""
    if hasattr(value, "val"):
        return f"the constant {value.val}"
    root, maker = _find_root(value, site)
    argument = _find_argument(root, site)
    if argument:
        return argument
    if maker is None:
        return f"a {format_type(value)}"
    return f"the {format_type(value)} of {source_line(maker).split(' ')[0]}"


def _find_root(value: Any, site: Site) -> tuple[Any, Any]:
    """What a value was made from by casts and reshapes alone, and the equation that made that."""
    maker = None
    for equation in site.jaxpr.eqns:
        if any(out is value for out in equation.outvars):
            maker = equation
            break
    if maker is None or not maker.invars or hasattr(maker.invars[0], "val"):  # an iota has no operands
        return value, maker
    name = maker.primitive.name
    if name in _SAME_NAME or registered(name).cast:
        return _find_root(maker.invars[0], site)
    return value, maker


def _find_argument(value: Any, site: Site) -> str:
    """The name of the argument that a value is, in the jaxpr of `site` or of those around it; "" if it is none."""
    place = None
    for number, argument in enumerate(site.jaxpr.invars):
        if argument is value:
            place = number
            break
    if place is None:
        return ""
    names = site.jaxpr.debug_info.arg_names or ()
    if place < len(names) and names[place]:
        return str(names[place])
    # A while has constants of its test, constants of its body, and a carry. Neither jaxpr takes all of them, so that
    # places do not match.
    if site.outer is None or site.outer.name == "while":
        return ""
    operands = site.outer.equation.invars
    offset = len(operands) - len(site.jaxpr.invars)  # a cond's predicate comes first
    if offset < 0:
        return ""
    operand = operands[place + offset]
    if hasattr(operand, "val"):
        return ""
    root, _ = _find_root(operand, site.outer)
    return _find_argument(root, site.outer)
