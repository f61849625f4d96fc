"""Ten programs that the partitioner splits, as users of jax, flax and MaxText write them, proved against one device.

None of them has shardkit in it: `jit`, NamedSharding and constraints choose where arrays are. Wrong ones are refuted.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing.exact import assert_compiled_equal

pytestmark = pytest.mark.optimized


def draw(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def put(mesh, tree, specs):
    """A tree of arrays on a mesh, by a tree of specs."""
    return jax.tree.map(lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)), specs, tree, is_leaf=is_spec)


def is_spec(x):
    return isinstance(x, P)


def constrain(mesh, x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def keep(mesh, x, *spec):
    """No constraint, as on one device."""
    return x


# Each takes `constrain(x, *spec)`, which is the identity in the reference.


def predict(constrain, params, x):
    """Layers of a plain network, as the page of jax on distributed arrays has them."""
    for w, b in params:
        x = jnp.tanh(x @ w + b[None])
    return x


def train_plain(constrain, params, x, y):
    """A step of gradient descent of that network: data parallelism is the specs alone."""

    def loss(params):
        return jnp.mean(jnp.sum((predict(constrain, params, x) - y) ** 2, -1))

    value, gradients = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.25 * g, params, gradients)


def train_fully_sharded(constrain, params, x, y):
    """The same with weights split by rows, and constrained to be whole where they are used."""

    def loss(params):
        whole = [(constrain(w), constrain(b)) for w, b in params]
        return jnp.mean((predict(constrain, whole, x) - y) ** 2)

    gradients = jax.grad(loss)(params)
    gradients = [(constrain(w, "data"), b) for w, b in gradients]
    return jax.tree.map(lambda p, g: p - 0.25 * g, params, gradients)


def feed_forward(constrain, params, x):
    """A gated layer of tensor parallelism, with the activations constrained as MaxText does."""
    x = constrain(x, "data", "sequence")
    hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
    hidden = constrain(hidden, "data", "sequence", "model")
    return constrain(hidden @ params["down"], "data", "sequence")


def dense_with_norm(constrain, params, x):
    """An RMS norm and a dense layer, as flax writes them with axes' names on each parameter."""
    x = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * params["scale"][None]
    x = constrain(x, "data")
    return constrain(x @ params["kernel"], "data", "model") + params["bias"][None]


def attend(constrain, params, x):
    """Self-attention with heads over the model axis and rotary angles, causal."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in ("q", "k", "v"))
    angles = jnp.arange(4.0)[:, None] * jnp.asarray([1.0, 0.5])[None]
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]

    def rotate(x):
        first, second = jnp.split(x, 2, -1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    q, k = constrain(rotate(q), "data", None, "model"), constrain(rotate(k), "data", None, "model")
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / 2
    causal = jnp.arange(4)[:, None] >= jnp.arange(4)[None]
    weights = jax.nn.softmax(jnp.where(causal[None, None], scores, -1e30), -1)
    return jnp.einsum("bhts,bshk,hkd->btd", weights, v, params["out"])


def scan_layers(constrain, params, x):
    """The gradient of stacked layers under a scan with remat, as deep models are written."""

    @jax.checkpoint
    def layer(x, w):
        return constrain(x + jnp.tanh(x @ w), "data"), None

    def loss(params):
        y, _ = lax.scan(layer, x, params)
        return jnp.sum(y * y)

    return jax.grad(loss)(params)


def cross_entropy(constrain, table, x, labels):
    """Logits over a vocabulary that is split, and their gradient by the table."""

    def loss(table):
        logits = constrain(x @ table.T, "data", "model")
        chosen = jnp.sum(jax.nn.one_hot(labels, 8) * logits, -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    return jax.value_and_grad(loss)(table)


def mix_experts(constrain, params, x):
    """A layer of experts whose tokens are dispatched by masks, with one expert for each token."""
    scores = jax.nn.softmax(x @ params["router"], -1)
    chosen = jnp.argmax(scores, -1)
    masks = jax.nn.one_hot(chosen, 4) * scores
    inputs = constrain(jnp.einsum("te,td->etd", jax.nn.one_hot(chosen, 4), x), "expert")
    hidden = constrain(jnp.einsum("etd,edf->etf", inputs, params["experts"]), "expert")
    return jnp.einsum("te,etf->tf", masks, hidden)


def convolve(constrain, kernel, x):
    """A convolution along a dim that is split, with its halo exchanged by the partitioner, and a mean over it."""
    x = constrain(x, None, "data")
    y = lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.tanh(y).mean(1)


def accumulate(constrain, w, batches):
    """Gradients of microbatches, added up in a loop."""

    def add(total, x):
        gradient = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return constrain(total + gradient, "data"), None

    total, _ = lax.scan(add, jnp.zeros_like(w), batches)
    return w - 0.125 * total


NETWORK = [(draw(4, 8), draw(8)), (draw(8, 4), draw(4))]
PROGRAMS = {
    "train_plain": (
        train_plain,
        {"data": 8},
        (NETWORK, draw(8, 4), draw(8, 4)),
        ([(P(), P())] * 2, P("data"), P("data")),
    ),
    "train_fully_sharded": (
        train_fully_sharded,
        {"data": 4},
        (NETWORK, draw(8, 4), draw(8, 4)),
        ([(P("data"), P())] * 2, P("data"), P("data")),
    ),
    "feed_forward": (
        feed_forward,
        {"data": 2, "sequence": 2, "model": 2},
        ({"gate": draw(4, 4), "up": draw(4, 4), "down": draw(4, 4)}, draw(2, 4, 4)),
        ({"gate": P(None, "model"), "up": P(None, "model"), "down": P("model")}, P("data", "sequence")),
    ),
    "dense_with_norm": (
        dense_with_norm,
        {"data": 4, "model": 2},
        ({"scale": draw(4), "kernel": draw(4, 6), "bias": draw(6)}, draw(8, 4)),
        ({"scale": P(), "kernel": P(None, "model"), "bias": P("model")}, P("data", "model")),
    ),
    "attend": (
        attend,
        {"data": 2, "model": 2},
        ({name: draw(4, 2, 4) for name in "qkv"} | {"out": draw(2, 4, 4)}, draw(2, 4, 4)),
        ({name: P(None, "model") for name in "qkv"} | {"out": P("model")}, P("data")),
    ),
    "scan_layers": (
        scan_layers,
        {"data": 2, "model": 2},
        (draw(3, 4, 4), draw(4, 4)),
        (P(None, "data", "model"), P("data")),
    ),
    "cross_entropy": (
        cross_entropy,
        {"data": 2, "model": 4},
        (draw(8, 4), draw(4, 4), np.asarray([3, 0, 7, 5], np.int32)),
        (P("model"), P("data"), P("data")),
    ),
    "mix_experts": (
        mix_experts,
        {"expert": 4},
        ({"router": draw(3, 4), "experts": draw(4, 3, 2)}, draw(8, 3)),
        ({"router": P(), "experts": P("expert")}, P("expert")),
    ),
    "convolve": (convolve, {"data": 4}, (draw(3, 2, 2), draw(2, 8, 2)), (P(), P(None, "data"))),
    "accumulate": (
        accumulate,
        {"data": 2, "model": 4},
        (draw(4, 4), draw(3, 4, 4)),
        (P("data", "model"), P(None, "data")),
    ),
}


def prove(function, sizes, args, specs):
    """Proves a program as compiled against the same without constraints, on one device."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = sk.make_mesh(devices, **sizes)
    on_mesh = [put(mesh, x, spec) for x, spec in zip(args, specs, strict=True)]
    step = jax.jit(partial(function, partial(constrain, mesh)))
    return assert_compiled_equal(step, *on_mesh, reference=partial(function, partial(keep, mesh)))


# proves N49: also of programs of the partitioner, against one device
@pytest.mark.quick("feed_forward", "accumulate")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_partitioner_is_one_device(name):
    assert "as compiled on" in prove(*PROGRAMS[name]).what


def test_a_constraint_that_changes_a_mean():
    """A mean that was rewritten for a layout, by the first row of each device: the constraint hides nothing."""

    def mean_of_shards(mesh, x):
        rows = x.reshape(4, 2, 4)[:, :1]
        return lax.with_sharding_constraint(rows, NamedSharding(mesh, P("data"))).mean((0, 1))

    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    x = put(mesh, draw(8, 4), P("data"))
    with pytest.raises(AssertionError, match="not the reference's for all inputs"):
        assert_compiled_equal(jax.jit(partial(mean_of_shards, mesh)), x, reference=lambda x: x.mean(0))


def test_a_shard_map_that_takes_the_mean_of_means():
    """Groups of unequal size, of which each device has one: the mean of their means is not the mean."""
    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    masks = np.asarray([1, 1, 1, 0, 1, 1, 1, 1], np.float32)

    def device(x, mask):
        local = (x * mask).sum() / mask.sum()
        return lax.pmean(local, "data")

    mean = jax.shard_map(device, mesh=mesh, in_specs=P("data"), out_specs=P())
    with pytest.raises(AssertionError, match="not the reference's for all inputs"):
        assert_compiled_equal(
            jax.jit(lambda x: mean(x, put(mesh, masks, P("data")))),
            put(mesh, draw(8), P("data")),
            reference=lambda x: (x * masks).sum() / masks.sum(),
        )


def test_a_shard_map_without_varying_types():
    """A gradient of replicated weights that nobody summed, which check_vma=True would have summed."""
    mesh = sk.make_mesh(jax.devices()[:4], data=4)

    def device(w, x):
        return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    step = jax.shard_map(device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    args = put(mesh, draw(4), P()), put(mesh, draw(8, 4), P("data"))

    def reference(w, x):
        return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    with pytest.raises(AssertionError, match="not the reference's for all inputs"):
        assert_compiled_equal(jax.jit(step), *args, reference=reference)


def test_a_gather_out_of_bounds():
    """Rows that are not there: a device clamps them to its own last row, one device to the table's."""
    mesh = sk.make_mesh(jax.devices()[:4], model=4)
    tokens = np.asarray([0, 3, 8, 9])  # of a table of eight

    def device(table):
        here = tokens // 2 == lax.axis_index("model")
        rows = table.at[tokens % 2].get(mode="clip")
        return lax.psum(jnp.where(here[:, None], rows, 0), "model")

    look_up = jax.shard_map(device, mesh=mesh, in_specs=P("model"), out_specs=P())
    with pytest.raises(AssertionError, match="not the reference's for all inputs"):
        assert_compiled_equal(
            jax.jit(look_up),
            put(mesh, draw(8, 2), P("model")),
            reference=lambda table: table.at[tokens].get(mode="clip"),
        )
