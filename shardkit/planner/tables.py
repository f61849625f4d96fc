"""Candidates as text: aligned columns, and figures of memory and time."""

from __future__ import annotations

from collections.abc import Iterable

from shardkit._arguments.typed import ITERABLE, check_kind
from shardkit.planner.candidates import Candidate, list_candidates
from shardkit.planner.layout import list_columns

_FIGURES = ("state GB", "activations GB", "compute ms", "hidden ms", "exposed ms", "step ms", "MFU %")


def table(candidates: Iterable[Candidate], *, names: Iterable[str] = ()) -> str:
    """Candidates as aligned text: memory in GB (10^9 bytes) per device, times in ms per step, MFU in percent.

    Args:
        candidates: the rows, in order.
        names: a name for each row; empty: no column of names.

    Returns:
        The text.

    Raises:
        ValueError: another number of names than candidates.

    Example:
        >>> model = sk.planner.Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256)
        >>> found = sk.planner.search(model, chip="v5e", chips=64, batch=256, sequence=4096)
        >>> print(sk.planner.table(found[:2]))
        data  fsdp  tensor  accumulate ...
    """
    check_kind("planner", "names", names, (ITERABLE,))
    candidates = list_candidates(candidates)
    names = list(names)
    if names and len(names) != len(candidates):
        raise ValueError(
            f"planner: names must be one per candidate; got {len(names)} for {len(candidates)}. Pass one for each, or "
            "none."
        )
    # Of all rows together, so that they have the same columns.
    columns = list_columns([candidate.layout for candidate in candidates])
    rows = [[*columns, *_FIGURES]]
    for candidate in candidates:
        sizes = [str(getattr(candidate.layout, column)) for column in columns]
        rows.append([*sizes, *_format_figures(candidate)])
    if names:
        heads = ["", *names]
        for head, row in zip(heads, rows, strict=True):
            row.insert(0, head)
    widths = []
    for column in zip(*rows, strict=True):
        widths.append(max(len(cell) for cell in column))
    lines = []
    for row in rows:
        lines.append("  ".join(map(str.rjust, row, widths)))
    return "\n".join(lines)


def _format_figures(candidate: Candidate) -> list[str]:
    return [
        format_gigabytes(candidate.state_bytes),
        format_gigabytes(candidate.activation_bytes),
        format_milliseconds(candidate.compute_seconds),
        format_milliseconds(candidate.hidden_seconds),
        format_milliseconds(candidate.exposed_seconds),
        format_milliseconds(candidate.seconds),
        f"{100 * candidate.mfu:.1f}",
    ]


def format_gigabytes(size: float) -> str:
    """Bytes in GB, with two decimals."""
    return f"{size / 1e9:.2f}"


def format_milliseconds(seconds: float) -> str:
    """Seconds in ms, with one decimal."""
    # With one decimal, a time below 0.1 ms would be shown as 0.0, as if nothing were sent.
    if 0 < seconds < 1e-4:
        return f"{1e3 * seconds:.2g}"
    return f"{1e3 * seconds:.1f}"
