"""The pages of docs/: their blocks run and print what they say, and what they name is there."""

import itertools
import posixpath
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from docs.generate import reference
from shardkit._jax.compat import varying_axes

ROOT = Path(__file__).parents[1]
PAGES = {page.relative_to(ROOT / "docs").as_posix(): page for page in sorted((ROOT / "docs").rglob("*.md"))}
# A few CPU seconds together, in the default tier; the blocks of all other pages run in the deep one.
QUICK = {
    "benchmarks/collectives.md",
    "benchmarks/index.md",
    "howto/from_jit.md",
    "howto/from_pmap.md",
    "index.md",
    "start.md",
}


def blocks(page):
    """The kind and the text of each block of Python and of what it prints."""
    return re.findall(r"^```(python|text)\n(.*?)^```$", page.read_text(), re.S | re.M)


def rows():
    names = [name for name, page in PAGES.items() if any(kind == "python" for kind, _ in blocks(page))]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.deep) for name in names]


# proves S62: the pages from pmap and from jit run as one program each, and print what stands below their blocks
@pytest.mark.parametrize("name", rows())
def test_a_page_prints_what_it_says(name, capsys):
    """A page is one program: its blocks share their names. A block that prints is followed by one of what it prints."""
    names, out = {}, ""
    for kind, text in blocks(PAGES[name]):
        if kind == "python":
            assert not out, f"what is printed before {text!r} stands nowhere"
            with jax.numpy_dtype_promotion("standard"):  # as readers have it
                exec(compile(text, name, "exec"), names)
            out = capsys.readouterr().out
        else:
            assert out == text
            out = ""
    assert not out


@pytest.mark.check
@pytest.mark.parametrize("name", PAGES)
def test_output_stands_below_the_block_that_prints_it(name):
    """`text` is what a block of Python prints, which the deep tier compares; what a job prints is `console`."""
    kinds = ["text", *(kind for kind, _ in blocks(PAGES[name]))]
    assert ("text", "text") not in itertools.pairwise(kinds)


@pytest.mark.check
def test_the_quick_pages_are_there():
    """A page that was renamed would otherwise move to the deep tier unseen."""
    assert QUICK - {row.values[0] for row in rows()} == set()


def test_the_texts_of_jax_in_symptoms_are_those_of_jax():
    """A reader searches for the line on the screen."""
    mesh, split = sk.make_mesh(jax.devices()[:2], data=2), P("data")
    gone, here, there = jnp.ones(2), *(jax.device_put(jnp.ones(2), device) for device in jax.devices()[:2])
    gone.delete()

    def running(x):
        return jax.lax.scan(lambda total, row: (total + row, row), 0.0, x)[1]

    wrong = [
        (lambda: gone + 1),
        (lambda: jax.shard_map(running, mesh=mesh, in_specs=split, out_specs=split)(jnp.ones(2))),
        (lambda: jax.shard_map(jnp.sum, mesh=mesh, in_specs=split, out_specs=P())(jnp.ones(2))),
        (lambda: jax.lax.psum(here, "data")),
        (lambda: jax.shard_map(jnp.sin, mesh=mesh, in_specs=split, out_specs=split)(jnp.ones(3))),
        (lambda: here + there),
    ]
    shown = re.findall(r"^\| `(.*?)` \|", PAGES["symptoms.md"].read_text(), re.M)
    said = ""
    for call in wrong:
        with pytest.raises(Exception) as error:
            call()
        said += f"{error.value}\n"
    elsewhere = {"RESOURCE_EXHAUSTED: Out of memory", "Fetching value for jax.Array that spans non-addressable"}
    assert [text for text in shown if text not in said and text not in elsewhere] == []
    assert len(shown) == len(wrong) + len(elsewhere)


def collectives_and_transposes():
    """The rows of the table of varying_types.md: call, types, backward, bytes, without their code marks."""
    text = PAGES["understand/varying_types.md"].read_text()
    lines = text[text.index("| call | type |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]
    return [pytest.param(call, types, backward, sent, id=call) for call, types, _, backward, sent in cells]


@pytest.mark.parametrize(("call", "types", "backward", "sent"), collectives_and_transposes())
def test_each_row_of_collectives_and_transposes_is_what_jax_traces(call, types, backward, sent):
    """Readers take the transpose of a collective from this table; jax decides it, and may change it."""
    before, after = types.split(" -> ")
    mesh = sk.make_mesh(jax.devices()[:4], a=4)
    specs = {"same": P(), "V:a": P("a")}
    x = jnp.arange(64.0).reshape(16, 4)

    def run(text, x):
        return eval(text, {"sk": sk, "a": "a", "x": x})  # a cell of the table

    def kernel(x):
        y = run(call, x)
        varies = {name: {"a"} if name == "V:a" else set() for name in (before, after)}
        assert [set(varying_axes(value)) for value in (x, y)] == [varies[before], varies[after]]
        return y

    mapped = jax.shard_map(kernel, mesh=mesh, in_specs=specs[before], out_specs=specs[after])
    y, transpose = jax.vjp(mapped, x)
    formula = sent.replace(" (", " * (").replace("2 B", "2 * B")
    size = x.nbytes if before == "same" else x.nbytes // 4
    assert sk.census(mapped, x).sent() == eval(formula, {"B": size, "n": 4})

    named = re.match(r"sk\.\w+", backward)  # else a slice or a cast, which send nothing
    expected = backward if "(" in backward else f"{backward}(x, a)"
    rows = sk.census(transpose, y).rows
    if named is None or named[0] == "sk.vary":
        assert rows == ()
        return
    by_hand = jax.shard_map(lambda y: run(expected, y), mesh=mesh, in_specs=specs[after], out_specs=specs[before])
    assert [row.kind for row in rows] == [row.kind for row in sk.census(by_hand, y).rows]
    np.testing.assert_array_equal(transpose(y)[0], by_hand(y))


def test_the_table_of_transposes_has_every_kernel():
    calls = [row.values[0] for row in collectives_and_transposes()]
    names = {re.match(r"sk\.(\w+)", call)[1] for call in calls}
    assert names == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "broadcast", "vary"}


@pytest.mark.check
@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("OOM", "symptoms.md"),
        ("dataloader", "howto/training_script.md"),
        ("zero3", "howto/choose_a_plan.md"),
        ("recompile", "symptoms.md"),
        ("ring", "howto/test_a_collective.md"),
    ],
)
def test_the_search_finds_what_others_call_it(word, name):
    assert re.search(rf"\b{word}\b", PAGES[name].read_text())


@pytest.mark.check
@pytest.mark.parametrize(
    ("word", "link"),
    [
        ("mean over devices", "understand/means_and_weights.md"),
        ("whole matrices", "howto/whole_matrices.md"),
        ("ring", "howto/test_a_collective.md"),
        ("row of a census", "#read-a-census-row-by-row"),
        ("recompiles", "symptoms.md#it-compiles-again"),
        ("two hosts", "howto/which_engine.md#slurm"),
        ("freeze", "howto/freeze_a_part.md"),
        ("which plan", "howto/choose_a_plan.md#example-13b-on-64-h100"),
        ("of your own on 8 devices", "start.md#take-a-training-step"),
        ("mixes the examples", "howto/losses.md"),
        ("70B", "howto/choose_a_plan.md#example-70b-on-512-v5p"),
        ("another mesh", "howto/resume_elsewhere.md"),
        ("slow", "symptoms.md#it-is-slow"),
        ("a proof", "howto/prove_for_all_inputs.md#what-a-certificate-means"),
    ],
)
def test_a_question_is_one_click_from_the_front_page(word, link):
    """What people ask first: a row of the table has their words, and its link leads to the section with the answer."""
    rows = [line for line in PAGES["index.md"].read_text().splitlines() if line.startswith("| ") and word in line]
    assert any(f"({link})" in row for row in rows)
    name, _, anchor = link.partition("#")
    headings = re.findall(r"^#+ (.*)", PAGES[name or "index.md"].read_text(), re.M)
    anchors = [re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings]
    assert not anchor or anchor in anchors


@pytest.mark.check
@pytest.mark.parametrize(("page", "link"), [("README.md", "docs/index.md"), ("docs/start.md", "index.md")])
def test_the_questions_are_one_click_from_where_a_reader_begins(page, link):
    """So the answers to them are two clicks away, from README and from the first step too."""
    assert f"({link}#find-your-answer)" in (ROOT / page).read_text()
    assert "## Find your answer" in PAGES["index.md"].read_text()


@pytest.mark.check
def test_the_code_of_the_front_pages_is_as_wide_as_the_page():
    """At 1280 pixels a line of more than 85 columns would be cut."""
    lines = [line for name in ("index.md", "start.md") for _, text in blocks(PAGES[name]) for line in text.splitlines()]
    assert max(map(len, lines)) <= 85


@pytest.mark.check
@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_what_is_there(name):
    """Names of the library, files of the repository, relative links; and every row of a table has all its columns."""
    text = PAGES[name].read_text()
    missing = [each for each in set(re.findall(r"`(?:@)?sk\.([\w.]+)", text)) if not reached(each)]
    files = set(re.findall(r"`((?:shardkit|docs|tests|examples|benchmarks|notebooks)/[\w/.]+)`", text))
    missing += [file for file in files if not (ROOT / file).exists()]
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M))
    made = {
        "proved.md",
        "proved_f.md",
        "papers.md",
        "reference/commands.md",
        *reference.pages(),
    }  # in the manual alone; make docs follows all other links too
    here = posixpath.dirname(name)
    missing += [
        link
        for link in links
        if not (PAGES[name].parent / link).exists() and posixpath.normpath(posixpath.join(here, link)) not in made
    ]
    assert missing == []
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    for table in tables:
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1, table


def reached(name):
    here = sk
    for part in name.rstrip(".").split("."):
        here = getattr(here, part, None)
    return here is not None
