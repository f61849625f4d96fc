"""`shardkit report` as a user runs it."""

import pytest

PROGRAM = """
import jax, jax.numpy as jnp
import shardkit as sk

def make():
    mesh = sk.make_mesh(data=4)
    step = jax.shard_map(lambda x: sk.all_reduce(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    return jax.jit(step), (jax.ShapeDtypeStruct((8, 4), jnp.float32),)

def broken():
    raise OSError("no disk")
"""


@pytest.fixture(autouse=True)
def program(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_page_is_written_and_says_which_command_made_it(program, inside):
    done = inside("report", "train.py:make", "--devices", 4, "--output", "new/page.html")
    text = (program / "new" / "page.html").read_text()
    assert "shardkit report train.py:make --devices 4 --output new/page.html" in text
    assert done.stdout.startswith("wrote new/page.html, ") and "on cpu, 1 collective a step, 0 findings" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.py:make", "--output", "page.txt"), "report: file must end in .html; got 'page.txt'. Pass for example"),
        (("train.py:make", "--target", "v5e"), "aot: topology 'v5e' must give a valid shape."),
        (
            ("train.py:broken",),
            "report: train.py:broken must return a step and its arguments; it raises OSError: no disk. Run it with "
            "python to see the traceback.\n",
        ),
    ],
)
def test_bad_use(words, message, inside):
    assert inside("report", *words, "--devices", 4, code=2).stderr.startswith(f"error: {message}")
