"""How large the house may be: a limit is raised in the change that needs it, with the reason beside it.

CONTRIBUTING.md has the three questions that such a change answers first.
"""

import subprocess
from pathlib import Path

import pytest

from shardkit import cli

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardkit"

# Lines of each room. Those with a star are what the project is for: plans, collectives and their proof.
LIMITS = {
    "collectives *": 4830,  # collectives as tables: made, found, checked, timed on links, executed, written for GPUs
    "layers *": 2380,  # documents dealt evenly; experts balanced without a loss, exchanged in five ways
    "on_device *": 3960,  # whether a loss adds over its examples, by a rule for each primitive
    "pipelines *": 1730,  # unequal stages as one body; embedding and head spread over all devices
    "plans *": 1265,
    "remat *": 670,
    "schedules *": 1970,  # what all devices run together; a search under costs by stage; the optimum of small ones
    "steps *": 2250,  # DiLoCo; whose steps a guard takes
    "strategies *": 1405,  # Muon by owners
    "testing *": 9200,  # from wrong to line, by what repairs the result; draws, coverage, NaN; linear algebra
    "": 65,
    "_arguments": 710,  # keys that jax cannot sort; options of a compiler
    "_jax": 1285,  # sums of shares through gloo; the registry of primitives, with what emulates each
    "analysis": 6710,  # FLOPs and kept bytes of any traced loss; what a step raises; what foreign calls send, as said
    "bench": 2535,  # strategies with Muon
    "cli": 2745,  # prove; what stood beside the package while that imported jax; numbers of no run
    "cost": 1415,
    "jobs": 2260,  # what the launcher killed, two jobs in one directory; who calls a step with another batch
    "meshes": 1725,  # the order of devices that loads links least: measured and predicted time, of all plans
    "models": 760,  # rows and columns of its matrices
    "planner": 2105,  # models of any config.json or loss; what a step holds, computes and sends; every axis; the code
    "reporting": 290,
    "resharding": 870,
    "runtime": 4310,  # DiLoCo's workers in a checkpoint, records of other types; what each step was called with
    "viz": 1470,  # tables of collectives
}


def lines(folder):
    return sum(path.read_text().count("\n") for path in folder.rglob("*.py"))


def own(folder):
    return sum(path.read_text().count("\n") for path in folder.glob("*.py"))


def test_every_room_keeps_to_its_limit():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    limits = {name.removesuffix(" *"): limit for name, limit in LIMITS.items()}
    assert limits.keys() == rooms | {""}
    found = {name: lines(PACKAGE / name) if name else own(PACKAGE) for name in limits}
    above = {name or "shardkit/*.py": (found[name], limits[name]) for name in limits if found[name] > limits[name]}
    assert sum(found.values()) <= 58_700
    assert not above, f"answer the three questions of CONTRIBUTING.md, then raise the limit: {above}"


def test_commands_and_pages():
    assert len(cli.every_command()) <= 13  # prove: of the three uses, proof had none
    pages = list((ROOT / "docs").rglob("*.md"))
    assert len(pages) <= 45, "pages that are written by hand; docs/generate makes the others"


def test_the_top_level():
    """Of what git tracks: what tests, builds and users leave beside it is no room."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: git says which folders belong to the project")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    folders = {name.split("/")[0] for name in tracked if "/" in name and not name.startswith(".")}
    assert folders == {"shardkit", "tests", "benchmarks", "notebooks", "examples", "docs"}
