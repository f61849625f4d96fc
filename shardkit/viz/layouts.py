"""The layout of a tree as a picture: which mesh axes split each leaf, along which dim, and its bytes per device."""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from shardkit._arguments.checks import counted
from shardkit._arguments.typed import Arrays, typed
from shardkit.meshes.layout import path_name, shard_bytes, split_dims
from shardkit.viz.bars import bytes_on, size
from shardkit.viz.style import (
    GRID,
    INK,
    LETTER,
    MUTED,
    PAPER,
    SERIES,
    SMALL,
    blank,
    file_of,
    filled,
    heading,
    look,
    saved,
    text_on,
)  # fmt: skip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW, _COLUMN, _BARS = 0.22, 0.62, 2.4  # inches


class DrawnLeaf(NamedTuple):
    """A leaf of a tree: its path, global shape and dtype as text, the dim that each mesh axis splits, and bytes.

    Several small leaves together have no dims.
    """

    name: str
    what: str
    splits: dict[str, int]
    local: int
    whole: int


@partial(typed, where="viz.tree")
def tree(tree: Arrays, *, leaves: int = 40, output: str | Path | None = None) -> Any:
    """The picture of a pytree's layout: a row per leaf, a column per mesh axis, and bytes per device as bars.

    A cell says which dim of the leaf the axis splits; an empty one that the devices along the axis hold the same.

    Args:
        tree: a train state, parameters, or any pytree of arrays or their ShapeDtypeStructs with shardings.
        leaves: the most leaves to draw, those with the most bytes; all others are one row.
        output: a .png or .svg to write; missing directories are created. The same tree gives the same bytes.

    Returns:
        A matplotlib figure, which notebooks show. The gid of a cell is its leaf and its axis, of a bar its leaf.

    Raises:
        TypeError: something else than arrays.
        ValueError: a tree without leaves, or none to draw; another kind of file.
        RuntimeError: matplotlib is not installed.

    Example:
        >>> params = {"w": sk.shard(jnp.ones((8, 4)), mesh, P("data", "model")), "b": jnp.ones(4)}
        >>> picture = sk.viz.tree(params)
    """
    path = file_of("viz.tree", output)
    sizes, every = layout(tree)
    if not every or leaves < 1:
        raise ValueError(
            f"viz.tree: the tree must have leaves, and at least 1 must be drawn; got {len(every)} leaves "
            f"and {leaves=}. Pass for example a train state."
        )
    rows = shown(every, leaves)
    held, whole = sum(leaf.local for leaf in every), sum(leaf.whole for leaf in every)
    devices = prod(sizes.values())
    note = f"{size(held)} on each device, {size(whole)} in all"
    with look():
        names = LETTER * (max(len(leaf.name) for leaf in rows) + 1)
        left = 0.15 + names + LETTER * max(len(leaf.what) for leaf in rows) + 0.15
        columns, high = _COLUMN * max(len(sizes), 1), _ROW * len(rows)
        width, up = left + columns + 0.2 + _BARS + 1.3, 0.95 + high + 0.55
        title = f"layout of {counted(len(every), 'array')}" + (f" on {counted(devices, 'device')}" if sizes else "")
        picture = blank(width, up, f"{title}: {note}")
        heading(picture, title, note)
        cells = picture.add_axes((left / width, 0.55 / up, columns / width, high / up))
        bars = picture.add_axes(((left + columns + 0.2) / width, 0.55 / up, _BARS / width, high / up))
        _cells(cells, rows, sizes)
        _bars(bars, rows)
        for number, leaf in enumerate(rows):
            y = (0.55 + high - (number + 0.5) * _ROW) / up
            picture.text(0.15 / width, y, leaf.name, va="center")
            picture.text((0.15 + names) / width, y, leaf.what, va="center", color=MUTED)
        return saved(picture, path)


def layout(tree: Any) -> tuple[dict[str, int], list[DrawnLeaf]]:
    """The sizes of the mesh axes of a tree's shardings, and its leaves."""
    sizes: dict[str, int] = {}
    out = []
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        sharding = getattr(x, "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        sizes |= {} if mesh is None else dict(mesh.shape)
        spec = getattr(sharding, "spec", None)
        splits = {} if spec is None else {axis: dim for dim, axes in split_dims(spec).items() for axis in axes}
        shape = tuple(jax.numpy.shape(x))
        whole = prod(shape) * (x if hasattr(x, "dtype") else jax.numpy.asarray(x)).dtype.itemsize
        what = f"{'x'.join(map(str, shape)) or 'scalar'} {getattr(x, 'dtype', type(x).__name__)}"
        out.append(DrawnLeaf(path_name(path), what, splits, shard_bytes(x), whole))
    return sizes, out


def shown(every: list[DrawnLeaf], most: int) -> list[DrawnLeaf]:
    """The leaves of the most bytes, in the order of the tree, and all others as one."""
    kept = sorted(range(len(every)), key=lambda i: -every[i].local)[:most]
    rows = [every[i] for i in sorted(kept)]
    rest = [leaf for i, leaf in enumerate(every) if i not in set(kept)]
    if rest:
        local, whole = sum(leaf.local for leaf in rest), sum(leaf.whole for leaf in rest)
        rows.append(DrawnLeaf(f"{len(rest)} smaller", "", {}, local, whole))
    return rows


def _cells(axes: Axes, rows: list[DrawnLeaf], sizes: dict[str, int]) -> None:
    """A cell per leaf and axis; filled where the axis splits a dim of the leaf."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    axes.set_xlim(0, max(len(sizes), 1))
    axes.set_ylim(len(rows), 0)
    axes.set_axis_off()
    for column, (axis, n) in enumerate(sizes.items()):
        axes.text(column + 0.5, -0.25, f"{axis}={n}", ha="center", va="bottom")
        for row, leaf in enumerate(rows):
            if not leaf.what:
                continue
            if axis not in leaf.splits:
                axes.add_patch(Rectangle((column + 0.04, row + 0.08), 0.92, 0.84, facecolor=PAPER, edgecolor=GRID))
                continue
            dim = leaf.splits[axis]
            own = filled(dim) | {"gid": f"{leaf.name}, {axis}", "hatch": ""}
            axes.add_patch(Rectangle((column + 0.04, row + 0.08), 0.92, 0.84, **own))
            axes.text(
                column + 0.5,
                row + 0.5,
                f"dim {dim}",
                ha="center",
                va="center_baseline",
                size=SMALL,
                color=text_on(to_rgb(SERIES[dim % len(SERIES)])),
            )


def _bars(axes: Axes, rows: list[DrawnLeaf]) -> None:
    """Bytes per device, and beside them what they are of."""
    most = max(leaf.local for leaf in rows) or 1
    axes.set_xlim(0, most)
    axes.set_ylim(len(rows), 0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    bytes_on(axes.xaxis, most)
    axes.set_xlabel("bytes per device")
    for row, leaf in enumerate(rows):
        [patch] = axes.barh(row + 0.5, leaf.local, 0.66, color=MUTED, gid=leaf.name).patches
        patch.set_gid(leaf.name)
        of = "" if leaf.local == leaf.whole else f" of {size(leaf.whole)}"
        axes.text(leaf.local + 0.01 * most, row + 0.5, f"{size(leaf.local)}{of}", va="center", size=SMALL, color=INK)
