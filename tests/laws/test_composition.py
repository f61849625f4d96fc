"""Compositions that the covering list has no row for, under every law: tuples of axes, Ulysses inside a ring, three
devices, axes of one device, documents, microbatches by layer, other orders of the mesh."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardkit as sk
from shardkit.models import transformer
from shardkit.models.transformer import Axes
from support.conformance import BATCH, WIDE, ModelRow, PlanRow, text_batch, weights
from support.layouts import mesh_of
from support.training import KEY, OPTIMIZERS, check

pytestmark = pytest.mark.optimized

LENGTH = 24
EXPERTS = replace(WIDE, experts=8, hidden=8, balance=0.1, router_z=0.01)
CONFIGS = {
    "dense": WIDE,
    "tied": replace(WIDE, tied=True),
    "one kv head": replace(WIDE, kv_heads=1),
    "uneven": replace(WIDE, dim=24, hidden=20, heads=4, kv_heads=1, vocabulary=34),
    "thirds": replace(WIDE, vocabulary=33, dim=24, heads=6, hidden=24),
    "ahead": replace(WIDE, microbatches=2, prefetch=True),
    "experts": EXPERTS,
    # A router's losses are those of a microbatch; without them, accumulation changes no number.
    "capacity": replace(EXPERTS, balance=0.0, router_z=0.0, capacity=1.0, group=2),
    "dropless": replace(EXPERTS, balance=0.0, router_z=0.0, microbatches=2, prefetch=True),
}
NAMES = ("data", "fsdp", "context", "ulysses", "model", "expert")


def batch(step: int) -> Any:
    """Packed documents; the first quarter of the examples, and more in the middle, have no weight at all."""
    tokens = text_batch(step, LENGTH)
    ends = np.random.default_rng(step).integers(0, 5, (BATCH, LENGTH)) == 0
    counted = ~np.isin(np.arange(BATCH), [0, 1, 2, 3, 8, 9])
    weights = tokens["weights"] * counted[:, None].astype(np.float32)
    return tokens | {"weights": weights, "segments": np.cumsum(ends, axis=1).astype(np.int32)}


@cache
def model(name: str) -> ModelRow:
    config = CONFIGS[name]

    def loss(axes: Axes | None) -> Any:
        return transformer.loss_fn(config, axes or transformer.ONE_DEVICE)

    return ModelRow(name, lambda: weights(config), batch, loss)


def tp(name: str, axis: Any = "model", ways: int = 2, *, sequence: bool = False) -> sk.Plan:
    return sk.tp(axis, transformer.tensor_rules(CONFIGS[name], axis, ways), sequence=sequence)


def fsdp(axis: Any = "fsdp", **options: Any) -> sk.Plan:
    return sk.fsdp(axis, min_size=1, layerwise=("layers",), **options)


def zero2(**options: Any) -> sk.Plan:
    return sk.zero2("zero", min_size=1, layerwise=("layers",), **options)


class Row(NamedTuple):
    """A model, the mesh in its order, the plans, the axes of the loss, microbatches of the step."""

    model: str
    sizes: dict[str, int]
    plans: tuple[sk.Plan, ...] = ()
    axes: Axes = Axes()
    accumulate: int = 1

    def under(self, plans: tuple[sk.Plan, ...], axes: Axes, accumulate: int = 1) -> Any:
        return Row(self.model, self.sizes, plans, axes, accumulate)

    @property
    def plan(self) -> PlanRow:
        return PlanRow(self.model, self.sizes, lambda: sk.chain(*self.plans), self.axes)


def of_one_device(live: str | None) -> Row:
    """Every strategy over an axis of one device; one of them may have two."""
    sizes = {name: 1 + (name == live) for name in NAMES}
    inside = (sk.cp("context"), sk.cp("ulysses"), sk.ep("expert"), tp("experts", ways=sizes["model"], sequence=True))
    axes = Axes("model", sequence=True, context="context", ulysses="ulysses", expert="expert")
    return Row("experts", sizes, (sk.dp("data"), fsdp(), *inside), axes)


FEW = {
    "context over two axes, the second first": Row("dense", {"a": 2, "b": 2, "model": 2}).under(
        (sk.cp(("b", "a")), tp("dense", sequence=True)), Axes("model", sequence=True, context=("b", "a"))
    ),
    "padded beside sequence parallelism": Row("uneven", {"fsdp": 4, "model": 2}).under(
        (fsdp(uneven="pad"), tp("uneven", sequence=True)), Axes("model", sequence=True)
    ),
}
REST = {
    "Ulysses inside a ring, beside zero2, accumulated": Row("tied", {"context": 2, "ulysses": 2, "zero": 2}).under(
        (sk.cp("context"), sk.cp("ulysses"), zero2()),
        Axes(context="context", ulysses="ulysses", order="contiguous"),
        accumulate=4,
    ),
    "Ulysses beside tensor parallelism": Row("one kv head", {"ulysses": 2, "model": 2, "replica": 2}).under(
        (sk.cp("ulysses"), tp("one kv head"), sk.dp("replica")), Axes("model", ulysses="ulysses")
    ),
    "Ulysses and a ring beside sequence parallelism": Row("tied", {"context": 2, "model": 2, "ulysses": 2}).under(
        (sk.cp("context"), tp("tied", sequence=True), sk.cp("ulysses")),
        Axes("model", sequence=True, context="context", ulysses="ulysses"),
    ),
    "model over two axes, the second first": Row("one kv head", {"a": 2, "fsdp": 2, "b": 2}).under(
        (tp("one kv head", ("b", "a"), 4, sequence=True), fsdp()), Axes(("b", "a"), sequence=True, impl="ring")
    ),
    "experts over two axes, the second first": Row("experts", {"a": 2, "b": 2, "zero": 2}).under(
        (sk.ep(("b", "a")), sk.zero1("zero", min_size=1)), Axes(expert=("b", "a"))
    ),
    "fsdp over two axes, the second first": Row("tied", {"a": 2, "model": 2, "b": 2}).under(
        (fsdp(("b", "a")), tp("tied", sequence=True)), Axes("model", sequence=True)
    ),
    "a secondary shard, prefetched": Row("ahead", {"a": 2, "model": 2, "b": 2}).under(
        (fsdp(("b", "a"), secondary="a"), tp("ahead", sequence=True)), Axes("model", sequence=True)
    ),
    "whole fsdp beside sequence and context": Row("dense", {"context": 2, "fsdp": 2, "model": 2}).under(
        (sk.cp("context"), sk.fsdp("fsdp", min_size=1), tp("dense", sequence=True)),
        Axes("model", sequence=True, context="context"),
        accumulate=2,
    ),
    "zero1 beside sequence and context": Row("dense", {"zero": 2, "context": 2, "model": 2}).under(
        (sk.zero1("zero", min_size=1), sk.cp("context"), tp("dense", sequence=True)),
        Axes("model", sequence=True, context="context"),
    ),
    "padded zero2 beside tensor parallelism": Row(
        "uneven", {"model": 2, "zero": 4}, (zero2(uneven="pad"), tp("uneven")), Axes("model")
    ),
    "three devices share heads": Row("thirds", {"model": 3, "data": 2}).under(
        (tp("thirds", ways=3, sequence=True), sk.dp("data")), Axes("model", sequence=True, impl="bidirectional")
    ),
    "three devices share tokens": Row(
        "thirds", {"fsdp": 2, "context": 3}, (fsdp(), sk.cp("context")), Axes(context="context")
    ),
    "microbatches and prefetch": Row("ahead", {"fsdp": 2, "context": 2, "model": 2}).under(
        (fsdp(), sk.cp("context"), tp("ahead", sequence=True)),
        Axes("model", sequence=True, context="context", impl="bidirectional"),
    ),
    "microbatches, prefetch and experts": Row("dropless", {"expert": 2, "model": 2, "fsdp": 2}).under(
        (fsdp(), sk.ep("expert"), tp("dropless", sequence=True)),
        Axes("model", sequence=True, expert="expert"),
        accumulate=2,
    ),
    "capacity beside sequence and context": Row("capacity", {"expert": 2, "context": 2, "model": 2}).under(
        (sk.ep("expert"), sk.cp("context"), tp("capacity", sequence=True)),
        Axes("model", sequence=True, context="context", expert="expert"),
        accumulate=4,
    ),
}
REST["every axis of one device"] = of_one_device(None)
REST |= {f"every axis but {live} of one device": of_one_device(live) for live in ("context", "model")}


DEFAULT = {*FEW, "every axis of one device"}  # test_expert.py has experts over two axes


def rows(*names: str) -> Any:
    """These rows, or all; of those the others are deep."""
    every = FEW | REST
    return [
        pytest.param(every[name], id=name.replace(" ", "_"), marks=() if names or name in DEFAULT else pytest.mark.deep)
        for name in names or every
    ]


def built(row: Row, optimizer: str = "sgd", **options: Any) -> sk.TrainStep:
    grad_fn = sk.value_and_grad(model(row.model).loss(row.axes))
    options |= {"mesh": mesh_of(**row.plan.sizes), "plan": row.plan.plan()}
    return sk.make_train_step(grad_fn, OPTIMIZERS[optimizer], **options)


# proves S92, F22, F25, F27, F30, F31, F32, F33, F34, F53, F54, F56, F58, F59: unequal weights and dropout on
@pytest.mark.quick("padded_beside_sequence_parallelism")
@pytest.mark.parametrize("row", rows())
def test_every_law_holds(row):
    check(row.plan, model(row.model), accumulate=row.accumulate, nonfinite="skip")


# proves F60
@pytest.mark.parametrize("row", rows("padded beside sequence parallelism"))
def test_evaluation_equals_one_device(row):
    params, loss = model(row.model).params(), model(row.model).loss
    mesh = mesh_of(**row.plan.sizes)
    state = built(row).init(params, KEY)
    evaluate = sk.make_eval_step(loss(row.axes), mesh=mesh, plan=row.plan.plan())
    mean, aux = jax.jit(loss(None))(params, batch(0), None)
    wanted = {"loss": mean.total / mean.weight} | {name: each.total / each.weight for name, each in aux.items()}
    found = evaluate(state.params, batch(0))
    assert float(found.pop("weight")) == float(mean.weight)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


# proves F47, F48: in float16 the scale of two meshes moves in step, and so do the numbers
@pytest.mark.deep
@pytest.mark.parametrize("precision", ["fp16", sk.Precision(jnp.bfloat16, jnp.bfloat16, master=jnp.float32)])
def test_lower_precision_is_near_one_device(precision):
    row = REST["microbatches, prefetch and experts"]
    alone = row._replace(sizes={"data": 1}, plans=(sk.dp("data"),), axes=transformer.ONE_DEVICE)
    found = []
    for each in (row, alone):
        init, step = built(each, "adamw", precision=precision)
        state, losses = init(model(row.model).params(), KEY), []
        for index in range(2):
            state, metrics = step(state, batch(index))
            losses.append(float(metrics["loss"]))
        found.append((losses, *(float(metrics.get(name, 1)) for name in ("loss_scale", "finite"))))
    (losses, *scale), (wanted, *wanted_scale) = found
    np.testing.assert_allclose(losses, wanted, rtol=3e-3)
    assert scale == wanted_scale


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_a_tuple_of_axes_splits_the_batch_in_its_own_order(axes):
    mesh = sk.abstract_mesh(a=2, data=2, b=2, fsdp=2)
    plan = sk.chain(sk.cp(axes), sk.fsdp("fsdp"), sk.dp("data"))
    assert plan.batch_spec(mesh) == jax.P(("data", "fsdp"), axes)
