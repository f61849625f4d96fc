"""The README's picture: a pipeline's timeline beside the census of the same step. Run it to write front.svg."""

from __future__ import annotations

from html import escape
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import shardkit as sk
from shardkit.analysis.jaxpr.census import Census
from shardkit.models import transformer
from shardkit.viz.schedule import boxes

SIZES = {"data": 2, "stage": 4, "model": 2}
ROWS, TOKENS = 16, 2048
SCHEDULE = sk.schedules.lockstep(devices=SIZES["stage"], microbatches=8)
CALLS = ('pipe = sk.pipeline(sk.schedules.lockstep(4, 8), "stage")', "sk.census(step, state, batch)")

# Names of colors: on a light page, on a dark one. Everything that a color says is also written.
LOOK = {
    "card": ("#ffffff", "#0d1117"),
    "edge": ("#d1d9e0", "#3d444d"),
    "text": ("#1f2328", "#f0f6fc"),
    "soft": ("#59636e", "#9198a1"),
    "F": ("#004488", "#79b8ff"),
    "onF": ("#ffffff", "#0d1117"),
    "B": ("#d55e00", "#f0883e"),
    "onB": ("#000000", "#0d1117"),
    "idle": ("#eaeef2", "#21262d"),
    "all_gather": ("#009e73", "#2dba8f"),
    "reduce_scatter": ("#e69f00", "#f0b429"),
    "ppermute": ("#cc79a7", "#d98cb8"),
    "all_reduce": ("#6e7781", "#8b949e"),
}
WIDTH, HEIGHT = 960, 312
LEFT, RIGHT, TOP = 24, 620, 92


def census() -> tuple[Census, int]:
    """The census of one step of a transformer on 16 devices that need not exist, and its number of parameters."""
    config = transformer.Config(vocabulary=32_000, layers=32, dim=4096, heads=32, hidden=11_008)
    pipe = sk.pipeline(SCHEDULE, "stage")
    rules = transformer.tensor_rules(config, "model", SIZES["model"])
    plan = sk.chain(sk.zero1("data"), pipe.plan, sk.tp("model", rules, sequence=True))
    pieces = transformer.pieces(config, transformer.Axes(model="model", stage="stage", sequence=True))
    init, step = sk.make_train_step(
        pipe.value_and_grad(*pieces, layer_numbers=True),
        optax.adamw(3e-4),
        mesh=sk.abstract_mesh(**SIZES),
        plan=plan,
        precision="bf16",
    )
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    tokens = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32)
    counted = sk.census(step, init.abstract(params), {"tokens": tokens, "targets": tokens})
    return counted, sum(leaf.size for leaf in jax.tree.leaves(params))


def timeline(x: float, y: float, width: float, row: float) -> list[str]:
    """A row per device, a box per action."""
    simulated = SCHEDULE.simulate()
    unit, out = width / simulated.makespan, []
    for device in range(SCHEDULE.devices):
        out.append(rect("idle", x, y + device * row, width, row - 5))
        out.append(text("soft", x - 8, y + device * row + row / 2 + 2, f"stage {device}", "end"))
    for box in boxes(SCHEDULE, simulated):
        left, top = x + box.begin * unit, y + box.device * row + box.top * (row - 5)
        wide, high = box.length * unit, box.height * (row - 5)
        out.append(rect(box.action.op, left + 0.5, top + 0.5, wide - 1, high - 1))
        out.append(
            text(f"on{box.action.op}", left + wide / 2, top + high / 2 + 4, str(box.action.microbatch), "middle")
        )
    below = y + SCHEDULE.devices * row + 14
    out += [rect("F", x, below - 9, 10, 10), text("text", x + 15, below, "forward")]
    out += [rect("B", x + 76, below - 9, 10, 10), text("text", x + 91, below, "backward, of the microbatch in the box")]
    most = f"at most {max(simulated.peak_in_flight):g} microbatches in flight"
    idle = f"bubble {simulated.bubble:.1%} (backward = 2 x forward), {most}"
    return [*out, text("text", x, below + 20, idle)]


def bars(counted: Census, x: float, y: float, width: float, row: float) -> list[str]:
    """A bar per axis, with a part per kind of collective."""
    axes = sorted(SIZES, key=lambda axis: -counted.sent(axis=axis))
    unit, out = width / float(counted.sent(axis=axes[0])), []
    for number, axis in enumerate(axes):
        top, left = y + number * row, x
        said = f"{counted.count(axis=axis):,} collectives, {float(counted.sent(axis=axis)) / 1e9:.2f} GB"
        out += [text("text", x, top, f"over {axis}", weight=True), text("text", x + width, top, said, "end")]
        rows = counted.select(axis=axis)
        kinds = {kind: float(sum(r.total for r in rows if r.kind == kind)) for kind in {r.kind for r in rows}}
        largest = sorted((kind for kind in kinds if kinds[kind] > 1e7), key=lambda kind: (-kinds[kind], kind))
        for kind in largest:
            out.append(rect(kind, left, top + 6, kinds[kind] * unit, 14))
            left += kinds[kind] * unit
        out.append(text("soft", x, top + 34, ", ".join(f"{kind} {kinds[kind] / 1e9:.2f}" for kind in largest)))
    twice = sum(counted.count(axis=axis) for axis in axes) - counted.count()  # they stand in the counts of both axes
    several = f" ({twice} over two axes)" if twice else ""
    total = f"in all: {counted.count():,} collectives{several}, {float(counted.sent()) / 1e9:.2f} GB"
    return [*out, text("text", x, y + len(axes) * row, total)]


def rect(name: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'


def text(name: str, x: float, y: float, words: str, anchor: str = "start", weight: bool = False, size: int = 12) -> str:
    bold = ' font-weight="600"' if weight else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text class="{name}" {place}{bold}>{escape(words)}</text>'


def style() -> str:
    """The classes; a viewer in dark mode gets the second color of each."""
    light = [f".{name}{{fill:{colours[0]}}}" for name, colours in LOOK.items()]
    dark = [f".{name}{{fill:{colours[1]}}}" for name, colours in LOOK.items()]
    fonts = "text{font-family:system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
    code = ".code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
    edges = [f".frame{{fill:none;stroke:{LOOK['edge'][side]}}}" for side in (0, 1)]
    return "\n".join(
        ["<style>", fonts + code, *light, edges[0], "@media(prefers-color-scheme:dark){", *dark, edges[1], "}</style>"]
    )


def picture() -> str:
    """The picture as SVG; the same program gives the same bytes."""
    counted, parameters = census()
    mesh = ", ".join(f"{axis}={size}" for axis, size in SIZES.items())
    words = (
        f"One training step of a {parameters / 1e9:.1f}B transformer on 16 devices ({mesh}), traced without any of them"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">'
    split = [SCHEDULE.name + " schedule", "what each device sends"]
    parts = [head, f"<title>{words}</title>", style(), rect("card", 0, 0, WIDTH, HEIGHT)]
    parts.append(f'<rect class="frame" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6"/>')
    parts.append(text("text", LEFT, 30, words, size=13))
    for x, title, call in zip((LEFT, RIGHT), split, CALLS, strict=True):
        parts.append(text("text", x, 58, title, weight=True, size=13))
        parts.append(text("code soft", x, 76, call))
    parts += timeline(LEFT + 56, TOP, RIGHT - LEFT - 56 - 36, 42)
    parts += bars(counted, RIGHT, TOP + 16, WIDTH - RIGHT - 24, 56)
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(picture())
