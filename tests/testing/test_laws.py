"""The laws on results that are made up: what is just within the bounds holds, and what is not is said in full."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import optax
import pytest

from shardkit.testing import laws
from shardkit.testing.laws import _list_differences, _reads_across_shards, compiles_once, same_numbers
from shardkit.testing.one_device import Wanted
from shardkit.testing.program import StepResult
from support.refusals import refused

pytestmark = pytest.mark.check

TREE = {"w": np.array([1.0, 2.0]), "b": np.array([4.0])}
WANTED = Wanted(
    loss=np.array(2.0),
    metrics={"weight": np.array(8.0), "hits": np.array(3.0)},
    grads=TREE,
    params=TREE,
    loss_allowed=0.01,
    metrics_allowed={"weight": 0.02, "hits": 0.04},
    grads_allowed={"w": 0.1, "b": 0.2},
    params_allowed={"w": np.array([0.1, 0.3]), "b": np.array([0.2])},
    carried={"n": np.array([5.0])},
    carried_allowed={"n": 0.5},
)
METRICS = {"loss": np.array(2.0), **WANTED.metrics}
TAKEN = StepResult(METRICS, TREE, TREE, WANTED.carried, 0)
ALONE = (
    " The loss is one device's, so the gradient alone may mix a device's examples, as where a GradFn clips by them, or "
    "the backward pass of a custom_vjp; clip in the optimizer, by optax.clip_by_global_norm."
)
CHECK = "Check the sums in the loss and the axes over which it varies, and that random numbers come from `keys`{hint}."
SCALED = ", and `scale`, which is 0.5 in a proof and must multiply only the gradients"


def judged(*steps, wanted=WANTED):
    ran = SimpleNamespace(steps=steps)
    return same_numbers(SimpleNamespace(ran=ran, refused=lambda: ""), SimpleNamespace(steps=(wanted,) * len(steps)))


def moved(tree, name, at, by):
    leaf = tree[name].copy()
    leaf[at] += by
    return {**tree, name: leaf}


def changed(what, by):
    """A step of which one number is off, and of what the message says it is."""
    if what in METRICS:
        return TAKEN._replace(metrics={**METRICS, what: METRICS[what] + by})
    field, name, at = what
    return TAKEN._replace(**{field: moved(getattr(TAKEN, field), name, at, by)})


# What is off, its bound, and how a message calls it, with what it is when it is off by twice the bound.
BOUNDS = [
    ("loss", 0.01, "the loss", "", "2.02", "2"),
    ("weight", 0.02, "the metric 'weight'", "", "8.04", "8"),
    ("hits", -0.04, "the metric 'hits'", "", "2.92", "3"),
    (("grads", "w", 1), 0.1, "the gradient of w", " at [1]", "2.2", "2"),
    (("grads", "b", 0), -0.2, "the gradient of b", " at [0]", "3.6", "4"),
    (("params", "w", 0), 0.1, "the updated parameter w", " at [0]", "1.2", "1"),
    (("params", "w", 1), 0.3, "the updated parameter w", " at [1]", "2.6", "2"),
    (("carried", "n", 0), 0.5, "the carried state n", " at [0]", "6", "5"),
]


# proves N8: every kind of result is compared, each with the bound of its own element, and in this order of the sides
@pytest.mark.parametrize(("what", "bound", "name", "at", "got", "wanted"), BOUNDS)
def test_what_is_compared_and_within_which_bound(what, bound, name, at, got, wanted):
    assert judged(TAKEN, changed(what, 0.99 * bound)) is None
    said = refused(lambda: judged(TAKEN, TAKEN, changed(what, 2 * bound)), AssertionError)
    assert said.startswith(
        f"step 2: {name} must equal one device's; the largest difference is {abs(2 * bound):.3g}{at}, where it is "
        f"{got} and one device's {wanted}"
    )
    alone = ALONE if name.startswith("the gradient") else ""
    assert said.endswith(f"; allowed is {abs(bound):.3g}. {CHECK.format(hint='')}{alone}")


def test_a_factor_that_is_the_scale_of_a_proof_is_said_to_be():
    doubled = {name: 2 * x for name, x in TREE.items()}
    said = refused(lambda: judged(TAKEN._replace(grads=doubled)), AssertionError)
    assert "the largest difference is 4 at [0]" in said and "(everywhere 2x one device's)" in said
    assert said.endswith(CHECK.format(hint=SCALED))
    for other in ({**doubled, "b": TREE["b"]}, {name: 3 * x for name, x in TREE.items()}):
        said = refused(lambda other=other: judged(TAKEN._replace(grads=other)), AssertionError)
        assert said.endswith(CHECK.format(hint="") + ALONE)


def test_what_need_not_be_there_and_what_must():
    within_a_call = TAKEN._replace(grads=None, params=None, carried=None)
    assert judged(within_a_call, TAKEN) is None
    note = "the step does not use row.optimizer: gradients are not compared"
    assert judged(TAKEN, TAKEN._replace(grads=None)) == note
    assert judged(TAKEN._replace(metrics={**METRICS, "finite": np.array(True), "loss_scale": np.array(8.0)})) is None
    one = WANTED._replace(metrics={**WANTED.metrics, "weight": np.array(1)})  # a scalar loss weighs one per shard
    assert judged(changed("weight", 100), wanted=one) is None
    assert refused(
        lambda: judged(TAKEN._replace(metrics={**METRICS, "mine": np.array(1.0), "a": np.array(1.0)})), AssertionError
    ) == (
        "step 0: the metrics must be those of one device; only the mesh returns 'a', 'mine'. Return the same means "
        "from the loss and from the reference."
    )
    lost = {name: x for name, x in METRICS.items() if name != "hits"}
    assert refused(lambda: judged(TAKEN._replace(metrics=lost)), AssertionError) == (
        "step 0: the metric 'hits' must have the structure and shapes of one device's; it is None and the reference "
        "one array. Return it like one device: a gradient for each parameter, the same means as metrics."
    )


def test_only_the_first_step_may_compile():
    def judge(*counts):
        steps = [SimpleNamespace(compiled=count) for count in counts]
        return compiles_once(SimpleNamespace(ran=SimpleNamespace(steps=steps)), None)

    assert judge(2) is None and judge(2, 0, 0) is None
    assert refused(lambda: judge(0, 0, 1), AssertionError) == (
        "only the first step may compile; the steps compiled [0, 0, 1] programs. Look for weakly typed leaves, and "
        "layouts that differ from those of the first state."
    )


def test_bytes_are_compared_axis_by_axis_and_per_step():
    """The order of the axes of a collective does not matter, and bytes over one axis do not pay for another's."""
    rows = [SimpleNamespace(axes=axes, total=total) for axes, total in ((("a", "b"), 8), (("b", "a"), 4), (("c",), 2))]
    right = {("b", "a"): Fraction(6), ("c",): Fraction(1)}
    assert _list_differences(rows, right, 2) == []
    assert _list_differences(rows, {("a", "b"): 12, ("c",): 2}, 1) == []
    found = _list_differences(rows, {("b", "a"): Fraction(5), ("d",): Fraction(2)}, 2)
    assert found == [(("a", "b"), 5, 6), (("b", "a"), 5, 6), (("c",), 0, 1), (("d",), 2, 0)]


@pytest.mark.parametrize(
    ("optimizer", "reads"),
    [
        (optax.sgd(0.1, 0.9), False),
        (optax.adam(1e-2), False),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), True),
        (optax.scale_by_trust_ratio(), True),
    ],
)
def test_which_optimizers_mix_the_elements_of_an_array(optimizer, reads, standard_promotion):
    """What one reads across shards, the compiler may send; of an elementwise one, nothing is forgiven."""
    program = SimpleNamespace(row=SimpleNamespace(optimizer=optimizer), params={"w": np.ones((2, 3), "f")})
    assert _reads_across_shards(program) is reads


def test_every_law_has_a_name_of_its_own():
    assert len({law.__name__ for law in laws.LAWS}) == len(laws.LAWS) == 10
