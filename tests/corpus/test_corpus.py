"""Published silent bugs: the proof for all inputs finds each and its line; `docs/corpus.md` says what else does."""

import difflib
import inspect
import math
import re
from pathlib import Path

import jax
import pytest

import shardkit as sk
from corpus import attention, experts, gradients, layouts, losses
from shardkit.testing import assert_equal_for_all_inputs, assert_matches_reference

CASES = [case for module in (losses, gradients, attention, experts, layouts) for case in module.CASES]
PAGE = Path(__file__).parents[2] / "docs" / "corpus.md"
# What is missing there has no line, and the right kernel's values around it are none of the reference's.
UNNAMED = {"ring's backward pass has stale keys"}

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))


def call(case):
    mesh = sk.make_mesh(jax.devices()[: math.prod(case.sizes.values())], **case.sizes)
    args, in_specs, out_specs = case.call
    return args, {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs}


def refuses(case, kernel):
    args, specs = call(case)
    try:
        jax.eval_shape(jax.shard_map(kernel, **specs), *args)
    except ValueError as error:
        return "out_specs" in str(error)
    return False


def rules(case, kernel, check_vma):
    args, specs = call(case)
    mapped = jax.shard_map(kernel, **specs, check_vma=check_vma)
    return {finding.rule for finding in sk.lint(mapped, *args, ignore=["check-vma-off"])}


def compare(tool, case, kernel, **options):
    args, specs = call(case)
    tool(kernel, case.reference, args=args, **specs, grad=case.grad, **options)


def row(case):
    cells = PAGE.read_text().split(f"\n| {case.name} |")[1].split("\n")[0].split("|")
    return dict(zip(("source", "check_vma", "lint", "floats", "proof"), map(str.strip, cells), strict=False))


@each_case
def test_the_right_kernel_is_proved(case):
    compare(assert_equal_for_all_inputs, case, case.right)


@each_case
def test_the_wrong_kernel_is_refuted_and_its_line_named(case):
    refused = refuses(case, case.wrong)
    with pytest.raises(AssertionError) as raised:
        compare(assert_equal_for_all_inputs, case, case.wrong, check_vma=not refused)
    named = re.findall(rf"{Path(inspect.getfile(case.wrong)).name}:(\d+)", str(raised.value))
    right = bool({int(line) for line in named} & case.lines.keys())
    assert right == (case.name not in UNNAMED), str(raised.value)
    linted = rules(case, case.wrong, not refused) > rules(case, case.right, True)
    told = row(case)
    assert case.source.split("/")[-1] in told["source"]
    assert told["check_vma"] == ("yes" if refused else "no")
    assert told["lint"] == ("yes" if linted else "no")
    assert told["proof"] == ("yes, its line" if right else "yes")


@each_case
def test_the_kernels_differ_in_the_marked_lines(case):
    right, wrong = (inspect.getsource(kernel).splitlines()[1:] for kernel in (case.right, case.wrong))
    new = [line[2:] for line in difflib.ndiff(right, wrong) if line.startswith("+ ")]
    assert set(new) <= {line.rstrip("\n") for line in case.lines.values()}


@pytest.mark.deep
@each_case
def test_what_floats_find(case):
    compare(assert_matches_reference, case, case.right, eager=False)
    found = False
    try:
        compare(assert_matches_reference, case, case.wrong, eager=False, check_vma=not refuses(case, case.wrong))
    except AssertionError:
        found = True
    assert row(case)["floats"] == ("yes" if found else "no")
