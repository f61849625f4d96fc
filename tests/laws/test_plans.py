"""The laws on every plan of the conformance list, with a model that is quick to compile, and beside jax's own ways."""

import zlib

import jax
import numpy as np
import pytest

import shardkit as sk
from shardkit.meshes.layout import spec_axes
from shardkit.models import transformer
from shardkit.plans.splits import LeafLayout
from shardkit.testing import LAWS
from support import conformance
from support.conformance import BATCH, MODELS, PLANS
from support.training import KEY, ONCE, OPTIMIZERS, STEPS, check, expected

pytestmark = pytest.mark.optimized

SOFTMAX, TRANSFORMER = MODELS
UNSPLIT = ("fsdp of one device",)


def name(row):
    return row.name.replace(" ", "_")


def one_in(n, row):
    """Some of the rows, and the same ones when others are added."""
    return zlib.crc32(row.name.encode()) % n == 0


# proves S58, S59, S60, S63, S92, F14, F15, F53, F55, F57, F59, F60
@pytest.mark.quick(
    "dp_over_two_axes",
    "toy_tp_x_fsdp_x_zero1",
    "zero1_layerwise",
    "zero2_layerwise",
    "fsdp_layerwise_pad",
    "fsdp_pad_x_zero2_pad_x_dp",
    "fsdp_with_a_secondary_shard_and_zero2_layerwise",
    "a_secondary_shard_over_one_device",
    "small_leaves_whole",
)
@pytest.mark.parametrize("row", PLANS, ids=name)
def test_every_plan(row):
    check(row, SOFTMAX, laws=LAWS if one_in(3, row) else ONCE)


@pytest.mark.check
@pytest.mark.parametrize("row", PLANS, ids=name)
def test_every_plan_splits_some_leaf(row):
    """A strategy that splits nothing would pass all laws: it is data parallelism."""
    makes = SOFTMAX.params, lambda: transformer.init(jax.random.key(2), conformance.TRANSFORMER)
    plan, params = row.plan(), [jax.eval_shape(make) for make in makes]
    layouts = [plan.layouts(each, sk.abstract_mesh(**row.sizes)) for each in params]
    split = [
        layout
        for each in layouts
        for layout in jax.tree.leaves(each, is_leaf=lambda x: isinstance(x, LeafLayout))
        if spec_axes(layout.update)
    ]
    names = {each.name.split("(")[0] for each in plan.strategies}
    assert split or names <= {"dp", "cp"} or row.name in UNSPLIT


@pytest.mark.deep  # the optimizers take turns: the covering list has each beside every kind of plan
@pytest.mark.parametrize("row", [row for row in PLANS if row.model_axis is None], ids=name)
def test_every_plan_with_a_transformer(row):
    check(row, TRANSFORMER, list(OPTIMIZERS)[PLANS.index(row) % 3])


def accumulations():
    """Every plan with a number of microbatches, the least and the most in turn."""
    for i, row in enumerate(PLANS):
        ways = int(np.prod([size for axis, size in row.sizes.items() if axis not in ("spare", row.model_axis)]))
        divisors = [k for k in range(2, BATCH // ways + 1) if BATCH // ways % k == 0]
        k = divisors[-(i % 2)]
        yield pytest.param(row, k, id=f"{name(row)}-{k}")


# Alone in finding: a plan whose sums or keys go wrong in microbatches, of which there are two or as many as examples.
# proves S86, S87, F45, F58: unequal weights and dropout on, and the effective batch stays what it is
@pytest.mark.quick("zero2_pad-2")
@pytest.mark.parametrize(("row", "accumulate"), list(accumulations()))
def test_every_accumulation(row, accumulate):
    check(row, SOFTMAX, "sgd", accumulate=accumulate)


# proves S61: the jit + NamedSharding path gives the same update
def test_automatic_partitioning_gives_the_same_training(data8):
    optimizer = OPTIMIZERS["sgd"]
    params = sk.shard(SOFTMAX.params(), data8, jax.P())
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, batch, keys):
        def mean(params):
            loss, _ = SOFTMAX.loss(None)(params, batch, keys)
            return loss.total / loss.weight

        updates, opt_state = optimizer.update(jax.grad(mean)(params), opt_state)
        return jax.tree.map(lambda p, u: p + u, params, updates), opt_state

    for index in range(STEPS):
        keys = sk.example_keys(sk.step_key(KEY, index), BATCH)
        params, opt_state = step(params, opt_state, sk.shard(SOFTMAX.batch(index), data8, jax.P("data")), keys)
    wanted = expected(SOFTMAX, "sgd", 1e-5).steps[-1]
    jax.tree.map(
        lambda x, y, gap: np.testing.assert_array_less(abs(x - y), gap), params, wanted.params, wanted.params_allowed
    )


# proves S10: the disabled configuration is one device and no difference
def test_a_disabled_configuration_is_the_undistributed_step():
    mesh = sk.DistributedConfig(enabled=False).mesh()
    assert mesh.size == 1
    check(conformance.PlanRow("disabled", dict(mesh.shape), lambda: sk.dp("data")), SOFTMAX)
