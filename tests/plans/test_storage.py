"""Leaves that do not divide under uneven="pad": stored and sent with their padding, and never computed with it."""

from fractions import Fraction
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis.hlo.differences import compiled, is_written
from shardkit.plans.storage import Padded, leaves_by_path
from support.layouts import Specs, specs
from support.optimizers import OPTIMIZERS, OWN, without_a_mesh
from support.refusals import value_error
from support.training import past_a_nan
from support.trees import assert_close, assert_laid_out

BATCH = 16
SENT = ("all_gather", "reduce_scatter")
SHAPES = {"w": (7, 5), "b": (5,), "v": (5, 3)}
HELD = 8 * 5 + 8 + 5 * 4  # each leaf with the dim lengthened that four devices lengthen least
LAYERWISE = 7 * 8 + 5 * 4  # dim 0 counts as the layers', so that the bias stays whole
PLANS = {
    "zero1": lambda **o: sk.zero1("d", min_size=1, uneven="pad", **o),
    "zero2": lambda **o: sk.zero2("d", min_size=1, uneven="pad", **o),
    "fsdp": lambda **o: sk.fsdp("d", min_size=1, uneven="pad", **o),
    "fsdp layerwise": lambda **o: sk.fsdp("d", min_size=1, uneven="pad", layerwise=("w", "b", "v"), **o),
}
LAID_OUT = {
    "zero1": ({"d": 4}, PLANS["zero1"]),
    "fsdp": ({"d": 4}, PLANS["fsdp"]),
    "two padded dims": (
        {"d": 4, "z": 2},
        lambda: sk.chain(
            PLANS["fsdp"](rules=lambda path, shape: 0),
            sk.zero1("z", min_size=1, uneven="pad", rules=lambda path, shape: len(shape) - 1),
        ),
    ),
}
CROSSING = ["adafactor", "lamb", "muon", "novograd", "clip_by_global_norm", "clip_by_block_rms", "adaptive_grad_clip"]


def loss_fn(params, batch, keys):
    layer = sk.gathered(lambda p, x: jnp.tanh(x @ p["w"] + p["b"][None, :]) @ p["v"])
    return sk.Mean.of((layer(params, batch["x"]) - batch["y"]) ** 2)


def make_params():
    rng = np.random.default_rng(0)
    return {name: 0.5 * rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def make_batch(step=0):
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(BATCH, 7)).astype("f"), "y": rng.normal(size=(BATCH, 3)).astype("f")}


def make(plan, optimizer=None, sizes=None, **options):
    sizes = sizes or {"d": 4}
    mesh = sk.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    return sk.make_train_step(sk.value_and_grad(loss_fn), optimizer, mesh=mesh, plan=plan, **options)


@cache
def one_device(name):
    """Parameters and optimizer state after three steps without a mesh."""
    return without_a_mesh(name, loss_fn, make_params(), map(make_batch, range(3)))


def padding_of(tree):
    """All values in the padding of a tree."""
    nodes = [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Padded)) if isinstance(x, Padded)]
    for node in nodes:
        inside = np.zeros(node.array.shape, bool)
        inside[tuple(slice(size) for size in node.shape)] = True
        yield np.asarray(node.array)[~inside]


# ---- numbers


@pytest.mark.quick("clip_by_block_rms-zero1", "novograd-fsdp", "lamb-two padded dims", "adafactor-fsdp")
@pytest.mark.parametrize("kind", LAID_OUT)
@pytest.mark.parametrize("name", ["adamw", *CROSSING])
def test_the_optimizer_sees_original_shapes(name, kind):  # proves F13, F53, F55, S67, S92
    sizes, plan = LAID_OUT[kind]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        wanted, opt_state = one_device(name)
        init, step = make(plan(), OPTIMIZERS[name](), sizes)
        state = init(make_params(), jax.random.key(0))
        for index in range(3):
            state, _ = step(state, make_batch(index))
    assert_close(sk.unpadded(state.params), wanted)
    shapes = lambda tree: jax.tree.map(jnp.shape, tree)  # noqa: E731
    assert shapes(sk.unpadded(state.opt_state)) == shapes(opt_state)
    assert all((x == 0).all() for x in padding_of(state))


@pytest.mark.quick("fsdp layerwise")
@pytest.mark.parametrize("kind", PLANS)
def test_dtypes_accumulation_and_a_loss_scale_go_with_it(kind):  # proves F13, F23
    low = sk.Precision(compute=jnp.bfloat16, param=jnp.bfloat16, master=jnp.float32, loss_scale="dynamic")
    with jax.numpy_dtype_promotion("standard"):
        made = [
            make(plan, optax.adam(1e-2), precision=low, accumulate=2, nonfinite="skip")
            for plan in (PLANS[kind](), sk.dp("d"))
        ]
        states = [past_a_nan(each, make_params(), make_batch, BATCH - 1) for each in made]
    # bfloat16 rounds what the plans sum in another order; the steps are of 1e-2
    assert_close(sk.unpadded(states[0].opt_state.copy), states[1].opt_state.copy, 4e-3)
    for leaf, copy in states[0].opt_state.copy.items():
        assert jnp.array_equal(sk.unpadded(states[0].params[leaf]), sk.unpadded(copy).astype(jnp.bfloat16))


# ---- what is stored and sent


def abstract(kind, **options):
    plan = PLANS[kind]()
    made = sk.make_train_step(
        sk.value_and_grad(loss_fn), optax.adam(1e-3), mesh=sk.abstract_mesh(d=4), plan=plan, **options
    )
    return made.step, made.init.abstract(make_params())


@pytest.mark.parametrize("k", [1, 2])
def test_what_is_sent_is_the_closed_form_of_the_padded_leaves(k):  # proves F13, S68
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch())
    with jax.numpy_dtype_promotion("standard"):
        for kind, times in {"zero1": 2, "zero2": k + 1, "fsdp": 2, "fsdp layerwise": 3 * k}.items():
            step, state = abstract(kind, accumulate=k)
            census = sk.census(step, state, batch)
            loss = sum(row.total for row in census.rows if row.kind == "all_reduce")
            held = LAYERWISE if "layerwise" in kind else HELD
            spared = k * Fraction(3, 4) * 4 * 7 * 8 if "layerwise" in kind else 0  # w is not gathered again: x is data
            assert census.sent() - loss == times * Fraction(3, 4) * 4 * held - spared
            assert {row.kind for row in census.rows} == {"all_reduce", *SENT}


def test_what_is_held_is_the_padded_leaf_over_n():  # proves F13, S65, S69
    whole = 4 * (7 * 5 + 5 + 5 * 3)
    for kind, params, update in [
        ("zero1", whole, HELD),
        ("zero2", whole, HELD),
        ("fsdp", HELD, HELD),
        ("fsdp layerwise", LAYERWISE + 4 * 5, LAYERWISE + 4 * 5),
    ]:
        state = abstract(kind)[1]
        assert (sk.bytes_per_device(state.params), sk.bytes_per_device(state.opt_state)) == (params, 2 * update + 4)


@pytest.mark.quick("clip_by_global_norm-zero1", "lamb-fsdp")
@pytest.mark.parametrize("kind", ["zero1", "fsdp"])
@pytest.mark.parametrize("name", ["adamw", "clip_by_global_norm", "lamb", "adafactor", "muon"])
def test_cutting_and_padding_add_no_collective(kind, name):  # proves F13, F55
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        init, step = make(PLANS[kind](), optax.with_extra_args_support(OPTIMIZERS[name]()))
        found = compiled(step, init(make_params(), jax.random.key(0)), make_batch())
    own = [row for row in found.rows if not is_written(row)]
    # muon multiplies matrices with their transposes, for which the compiler gathers rows that do not divide
    count, sent = (21, 1600) if name == "muon" else OWN[name]
    assert sum(row.times for row in own) <= count and sum(row.total for row in own) <= sent
    ours = {kind: sum(row.total for row in found.rows if is_written(row) and row.kind == kind) for kind in SENT}
    assert ours == dict.fromkeys(SENT, Fraction(3, 4) * 4 * HELD)


# ---- layouts


def test_the_dim_is_the_one_that_padding_lengthens_least():
    tree = {"w": (7, 9), "even": (4, 9), "stack": {"w": (3, 5)}, "scale": ()}
    tree = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), tree, is_leaf=lambda x: isinstance(x, tuple))
    plan = sk.fsdp("d", min_size=1, uneven="pad", layerwise=("stack",))
    found = specs(plan.layouts(tree, sk.abstract_mesh(d=4)))
    assert found["w"] == Specs(P("d"), P(), P("d"), padded=((0, 7),))
    assert found["even"] == Specs(P("d"), P(), P("d"))  # what divides is not padded
    assert found["scale"] == Specs(P(), P(), P())
    assert found["stack"]["w"].padded == ((1, 5),)  # the layers' dim never is


def test_a_plan_says_what_is_padded():  # proves F13, S65, S68
    plan = sk.chain(PLANS["fsdp"](), sk.zero1("z", min_size=1, uneven="pad"))
    tree = {**make_params(), "scale": jnp.float32(1)}
    assert sk.describe(plan, tree, sk.abstract_mesh(d=4, z=3)).splitlines() == [
        "leaf   shape   at rest      bytes/device  update      bytes/device  why",
        "b      [5]     ('d',)       8             ('d',)      8             "
        "fsdp('d') splits dim 0, padded from 5 to 8; zero1('z'): no dim is left to pad",
        "scale  []      whole        4             whole       4             "
        "fsdp('d'): a scalar, which has no dim; zero1('z'): a scalar, which has no dim",
        "v      [5, 3]  (None, 'd')  20            ('z', 'd')  8             "
        "fsdp('d') splits dim 1, padded from 3 to 4; zero1('z') splits dim 0, padded from 5 to 6",
        "w      [7, 5]  ('d',)       40            ('d', 'z')  16            "
        "fsdp('d') splits dim 0, padded from 7 to 8; zero1('z') splits dim 1, padded from 5 to 6",
        "fsdp('d') + zero1('z'): 72 bytes per device at rest, 36 per gradient or optimizer moment",
    ]
    init, _ = make(PLANS["fsdp"]())
    state = init(make_params(), jax.random.key(0))
    assert sk.describe(PLANS["fsdp"](), state.params) == sk.describe(PLANS["fsdp"](), make_params(), mesh4())


def mesh4():
    return sk.make_mesh(jax.devices()[:4], d=4)


@pytest.mark.parametrize(
    "message, make_layouts",
    {
        "zero1: dim 0 of leaf b must be divisible by axis 'z' or one that can be padded, which a layer "
        "dim, or a dim that another strategy splits, cannot; got shape (2,) over 3 devices. Choose another "
        "dim.": lambda tree: sk.chain(
            sk.fsdp("d", min_size=1, uneven="pad", rules=lambda path, shape: 0),
            sk.zero1("z", min_size=1, uneven="pad", rules=lambda path, shape: 0),
        ).layouts(tree, sk.abstract_mesh(d=4, z=3)),
        "zero2: dim 0 of leaf w must be divisible by axis 'd' or one that can be padded, which a layer dim, or "
        "a dim that another strategy splits, cannot; got shape (7, 5) over 4 devices. "
        "Choose another dim.": lambda tree: sk.zero2(
            "d", min_size=1, uneven="pad", layerwise=("w",), rules=lambda path, shape: 0
        ).layouts({"w": tree["w"]}, sk.abstract_mesh(d=4)),
    }.items(),
)
def test_a_dim_that_cannot_be_padded_is_refused(make_layouts, message):
    with value_error(message):
        make_layouts({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()})


# ---- a state


@pytest.mark.quick("fsdp layerwise")
@pytest.mark.parametrize("kind", PLANS)
def test_a_state_goes_out_and_comes_back(kind):
    init, step = make(PLANS[kind](), nonfinite="skip")
    state = init(make_params(), jax.random.key(0))
    assert_close(sk.unpadded(state.params), make_params(), 0)
    assert_laid_out(state, init.abstract(make_params()))
    saved, layouts = jax.device_get(state._replace(key=None)), jax.tree.map(lambda x: x.sharding, state)
    state, metrics = step(state, make_batch())
    restored = jax.device_put(saved, layouts._replace(key=None))._replace(key=jax.random.key(0))
    again, metrics_again = step(restored, make_batch())
    assert metrics["loss"] == metrics_again["loss"]
    jax.tree.map(np.testing.assert_array_equal, state.params, again.params)
    assert all(x.is_deleted() for x in jax.tree.leaves(restored.params))  # the step donates its padded state too


def test_another_plan_takes_the_parameters_over():
    init, step = make(PLANS["fsdp"]())
    state, _ = step(init(make_params(), jax.random.key(0)), make_batch())
    wanted = sk.unpadded(state.params)
    other = make(PLANS["zero1"](), sizes={"d": 8})[0](state.params, jax.random.key(0))
    assert_close(other.params, wanted, 0)
    assert jax.tree.map(jnp.shape, sk.unpadded(other.opt_state)) == jax.tree.map(
        jnp.shape, (optax.sgd(0.1, 0.9).init(wanted))
    )


def test_parameters_made_inside_jit_are_padded_there_and_evaluation_takes_them():
    init, _ = make(PLANS["fsdp"]())
    made = init(lambda key: jax.tree.map(lambda x: x + 1, make_params()), jax.random.key(0))
    assert_close(sk.unpadded(made.params), jax.tree.map(lambda x: x + 1, make_params()), 0)
    assert made.params["w"].array.sharding.spec == P("d") and made.params["w"].array.shape == (8, 5)
    init, _ = make(PLANS["fsdp layerwise"]())
    state = init(make_params(), jax.random.key(0))
    evaluate = sk.make_eval_step(loss_fn, mesh=mesh4(), plan=PLANS["fsdp layerwise"]())
    loss = loss_fn(make_params(), make_batch(), None)
    np.testing.assert_allclose(evaluate(state.params, make_batch())["loss"], loss.total / loss.weight, rtol=1e-6)


def test_a_padded_state_is_evaluated_under_its_own_plan_or_unpadded():
    """Under another plan the zeros would count as classes: a loss of 2.079 and not 1.609."""
    mesh = sk.make_mesh(data=8)
    classes = {"b": np.zeros(5, np.float32)}  # of equal logits: log 5
    loss = lambda params, batch, keys: sk.Mean.of(-jax.nn.log_softmax(params["b"])[batch])  # noqa: E731
    init, step = sk.make_train_step(
        sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=sk.fsdp("data", min_size=1, uneven="pad")
    )
    state, batch = init(classes, jax.random.key(0)), np.arange(40, dtype=np.int32) % 5
    evaluate = sk.make_eval_step(loss, mesh=mesh, plan=sk.dp("data"))
    with value_error(
        "evaluate: the parameters must be stored as this plan stores them; leaf b is stored with dim 0 of 5 padded, "
        "and must be in its original form. Pass unpadded(...) of them to init, or to an evaluation with a plan that "
        "pads nothing."
    ):
        evaluate(state.params, batch)
    np.testing.assert_allclose(evaluate(sk.unpadded(state.params), batch)["loss"], np.log(5), rtol=1e-6)
    _, other = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
    with pytest.raises(ValueError, match="step: the state must be laid out as the plan of the step says; leaf params"):
        other(state, batch)
    step(state, batch)


@pytest.mark.check
def test_leaves_that_share_a_path_are_refused_where_they_are_kept_by_path():
    """Of two the second took the place of the first: in the rules of tp, in muon, in what diloco exchanges."""
    params = {"a": {"b": np.ones((4, 8), "f")}, "a.b": np.ones((8, 4), "f")}
    mesh, says = sk.abstract_mesh(data=2, model=2), "the path of each leaf must be unique; got two leaves at 'a.b'. "
    says += "Rename one of them."
    with value_error(f"tp: rules: {says}"):
        sk.tp("model", {"a": {"b": P(None, "model")}, "a.b": P("model")})
    with value_error(f"parameters: {says}"):
        leaves_by_path(params)
    with value_error(f"describe: {says}"):
        sk.describe(params)
    layouts = sk.chain(sk.fsdp("data", min_size=1), sk.tp("model", lambda path, shape: shape.index(8)))
    found = layouts.layouts(params, mesh)
    assert (found["a"]["b"].rest, found["a.b"].rest) == (P("data", "model"), P(("model", "data")))
