"""The pages of docs/: their blocks run and print what they say, and what they name is there."""

import itertools
import posixpath
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from docs.generate import reference

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


@pytest.mark.check
@pytest.mark.parametrize(
    ("word", "name"),
    [("OOM", "symptoms.md"), ("dataloader", "howto/training_script.md"), ("zero3", "howto/choose_a_plan.md")],
)
def test_the_search_finds_what_others_call_it(word, name):
    assert re.search(rf"\b{word}\b", PAGES[name].read_text())


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
