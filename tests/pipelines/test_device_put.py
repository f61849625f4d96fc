"""Pipelines of several programs on disjoint sub-meshes: values, gradients, overlap, dtypes, and what is refused."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.pipelines import stage_programs
from shardkit.pipelines.device_put import build_stations, device_put_pipeline
from support.counting import Compiles
from support.refusals import value_error

WIDTHS = (784, 512, 512, 256, 10)
ALONE, SPLIT = ({"stage": 4}, P()), ({"stage": 4, "data": 2}, P("data"))


def layers(widths, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [
        {
            "w": (rng.normal(size=(rows, columns)) / np.sqrt(rows)).astype(dtype),
            "b": (rng.normal(size=columns) / 3).astype(dtype),
        }
        for rows, columns in pairwise(widths)
    ]


def inputs(rows, width, classes=10):
    rng = np.random.default_rng(1)
    return rng.normal(size=(rows, width)).astype("f"), rng.integers(0, classes, rows)


def dense(p, x):
    return jnp.tanh(x @ p["w"] + p["b"][None])


def logits(p, x):
    return x @ p["w"] + p["b"][None]


def stages_of(params):
    return [dense] * (len(params) - 1) + [logits]


def cross_entropy(y, labels):
    losses = jax.nn.logsumexp(y, axis=-1) - jnp.take_along_axis(y, labels[:, None], axis=-1)[:, 0]
    return sk.Mean.of(losses), {"hits": sk.Mean.of(jnp.argmax(y, axis=-1) == labels)}


def sequential(params, x):
    for stage, p in zip(stages_of(params), params, strict=True):
        x = stage(p, x)
    return x


def placed(params, meshes, specs=None):
    specs = specs or [P()] * len(params)
    return [sk.shard(p, mesh, spec) for p, mesh, spec in zip(params, meshes, specs, strict=True)]


def close(found, wanted, rtol=1e-6):
    scale = np.max(np.abs(wanted))
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=rtol, atol=rtol * scale)


def same_leaves(found, wanted):
    jax.tree.map(close, found, wanted)


# ---- values


# proves S83, F5: where each half's arrays lie on the way, and the composition's numbers
def test_what_the_first_half_makes_is_put_on_the_second():
    left, right = sk.submeshes(sk.make_mesh(stage=2, data=4), "stage")
    rng = np.random.default_rng(0)
    w, v, x = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((12, 16), (16, 10), (8, 12)))
    params, seen = [sk.shard(w, left, P()), sk.shard(v, right, P())], []
    assert not params[0].devices() & params[1].devices()

    def second(w, x):
        seen.append(x.shape)  # of the whole microbatch's rows that one device has
        return x @ w

    stages = [lambda w, x: jnp.tanh(x @ w), second]
    (y,) = device_put_pipeline(stages, [left, right], specs=P("data"))(params, x, microbatches=1)
    assert y.devices() == set(right.devices.flat) and set(seen) == {(2, 16)}
    np.testing.assert_allclose(y, np.tanh(x @ w) @ v, rtol=1e-5, atol=1e-6)


def test_four_devices_and_twelve_microbatches():  # proves S84, S76, S77: widths 784-512-512-256-10, outputs in order
    meshes = sk.submeshes(sk.make_mesh(jax.devices()[:4], stage=4), "stage")
    params, (x, _) = layers(WIDTHS), inputs(48, 784)
    outputs = device_put_pipeline(stages_of(params), meshes)(placed(params, meshes), x, microbatches=12)
    assert [y.shape for y in outputs] == [(4, 10)] * 12
    close(np.concatenate(outputs), sequential(params, x))


@pytest.mark.quick("8")
@pytest.mark.parametrize("microbatches", [1, 2, 8])  # proves S77, S81
def test_microbatches_do_not_change_the_output(microbatches):
    meshes = sk.submeshes(sk.make_mesh(stage=4, data=2), "stage")
    params, (x, _) = layers((6, 8, 5, 7, 10)), inputs(16, 6)
    forward = device_put_pipeline(stages_of(params), meshes, specs=P("data"))
    close(np.concatenate(forward(placed(params, meshes), x, microbatches=microbatches)), sequential(params, x))


def heavy(p, x):
    return jax.lax.fori_loop(0, 10, lambda _, x: jnp.tanh(x @ p), x)


@pytest.mark.clock  # a busy machine looks when all is ready
@pytest.mark.deep  # a wait makes it slower, not wrong
def test_nothing_waits_for_what_was_started():  # proves S84: overlap by asynchronous dispatch
    meshes = sk.submeshes(sk.make_mesh(stage=2, data=4), "stage")
    params, x = placed([jnp.eye(512)] * 2, meshes), np.ones((1024, 512), "f")
    forward = device_put_pipeline([heavy] * 2, meshes, specs=P("data"))
    step = sk.device_put_value_and_grad([heavy] * 2, lambda y, t: jnp.mean((y - t) ** 2), meshes, specs=P("data"))
    for _ in range(2):  # the second time everything is compiled
        outputs = forward(params, x, microbatches=4)
        waiting = not outputs[-1].is_ready()
        jax.block_until_ready(outputs)
        loss, _, grads = step(params, x, x, microbatches=4)
        waiting = waiting and not any(leaf.is_ready() for leaf in (loss, *grads))
        jax.block_until_ready(grads)
    assert waiting


# ---- gradients


def reference(params, x, labels):
    def loss(params):
        (total, weight), aux = cross_entropy(sequential(params, x), labels)
        return total / weight, aux["hits"].total / weight

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.quick("3-sizes1-spec1")
@pytest.mark.parametrize(("sizes", "spec"), [ALONE, SPLIT])
@pytest.mark.parametrize("microbatches", [1, 3, 12])
def test_gradients_equal_those_of_the_sequential_model(sizes, spec, microbatches):  # proves S80, S76, S81
    meshes = sk.submeshes(sk.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes), "stage")
    params, (x, labels) = layers(WIDTHS), inputs(24, 784)
    step = sk.device_put_value_and_grad(stages_of(params), cross_entropy, meshes, specs=spec)
    loss, aux, grads = step(placed(params, meshes), x, labels, microbatches=microbatches)
    (wanted, hits), wanted_grads = reference(params, x, labels)
    close(loss, wanted)
    close(aux["hits"], hits)
    same_leaves(grads, wanted_grads)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))
    for mesh, each in zip(meshes, grads, strict=True):
        assert all(leaf.sharding.device_set == set(mesh.devices.flat) for leaf in jax.tree.leaves(each))


def test_stages_may_be_tensor_parallel():
    """Two stages on data=2, model=2: columns then rows inside each, gradients laid out as the parameters."""
    meshes = sk.submeshes(sk.make_mesh(stage=2, data=2, model=2), "stage")
    spec = {"up": {"w": P(None, "model"), "b": P("model")}, "down": {"w": P("model"), "b": P()}}

    def block(p, x):
        h = jnp.tanh(sk.layers.column_linear(x, p["up"]["w"], "model") + p["up"]["b"][None])
        return x + sk.layers.row_linear(h, p["down"]["w"], "model") + p["down"]["b"][None]

    def whole(p, x):
        return x + logits(p["down"], dense(p["up"], x))

    params = [dict(zip(("up", "down"), layers((10, 16, 10)), strict=True)) for _ in range(2)]
    x, labels = inputs(8, 10)
    step = sk.device_put_value_and_grad([block] * 2, cross_entropy, meshes, specs=P("data"), param_specs=[spec, spec])
    loss, _, grads = step(placed(params, meshes, [spec] * 2), x, labels, microbatches=2)

    def total(params):
        mean, _ = cross_entropy(whole(params[1], whole(params[0], x)), labels)
        return mean.total / mean.weight

    wanted, wanted_grads = jax.jit(jax.value_and_grad(total))(params)
    close(loss, wanted)
    same_leaves(grads, wanted_grads)
    assert grads[0]["up"]["w"].sharding.spec == P(None, "model")


def test_unequal_weights_and_tokens_that_enter():
    """Integers enter the first stage, a dict of targets the loss; the mean is over all tokens that count."""
    meshes = sk.submeshes(sk.make_mesh(stage=2, data=4), "stage")
    rng = np.random.default_rng(2)
    batch = {"tokens": rng.integers(0, 11, (8, 5)), "gain": rng.normal(size=8).astype("f")}
    targets = {"y": rng.normal(size=(8, 5, 3)).astype("f"), "mask": rng.integers(0, 2, (8, 5)).astype("f")}
    params = [rng.normal(size=shape).astype(np.float32) for shape in ((11, 6), (6, 3))]

    def embed(p, batch):
        return p[batch["tokens"]] * batch["gain"][:, None, None]

    def loss(y, targets):
        return sk.Mean.of(jnp.sum((y - targets["y"]) ** 2, axis=-1), targets["mask"])

    step = sk.device_put_value_and_grad([embed, lambda p, x: x @ p], loss, meshes, specs=P("data", None, None))
    found, aux, grads = step(placed(params, meshes), batch, targets, microbatches=2)

    def total(params):
        mean = loss(embed(params[0], batch) @ params[1], targets)
        return mean.total / mean.weight

    wanted, wanted_grads = jax.jit(jax.value_and_grad(total))(params)
    close(found, wanted)
    same_leaves(grads, wanted_grads)
    assert aux == {}


# ---- what it costs


def test_bfloat16_stays_and_gradients_add_up_in_float32():
    meshes = sk.submeshes(sk.make_mesh(stage=2, data=4), "stage")
    params, (x, labels) = layers((12, 16, 10), jnp.bfloat16), inputs(16, 12)
    x = x.astype(jnp.bfloat16)
    outputs = device_put_pipeline([dense, logits], meshes, specs=P("data"))(placed(params, meshes), x, microbatches=4)
    assert all(y.dtype == jnp.bfloat16 for y in outputs)
    step = sk.device_put_value_and_grad([dense, logits], cross_entropy, meshes, specs=P("data"))
    loss, _, grads = step(placed(params, meshes), x, labels, microbatches=4)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    (wanted, _), wanted_grads = reference(wide, x.astype("f"), labels)
    assert loss.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))
    close(loss, wanted, 2e-2)
    jax.tree.map(lambda g, w: close(g, w, 3e-2), grads, wanted_grads)


def test_a_second_call_compiles_nothing():
    meshes = sk.submeshes(sk.make_mesh(stage=4, data=2), "stage")
    params, (x, labels) = layers((6, 8, 5, 7, 10)), inputs(16, 6)
    traces = []

    def counted(stage):
        return lambda p, x: traces.append(x.shape) or stage(p, x)

    stages = [counted(stage) for stage in stages_of(params)]
    forward = device_put_pipeline(stages, meshes, specs=P("data"))
    step = sk.device_put_value_and_grad(stages, cross_entropy, meshes, specs=P("data"))
    weights = placed(params, meshes)

    def both():
        jax.block_until_ready((forward(weights, x, microbatches=4), step(weights, x, labels, microbatches=4)))

    both()
    assert len(traces) == 3 * 4  # forward in each of the two functions, and forward inside the backward
    with Compiles() as compiles:
        both()
    assert compiles.count == 0 and len(traces) == 3 * 4


def test_what_is_moved_between_meshes(monkeypatch):
    """M times S - 1 moves forward, and as many back; and the targets, and the weight of the loss to each stage."""
    meshes = sk.submeshes(sk.make_mesh(stage=4, data=2), "stage")
    params, (x, labels) = layers((6, 8, 5, 7, 10)), inputs(24, 6)
    weights = placed(params, meshes)
    forward = device_put_pipeline(stages_of(params), meshes, specs=P("data"))
    step = sk.device_put_value_and_grad(stages_of(params), cross_entropy, meshes, specs=P("data"))
    moved = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda tree, target: moved.append(tree) or put(tree, target))
    borders = [(8, 8), (8, 5), (8, 7)]
    forward(weights, x, microbatches=3)
    assert sorted(tree.shape for tree in moved) == sorted(3 * [(8, 6), *borders])
    moved.clear()
    step(weights, x, labels, microbatches=3)
    assert sorted(tree.shape for tree in moved) == sorted(3 * [(8, 6), (8,), *borders, *borders] + 4 * [()])


def test_gradients_are_reduced_once_a_step():
    """No microbatch sends anything but the sums of the loss; the end sends each gradient once, in float32."""
    (mesh,) = sk.submeshes(sk.make_mesh(stage=1, data=8), "stage")
    params, (x, labels) = layers((12, 10), jnp.bfloat16)[0], inputs(16, 12)
    (station,) = build_stations("test", [logits], [mesh], P("data"), P())
    x, y = (jnp.zeros((16, width), jnp.bfloat16) for width in (12, 10))
    backward, zeros = stage_programs.build_backward(station, first=True), stage_programs.build_zeros(station)
    sums = zeros(params)
    assert not sk.census(stage_programs.build_forward(station), params, x).rows
    assert not sk.census(zeros, params).rows
    assert not sk.census(backward, params, x, y, sums).rows
    head = sk.census(stage_programs.build_head(station, cross_entropy), y, labels)
    assert (head.count(kind="all_reduce"), head.sent()) == (1, 2 * (8 - 1) * 2 * 8 / 8)
    end = sk.census(stage_programs.build_finish(station), sums, jnp.float32(1))
    assert end.sent() == end.sent(axis="data") == 2 * (8 - 1) * 4 * (12 * 10 + 10) / 8


# ---- what is refused


PAIR = layers((12, 16, 10))


def halves(**sizes):
    return sk.submeshes(sk.make_mesh(stage=2, **sizes), "stage")


def uneven():
    return on_devices([range(4), range(4, 8)], [{"data": 2, "model": 2}, {"data": 4, "model": 1}])


def on_devices(numbers, sizes):
    devices = jax.devices()
    return [sk.make_mesh([devices[n] for n in some], **each) for some, each in zip(numbers, sizes, strict=True)]


TWO = [dense, logits]
NO_BATCH = "every array of the batch must have the same number of examples along dim 0; got"
# What is refused, of stages, meshes and more.
REFUSED = {
    "there must be one mesh per stage, and at least one; got stages=3, meshes=2. Split a mesh with submeshes along an "
    "axis of that size.": lambda: ([dense] * 3, halves(data=4), {}),
    "all meshes must have the same number of devices, because each device sends to one of the next mesh; got 6, 2. "
    "Split one mesh with submeshes.": lambda: (
        TWO,
        on_devices([range(6), range(6, 8)], [{"data": 6}, {"data": 2}]),
        {},
    ),
    "no two meshes may share a device; stages 0 and 1 share 2, 3. Split one mesh with submeshes.": lambda: (
        TWO,
        on_devices([range(4), range(2, 6)], [{"data": 4}] * 2),
        {},
    ),
    f"the input of stage 1 must have shards of one shape on both sides of the move; with {P('data')} they are (4, 16) "
    "on data=2, model=2 and (2, 16) on data=4, model=1. Give all meshes the same axis sizes, or choose another "
    "spec.": lambda: (TWO, uneven(), {"specs": P("data")}),
    "the input of stage 1: dim 0 must be divisible by axis 'data'; got size 6 over 4 devices. Pad dim 0 or choose "
    "another dim.": lambda: (TWO, uneven(), {"specs": P("data"), "x": np.zeros((6, 12), "f")}),
    "the input of stage 0: dim 0 must be divisible by axis 'data'; got size 2 over 4 devices. Pad dim 0 or choose "
    "another dim.": lambda: (TWO, halves(data=4), {"specs": P("data"), "microbatches": 4}),
    f"the output of stage 0: the spec {P('data', None)} has 2 entries for an array of rank 1. Drop an entry.": lambda: (
        [lambda p, x: jnp.sum(dense(p, x), axis=1), logits],
        halves(data=4),
        {"specs": [P("data"), P("data", None), P("data")]},
    ),
    "microbatches must divide the batch; got 3 and 8. Change one of them.": lambda: (
        TWO,
        halves(data=4),
        {"microbatches": 3},
    ),
    "microbatches must be a whole number of at least 1; got 0. Pass microbatches=1 or more.": lambda: (
        TWO,
        halves(data=4),
        {"microbatches": 0},
    ),
    f"{NO_BATCH} a: (8, 12), b: (6,), c: (). Pass arrays that share dim 0.": lambda: (
        TWO,
        halves(data=4),
        {"x": {"a": np.zeros((8, 12)), "b": np.zeros(6), "c": np.zeros(())}},
    ),
    f"{NO_BATCH} no array. Pass arrays that share dim 0.": lambda: (TWO, halves(data=4), {"x": {}}),
    "specs must be one spec or a list of 3; got a list of 2. Pass one per stage, and in specs one more for the output "
    "of the last.": lambda: (TWO, halves(data=4), {"specs": [P("data")] * 2}),
    "param_specs must be one spec or a list of 2; got a list of 1. Pass one per stage, and in specs one more for the "
    "output of the last.": lambda: (TWO, halves(data=4), {"param_specs": [P()]}),
    f"stage 0: the spec {P('model')} uses axis 'model', which the mesh does not have; its axes are 'stage', 'data'. "
    "Use one of them, or add the axis to make_mesh.": lambda: (TWO, halves(data=4), {"specs": P("model")}),
}


@pytest.mark.parametrize("message, given", REFUSED.items())
def test_what_does_not_fit_is_refused(given, message):  # proves S77, S85
    stages, meshes, options = given()
    x, microbatches = options.pop("x", inputs(8, 12)[0]), options.pop("microbatches", 1)
    with value_error(f"device_put_pipeline: {message}"):
        device_put_pipeline(stages, meshes, **options)(placed(PAIR, meshes), x, microbatches=microbatches)


def test_the_gradients_refuse_in_their_own_name():
    with value_error(
        "device_put_value_and_grad: there must be one mesh per stage, and at least one; got stages=1, meshes=2. "
        "Split a mesh with submeshes along an axis of that size."
    ):
        sk.device_put_value_and_grad([dense], cross_entropy, halves(data=4))
