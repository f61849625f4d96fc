"""What docs/generate/ makes of the library for the manual: nothing public is missing, nothing leads nowhere."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardkit as sk
from docs.generate import commands, docstrings, links, measurements, navigation, notebooks, papers, proofs, reference
from support.refusals import value_error

pytestmark = pytest.mark.check
ROOT = Path(__file__).parents[1]


def test_every_public_name_is_in_the_reference():
    """What `sk`, its modules and theirs list in `__all__`, found without the list of the reference's pages."""
    shown = {id(name.value) for face in reference.FACES for name in reference.names(face)}
    text = "".join(reference.pages().values())
    todo, missing, seen = [("sk", sk, dir(sk))], [], set()
    while todo:
        called, module, listed = todo.pop()
        for name in listed:
            value = getattr(module, name)
            if inspect.ismodule(value):
                if value not in seen:
                    seen.add(value)
                    own = [n for n, each in vars(value).items() if n[0] != "_" and reference.is_defined_in(value, each)]
                    todo.append((f"{called}.{name}", value, getattr(value, "__all__", own)))
            elif id(value) not in shown:
                missing.append(f"{called}.{name}")
    assert missing == []
    bare = [name.called for face in reference.FACES for name in reference.names(face) if not name.docstring]
    assert bare == []  # a constant has a docstring too, below its assignment
    for face in reference.FACES:  # each on one page, and only there
        assert all(text.count(f"::: {name.path}\n") == 1 for name in reference.names(face)), face


def test_the_public_names_are_few():
    """Catches a helper that a face exports only because its module has it: for a name above 250 another one leaves."""
    paths = {name.path for face in reference.FACES for name in reference.names(face)}
    assert len(paths) <= 250


def test_the_overview_of_the_reference_links_every_page_and_names_everything():
    """The folder's first page, which a list of files would not have."""
    pages = reference.pages()
    overview = pages.pop("reference/index.md")
    assert all(f"]({page.removeprefix('reference/')})" in overview for page in pages)
    for name in ("`sk.all_reduce`", "`sk.census`", "`sk.ring.all_gather`", "`sk.schedules.gpipe`", "`sk.aot.compile`"):
        assert overview.count(name) == 1


def test_names_of_sk_from_other_rooms_are_found_and_of_an_unknown_file_refused():
    assert "sk.census" in {name.called for name in reference.names("sk")}
    with value_error(
        "shardkit.somewhere.name belongs to no group of sk. Name its file in GROUPS of docs/generate/reference.py."
    ):
        reference.group_of("shardkit.somewhere.name")
    assert reference.group_of("shardkit.strategies.pipeline.pp") == "pipelines"  # and not "plans", which is shorter


def test_sections_of_docstrings_stand_apart():
    """Args directly under Layout would be read as part of its paragraph."""
    text = "Does.\n\nLayout: `X -> Y`\nArgs:\n    x: one.\nCost: n\nbytes.\n\nExample:\n    >>> f()"
    assert docstrings.separate_sections("Source: A (arXiv:1811.06965).").endswith(
        "](https://arxiv.org/abs/1811.06965))."
    )
    assert docstrings.separate_sections(text) == (
        "Does.\n\n**Layout:** `X -> Y`\n\nArgs:\n    x: one.\n\n**Cost:** n\nbytes.\n\nExamples:\n    >>> f()"
    )


def test_pages_are_arranged_and_a_page_without_a_section_is_refused():
    pages = ["howto/zzz.md", "howto/from_jit.md", "index.md", "learn/01.md", "reference/sk.md", "reference/json.md"]
    assert navigation.arrange(pages, reference=["reference/sk.md"]) == [
        {"Start": "index.md"},
        {"Learn": "learn/01.md"},
        {"How to": ["howto/from_jit.md", "howto/zzz.md"]},
        {"Reference": ["reference/sk.md", "reference/json.md"]},
    ]
    with value_error("the pages elsewhere/page.md are in no section. Name them in docs/generate/navigation.py."):
        navigation.arrange(["elsewhere/page.md"])


def test_links_between_pages_notebooks_and_examples_lead_to_pages():
    text = (
        "[a](../docs/howto/words.md#the-job) [b](02_b.ipynb) [c](../examples/lora.py) [d](https://x.org/y) [e](#h)"
        "\n\n```python\nx = f[0](02_b.ipynb)\n```\n"
    )
    assert links.rewrite_links(text, "notebooks/01_a.ipynb", "learn/01_a.md") == (
        "[a](../howto/words.md#the-job) [b](02_b.md) [c](../examples.md#lora) [d](https://x.org/y) [e](#h)"
        "\n\n```python\nx = f[0](02_b.ipynb)\n```\n"
    )
    assert links.rewrite_links("[n](../notebooks/01_a.ipynb)", "docs/start.md", "start.md") == "[n](learn/01_a.md)"


def test_a_notebook_shows_its_stored_outputs(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# One\n", "\n", "<details>\n", "why\n", "</details>"]},
        {
            "cell_type": "code",
            "source": "print(1)",
            "outputs": [
                {"output_type": "stream", "text": ["1\n"]},
                {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "<Figure>"}},
            ],
        },
        {"cell_type": "code", "source": "", "outputs": []},
    ]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    text, pictures = notebooks.page(tmp_path / "a.ipynb")
    assert text == (
        '# One\n\n<details markdown="1">\nwhy\n</details>\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n'
        "[![What the code above draws](a_1_1.png){ .on-white }](a_1_1.png)\n"
    )
    assert pictures == {"a_1_1.png": b"\0\0\0"}


def test_formulas_become_mathml():
    pytest.importorskip(
        "latex2mathml", reason="latex2mathml is not installed; pip install 'shardkit[docs]' installs it"
    )
    formulas = importlib.import_module("docs.generate.formulas")
    text = formulas.draw_formulas(
        '<p><span class="arithmatex">\\(a &lt; b\\)</span></p><div class="arithmatex">\\[n-1\\]</div>'
    )
    assert text.count("<math") == 2 and 'display="block"' in text
    assert "arithmatex" not in text and "<mo>&lt;</mo>" in text.replace("&#x0003C;", "&lt;")


def test_the_help_of_every_command_is_shown():
    """As it is printed, whatever terminal builds the manual."""
    made = dict(commands.print_helps())
    assert {"launch", "aot", "bench comm", "bench compare"} <= set(made)
    assert "--topology" in made["aot"] and "usage: shardkit bench comm" in made["bench comm"]
    assert max(len(line) for text in made.values() for line in text.splitlines()) <= 84
    one_page = (ROOT / "docs" / "one_page.md").read_text().partition("## The command")[2]
    assert [name for name in made if not re.search(rf"[` ]{name.split()[-1]}[` ]", one_page)] == []
    assert "\x1b" not in commands.page() and "## shardkit bench comm\n" in commands.page()


def test_papers_come_from_the_sources_of_docstrings():
    text = papers.page(ROOT / "shardkit")
    assert "[arXiv:1811.06965](https://arxiv.org/abs/1811.06965)" in text
    row = next(line for line in text.splitlines() if "Zero Bubble" in line and "section 6" in line)
    assert "`schedules/zero_bubble_v.py`" in row


def test_pages_of_benchmarks_show_plots_and_the_table_of_records():
    """Markers that no page of the repository shows; a file of records without a row would be forgotten."""
    text = "<!-- plot benchmarks/results/comm.jsonl op=all_reduce: Bandwidth -->\n<!-- results -->"
    shown = measurements.fill_in(text, ROOT)
    assert shown.startswith("[![Bandwidth](pictures/comm.svg)](pictures/comm.svg)\n| records |")
    rows = shown.splitlines()[3:]
    assert [row.split("`")[1] for row in rows] == [
        f"benchmarks/results/{p.name}" for p in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    ]
    assert all(row.endswith("| 0 |") for row in rows)  # no wrong element in what is published
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "benchmarks").glob("*.md"))
    assert len(measurements.PLOT.findall(pages)) == pages.count("<!-- plot ") > 0


def test_what_is_proved_is_read_from_the_tests():
    pages = proofs.pages(ROOT)
    rows = [line for line in pages["proved.md"].splitlines() if line.startswith("| S62 |")]
    assert "\n| F1 |" in pages["proved_f.md"] and "| F1 |" not in pages["proved.md"]
    assert len(rows) == 1 and "`tests/test_manual.py`" in rows[0]


def test_dead_links_and_files_from_elsewhere_are_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">b</a> <a href="b.html#gone">b</a> <a href="c.html">c</a> <a href="https://x.org">x</a>'
        '<script src="https://x.org/y.js"></script> <img src="data:abc">'
    )
    (tmp_path / "b.html").write_text('<h2 id="there">b</h2>')
    assert importlib.import_module("docs.generate.checks").find_faults(tmp_path) == [
        "a.html: b.html#gone has no such anchor.",
        "a.html: c.html leads nowhere.",
        "a.html: script loads https://x.org/y.js.",
    ]


@pytest.mark.deep
def test_the_manual_builds_without_a_warning(tmp_path):
    """Every page, link and docstring of the reference; `make docs` is the same."""
    for package in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(package, reason="pip install 'shardkit[docs]' installs it")
    site = tmp_path / "site"
    options = {"cwd": ROOT, "env": os.environ | {"NO_MKDOCS_2_WARNING": "1"}, "capture_output": True, "text": True}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)], timeout=300, **options
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "unpkg" not in (site / "index.html").read_text()
    assert 'src="assets/search_words.js"' in (site / "index.html").read_text()  # else any word of a query is enough
    assert 'id="sk.all_reduce"' in (site / "reference" / "sk.collectives.html").read_text()
    assert 'href="reference/sk.meshes_and_layouts.html#sk.make_mesh"' in (site / "what_it_does.html").read_text()
    symptoms = (site / "symptoms.html").read_text()
    assert 'highlight wrapped">' in symptoms and 'language-text highlight">' in symptoms  # sentences, not tables
    assert all("$$" not in page.read_text() for page in (site / "learn").glob("*.html"))
    assert "<svg" in (site / "benchmarks" / "pictures" / "comm.svg").read_text()
    assert (site / "search" / "search_index.js").exists()  # without a server a page cannot fetch the .json beside it


def test_a_long_name_in_a_table_may_be_broken():
    """A column is else as wide as its longest name, and a table of five wider than any screen."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; pip install 'shardkit[docs]' installs it")
    hooks = importlib.import_module("docs.generate.hooks")
    cell = hooks.break_names_in_cell(
        re.match(".*", "<td><code>vocab_parallel_cross_entropy</code> <code>sk.vary</code></td>")
    )
    assert cell == '<td><code class="long">vocab_<wbr>parallel_<wbr>cross_<wbr>entropy</code> <code>sk.vary</code></td>'


def test_printed_sentences_go_on_in_the_next_line_and_printed_tables_become_smaller():
    """A table's last columns, which a page of 85 columns cut off, are often the answer; a broken row cannot be read."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; pip install 'shardkit[docs]' installs it")
    hooks = importlib.import_module("docs.generate.hooks")

    class Page:
        file = None

    def kind(line):
        text = f'<div class="language-text highlight"><pre><code>{line}</code></pre></div>'
        return re.match(r'<div class="language-text highlight ?(\w*)">', hooks.on_page_content(text, Page()))[1]

    assert [kind("word " * 10), kind("word " * 20), kind("1  23 " * 16), kind("1  23 " * 18)] == [
        "",
        "wrapped",
        "wide",
        "widest",
    ]
