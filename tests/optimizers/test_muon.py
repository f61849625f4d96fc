"""Muon by owners: optax's numbers on every plan, what it sends, and how much each device computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers

import shardkit as sk
from shardkit import schedules, testing
from shardkit.analysis.jaxpr.counts import flops
from shardkit.testing._compare import UnequalError
from shardkit.testing.exact.law import equal_for_all_inputs
from shardkit.testing.one_device import Reference, Training
from shardkit.testing.program import Program
from support.refusals import raises, type_error, value_error
from support.training import lenient

KEY, LAYERS, D, H, K, F = jax.random.key(0), 6, 8, 4, 2, 12
RNG = np.random.default_rng(0)


def draw(*shape: int) -> Any:
    return (0.3 * RNG.normal(size=shape)).astype(np.float32)


STACK = {
    "into": draw(LAYERS, D, H, K),
    "out": draw(LAYERS, H, K, D),
    "up": draw(LAYERS, D, F),
    "down": draw(LAYERS, F, D),
}
PARAMS = {"embed": draw(16, D), "layers": STACK | {"gain": 1 + draw(LAYERS, D)}}
BATCH = {"x": RNG.integers(0, 16, 16), "y": draw(16, D), "weight": 0.5 + RNG.integers(0, 3, 16).astype("f")}
EACH = {
    "matrices": {"into": (1, (2, 3)), "out": ((1, 2), 3), "up": (1, 2), "down": (1, 2)},
    "by heads": {"into": (1, 3), "out": (2, 3), "up": (1, 2), "down": (1, 2)},
}


def numbers(which: str) -> Any:
    def of(params: Any) -> Any:
        found = {name: MuonDimensionNumbers(*dims) for name, dims in EACH[which].items()}
        return {"embed": None, "layers": {name: found.get(name) for name in params["layers"]}}

    return of


def embed(shared: Any, batch: Any, keys: Any) -> jax.Array:
    return shared["embed"][batch["x"]]


def head(shared: Any, x: jax.Array, batch: Any) -> Any:
    return sk.Mean.of(jnp.sum((x - batch["y"]) ** 2, -1), batch["weight"])


def stage_of(axis: str | None) -> Any:
    def layer(w: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(jnp.einsum("bd,dhk->bhk", x * w["gain"][None], w["into"]))
        x = x + jnp.einsum("bhk,hkd->bd", h, w["out"])
        return x + sk.layers.row_linear(jnp.tanh(sk.layers.column_linear(x, w["up"], axis)), w["down"], axis)

    return lambda layers, x, keys: sk.scan_layers(layer, layers, x)


def grad_of(axis: str | None = None) -> Any:
    def loss(params: Any, batch: Any, keys: Any) -> Any:
        return head(params, stage_of(axis)(params["layers"], embed(params, batch, keys), keys), batch)

    return sk.value_and_grad(loss)


LAYERWISE: Any = {"min_size": 1, "layerwise": ("layers",)}
RULES = {
    "embed": P(),
    "layers": dict.fromkeys(PARAMS["layers"], P()) | {"up": P(None, None, "m"), "down": P(None, "m")},
}
PIPE = sk.pipeline(schedules.interleaved(2, 2, chunks=2), "stage", layers_per_stage=(1, 2, 1, 2))
PLANS = {
    "dp": ({"data": 8}, sk.dp("data")),
    "zero1": ({"data": 8}, sk.zero1("data", min_size=1)),
    "padded": ({"data": 8}, sk.fsdp("data", **LAYERWISE, uneven="pad")),
    "three axes": (
        {"a": 2, "b": 2, "c": 2},
        sk.chain(sk.dp("a"), sk.zero2("b", **LAYERWISE), sk.fsdp("c", **LAYERWISE)),
    ),
    "tensor": ({"data": 4, "m": 2}, sk.chain(sk.fsdp("data", **LAYERWISE), sk.tp("m", RULES))),
    "pipeline": ({"data": 4, "stage": 2}, sk.chain(sk.zero1("data", min_size=1), PIPE.plan)),
    "one device": ({"data": 1}, sk.fsdp("data", min_size=1)),
}


# Catches a matrix that is put together in another order, a part that returns to another device, padding that counts, a
# factor by the part's shape, and a group of leaves that are split differently.
# proves N42, N49
@pytest.mark.quick(
    "dp-by heads",
    "zero1-matrices",
    "padded-matrices",
    "three axes-matrices",
    "tensor-by heads",
    "pipeline-by heads",
    "one device-by heads",
)
@pytest.mark.parametrize("which", EACH)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_has_optaxs_numbers(name, which):
    sizes, plan = PLANS[name]
    options = {"muon_weight_dimension_numbers": numbers(which)}
    options |= {"weight_decay": 0.1, "nesterov": False, "consistent_rms": 0.2} if which == "by heads" else {}
    types = {"axis_types": AxisType.Explicit} if name == "padded" else {}
    mesh = sk.make_mesh(jax.devices()[: int(np.prod([*sizes.values()]))], **types, **sizes)
    grad_fn = grad_of("m" if name == "tensor" else None)
    if name == "pipeline":
        grad_fn = PIPE.value_and_grad(embed, stage_of(None), head)
    optimizer, batches = lenient(sk.muon(0.02, mesh=mesh, plan=plan, **options)), (BATCH, BATCH)
    program = Program.of(testing.Row(sizes, plan, **types), grad_fn, optimizer, PARAMS, [*batches], KEY)
    alone = Training(grad_of(), lenient(optax.contrib.muon(0.02, **options)), PARAMS, batches, KEY)
    assert equal_for_all_inputs(program, Reference((), alone)) is None


def test_a_padded_square_is_orthogonalized_as_it_is():
    """Padded it would be taller than wide, and rescaled by columns."""
    plan, params = sk.fsdp("data", min_size=1, uneven="pad"), {"w": draw(9, 9)}
    grad_fn = sk.value_and_grad(lambda params, batch, keys: sk.Mean.of(jnp.tanh(batch["y"] @ params["w"][:8]).sum(1)))
    mesh, options = sk.make_mesh(jax.devices()[:4], data=4), {"preconditioning": "aol"}
    optimizer = lenient(sk.muon(0.02, mesh=mesh, plan=plan, **options))
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan)
    one = sk.make_mesh(jax.devices()[:1], data=1)
    alone = sk.make_train_step(grad_fn, lenient(optax.contrib.muon(0.02, **options)), mesh=one, plan=sk.dp("data"))
    found, wanted = step(init(params, KEY), BATCH)[0], alone.step(alone.init(params, KEY), BATCH)[0]
    assert jax.tree.structure(sk.unpadded(found.opt_state)) == jax.tree.structure(wanted.opt_state)
    np.testing.assert_allclose(sk.unpadded(found.params)["w"], wanted.params["w"], atol=1e-5)


def test_hyperparameters_are_injected():
    """Arrays in place of numbers, as for optax's."""
    options = {"learning_rate": 0.02, "beta": 0.9, "weight_decay": 0.1, "ns_steps": 4}
    here = {"mesh": sk.make_mesh(jax.devices()[:2], data=2), "plan": sk.zero1("data", min_size=1)}
    w, found = {"w": draw(6, 4)}, []
    for muon, more in ((sk.muon, here), (optax.contrib.muon, {})):
        static = ("ns_coeffs", "nesterov", "preconditioning", *more)
        with jax.numpy_dtype_promotion("standard"):
            optimizer = optax.inject_hyperparams(muon, static_args=static)(**options, **more)
            found.append(jax.jit(optimizer.update)(w, optimizer.init(w), w)[0]["w"])
    np.testing.assert_allclose(*found, atol=1e-6)


def test_another_muon_is_another():
    """Of one iteration less; the law of the test before must not say that it is the same."""
    sizes, plan = PLANS["zero1"]
    mesh, options = sk.make_mesh(**sizes), {"muon_weight_dimension_numbers": numbers("matrices")}
    optimizer = lenient(sk.muon(0.02, mesh=mesh, plan=plan, ns_steps=4, **options))
    program = Program.of(testing.Row(sizes, plan), grad_of(), optimizer, PARAMS, [BATCH], KEY)
    alone = Training(grad_of(), lenient(optax.contrib.muon(0.02, **options)), PARAMS, (BATCH,), KEY)
    with pytest.raises(UnequalError, match=r"the updated parameter layers.* is not the reference's for all inputs"):
        equal_for_all_inputs(program, Reference((), alone))


def flops_of(optimizer: Any, mesh: Any, plan: sk.Plan) -> int:
    """FLOPs of the matrix products of a step on a device."""
    init, step = sk.make_train_step(grad_of(), optimizer, mesh=mesh, plan=plan)
    return flops(step.trace(init(PARAMS, KEY), BATCH).jaxpr.jaxpr)


# proves N49: of six layers on eight devices a device has at most one of each kind, and sends and gets its parts alone
@pytest.mark.parametrize(("name", "kind", "each"), [("dp", "all_gather", 8), ("zero1", "all_to_all", 2)])
def test_what_a_device_computes_and_sends(name, kind, each):
    sizes, plan = PLANS[name]
    mesh, options = sk.make_mesh(**sizes), {"muon_weight_dimension_numbers": numbers("matrices")}
    optimizer, one = lenient(sk.muon(0.02, mesh=mesh, plan=plan, **options)), sk.make_mesh(jax.devices()[:1], data=1)
    alone = [
        flops_of(opt, one, sk.dp("data")) for opt in (lenient(optax.contrib.muon(0.02, **options)), optax.sgd(0.1))
    ]
    split = [flops_of(opt, mesh, plan) for opt in (optimizer, optax.sgd(0.1))]
    assert LAYERS * (split[0] - split[1]) == alone[0] - alone[1] > 0
    init, step = sk.make_train_step(grad_of(), optimizer, mesh=mesh, plan=plan)
    rows = sk.census(step, init(PARAMS, KEY), BATCH).select(kind=kind)
    rows = [row for row in rows if "owners.py" in row.source]
    elements = 8 * 2 * (D * H * K + D * F)  # of eight layers, two of which are zeros
    assert sum(row.sent for row in rows) == each * 4 * elements // 8 * 7 // 8


def test_what_is_refused():
    mesh, plan, w = sk.make_mesh(data=8), sk.dp("data"), {"w": jnp.ones(4)}
    optimizer = sk.muon(0.02, mesh=mesh, plan=plan)
    with type_error("muon: update must be passed the parameters, for their layout; got None. Pass them third."):
        optimizer.update(w, optimizer.init(w))
    wrong = sk.muon(0.02, mesh=mesh, plan=plan, muon_weight_dimension_numbers={"w": MuonDimensionNumbers(0, 0)})
    with value_error(
        "muon: rows and columns of leaf w must be different dims; got (0,) and (0,). Name others, or None for adam."
    ):
        lenient(wrong).update(w, wrong.init(w), w)
    with value_error("parameters: the path of each leaf must be unique; got two leaves at 'a.b'. Rename one of them."):
        twice = {"a": {"b": jnp.ones((4, 4))}, "a.b": jnp.ones((4, 8))}
        jax.eval_shape(lambda w: optimizer.update(w, optimizer.init(w), w), twice)


COEFFICIENTS = "muon: ns_coeffs must be three finite numbers, or three for each step; got {}. Pass for example "
COEFFICIENTS += "(3.4445, -4.7750, 2.0315)."
TOO_MANY = "muon: ns_coeffs with one row for each step must have 1 to ns_steps=5 rows; got 6. Pass ns_steps=6."
OF_MATRICES = "muon: muon_weight_dimension_numbers must be a tree of optax.contrib.MuonDimensionNumbers and None, or a "
OF_MATRICES += "function that returns one; got {'w': 1}. Pass None for all leaves of two dims."
BETA = "muon: beta must be below 1, the share of the momentum that is kept; got 1. Pass 0.95."


@pytest.mark.check
@pytest.mark.parametrize(
    "kind, message, option",
    [
        (ValueError, COEFFICIENTS.format("(nan, 1.0, 1.0)"), {"ns_coeffs": (float("nan"), 1.0, 1.0)}),
        (ValueError, COEFFICIENTS.format("((1, 2), (1, 2, 3))"), {"ns_coeffs": ((1, 2), (1, 2, 3))}),
        (ValueError, COEFFICIENTS.format("'quintic'"), {"ns_coeffs": "quintic"}),
        (ValueError, TOO_MANY, {"ns_coeffs": ((3.0, -4.0, 2.0),) * 6}),
        (ValueError, BETA, {"beta": 1}),
        (TypeError, OF_MATRICES, {"muon_weight_dimension_numbers": {"w": 1}}),
    ],
)
def test_arguments_that_mean_nothing_are_refused(kind, message, option):
    with raises(kind, message):
        sk.muon(0.1, mesh=sk.abstract_mesh(data=8), plan=sk.dp("data"), **option)


def test_coefficients_are_numbers_of_any_kind():
    mesh, plan, w = sk.abstract_mesh(data=8), sk.dp("data"), {"w": jnp.ones((4, 4))}
    for given in ((3, -4, 2), np.array([3, -4, 2]), [[3, -4, 2]], (3.0, -4, 2)):
        state = jax.eval_shape(sk.muon(0.1, mesh=mesh, plan=plan, ns_coeffs=given).init, w)
        assert state.inner_states["muon"].inner_state[0].ns_coeffs.dtype == jnp.float32
