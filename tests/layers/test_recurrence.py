"""layers/recurrence.py: the recurrence token by token, proved for all inputs; documents, odd sizes, bytes, a step."""

import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.layers import recurrence
from shardkit.testing.exact import program_pair
from support.refusals import type_error, value_error

TOKENS = P(None, "context")


def run_token_by_token(q, k, v, *, log_decay=None, erase=None, bonus_HK=None, segments_bt=None):
    """The recurrence as the docstring of the layer writes it."""
    b, t, heads, width = q.shape
    if log_decay is None:
        log_decay = jnp.zeros(q.shape, q.dtype)
    if log_decay.ndim == 3:
        log_decay = jnp.broadcast_to(log_decay[..., None], q.shape)
    state = jnp.zeros((b, heads, width, v.shape[-1]), q.dtype)
    ys = []
    for i in range(t):
        if segments_bt is not None and i > 0:
            goes_on = segments_bt[:, i] == segments_bt[:, i - 1]
            state = jnp.where(goes_on[:, None, None, None], state, 0.0)
        before = state
        state = jnp.exp(log_decay[:, i])[..., None] * state
        if erase is not None:
            a, b_ = erase
            state = state - a[:, i, :, :, None] * jnp.einsum("bhk,bhkv->bhv", b_[:, i], before)[:, :, None, :]
        state = state + k[:, i, :, :, None] * v[:, i, :, None, :]
        y = jnp.einsum("bhk,bhkv->bhv", q[:, i], state)
        if bonus_HK is not None:
            own = (q[:, i] * bonus_HK[None] * k[:, i]).sum(-1, keepdims=True)
            y = jnp.einsum("bhk,bhkv->bhv", q[:, i], before) + own * v[:, i]
        ys.append(y)
    return jnp.stack(ys, 1)


# The options of each model, with the shapes of their arrays: "h" a number a head, "k" one for each row of the state.
MODELS = {
    "linear attention": {},
    "mamba-2": {"log_decay": "h"},
    "gated linear attention": {"log_decay": "k"},
    "rwkv-6": {"log_decay": "k", "bonus_HK": "HK"},
    "deltanet": {"erase": ("k", "k")},
    "gated deltanet": {"log_decay": "h", "erase": ("k", "k")},
    "rwkv-7": {"log_decay": "k", "erase": ("k", "k")},
    "all options": {"log_decay": "k", "erase": ("k", "k"), "bonus_HK": "HK"},
}


def shapes_of(model, b, t, heads, width):
    dims = {"h": (b, t, heads), "k": (b, t, heads, width), "HK": (heads, width)}
    return jax.tree.map(lambda kind: dims[kind], MODELS[model])


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(size, int) for size in x)


def specs_of(model):
    return jax.tree.map(lambda kind: P() if kind == "HK" else TOKENS, MODELS[model])


def draw(model, b, t, heads, width, value_width, dtype=np.float32):
    """Arguments of the model, and documents of other lengths in each sequence."""
    rng = np.random.default_rng(1)

    def array(shape):
        return jnp.asarray(rng.normal(size=shape) * 0.7, dtype)

    arrays = [array((b, t, heads, size)) for size in (width, width, value_width)]
    options = jax.tree.map(array, shapes_of(model, b, t, heads, width), is_leaf=is_shape)
    if "log_decay" in options:
        options["log_decay"] = -3 * abs(options["log_decay"])
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (b, t)), 1), jnp.int32)
    return arrays, options, segments


def over_context(mesh, model, **options):
    """The layer as a function of global arrays, its options and its documents."""

    def run(q, k, v, arrays, segments):
        return sk.layers.linear_recurrence(q, k, v, "context", **arrays, segments_bt=segments, **options)

    specs = (TOKENS, TOKENS, TOKENS, specs_of(model), TOKENS)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=TOKENS))


def prove(model, n, *, t=8, chunk=2, documents=(3, 1, 4)):
    """The proof of the layer over n devices, for a sequence of documents of these lengths."""
    shapes = shapes_of(model, 1, t, 1, 2)
    arrays = [jax.ShapeDtypeStruct((1, t, 1, 2), jnp.float32)] * 3
    options = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=is_shape)
    segments = np.repeat(np.arange(len(documents), dtype=np.int32), documents)[None]
    return sk.testing.assert_equal_for_all_inputs(
        lambda q, k, v, options, segments: sk.layers.linear_recurrence(
            q, k, v, "context", **options, segments_bt=segments, chunk=chunk
        ),
        lambda q, k, v, options, segments: run_token_by_token(q, k, v, **options, segments_bt=segments),
        mesh=sk.abstract_mesh(context=n),
        in_specs=(TOKENS, TOKENS, TOKENS, specs_of(model), TOKENS),
        out_specs=TOKENS,
        args=(*arrays, options, segments),
    )


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_the_recurrence_for_all_inputs(model):
    """With gradients, and documents that begin on a device, at its first token, and not at all."""
    prove(model, 2)
    prove(model, 4, chunk=1)


@pytest.mark.parametrize("model", ["mamba-2", "rwkv-6", "gated deltanet"])
def test_on_eight_devices(model):
    prove(model, 8, t=16, documents=(3, 1, 12))


def swap(earlier, later):
    return recurrence._Change(
        recurrence._multiply_keep(earlier.keep, later.keep), recurrence._apply(later, earlier.add)
    )


MISTAKES = {
    "the changes of devices in the other order": ("_follow", swap),
    "no state from other devices": ("_find_first_state", lambda changes, names: recurrence._zero_state(changes)),
    "documents of this device alone": (
        "_find_begins",
        lambda segments, q, names, count: segments != jnp.concatenate([segments[:, :1], segments[:, :-1]], 1),
    ),
    "the decay of a token counted twice": (
        "_decay_rows",
        lambda x, log_decay, mask: jnp.where(mask[..., None], x * jnp.exp(2 * log_decay), 0.0),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refuted(mistake, monkeypatch):
    """The second document begins with a device, and no device after it has another begin."""
    monkeypatch.setattr(program_pair.ProgramPair, "_locate", lambda *_, **__: "")  # the line of a mistake takes 10 s
    prove("gated deltanet", 4, chunk=1, documents=(2, 6))
    monkeypatch.setattr(recurrence, *MISTAKES[mistake])
    with pytest.raises(AssertionError):
        prove("gated deltanet", 4, chunk=1, documents=(2, 6))


@pytest.mark.parametrize("model", ["gated deltanet", "rwkv-6"])
@pytest.mark.parametrize("t, chunk", [(18, 4), (6, 64)])
def test_floats_and_padded_chunks(model, t, chunk):
    """Nine tokens of a device in chunks of four: three are padding. Fewer tokens than a chunk has are one chunk."""
    arrays, options, segments = draw(model, 2, t, 2, 4, 3)
    weights = jnp.asarray(np.random.default_rng(2).normal(size=arrays[2].shape), jnp.float32)
    run = over_context(sk.make_mesh(jax.devices()[:2], context=2), model, chunk=chunk)

    def total(fn):
        return lambda arrays, options: jnp.sum(fn(arrays, options) * weights)

    ours = total(lambda arrays, options: run(*arrays, options, segments))
    reference = total(lambda arrays, options: run_token_by_token(*arrays, **options, segments_bt=segments))
    got = jax.jit(jax.value_and_grad(ours, (0, 1)))(arrays, options)
    want = jax.jit(jax.value_and_grad(reference, (0, 1)))(arrays, options)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * float(abs(theirs).max()) + 1e-6)


def test_strong_decays_are_no_nan():
    """Of the states a decay of exp(-60) leaves nothing; the quotient of two running products would be infinite."""
    arrays, options, segments = draw("gated linear attention", 1, 16, 1, 2, 2)
    options["log_decay"] = jnp.full_like(options["log_decay"], -60)
    run = over_context(sk.make_mesh(jax.devices()[:2], context=2), "gated linear attention", chunk=8)
    y, grads = jax.value_and_grad(lambda q: run(q, *arrays[1:], options, segments).sum())(arrays[0])
    q, k, v = arrays
    own = jnp.einsum("bthk,bthk->bth", q, k)[..., None] * v  # a token sees itself alone
    assert y == pytest.approx(float(own.sum()), rel=1e-5)
    assert np.isfinite(grads).all()


@pytest.mark.parametrize("lowest", [-1e30, -np.inf])
@pytest.mark.parametrize("model", ["mamba-2", "all options", "gated deltanet"])
def test_a_token_that_forgets_everything_leaves_its_neighbors_as_they_are(model, lowest):
    """As models reset a state. A difference of two running sums would lose the decays beside it, or be NaN."""
    arrays, options, segments = draw(model, 1, 12, 1, 2, 2)
    options["log_decay"] = options["log_decay"].at[:, 5].set(lowest)
    got = sk.layers.linear_recurrence(*arrays, None, **options, segments_bt=0 * segments, chunk=16)
    np.testing.assert_allclose(got, run_token_by_token(*arrays, **options), atol=1e-4)
    loss = lambda decay: sk.layers.linear_recurrence(*arrays, None, **options | {"log_decay": decay}, chunk=16).sum()  # noqa: E731
    assert np.isfinite(jax.grad(loss)(options["log_decay"])).all()


def test_with_64_bits():
    arrays, options, _ = draw("gated deltanet", 1, 8, 1, 2, 2)
    with jax.enable_x64(True):
        small = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, options))
        run = over_context(sk.make_mesh(jax.devices()[:2], context=2), "gated deltanet", chunk=2)
        y = run(*small[0], small[1], jnp.zeros((1, 8), jnp.int32))
    np.testing.assert_allclose(y, run_token_by_token(*arrays, **options), atol=1e-4)


def test_half_precision_keeps_float32_states():
    arrays, options, segments = draw("mamba-2", 1, 64, 2, 4, 4)
    small = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (arrays, options))
    run = over_context(sk.make_mesh(jax.devices()[:2], context=2), "mamba-2", chunk=16)
    y = run(*small[0], small[1], segments)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), small)
    want = run_token_by_token(*exact[0], **exact[1], segments_bt=segments)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), want, atol=2**-8 * float(abs(want).max()))


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("model", ["linear attention", "gated linear attention", "gated deltanet"])
def test_bytes_do_not_depend_on_the_tokens(model, n):
    b, heads, width, value_width = 2, 3, 4, 5
    keep = {"linear attention": 1, "gated linear attention": width, "gated deltanet": width * width}[model]
    steps = (n > 1) + (max(n - 2, 0)).bit_length()
    expected = 4 * steps * b * heads * (keep + width * value_width) + 4 * b * (n > 1)
    for t in (8 * n, 32 * n):
        arrays, options, segments = draw(model, b, t, heads, width, value_width)
        run = over_context(sk.make_mesh(jax.devices()[:n], context=n), model, chunk=4)
        census = sk.census(run, *arrays, options, segments)
        sent = sum(row.bytes_in * row.times for row in census.rows)
        assert sent == expected


REFUSED = [
    (
        {"log_decay": jnp.zeros((1, 8))},
        "log_decay must have the shape [b, t, H], b=1, t=8, H=2; got (1, 8). Pass an array of that shape.",
    ),
    (
        {"erase": (jnp.zeros((1, 8, 2, 4)), jnp.zeros((1, 8, 2, 3)))},
        "erase[1] must have the shape [b, t, H, K], b=1, t=8, H=2, K=4; got (1, 8, 2, 3). Pass an array of that shape.",
    ),
    ({"chunk": 0}, "chunk must be a whole number of at least 1; got 0. Pass chunk=1 or more."),
]


def test_one_device_and_refusals():
    arrays, options, segments = draw("rwkv-6", 1, 8, 2, 4, 3)
    y = sk.layers.linear_recurrence(*arrays, None, **options, segments_bt=segments, chunk=4)
    np.testing.assert_allclose(y, run_token_by_token(*arrays, **options, segments_bt=segments), atol=1e-4)
    q, k, v = arrays
    with type_error(
        "linear_recurrence: erase must be a pair (a, b) of arrays [b, t, H, K]; got tuple. Pass erase=(a, b)."
    ):
        sk.layers.linear_recurrence(q, k, v, None, erase=(q, q, q))
    with value_error("linear_recurrence: there must be at least one token; got none. Pass q with t of 1 or more."):
        sk.layers.linear_recurrence(q[:, :0], k[:, :0], v[:, :0], None)
    for options, message in REFUSED:
        with value_error(f"linear_recurrence: {message}"):
            sk.layers.linear_recurrence(q, k, v, None, **options)
    with value_error(
        "linear_recurrence: k must have the shape [b, t, H, K], b=1, t=8, H=2, K=4; got (1, 4, 2, 4). Pass "
        "an array of that shape."
    ):
        sk.layers.linear_recurrence(q, k[:, :4], v, None)


EXAMPLE = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples" / "recurrent_models.py")))


@pytest.mark.parametrize(
    "mixer",
    [pytest.param("mamba_2", marks=pytest.mark.deep), pytest.param("rwkv_6", marks=pytest.mark.deep), "gated_deltanet"],
)
def test_the_examples_models_train_as_on_one_device(mixer):
    """Under fsdp and cp, with documents; two steps, so that a wrong gradient shows in the second loss too."""

    def grad_fn(axis):
        return sk.value_and_grad(partial(EXAMPLE.loss_fn, mixer=getattr(EXAMPLE, mixer), axis=axis))

    rng = np.random.default_rng(3)

    def make_batch():
        tokens = rng.integers(0, EXAMPLE.VOCABULARY, (4, 17))
        segments = np.sort(rng.integers(0, 3, (4, 16)), 1).astype(np.int32)
        return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments}

    sk.testing.assert_same_training(
        grad_fn("context"),
        grad_fn(None),
        optax.sgd(0.5),
        mesh=sk.make_mesh(data=2, context=4),
        plan=sk.chain(sk.fsdp("data", min_size=1), sk.cp("context")),
        params=EXAMPLE.init(jax.random.key(0)),
        batches=[make_batch() for _ in range(2)],
    )


def test_the_combine_of_the_scan_is_associative():  # a scan of another number of devices gives the same state
    changes = recurrence._Change(jnp.ones((2, 2)), jnp.ones((2, 3)))
    sk.testing.assert_associative(recurrence._follow, recurrence._Change(np.eye(2), 0.0), changes)
    rows = recurrence._Change(jnp.ones((2, 1)), jnp.ones((2, 3)))
    sk.testing.assert_associative(recurrence._follow, recurrence._Change(1.0, 0.0), rows)
