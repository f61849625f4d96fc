"""The bytes that a plan must send, computed by hand: the law compares them with the census, and both could be wrong."""

import jax
import jax.numpy as jnp
import pytest

import shardkit as sk
from shardkit.plans.traffic import ValueBytes, plan_traffic

pytestmark = pytest.mark.check

BF16 = ValueBytes(compute=2)
WEIGHTS = {"w": (8, 3)}  # 96 bytes
STACK = {"layers": (5, 8, 3), "out": (8,)}  # five layers of 96 bytes, and 32
ODD = {"w": (7, 3)}  # stored as 8 rows
INT8 = sk.algorithms.compressed(jnp.int8)
FSDP, LAYERS = {"min_size": 1}, {"min_size": 1, "layerwise": ("layers",)}
DP_FSDP, DP_ZERO = (sk.chain(sk.dp("b"), plan("a", min_size=1)) for plan in (sk.fsdp, sk.zero1))
WHOLE, PART = 3 / 4 * 96, 96 // 4  # what a device gets of the weights from three others of four, and holds itself

CASES = {
    "dp": (sk.dp("a"), WEIGHTS, {}, {"a": 2 * WHOLE}),
    "dp, once for all microbatches": (sk.dp("a"), WEIGHTS, {"accumulate": 2}, {"a": 2 * WHOLE}),
    "dp, sums in float32": (sk.dp("a"), WEIGHTS, {"value_bytes": BF16}, {"a": 2 * WHOLE}),
    "dp on one device": (sk.dp("a"), WEIGHTS, {"mesh": {"a": 1}}, {}),
    "zero1": (sk.zero1("a", min_size=1), WEIGHTS, {"accumulate": 2}, {"a": 2 * WHOLE}),
    "zero2 reduces each microbatch": (sk.zero2("a", min_size=1), WEIGHTS, {"accumulate": 2}, {"a": 3 * WHOLE}),
    "fsdp": (sk.fsdp("a", **FSDP), WEIGHTS, {"accumulate": 2}, {"a": 2 * WHOLE}),
    "fsdp gathers in bfloat16": (sk.fsdp("a", **FSDP), WEIGHTS, {"value_bytes": BF16}, {"a": 1.5 * WHOLE}),
    "padded": (sk.fsdp("a", uneven="pad", **FSDP), ODD, {}, {"a": 2 * WHOLE}),
    "padded, once per step": (sk.zero1("a", uneven="pad", **FSDP), ODD, {}, {"a": 2 * WHOLE}),
    "layer by layer": (sk.fsdp("a", **LAYERS), STACK, {}, {"a": 5 * 3 * WHOLE + 2 * 24}),
    "layer by layer, each microbatch": (
        sk.fsdp("a", **LAYERS), STACK, {"accumulate": 3}, {"a": 3 * 5 * 3 * WHOLE + 2 * 24},
    ),
    "the last layer once": (sk.fsdp("a", **LAYERS), STACK, {"prefetched": True}, {"a": (5 * 3 - 1) * WHOLE + 2 * 24}),
    # a message of 6 elements is 7 bytes with its scale, to each of three; of out 2 elements are 3
    "small layers": (
        sk.fsdp("a", gather=INT8, **LAYERS), STACK, {"accumulate": 3},
        {"a": 3 * 5 * (2 * 3 * 7 + WHOLE) + 3 * 3 + 24},
    ),
    "small both ways": (sk.fsdp("a", gather=INT8, reduce=INT8, **FSDP), WEIGHTS, {}, {"a": 2 * 3 * 7}),
    "two strategies": (DP_FSDP, WEIGHTS, {"mesh": {"a": 4, "b": 2}}, {"a": 2 * WHOLE, "b": PART}),
    "in groups": (
        DP_ZERO, WEIGHTS, {"mesh": {"a": 4, "b": 2}, "deterministic": 8}, {"ab": 7 * 3 * 4, "b": 3 * 4, "a": WHOLE},
    ),
    "a device's groups in runs": (sk.dp("a"), WEIGHTS, {"deterministic": 12}, {"a": 3 * WHOLE + WHOLE}),
    "a secondary shard": (
        sk.fsdp(("a", "b"), secondary="b", **LAYERS), STACK, {"mesh": {"a": 2, "b": 2}},
        {"ab": 2 * 3 / 4 * 32, "b": 3 * 5 * 96 / 2, "a": 2 * 5 * 96 / 4},
    ),
}  # fmt: skip


# proves N8: each row is a way in which a plan counts a leaf, a layer, a microbatch or a dtype
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_step(name):
    plan, shapes, options, wanted = CASES[name]
    options = dict(options)
    sizes = options.pop("mesh", {"a": 4})
    params = {leaf: jax.ShapeDtypeStruct(shape, jnp.float32) for leaf, shape in shapes.items()}
    mesh = sk.abstract_mesh(**sizes)
    found = plan_traffic(plan, params, mesh, **options).sent
    assert {"".join(sorted(axes)): float(sent) for axes, sent in found.items()} == wanted


LAYERWISE = sk.fsdp("a", layerwise=("w",), min_size=1)
STAGES = {
    "dp": (sk.dp("a"), {"stage": 0}),
    "zero1": (sk.zero1("a", min_size=1), {"stage": 1}),
    "zero2": (sk.zero2("a", min_size=1), {"stage": 2}),
    "fsdp": (sk.fsdp("a", **FSDP), {"stage": 3, "layerwise": False}),
    "layerwise": (LAYERWISE, {"stage": 3}),
}


# Catches a closed form of ZeRO that is no longer what the plans of that name send.
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", STAGES)
def test_the_closed_form_of_zero_is_what_its_plan_sends(name, accumulate):
    plan, form = STAGES[name]
    params = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    mesh = sk.abstract_mesh(a=4)
    sent = plan_traffic(plan, params, mesh, accumulate=accumulate, value_bytes=BF16).sent
    # Parameters are gathered in bfloat16, but those of an update in float32.
    parameter_bytes = 4 if name in ("zero1", "zero2") else 2
    volume = sk.cost.zero_volume(
        8 * 16, 4, accumulate=accumulate, parameter_bytes=parameter_bytes, gradient_bytes=4, **form
    )
    assert {axes: float(size) for axes, size in sent.items()} == {("a",): volume}
