"""Training a part of the parameters: frozen leaves, optimizers by label, an average, as in `examples/lora.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from support.examples import difference, example_of
from support.refusals import raises, value_error

pytestmark = pytest.mark.usefixtures("standard_promotion")
LORA = example_of("lora")
RNG = np.random.default_rng(0)
BATCHES = [{"x": RNG.normal(size=(16, 16)).astype("f"), "y": RNG.normal(size=16).astype("f")} for _ in range(3)]


@pytest.fixture(scope="module")
def one_device():
    """Plain jax: the gradient of the trained leaves alone, an optimizer for each label, and the average."""
    params = LORA["init"](jax.random.key(0))
    groups = {"lora": LORA["select_lora"], "head": lambda params: params["head"]}
    states = {name: LORA["OPTIMIZERS"][name].init(of(params)) for name, of in groups.items()}
    average, losses = LORA["select_lora"](params), []

    def loss_fn(some, batch):
        layers = {"w": params["layers"]["w"], **some["lora"]["layers"]}
        return jnp.divide(*LORA["loss_fn"]({"layers": layers, "head": some["head"]}, batch, None))

    @jax.jit
    def step(some, states, average, batch):
        loss, grads = jax.value_and_grad(loss_fn)(some, batch)
        new = {name: LORA["OPTIMIZERS"][name].update(grads[name], states[name]) for name in groups}
        some = {name: optax.apply_updates(some[name], updates) for name, (updates, _) in new.items()}
        states = {name: state for name, (_, state) in new.items()}
        return loss, some, states, optax.incremental_update(some["lora"], average, 0.1)

    some = {name: of(params) for name, of in groups.items()}
    with jax.numpy_dtype_promotion("standard"):
        for batch in BATCHES:
            loss, some, states, average = step(some, states, average, batch)
            losses.append(loss)
    trained = {"layers": {"w": params["layers"]["w"], **some["lora"]["layers"]}, "head": some["head"]}
    return losses, trained, average


ROWS = {
    "dp": ({"data": 4}, sk.dp("data")),
    "fsdp": ({"data": 2, "fsdp": 2}, sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=("layers",), min_size=1))),
    "fsdp-whole": ({"data": 4}, sk.fsdp("data", min_size=1)),
    "zero1": ({"data": 4}, sk.zero1("data", min_size=1)),
    "zero2": ({"data": 4}, sk.zero2("data", layerwise=("layers",), min_size=1)),
}


# Catches a frozen leaf that moves, whose gradient is sent, or that has optimizer state; a trained one that is constant;
# and an average that is whole on each device.
@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("row", ROWS)
def test_a_part_of_the_parameters_is_trained(row, one_device):
    sizes, plan = ROWS[row]
    step, state = LORA["make"](sk.make_mesh(jax.devices()[:4], **sizes), plan)
    frozen = np.asarray(state.params["layers"]["w"])
    sent = sk.census(step, state, BATCHES[0])
    for batch, loss in zip(BATCHES, one_device[0], strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert difference((state.params, state.carried), one_device[1:]) < 1e-5
    np.testing.assert_array_equal(state.params["layers"]["w"], frozen)
    held = [x.shape for x in jax.tree.leaves(state.opt_state)]
    assert sorted(held) == [(), (4, 2, 16), (4, 2, 16), (4, 16, 2), (4, 16, 2)], held
    own, average = (
        jax.tree.map(lambda x: x.sharding.spec, tree) for tree in (LORA["select_lora"](state.params), state.carried)
    )
    assert average == own
    largest = max(row.bytes_in for row in sent.rows if row.kind != "all_gather")
    assert largest <= state.params["layers"]["up"].nbytes < frozen[:1].nbytes


# Catches a frozen leaf of a stage whose gradient is sent or moves it.
@pytest.mark.deep
def test_a_part_of_a_pipeline_is_trained(one_device):
    pipe = sk.pipeline(sk.schedules.lockstep(2, 4), "stage")
    grad_fn = pipe.value_and_grad(
        lambda shared, batch, keys: batch["x"],
        lambda layers, x, keys: sk.scan_layers(LORA["apply_layer"], layers, x),
        lambda shared, x, batch: sk.Mean.of(((x @ shared["head"])[:, 0] - batch["y"]) ** 2),
        trained=LORA["TRAINED"],
    )
    optimizer = optax.multi_transform(LORA["OPTIMIZERS"], LORA["LABELS"])
    plan, mesh = sk.chain(sk.dp("data"), pipe.plan), sk.make_mesh(jax.devices()[:4], data=2, stage=2)
    init, step = sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan)
    state = init(LORA["init"], jax.random.key(0))
    reduced = [row.bytes_in for row in sk.census(step, state, BATCHES[0]).rows if row.kind == "all_reduce"]
    assert max(reduced) == state.params["layers"]["up"].nbytes // 2
    for batch in BATCHES:
        state, _ = step(state, batch)
    assert difference(sk.unpadded(state.params), one_device[1]) < 1e-5


@pytest.mark.check
def test_what_is_trained_must_be_a_tree_of_bools_like_the_parameters():
    rule = "value_and_grad: trained must be a tree of bools like the parameters, or a prefix of them"
    for trained, kind, found in (
        ({"w": 1}, TypeError, "; got 1 in it. Pass for example {'layers': False, 'head': True}."),
        ({"w": False}, ValueError, ", True for some leaf; got {'w': False}. Set True for the leaves that you train."),
        ({}, ValueError, ", True for some leaf; got {}. Set True for the leaves that you train."),
    ):
        with raises(kind, rule + found):
            sk.value_and_grad(LORA["loss_fn"], trained=trained)
    grad_fn = sk.value_and_grad(lambda params, batch, keys: params["w"].sum(), trained={"v": True})
    with value_error(f"{rule}; got PyTreeDef({{'v': *}}) for PyTreeDef({{'w': *}}). Make it with jax.tree.map."):
        jax.eval_shape(grad_fn, {"w": np.ones(2, "f")}, None, None)
