"""What mkdocs calls while it builds the manual: pages that are generated, links, formulas.

Start with `pages`, which says what is generated; the files beside this one say how.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

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
    made: dict[str, str | bytes] = {**reference.pages()}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = notebooks.page(path)
        made[f"learn/{path.stem}.md"] = links.rewritten(text, f"notebooks/{path.name}", f"learn/{path.stem}.md")
        made |= {f"learn/{name}": data for name, data in pictures.items()}
    template = [ROOT / "examples" / "research" / f"{name}.py" for name in ("model", "train", "test")]
    made["examples.md"] = examples.page([*template, *sorted((ROOT / "examples").glob("*.py"))])
    for file, page in links.PAGES.items():
        if page != "index.md":
            made[page] = links.rewritten(links.titled((ROOT / file).read_text(), page), file, page)
    made |= {f"benchmarks/pictures/{name}": data for name, data in measurements.pictures(ROOT)}
    made["reference/commands.md"] = commands.page()
    made["papers.md"] = papers.page(ROOT / "shardkit")
    made |= proofs.pages(ROOT)
    return made


def on_files(files: Files, config: Any) -> Files:
    """Adds what is generated, and arranges all pages."""
    made = pages()
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    config["nav"] = navigation.arranged(
        (file.src_uri for file in files.documentation_pages()),
        reference=[path for path in made if path.startswith("reference/")],
    )
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Plots of records, and links to notebooks and other files of the repository, which lead to their pages."""
    if page.file.src_uri in navigation.LISTS:
        page.meta["search"] = {"boost": 0.2}  # lists name everything, and explain nothing
    if not (ROOT / "docs" / page.file.src_uri).exists():
        return text  # generated
    text = measurements.shown(text, ROOT)
    return links.rewritten(text, f"docs/{page.file.src_uri}", page.file.src_uri)


def on_page_content(text: str, page: Any, **_: Any) -> str:
    """Formulas are drawn, names of the library lead to the reference, and short code is not broken into lines."""
    parts = _LEFT_ALONE.split(formulas.drawn(text))
    text = "".join(part if _LEFT_ALONE.fullmatch(part) else _CALLED.sub(_link(page), part) for part in parts)
    text = _CELL.sub(in_a_cell, text)
    return _PRINTED.sub(_wrapped, _SHORT.sub(r'<code class="short">\1</code>', text))


def in_a_cell(found: re.Match[str]) -> str:
    """A cell whose long names may be broken: a column is else as wide as its longest name, and the table scrolls."""
    return _NAME.sub(lambda name: f'<code class="long">{_JOINT.sub("<wbr>", name[1])}</code>', found[0])


def _wrapped(found: re.Match[str]) -> str:
    """What is printed, long sentences in several lines; tables, whose columns are two spaces apart, are smaller."""
    lines = html.unescape(_TAG.sub("", found[2])).splitlines()
    long = [line.strip() for line in lines if len(line) > _COLUMNS]
    if not long:
        return found[0]
    kind = "wrapped"
    if any("  " in line for line in long):
        kind = "wide" if max(map(len, lines)) <= _SMALL_COLUMNS else "widest"
    return f"{found[1]} {kind}{found[2]}"


def _link(page: Any) -> Any:
    """Replaces a name that is in the reference, or the file of an example, by a link to it."""
    if not _WHERE:
        for path, text in reference.pages().items():
            _WHERE.update({name: f"{path.removesuffix('.md')}.html#{name}" for name in _anchors(text)})
        _WHERE.update(
            {face: f"reference/{face}.html" for face in reference.FACES.keys() - reference.INSIDE.keys() - {"sk"}}
        )
        _WHERE.update({f"examples/{p.name}": f"examples.html#{p.stem}" for p in (ROOT / "examples").glob("*.py")})

    def link(found: re.Match[str]) -> str:
        where = _WHERE.get(found[1]) or _WHERE.get(f"sk.{found[1]}")  # from shardkit import testing
        if where is None:
            return found[0]
        target = posixpath.relpath(where, posixpath.dirname(page.file.src_uri) or ".")
        return f'<a href="{target}">{found[0]}</a>'

    return link


def on_post_build(config: Any) -> None:
    """The build fails for a link that leads nowhere, also where a hook has made it."""
    found = checks.faults(Path(config["site_dir"]).resolve())
    if found:
        raise PluginError("\n".join(found))


_WHERE: dict[str, str] = {}


def _anchors(text: str) -> list[str]:
    return re.findall(r'<a id="([\w.]+)">', text)
