"""Published silent bugs: the proof for all inputs finds each; `docs/corpus.md` says whether it names the line, and what
else finds it."""

import inspect
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus import attention, choices, experts, gradients, layouts, losses
from corpus.case import Case
from shardkit.testing import assert_equal_for_all_inputs, assert_matches_reference
from support.planted.kernels import KERNELS

CASES = [case for module in (losses, gradients, attention, experts, layouts, choices) for case in module.CASES]
PAGE = Path(__file__).parents[2] / "docs" / "corpus.md"
SINCE = {"untuned", "before", "before, line mended", "before, line tuned", "tuned"}  # the page says what they mean
# Right but for rounding, of which exact arithmetic knows nothing.
ROUNDED = {"gradient summed in bfloat16 over tensor parallelism"}

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))


def call(case):
    args, in_specs, out_specs = case.call
    names = jax.tree.leaves([tuple(spec) for spec in jax.tree.leaves((in_specs, out_specs))])
    sizes = case.sizes or dict.fromkeys(names, 2)
    mesh = sk.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
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
    columns = ("source", "check_vma", "lint", "sums", "floats", "proof", "since")
    return dict(zip(columns, map(str.strip, cells), strict=False))


def narrow(case, kernel, check_vma=True):
    """What is said of sums that are not float32; "" where all are."""
    args, specs = call(case)
    try:
        sk.expects(sums="float32").check(jax.shard_map(kernel, **specs, check_vma=check_vma), *args)
    except AssertionError as error:
        return str(error)
    return ""


def names_its_line(case, text):
    named = re.findall(rf"{Path(inspect.getfile(case.wrong)).name}:(\d+)", text)
    return bool({int(line) for line in named} & case.lines)


@each_case
def test_the_right_kernel_is_proved(case):
    compare(assert_equal_for_all_inputs, case, case.right)


@each_case
def test_the_wrong_kernel_is_refuted_and_its_line_named(case):
    refused = refuses(case, case.wrong)
    told = row(case)
    if case.name in ROUNDED:
        compare(assert_equal_for_all_inputs, case, case.wrong, check_vma=not refused)
        assert told["proof"] == "no"
    else:
        with pytest.raises(AssertionError) as raised:
            compare(assert_equal_for_all_inputs, case, case.wrong, check_vma=not refused)
        right = names_its_line(case, str(raised.value))
        assert told["proof"] == ("yes, its line" if right else "yes"), str(raised.value)
    linted = rules(case, case.wrong, not refused) > rules(case, case.right, True)
    assert case.source.split("/")[-1] in told["source"]
    assert told["since"] in SINCE
    assert told["check_vma"] == ("yes" if refused else "no")
    assert told["lint"] == ("yes" if linted else "no")


# proves N66: a sum over tensor parallelism in bfloat16, where float32 was asked for, is named with its line
@each_case
def test_sums_in_another_dtype_than_was_asked_for(case):
    assert narrow(case, case.right) == ""
    said = narrow(case, case.wrong, check_vma=not refuses(case, case.wrong))
    assert row(case)["sums"] == ("yes, its line" if names_its_line(case, said) else "yes" if said else "no")
    if case.name in ROUNDED:
        assert said.splitlines()[1] == "- expected sums in float32; all_reduce over 'model' adds in bfloat16"


@pytest.mark.parametrize("planted", KERNELS, ids=lambda planted: planted.name.replace(" ", "_"))
def test_what_is_planted_elsewhere_is_refuted_too(planted):
    """Kernels that were written for the comparison of floats, of a line each."""
    case = Case(planted.name, "", planted.kernel, planted.reference, planted.call, sizes=planted.sizes)
    with pytest.raises(AssertionError) as raised:
        compare(assert_equal_for_all_inputs, case, planted.kernel, check_vma=not refuses(case, planted.kernel))
    assert re.search(r"kernels\.py:\d+|has shape|it is zero", str(raised.value))


def test_logarithms_under_masks_and_weights():
    """The same loss of the log-softmax, and of a sum of exps that is not shifted: weighted it is shifted in both."""
    args, rows = (np.zeros((4, 3), "f"), np.zeros(4, "f"), np.array([0, 2, 1, 1])), P("data")

    def reference(x, targets):
        return -jnp.sum(jax.nn.one_hot(targets, 3) * jax.nn.log_softmax(x), 1)

    def loss(x, targets, log_sum):
        return log_sum(x) - jnp.sum(x * jax.nn.one_hot(targets, 3), 1)

    for kernel, wanted in (
        (lambda x, _, t: loss(x, t, lambda x: jnp.log(jnp.sum(jnp.exp(x), 1))), lambda x, _, t: reference(x, t)),
        (lambda x, w, t: w * loss(x, t, lambda x: jax.nn.logsumexp(x, 1)), lambda x, w, t: -w * -reference(x, t)),
    ):
        case = Case("", "", kernel, wanted, (args, (rows, rows, rows), rows))
        compare(assert_equal_for_all_inputs, case, kernel)


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
