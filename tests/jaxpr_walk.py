"""A walk over a traced program that lists its collectives; small enough to be believed."""

from typing import Any, NamedTuple

import jax

KINDS = {
    "psum": "psum",
    "psum_invariant": "psum",
    "pmax": "pmax",
    "pmin": "pmin",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "ppermute",
}


class Row(NamedTuple):
    """One collective: its kind, its mesh axes, the shapes and bytes of its operands on one device, times a call."""

    kind: str
    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    count: int


def collectives(fn: Any, *args: Any) -> list[Row]:
    """Every collective that a call of `fn` makes, a row for each place in the program."""
    return _walk(jax.make_jaxpr(fn)(*args).jaxpr, 1)


def _walk(jaxpr: Any, count: int) -> list[Row]:
    rows = []
    for equation in jaxpr.eqns:
        kind = KINDS.get(equation.primitive.name)
        if kind:
            axes = equation.params.get("axes") or equation.params["axis_name"]
            avals = [v.aval for v in equation.invars]
            size = sum(a.size * a.dtype.itemsize for a in avals)
            rows.append(Row(kind, tuple(axes), tuple(a.shape for a in avals), size, count))
        times = count * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    rows += _walk(inner, times)
    return rows
