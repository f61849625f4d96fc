"""HTML from values: whatever is not `Html` already is escaped, so that no name of a user can become markup."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

_VOID = ("meta", "br")
# Light, dark and on paper, from a telephone's width on. Contrasts are at least 4.5 to 1.
STYLE = """
:root { color-scheme: light dark; --ink: #1a1d21; --quiet: #565d66; --paper: #ffffff; --box: #f5f6f8; --line: #d5d9df;
  --mark: #0072b2; --good: #1b6e3c; --bad: #a8320a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --quiet: #a9b0ba; --paper: #15181c; --box: #1e2228;
  --line: #3a414b; --mark: #56b4e9; --good: #6fce96; --bad: #ff9d6b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.25rem 1rem 3rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .5rem; padding-top: .5rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { margin: .4rem 0; max-width: 70ch; }
.quiet { color: var(--quiet); }
a { color: var(--mark); }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .75rem 0 0; padding: 0; list-style: none; }
code, pre, td, tbody th { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: .8125rem; }
pre { padding: .75rem; background: var(--box); }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .5rem; margin: 1rem 0; }
.figures > div { background: var(--box); border: 1px solid var(--line); border-radius: .4rem; padding: .5rem .75rem; }
dt { color: var(--quiet); font-size: .8125rem; }
dd { margin: 0; font-weight: 600; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.scroll { overflow-x: auto; margin: .35rem 0; border: 1px solid var(--line); border-radius: .4rem; }
.scroll:focus-visible, a:focus-visible { outline: 2px solid var(--mark); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-top: 1px solid var(--line); }
td, tbody th { white-space: nowrap; }
td.wide { white-space: normal; min-width: 22rem; }
thead { background: var(--box); }
thead th, thead td { border-top: 0; }
thead th { font-size: .8125rem; white-space: nowrap; }
tbody th { font-weight: 500; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.bar { display: inline-block; height: .8rem; min-width: 1px; background: var(--mark); vertical-align: middle; }
td.bars { width: 30%; min-width: 7rem; }
.findings { padding-left: 1.2rem; }
.findings li { margin: .75rem 0; max-width: 80ch; }
figure { margin: 1rem 0; }
figcaption { color: var(--quiet); font-size: .875rem; }
@media print { :root { --ink: #000; --quiet: #444; --paper: #fff; --box: #fff; --line: #999; --mark: #0072b2;
  --good: #000; --bad: #000; } body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; }
  .scroll { overflow: visible; } td, tbody th { white-space: normal; font-size: 7.5pt;
  padding: .15rem .3rem; }
  td.wide { min-width: 0; } td.bars { width: 10%; min-width: 2cm; } h2, h3, figcaption { break-after: avoid; }
  tr, .figures > div { break-inside: avoid; }
  .bar { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escaped(value: object) -> Html:
    """A value as text of a page. Control characters and lone surrogates, which a page cannot hold, are replaced."""
    if isinstance(value, Html):
        return value
    text = "".join(c if c in "\n\t" or (c >= " " and not _forbidden(ord(c))) else "\ufffd" for c in str(value))
    return Html(html.escape(text))


def _forbidden(code: int) -> bool:
    return 0x7F <= code <= 0x9F or 0xD800 <= code <= 0xDFFF or code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF


def joined(parts: Iterable[object]) -> Html:
    """Parts one after the other."""
    return Html("".join(map(escaped, parts)))


def element(name: str, /, *content: object, **attributes: Any) -> Html:
    """An element; `class_` is the attribute class, `aria_label` aria-label. An attribute that is None is left out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    head = " ".join([name, *(f'{key}="{escaped(str(value))}"' for key, value in given.items())])
    return Html(f"<{head}>") if name in _VOID else Html(f"<{head}>{joined(content)}</{name}>")


def bars(values: Iterable[float | Fraction]) -> list[float]:
    """The lengths of bars: each value's share of the largest."""
    given = [float(value) for value in values]
    most = max(given, default=0.0)
    return [value / most if most > 0 else 0.0 for value in given]


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Sequence[str] = (),
    wide: Sequence[str] = (),
    bars: Sequence[float] = (),
) -> Html:
    """A table that scrolls inside its box.

    Args:
        caption: what it shows.
        head: the names of the columns.
        rows: a value for each column; the first names the row.
        numbers: the names of the columns of numbers, which end at the right.
        wide: the names of the columns of sentences, which are broken into lines.
        bars: the length of a bar at the end of each row, from 0 to 1; none without them.
    """
    classes = ["number" if name in numbers else "wide" if name in wide else None for name in head]
    titles = [element("th", name, scope="col", class_=kind) for name, kind in zip(head, classes, strict=True)]
    titles += [element("td", class_="bars", aria_hidden="true")] if bars else []
    body = []
    for number, row in enumerate(rows):
        first, *others = zip(row, classes, strict=True)
        cells = [element("th", first[0], scope="row"), *(element("td", value, class_=kind) for value, kind in others)]
        if bars:  # the figures say the same
            length = element("span", class_="bar", style=f"width:{100 * bars[number]:.2f}%") if bars[number] else ""
            cells.append(element("td", length, class_="bars", aria_hidden="true"))
        body.append(element("tr", *cells, "\n"))
    inner = element("table", element("thead", element("tr", *titles)), element("tbody", *body), aria_label=caption)
    box = element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)
    return element("figure", element("figcaption", caption), box)  # a caption inside would scroll away with the table


def block(label: str, text: object) -> Html:
    """Text whose lines are kept as they are, and scroll inside their box."""
    return element("pre", text, class_="scroll", tabindex="0", role="region", aria_label=label)


def figures(pairs: Iterable[tuple[str, object]]) -> Html:
    """Names and values, as a list of definitions."""
    return element("dl", *(element("div", element("dt", k), element("dd", v)) for k, v in pairs), class_="figures")


class Part(NamedTuple):
    """A part of the page.

    Attributes:
        title: its heading.
        content: what stands below.
    """

    title: str
    content: tuple[object, ...]

    @property
    def name(self) -> str:
        """Its address in the page."""
        return "-".join(self.title.lower().split())


def part(title: str, *content: object) -> Part:
    """A part of the page."""
    return Part(title, content)


def sections(parts: Sequence[Part]) -> Html:
    """The parts below each other, and links to them before."""
    links = (element("li", element("a", each.title, href=f"#{each.name}")) for each in parts)
    below = (
        element("section", element("h2", each.title, id=each.name), *each.content, "\n", aria_labelledby=each.name)
        for each in parts
    )
    return joined([element("nav", element("ul", *links), aria_label="contents"), *below])


def document(title: str, style: str, *content: object) -> Html:
    """A whole page. Its policy forbids scripts, and all that is not in the page itself."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(style)),
    )
    return Html(f'<!DOCTYPE html>\n<html lang="en">{head}\n{element("body", *content)}</html>\n')
