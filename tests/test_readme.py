"""The front page: its length, its programs and what they print, its picture, its table, its links."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import shardkit as sk
from shardkit.models import transformer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# As readers have it: optax.adamw promotes.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def table(first):
    """The cells of the rows of the table whose header begins with `first`."""
    lines = README[README.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# It grows with every feature until nobody reads it; its first program is wider than a phone or the manual's column.
@pytest.mark.check
def test_it_is_one_page_and_its_first_screen_says_what_there_is():
    lines = README.splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 120
    first = re.search(r"```python\n(.*?)```", README, re.S)[1].splitlines()
    assert len([line for line in first if line]) <= 20 and max(map(len, first)) <= 80
    screen = "\n".join(lines[:40])
    assert all(part in screen for part in ("```text", "$ make train", "$ make test"))


# proves F90
def test_its_programs_print_what_stands_below_them(tmp_path):
    """A name that was renamed, a number that changed. In a fresh process, every warning an error."""
    blocks = re.findall(r"```(python|text)\n(.*?)```", README, re.S)
    code = "\n".join(text for kind, text in blocks if kind == "python")
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = "".join(text for kind, text in blocks if kind == "text")
    assert done.stdout == shown


# The picture shows a census or a schedule of an earlier version: run docs/pictures/front.py.
def test_the_picture_is_that_of_this_version():
    made = runpy.run_path(str(ROOT / "docs" / "pictures" / "front.py"))["picture"]()
    assert made == (ROOT / "docs" / "pictures" / "front.svg").read_text()


AXES = {  # what the model itself needs
    "tp": {"model": "n", "sequence": True},
    "cp": {"context": "n"},
    "ep": {"expert": "n"},
    "pp": {"stage": "n"},
}


def measured(name):
    """Layouts, bytes sent and bytes held of a step under the plan `name`, on 8 devices that need not exist."""
    wide = {"hidden": 5632} if name != "ep" else {"hidden": 704, "experts": 8}
    config = transformer.Config(vocabulary=32_000, layers=24, dim=2048, heads=16, **wide)
    axes = transformer.Axes(**AXES.get(name, {}))
    pipe = sk.pipeline(sk.schedules.lockstep(devices=8, microbatches=8), "n")
    plan = {
        "fsdp": lambda: sk.fsdp("n", layerwise=("layers",)),
        "tp": lambda: sk.tp("n", transformer.tensor_rules(config, "n", 8), sequence=True),
        "pp": lambda: pipe.plan,
    }.get(name, lambda: getattr(sk, name)("n"))()
    grad_fn = sk.value_and_grad(transformer.loss_fn(config, axes))
    if name == "pp":
        grad_fn = pipe.value_and_grad(*transformer.pieces(config, axes), layer_numbers=True)
    mesh = sk.abstract_mesh(n=8)
    init, step = sk.make_train_step(grad_fn, optax.adamw(3e-4), mesh=mesh, plan=plan, precision="bf16")
    params = jax.eval_shape(lambda: transformer.init(jax.random.key(0), config))
    assert f"{sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e9:.2f}" == "1.36"
    tokens, state = jax.ShapeDtypeStruct((8, 2048), jnp.int32), init.abstract(params)
    sent = sk.census(step, state, {"tokens": tokens, "targets": tokens}).sent()
    layers = plan.layouts(params, mesh)["layers"]
    weight = (layers["experts"] if name == "ep" else layers)["up"]
    dims = "LEDF" if name == "ep" else "LDF"
    laid = {"W": split(dims, weight.rest), "Adam": split(dims, weight.update), "x": split("BT", plan.batch_spec(mesh))}
    return laid, f"{float(sent) / 1e9:.2f} GB", f"{sk.bytes_per_device(state) / 1e9:.2f} GB"


def split(dims, spec):
    """A shape in the algebra of the table: `[L, D_n, F]`."""
    axes = [*spec, *[None] * (len(dims) - len(spec))]
    return f"[{', '.join(dim + ('_n' if axis else '') for dim, axis in zip(dims, axes, strict=True))}]"


# A figure of the table that is no longer what a step sends or holds.
@pytest.mark.parametrize("name", [row[0].strip("`") for row in table("plan")])
def test_a_plan_costs_what_the_table_says(name):
    [_, layout, sends, holds, _] = next(row for row in table("plan") if row[0] == f"`{name}`")
    laid, sent, held = measured(name)
    assert (sends, holds) == (sent, held)
    if name.startswith("zero"):
        assert f"`{laid['Adam']}`" in layout and laid["W"] == "[L, D, F]"
    else:
        assert layout == f"`W{laid['W']}`, `x{laid['x']}`" and laid["W"] == laid["Adam"]


# The figures beside jit are those of another machine than the results that are kept.
@pytest.mark.check
def test_the_figures_beside_jit_are_those_of_the_results():
    records = map(json.loads, (ROOT / "benchmarks" / "results" / "strategies.jsonl").read_text().splitlines())
    kept = {record["case"]: record for record in records}
    ours, theirs = kept["fsdp"], kept["jit, constraints: fsdp"]
    text = " ".join(README.split())
    sent = [f"{record['wire_bytes'] / 2**20:.2f}" for record in (ours, theirs)]
    assert f"takes {ours['cpu_ratio']:.2f} times the CPU time of one device, and sends {sent[0]} MiB" in text
    beside = f"With `jit` and sharding constraints it takes {theirs['cpu_ratio']:.2f} times, and sends {sent[1]} MiB"
    assert beside in text


@pytest.mark.check
def test_what_it_names_is_there():
    """A page that was moved, a file that was renamed."""
    files = re.findall(r"`((?:tests|benchmarks|notebooks|examples|results|docs)/[\w/.]+)`", README)
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", README)
    assert len(links) > 10 and [name for name in files + links if not (ROOT / name).exists()] == []
