"""scan_layers: the same bits however the weights travel, the traffic of each way, memory, and what is refused."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import shardkit as sk
from shardkit import cost
from shardkit._jax.jaxprs import walk
from shardkit.testing import assert_same_training
from support.compilers import gpu, tpu
from support.refusals import raises, value_error

BATCH, WIDTH, HIDDEN = 16, 16, 32
PLANS = {
    "dp": sk.dp("d"),
    "zero2": sk.zero2("d", min_size=1, layerwise=("layers",)),
    "fsdp": sk.fsdp("d", min_size=1, layerwise=("layers",)),
    "fsdp and zero2": sk.chain(
        sk.fsdp("d", min_size=1, layerwise=("layers",)), sk.zero2("z", min_size=1, layerwise=("layers",))
    ),
}
WAYS = [
    {},
    {"remat": "full"},
    {"remat": "dots"},
    {"remat": "dots_without_batch"},
    {"prefetch": True, "remat": "full", "microbatches": 2},
    {"prefetch": True},
    {"prefetch": True, "remat": "full"},
    {"microbatches": 2},
    {"remat": ("hidden",), "microbatches": 2},
    {"prefetch": True, "remat": ("hidden",), "offload": True},
    {"remat": "dots_without_batch", "offload": True},
    {"prefetch": True, "remat": jax.checkpoint_policies.everything_saveable},
]


def params(layers):
    rng = np.random.default_rng(0)
    shapes = {"up": (layers, WIDTH, HIDDEN), "down": (layers, HIDDEN, WIDTH)}
    stack = {name: (0.1 * rng.normal(size=shape)).astype("f") for name, shape in shapes.items()}
    stack["gain"] = np.ones((layers, WIDTH), "f")
    return {"layers": stack, "head": rng.normal(size=(WIDTH, 3)).astype("f")}


def loss_fn(way):
    def loss(params, batch, keys):
        table = jnp.linspace(0.0, 1.0, WIDTH)[None]  # a layer may close over constants, and over what has a gradient
        scale = jnp.mean(params["head"] ** 2)  # not saturated: its gradient is that of a weight which layers close over

        def layer(weights, x):
            (w, number), (x, keys) = weights, x  # integers and keys travel along
            h = jnp.tanh((sk.dropout(x + table.astype(x.dtype), keys, 0.1) * w["gain"][None]) @ w["up"])
            h = checkpoint_name(h, "hidden") @ w["down"] * scale
            return x + h / (1 + number.astype(x.dtype)), keys

        numbers = jnp.arange(jax.tree.leaves(params["layers"])[0].shape[0])
        x, _ = sk.scan_layers(layer, (params["layers"], numbers), (batch["x"], keys), **way)
        return sk.Mean.of((x @ params["head"] - batch["y"]) ** 2)

    return loss


def batch(step):
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(BATCH, WIDTH)).astype("f"), "y": rng.normal(size=(BATCH, 3)).astype("f")}


def trained(name, layers, way, steps=2, accumulate=1):
    mesh = sk.make_mesh(jax.devices()[:2], z=1, d=2)
    init, step = sk.make_train_step(
        sk.value_and_grad(loss_fn(way)), optax.sgd(0.01), mesh=mesh, plan=PLANS[name], accumulate=accumulate
    )
    state = init(params(layers), jax.random.key(0))
    for index in range(steps):
        state, _ = step(state, batch(index))
    return state.params, step, state


@pytest.mark.quick("gathered-checkpoint")
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize("run", ["gathered", "scan_layers"])
def test_one_trace_serves_calls_that_are_differentiated_differently(run, wrap):
    """jax keeps the trace: the first call's input is data, the second's depends on parameters."""
    layer = lambda w, x: x + jnp.tanh(x @ w["w"])  # noqa: E731

    def loss(params, batch, keys):
        stack = params["layers"]
        if run == "gathered":
            each = [jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(2)]
            call = wrap(lambda w, x: sk.gathered(layer)(w, x))
        else:
            each = [stack, stack]
            call = wrap(lambda w, x: sk.scan_layers(layer, w, x))
        return sk.Mean.of((call(each[1], call(each[0], batch)) * call(each[0], batch)) @ params["head"])

    rng = np.random.default_rng(0)
    tree = {"layers": {"w": 0.5 * rng.normal(size=(2, 4, 4)).astype("f")}, "head": np.ones((4, 1), "f")}
    assert_same_training(
        sk.value_and_grad(loss),
        sk.value_and_grad(loss),
        optax.sgd(0.1),
        mesh=sk.make_mesh(jax.devices()[:2], d=2),
        plan=PLANS["fsdp"],
        params=tree,
        batches=[rng.normal(size=(4, 4)).astype("f")],
    )


@cache
def one_device(layers):
    """Parameters after two steps without a mesh."""

    @jax.jit
    def step(params, batch, keys):
        def mean(params):
            loss = loss_fn({})(params, batch, keys)
            return loss.total / loss.weight

        return jax.tree.map(lambda p, g: p - jnp.float32(0.01) * g, params, jax.grad(mean)(params))

    found = params(layers)
    for index in range(2):
        found = step(found, batch(index), sk.example_keys(sk.step_key(jax.random.key(0), index), BATCH))
    return found


# Every option under one plan, one layer and an odd number of them, and what changes the order of gathers and sums.
CHOSEN = {(1, "zero2", 2), (3, "fsdp and zero2", 2), (4, "fsdp", 5), (5, "fsdp and zero2", 1), (6, "fsdp", 2)}
CHOSEN |= {(7, "fsdp and zero2", 2), (8, "dp", 2), (9, "zero2", 2)}
# In the deep tier every way under every plan; the numbers of layers take turns, so that each way and plan meets all.
ALL = [(way, name, (1, 2, 5)[(way + i) % 3]) for way in range(len(WAYS)) for i, name in enumerate(PLANS)]
ALL += sorted(CHOSEN - set(ALL))


@pytest.mark.parametrize(
    ("way", "name", "layers"), [pytest.param(*row, marks=[] if row in CHOSEN else pytest.mark.deep) for row in ALL]
)
def test_every_way_of_running_a_stack_gives_the_same_parameters(way, name, layers):  # proves F19, F23, F46, F49
    found, *_ = trained(name, layers, WAYS[way])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, one_device(layers))


# 256 + 1 + 1 + 1 is 259, which bfloat16 does not know: added one by one it stays 256. The gradient of a whole leaf has
# its dtype, and is rounded once, to 260.
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize(("name", "total"), [("fsdp", 259), pytest.param("dp", 260, marks=pytest.mark.deep)])
def test_microbatches_are_summed_in_float32(name, total, prefetch):  # proves F23, F45
    def loss(params, batch, keys):
        y = sk.scan_layers(lambda w, x: x * w[None], params["layers"], batch, microbatches=4, prefetch=prefetch)
        return sk.Mean.of(y[:, 0])

    mesh = sk.make_mesh(jax.devices()[:2], d=2)
    policy = sk.Precision(compute=jnp.bfloat16)
    init, step = sk.make_train_step(
        sk.value_and_grad(loss), optax.sgd(1.0), mesh=mesh, plan=PLANS[name], precision=policy
    )
    state = init({"layers": np.ones((2, 2), "f")}, jax.random.key(0))
    state, _ = step(state, np.tile(np.array([[256], [1], [1], [1]], "f"), (2, 2)))
    np.testing.assert_array_equal(1 - np.asarray(state.params["layers"])[:, 0], total / 4)


def traffic(step, state):
    census = sk.census(step, state, batch(0))
    assert census.count(kind="all_reduce") == 1  # the loss
    return {kind: (census.count(kind=kind), census.sent(kind=kind)) for kind in ("all_gather", "reduce_scatter")}


@pytest.mark.quick("5")
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_prefetching_sends_what_gathering_in_place_sends_but_for_the_last_layer(layers):  # proves F20, F23
    for k in (1, 2):
        _, *plain = trained("fsdp", layers, {"remat": "full"}, steps=0, accumulate=k)
        _, *ahead = trained("fsdp", layers, {"prefetch": True}, steps=0, accumulate=k)
        assert traffic(*plain)["all_gather"][0] == 1 + 2 * k * layers * 3  # the head once, three leaves twice
        assert traffic(*ahead)["all_gather"][0] == 1 + k * (2 * layers - 1) * 3  # the last layer's once
        assert traffic(*ahead)["reduce_scatter"] == traffic(*plain)["reduce_scatter"]
        assert traffic(*ahead)["reduce_scatter"][0] == 1 + k * layers * 3


@pytest.mark.quick("fsdp-3-1-False", "zero2-2-2-False", "fsdp-3-4-True", "zero2-2-1-True")
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize(("name", "stage"), [("fsdp", 3), ("zero2", 2)])
def test_layer_major_accumulation_sends_as_much_as_none(name, stage, k, prefetch):  # proves F19, F20, F45
    _, step, state = trained(name, 5, {"prefetch": prefetch, "microbatches": k}, steps=0)
    sizes = {part: sum(x.size for x in jax.tree.leaves(tree)) for part, tree in state.params.items()}
    bytes_ = {"parameter_bytes": 4, "gradient_bytes": 4}
    expected = cost.zero_volume(sizes["layers"], 2, stage, accumulate=k, layer_major=True, **bytes_)
    expected += cost.zero_volume(sizes["head"], 2, stage, layerwise=False, **bytes_)
    if prefetch and stage == 3:  # the last of five layers is gathered once
        expected -= sizes["layers"] // 5 * 4 // 2
    assert sum(sent for _, sent in traffic(step, state).values()) == expected


def test_a_prefetched_gather_stands_before_the_layer_that_hides_it():
    _, step, state = trained("fsdp", 5, {"prefetch": True}, steps=0)
    jaxpr = step.trace(state, batch(0)).jaxpr.jaxpr
    scans = [site.equation.params["jaxpr"].jaxpr.eqns for site in walk(jaxpr) if site.name == "scan"]
    bodies = [[e.primitive.name for e in body] for body in scans]
    bodies = [names for names in bodies if any("custom_vjp" in n or n == "all_gather" for n in names)]
    assert len(bodies) == 2  # forward and backward
    for names in bodies:
        gather = min(i for i, n in enumerate(names) if n in ("all_gather", "custom_vjp_call", "custom_vjp_call_jaxpr"))
        computes = ("dot_general", "checkpoint", "remat2")
        assert gather < min(i for i, n in enumerate(names) if n in computes)


@jax.tree_util.register_dataclass
@dataclass
class Norm:
    mean: Any


@pytest.mark.parametrize("place", [None, 0, "norm"])
def test_what_a_layer_sets_would_be_lost(place):
    norm = Norm(jnp.ones(3))
    weights = {None: norm, 0: (norm, jnp.arange(3)), "norm": {"norm": norm, "w": jnp.ones(3)}}[place]

    def layer(weights, x):
        (weights if place is None else weights[place]).mean = x
        return x

    with pytest.raises(ValueError, match=r"^scan_layers: a layer must not change .* it changed .*mean\. Pass "):
        sk.scan_layers(layer, weights, jnp.ones(()))


def test_a_dict_of_weights_is_the_layers_own():
    def layer(weights, x):
        weights["w"] = weights["w"] * 2
        return x * weights["w"]

    assert float(sk.scan_layers(layer, {"w": jnp.ones(3)}, jnp.ones(()))) == 8


# One device's program, the same layer under fsdp, and under a checkpoint: a flag of Python was traced there.
@pytest.mark.parametrize("options", [{}, {"keep": True}, {"remat": "full"}])
@pytest.mark.parametrize("name", ["dp", "fsdp"])
def test_a_gathered_layer_may_branch_by_what_is_no_array(name, options):
    def project(w, x, activation, *, scale=1, residual=False):
        y = jnp.tanh(x @ w) if activation == "tanh" else x @ w
        return x + scale * y if residual else y

    def loss(params, batch, keys):
        layer = sk.gathered(project, **options)
        x = layer(params["layers"], batch, "tanh", residual=True)
        return jnp.mean(layer(params["layers"], x, None, scale=2, residual=True) ** 2)

    mesh = sk.make_mesh(jax.devices()[:2], z=1, d=2)
    init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=PLANS[name])
    w, x = np.eye(4, dtype="f"), np.arange(16, dtype="f").reshape(4, 4) / 16
    state, metrics = step(init({"layers": w}, jax.random.key(0)), x)

    def by_hand(w):
        y = x + jnp.tanh(x @ w)
        return jnp.mean((y + 2 * y @ w) ** 2)

    expected, grad = jax.value_and_grad(by_hand)(w)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    np.testing.assert_allclose(state.params["layers"], w - 0.1 * grad, rtol=1e-5, atol=1e-6)


class Stream:
    """Activations in a class that is equal to itself alone."""

    def __init__(self, x):
        self.x = x


jax.tree_util.register_pytree_node(Stream, lambda stream: ((stream.x,), None), lambda _, children: Stream(*children))


# Types of the carry were compared as trees of this class, which are never equal: the search for them did not end.
def test_activations_of_a_class_without_equality():
    result = sk.scan_layers(lambda w, stream: Stream(stream.x * w), jnp.full(3, 2.0), Stream(jnp.ones(2)))
    np.testing.assert_array_equal(result.x, [8, 8])


# Of (a, b, c) a layer spreads an axis by one leaf: the carry has its type only after three traces.
def test_a_carry_that_varies_later_than_in_the_first_layer():
    def layer(w, carry):
        a, b, c = carry
        return a * w, a + b, b + c

    def kernel(x):
        ones = jnp.ones(())
        return sum(sk.scan_layers(layer, jnp.full(3, 2.0), (x[0], ones, ones)))[None]

    mesh = sk.make_mesh(jax.devices()[:2], d=2)
    split = jax.P("d")
    result = jax.shard_map(kernel, mesh=mesh, in_specs=split, out_specs=split)(jnp.array([1.0, 3.0]))
    # a is 8 x after three layers, b is 1 + 7 x, and c is 1 + 3 + 4 x.
    np.testing.assert_array_equal(result, [8 + 8 + 8, 24 + 22 + 16])


def test_mistakes_are_refused():
    stack = {"w": jnp.ones((3, 4, 4)), "v": jnp.ones((2, 4))}
    with value_error(
        "scan_layers: all leaves must have the same number of layers along dim 0; got [2, 3]. Stack them, and close "
        "over shared values in layer_fn."
    ):
        sk.scan_layers(lambda w, x: x, stack, jnp.ones(4))
    with value_error(
        "scan_layers: remat must be None, one of 'full', 'dots', 'dots_without_batch', a tuple of checkpoint names, or "
        "a policy of jax.checkpoint_policies; got 'none'. Pass for example remat='dots'."
    ):
        sk.scan_layers(lambda w, x: x, stack["w"], jnp.ones(4), remat="none")
    with value_error(
        "scan_layers: offload must go with remat='dots_without_batch' or a tuple of checkpoint names, which name the "
        "values to save to host memory; got remat=None. Pass remat='dots_without_batch', or leave offload out."
    ):
        sk.scan_layers(lambda w, x: x, stack["w"], jnp.ones(4), offload=True)
    with value_error(
        "scan_layers: dim 0 of every activation must be divisible by microbatches, at least 1; got sizes [0, 4] and "
        "microbatches=3. Choose a divisor of the examples on a device, and let layer_fn close over anything that is "
        "not per example."
    ):
        sk.scan_layers(lambda w, x: x, stack["w"], (jnp.ones(4), jnp.float32(0)), microbatches=3)


# ---- what compilers leave of it


@pytest.mark.parametrize("topology", [pytest.param("v5e:2x4", marks=tpu), pytest.param("h100:1x1x8", marks=gpu)])
def test_a_list_of_layers_is_gathered_again_for_its_backward_pass(topology):
    """Without a barrier compilers find the forward pass' gathers once more, merge the two, and keep all weights."""
    layers, width = 3, 512

    def compiled(keep):
        def loss(params, x, keys):
            for layer in params["layers"]:
                x = sk.gathered(lambda layer, x: jnp.tanh(x @ layer["w"]), keep=keep)(layer, x)
            return sk.Mean.of(x**2)

        plan = sk.fsdp("d", layerwise=("layers",))
        mesh = sk.abstract_mesh(d=8)
        init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=plan)
        state = init.abstract({"layers": [{"w": jax.ShapeDtypeStruct((width, width), jnp.float32)}] * layers})
        x = jax.ShapeDtypeStruct((64, width), jnp.float32)
        with jax.numpy_dtype_promotion("standard"):
            return sk.aot.compile(step, (state, x), topology=topology)

    counts = (compiled(keep).select(kind="all_gather") for keep in (False, True))
    again, kept = (sum(row.times * row.arrays for row in rows) for rows in counts)
    assert kept == layers
    assert again >= 2 * layers - 1  # the last layer's weights are at hand when its backward pass begins


def in_a_list(way):
    def loss_fn(params, batch, keys):
        layer, x = (lambda w, x: x + jnp.tanh(x @ w["w"]) * w["b"][None]), batch["x"]
        if way == "scan":
            return sk.Mean.of(sk.scan_layers(layer, params["layers"], x))
        for weights in params["layers"]:
            x = sk.gathered(layer)(weights, x)
        return sk.Mean.of(x * x)

    return loss_fn


def listed():
    return {
        "layers": [
            {"w": jax.random.normal(jax.random.key(i), (8, 3)) @ jnp.ones((3, 8)), "b": jnp.ones(8)} for i in (0, 1)
        ]
    }


# Its rows were taken for layers, and what jax says of that names neither.
@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("by", [sk.fsdp, sk.zero2])
def test_a_list_of_layers_is_gathered_one_by_one_and_not_scanned(by):
    mesh = sk.make_mesh(data=2, fsdp=2, model=2)
    plan = sk.chain(sk.dp("data"), by("fsdp", layerwise=("layers",), min_size=1))
    batch = {"x": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)}
    losses = [sk.value_and_grad(in_a_list("gathered"))] * 2
    assert_same_training(*losses, optax.sgd(0.1), mesh=mesh, plan=plan, params=listed(), batches=[batch])
    for message, (other, kind) in {
        "scan_layers: the layers must be one stack, a pytree of leaves with the layer as dim 0; got a list of 2. "
        "Stack them once, before init, with jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers), or call "
        "gathered(layer_fn)(weights, x) layer by layer.": (sk.dp("data"), TypeError),
        "scan_layers: dim 0 of a stack, the layers, must not be sharded; layers.0.b is sharded there over axis "
        "'fsdp'. Stack the layers if they are a list, or choose another dim with the plan's rules=.": (
            plan,
            ValueError,
        ),
    }.items():
        evaluate = sk.make_eval_step(in_a_list("scan"), mesh=mesh, plan=other)
        with raises(kind, message):
            jax.eval_shape(evaluate, jax.eval_shape(listed), batch)


# proves S90
@pytest.mark.optimized
def test_recomputing_layers_takes_less_memory_and_changes_no_number(data8):
    layers, hidden, rows = 8, 256, 64

    def layer(w, x):
        return x + jnp.tanh(jnp.tanh(x @ w["up"]) @ w["down"])

    def params(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (layers, WIDTH, hidden)) / 4,
            "down": jax.random.normal(down, (layers, hidden, WIDTH)) / 16,
        }

    x = np.random.default_rng(0).normal(size=(8 * rows, WIDTH)).astype(np.float32)
    temp, states = {}, {}
    for remat in (None, "full"):

        def loss(params, batch, keys, remat=remat):
            return sk.Mean.of(sk.scan_layers(layer, params, batch, remat=remat) ** 2)

        init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=data8, plan=sk.dp("data"))
        state = init(params, jax.random.key(0))
        temp[remat] = step.lower(state, x).compile().memory_analysis().temp_size_in_bytes
        states[remat] = step(state, x)[0].params
    kept = layers * rows * hidden * 4  # of each layer at least what one matmul made
    assert temp["full"] < temp[None] - kept
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), states["full"], states[None])


# A Python number in the carry took away the comparison of all other leaves, and was itself an AttributeError.
def test_a_number_in_the_carry_is_carried_and_all_other_leaves_are_compared():
    stack = jnp.full((3, 4, 4), 0.25)

    def count(weights, carry):
        x, total = carry
        return x @ weights, total + jnp.sum(x)

    x, total = sk.scan_layers(count, stack, (jnp.ones((2, 4)), 0.0))
    assert np.allclose(x, 1) and float(total) == 24  # three layers of eight ones

    def widen(weights, carry):
        x, total = carry
        return (x @ weights.astype(x.dtype)).astype(jnp.float32), total

    with raises(
        TypeError,
        "scan_layers: layer_fn(weights, x) must return an x of the same tree, shapes and dtypes, which the next layer "
        "gets; it gets 0: bfloat16[2,4], 1: float and returns 0: float32[2,4], 1: float32[]. Cast or reshape it in "
        "the layer.",
    ):
        sk.scan_layers(widen, stack, (jnp.ones((2, 4), jnp.bfloat16), 0.0))

    # A number that becomes an array in the first layer is no carry either: jax's scan said so in its own words.
    with raises(
        TypeError,
        "scan_layers: layer_fn(weights, x) must return an x of the same tree, shapes and dtypes, which the next layer "
        "gets; it gets float and returns float32[4,4]. Cast or reshape it in the layer.",
    ):
        sk.scan_layers(lambda weights, x: x * weights, stack, 1.0)

    with raises(
        TypeError,
        "scan_layers: layer_fn(weights, x) must return an x of the same tree, shapes and dtypes, which the next layer "
        "gets; it gets PyTreeDef((*, *)) and returns PyTreeDef([*, *]). Cast or reshape it in the layer.",
    ):
        sk.scan_layers(lambda weights, x: list(x), stack, (jnp.ones(2), jnp.ones(2)))
