"""The plan and the model's axes must agree, or the numbers would silently be those of another model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import schedules
from shardkit.models import transformer
from shardkit.models.transformer import Axes
from support.pipelines import pipelined_grad

pytestmark = pytest.mark.check
CONFIG = transformer.Config(vocabulary=16, layers=2, dim=8, heads=2, hidden=8)
PARAMS = jax.eval_shape(lambda: transformer.init(jax.random.key(0), CONFIG))
BATCH = {name: np.zeros((8, 16), np.int32) for name in ("tokens", "targets")}


def refused(function, plan, sizes, *, train=True, **options):
    """The error of a step, or of an evaluation, that is traced."""
    mesh = sk.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    with pytest.raises(ValueError) as error:
        if train:
            init, step = sk.make_train_step(function, optax.sgd(0.1), mesh=mesh, plan=plan, **options)
            step.trace(init.abstract(PARAMS), BATCH)
        else:
            jax.eval_shape(sk.make_eval_step(function, mesh=mesh, plan=plan), PARAMS, BATCH)
    return str(error.value)


def wrapped(axes, config=CONFIG):
    """A user's loss around the model's, which hides the attributes of the model's loss."""
    return lambda params, batch, keys: transformer.loss_fn(config, axes)(params, batch, keys)[0]


LOOK = (
    "transformer: attention must run over axis {}, which split the tokens in the plan; got axes.context={!r} and "
    "axes.ulysses={!r}. Pass Axes(context=...), or Axes(ulysses=...), with the axes of the plan's cp."
)
CASES = {
    "no axis": (Axes(), (sk.cp("context"),), {"context": 2}, LOOK.format("'context'", None, None)),
    "one of two": (
        Axes(context="context", order="contiguous"),
        (sk.cp("context"), sk.cp("more")),
        {"context": 2, "more": 2},
        LOOK.format("'more'", "context", None),
    ),
    "one of a tuple": (
        Axes(ulysses="more"),
        (sk.cp(("context", "more")),),
        {"context": 2, "more": 2},
        LOOK.format("'context'", None, "more"),
    ),
    "examples": (
        Axes(context="context"),
        (sk.dp("context"),),
        {"context": 2},
        "transformer: the tokens must be split over axes.context='context'; got different examples along axis "
        "'context'. Chain cp('context') into the plan, and dp over another axis.",
    ),
    "examples by heads": (
        Axes(ulysses="fsdp"),
        (sk.fsdp("fsdp", min_size=1),),
        {"fsdp": 2},
        "transformer: the tokens must be split over axes.ulysses='fsdp'; got different examples along axis 'fsdp'. "
        "Chain cp('fsdp') into the plan, and dp over another axis.",
    ),
}
for name in ("context", "ulysses"):
    CASES[f"the same tokens by {name}"] = (
        Axes(**{name: ("data", "two")}),
        (),
        {"two": 2},
        f"transformer: the tokens must be split over axes.{name}=('data', 'two'); got the same tokens along axis "
        "'two'. Chain cp(('data', 'two')) into the plan.",
    )


# Attention stayed within a device's piece of the sequence, or went round a ring of other examples.
# proves F72: what would train on other numbers than one device is refused
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_split_over_the_axes_along_which_attention_looks(case):
    axes, plans, sizes, message = CASES[case]
    plan, sizes = sk.chain(sk.dp("data"), *plans), {"data": 2} | sizes
    assert refused(wrapped(axes), plan, sizes, train=False) == message
    assert refused(sk.value_and_grad(wrapped(axes)), plan, sizes, accumulate=2) == message
    assert refused(sk.value_and_grad(wrapped(axes)), sk.chain(plan, sk.dp("one")), sizes | {"one": 1}) == message


def test_a_contiguous_order_over_two_axes_of_which_one_has_one_device():
    """Positions varied over it, and the step refused the Mean of a right model."""
    axes = Axes(context="context", ulysses="ulysses", order="contiguous", stage="stage")
    pipe = sk.pipeline(schedules.gpipe(2, 2), "stage")
    staged = pipe.value_and_grad(*transformer.pieces(CONFIG, axes), layer_numbers=True)
    plan = sk.chain(pipe.plan, sk.cp("context"), sk.cp("ulysses"))
    mesh = sk.make_mesh(jax.devices()[:4], stage=2, context=1, ulysses=2)
    init, step = sk.make_train_step(transformer.in_order(staged, axes), optax.sgd(0.1), mesh=mesh, plan=plan)
    found = sk.census(step, init.abstract(PARAMS), BATCH)
    assert found.count(axis="ulysses") and not found.select(axis="context")


def test_a_pipeline_is_told_of_tokens_that_nothing_looks_across():
    axes = Axes(stage="stage")
    grad_fn = pipelined_grad(*transformer.pieces(CONFIG, axes), schedules.gpipe(2, 2), "stage", layer_numbers=True)
    plan = sk.chain(sk.dp("data"), sk.cp("context"), sk.pp("stage"))
    message = LOOK.format("'context'", None, None)
    assert refused(grad_fn, plan, {"data": 2, "context": 2, "stage": 2}) == message


# Sums over devices counted whole weights once on each: the feed-forward block twice, every class of the head twice.
@pytest.mark.parametrize(
    "whole, what, here",
    [
        (("gate", "up", "down"), "8 hidden features", "8 features"),
        (("head",), "16 vocabulary entries", "16 entries"),
        (("query", "key", "value", "attention_out"), "2 query heads", "2 heads"),
    ],
)
@pytest.mark.parametrize("sequence", [False, True])
def test_weights_are_split_over_the_axes_of_the_model(whole, what, here, sequence):
    specs = transformer.tensor_rules(CONFIG, "model", 2)
    leave = lambda path, spec: P() if path[-1].key in whole else spec  # noqa: E731
    rules = jax.tree_util.tree_map_with_path(leave, specs, is_leaf=lambda x: isinstance(x, P))
    plan = sk.chain(sk.dp("data"), sk.tp("model", rules, sequence=sequence))
    axes = Axes("model", sequence=sequence)
    assert refused(sk.value_and_grad(wrapped(axes)), plan, {"data": 2, "model": 2}) == (
        f"transformer: the {what} must be split over axes.model='model'; got {here} on each of 2 devices. Chain "
        "tp('model', tensor_rules(config, 'model', 2)) into the plan."
    )


def test_weights_that_no_plan_splits_are_refused():
    assert refused(sk.value_and_grad(wrapped(Axes("model"))), sk.fsdp("fsdp"), {"fsdp": 2, "model": 2}) == (
        "transformer: the 2 query heads must be split over axes.model='model'; got 2 heads on each of 2 devices. Chain "
        "tp('model', tensor_rules(config, 'model', 2)) into the plan."
    )


@pytest.mark.parametrize(
    "leaf, dim, what",
    [("down", 1, "8 hidden features"), ("head", 1, "16 vocabulary entries"), ("query", 2, "2 query heads")],
)
def test_weights_that_the_model_does_not_know_to_be_split_are_refused(leaf, dim, what):
    plan = sk.tp("model", lambda path, shape: dim if path.split(".")[-1] == leaf else None)
    noun, size = what.split()[-1], int(what.split()[0]) // 2
    assert refused(wrapped(Axes()), plan, {"model": 2}, train=False) == (
        f"transformer: the {what} must be split over axes.model=None; got {size} {noun} on each of 1 devices. Pass "
        "Axes(model=...) with the axis of the plan's tp."
    )


def test_a_hand_written_shard_map_says_nothing_of_its_tokens_and_is_taken():
    """Tokens that vary along an axis may be different examples; only a plan knows."""
    mesh, loss = sk.make_mesh(jax.devices()[:2], data=2), transformer.loss_fn(CONFIG)
    kernel = lambda p, b: sk.all_reduce(loss(p, b, None)[0].total, "data")  # noqa: E731
    out = jax.eval_shape(jax.shard_map(kernel, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()), PARAMS, BATCH)
    assert out.dtype == jnp.float32
