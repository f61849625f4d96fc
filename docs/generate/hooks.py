"""What mkdocs calls while it builds the manual: pages that are generated, links, formulas.

Start with `pages`, which says what is generated; the files beside this one say how.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from docs.generate import (  # noqa: E402
    checks,
    commands,
    examples,
    formulas,
    links,
    measurements,
    navigation,
    notebooks,
    papers,
    proofs,
    reference,
)

_CALLED = re.compile(r"<code>([a-z]\w*\.[\w.]+|examples/\w+\.py)((?:\([^<]*\))?)</code>")
_SHORT = re.compile(r"<code>([^<\n]{1,30})</code>")
_CELL = re.compile(r"<td.*?</td>", re.S)
_NAME = re.compile(r"<code>([^<\n]{16,})</code>")
_JOINT = re.compile(r"(?<=[_./(,=:])(?=\w)")  # behind which a long name in a cell may go on in the next line
_PRINTED = re.compile(r'(<div class="language-text highlight)(">.*?</div>)', re.S)
_TAG = re.compile(r"<[^>]*>")
_COLUMNS = 85  # as many as a page shows at 1280 pixels
_SMALL_COLUMNS = 100  # the same in the letters of a wide table
_LEFT_ALONE = re.compile(r"(<h\d.*?</h\d>|<a [^>]*>.*?</a>|<pre.*?</pre>)", re.S)


def pages() -> dict[str, str | bytes]:
    """What is in no file of docs/: pages and pictures by their paths in the manual."""
    contents: dict[str, str | bytes] = {}
    contents.update(reference.pages())
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = notebooks.page(path)
        page = f"learn/{path.stem}.md"
        contents[page] = links.rewrite_links(text, f"notebooks/{path.name}", page)
        for name, data in pictures.items():
            contents[f"learn/{name}"] = data
    template = [ROOT / "examples" / "research" / f"{name}.py" for name in ("model", "train", "test")]
    contents["examples.md"] = examples.page([*template, *sorted((ROOT / "examples").glob("*.py"))])
    for file, page in links.PAGES.items():
        if page != "index.md":
            text = links.change_title((ROOT / file).read_text(), page)
            contents[page] = links.rewrite_links(text, file, page)
    for name, data in measurements.pictures(ROOT):
        contents[f"benchmarks/pictures/{name}"] = data
    contents["reference/commands.md"] = commands.page()
    contents["papers.md"] = papers.page(ROOT / "shardkit")
    contents.update(proofs.pages(ROOT))
    return contents


def on_files(files: Files, config: Any) -> Files:
    """Adds what is generated, and arranges all pages."""
    contents = pages()
    for path, content in contents.items():
        files.append(File.generated(config, path, content=content))
    all_pages = [file.src_uri for file in files.documentation_pages()]
    reference_pages = [path for path in contents if path.startswith("reference/")]
    config["nav"] = navigation.arrange(all_pages, reference=reference_pages)
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Plots of records, and links to notebooks and other files of the repository, which lead to their pages."""
    if page.file.src_uri in navigation.LISTS:
        page.meta["search"] = {"boost": 0.2}  # lists name everything, and explain nothing
    if not (ROOT / "docs" / page.file.src_uri).exists():
        return text  # generated
    text = measurements.fill_in(text, ROOT)
    return links.rewrite_links(text, f"docs/{page.file.src_uri}", page.file.src_uri)


def on_page_content(text: str, page: Any, **_: Any) -> str:
    """Formulas are drawn, names of the library lead to the reference, and short code is not broken into lines."""
    parts = []
    for part in _LEFT_ALONE.split(formulas.draw_formulas(text)):
        if not _LEFT_ALONE.fullmatch(part):
            part = _link_names(part, page)
        parts.append(part)
    text = _CELL.sub(break_names_in_cell, "".join(parts))
    text = _SHORT.sub(r'<code class="short">\1</code>', text)
    return _PRINTED.sub(_classify_printed, text)


def break_names_in_cell(cell: re.Match[str]) -> str:
    """A cell whose long names may be broken: a column is else as wide as its longest name, and the table scrolls."""
    return _NAME.sub(_break_name, cell[0])


def _break_name(name: re.Match[str]) -> str:
    return f'<code class="long">{_JOINT.sub("<wbr>", name[1])}</code>'


def _classify_printed(block: re.Match[str]) -> str:
    """What is printed, long sentences in several lines; tables, whose columns are two spaces apart, are smaller."""
    lines = html.unescape(_TAG.sub("", block[2])).splitlines()
    long_lines = [line.strip() for line in lines if len(line) > _COLUMNS]
    if not long_lines:
        return block[0]
    kind = "wrapped"
    is_table = any("  " in line for line in long_lines)
    if is_table:
        kind = "widest"
        if max(len(line) for line in lines) <= _SMALL_COLUMNS:
            kind = "wide"
    return f"{block[1]} {kind}{block[2]}"


def _link_names(text: str, page: Any) -> str:
    """The HTML with a link at each name that is in the reference, and at each file of an example."""
    addresses = _find_addresses()

    def link(name: re.Match[str]) -> str:
        address = addresses.get(name[1]) or addresses.get(f"sk.{name[1]}")  # from shardkit import testing
        if address is None:
            return name[0]
        target = posixpath.relpath(address, posixpath.dirname(page.file.src_uri) or ".")
        return f'<a href="{target}">{name[0]}</a>'

    return _CALLED.sub(link, text)


@cache  # of one build, in which the reference does not change
def _find_addresses() -> dict[str, str]:
    """Where in the manual each public name, each module with a page of its own, and each example is."""
    addresses = {}
    for path, text in reference.pages().items():
        for name in _find_anchors(text):
            addresses[name] = f"{path.removesuffix('.md')}.html#{name}"
    for face in reference.FACES:
        if face != "sk" and face not in reference.INSIDE:
            addresses[face] = f"reference/{face}.html"
    for example in (ROOT / "examples").glob("*.py"):
        addresses[f"examples/{example.name}"] = f"examples.html#{example.stem}"
    return addresses


def on_post_build(config: Any) -> None:
    """The build fails for a link that leads nowhere, also where a hook has made it."""
    faults = checks.find_faults(Path(config["site_dir"]).resolve())
    if faults:
        raise PluginError("\n".join(faults))


def _find_anchors(text: str) -> list[str]:
    return re.findall(r'<a id="([\w.]+)">', text)
