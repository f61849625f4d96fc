"""What the first call of a step says of a loss that mixes the tokens of each device, under context parallelism."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from support.training import lenient

B, T, D, V = 4, 8, 4, 5
RNG = np.random.default_rng(0)
PARAMS = {"embed": RNG.normal(size=(V, D)), "places": RNG.normal(size=(T, D)), "out": RNG.normal(size=(D, V))}
PARAMS = {name: x.astype("f") for name, x in PARAMS.items()}
TOKENS = RNG.integers(0, V, (B, T + 1)).astype("i")
BATCH = {
    "tokens": TOKENS[:, :-1],
    "targets": TOKENS[:, 1:],
    "weights": (np.arange(T)[None] < np.array([[3], [8], [5], [7]])).astype("f"),
    "places": np.tile(np.arange(T, dtype="i"), (B, 1)),
    "documents": np.tile(np.repeat(np.arange(T // 2, dtype="i"), 2), (B, 1)),
    "label": np.arange(B) % V,
}
PLANS = {
    "cp": ({"context": 2}, sk.cp("context")),
    "dp and cp": ({"data": 2, "context": 2}, sk.chain(sk.dp("data"), sk.cp("context"))),
}


@pytest.fixture(autouse=True)
def as_newcomers_write():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def stepped(loss, batch=BATCH, sizes=None, plan=None, **options):
    sizes = sizes or {"context": 4}
    mesh = sk.make_mesh(jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    job = {"mesh": mesh, "plan": plan or sk.cp("context"), "donate": False, **options}
    init, step = sk.make_train_step(sk.value_and_grad(loss), lenient(optax.sgd(0.1)), **job)
    return step, init(PARAMS, jax.random.key(0)), batch


def without_a_word(step, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return step(*args)


def refused(loss, **options):
    step, state, batch = stepped(loss, **options)
    with pytest.raises(ValueError) as error:
        step(state, batch)
    return str(error.value)


def warned(loss, **options):
    step, state, batch = stepped(loss, **options)
    with pytest.warns(UserWarning) as told:
        step(state, batch)
    (warning,) = told
    assert warning.filename == __file__
    return str(warning.message)


def embedded(params, batch):
    return params["embed"][batch["tokens"]]


def errors(params, x, targets):
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], targets)


def attended(x, is_seen):
    scores = jnp.where(is_seen, x @ x.swapaxes(1, 2), -1e30)
    return x + jax.nn.softmax(scores) @ x


def is_earlier(count):
    return jnp.tril(jnp.ones((count, count), bool))


def plain(params, batch, keys):
    return sk.Mean.of(errors(params, embedded(params, batch), batch["targets"]), batch["weights"])


def local_attention(params, batch, keys):
    x = embedded(params, batch)
    return sk.Mean.of(errors(params, attended(x, is_earlier(x.shape[1])), batch["targets"]))


# What alone finds attention over a device's own tokens: every other number of the program is right.
@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_that_mixes_tokens_in_full(plan):
    sizes, of_plan = PLANS[plan]
    message = re.sub(r"py:\d+", "py:N", refused(local_attention, sizes=sizes, plan=of_plan))
    assert re.fullmatch(
        r"step: the loss must add over its tokens, because each device computes that of its own; dot_general pairs "
        r"every token with every other at test_first_call_tokens.py:N \(attended\), so the loss of the tokens of two "
        r"devices is [\d.]+, and not the mean of theirs, [\d.]+. Return sk.Mean\(total, weight\) of sums over tokens, "
        r"attend over the tokens of all devices, as sk.layers.ring_attention does, take the positions of a device's "
        r"own from sk.layers.positions and what stands beside them from sk.collectives.halo_exchange, or pass "
        r"make_train_step\(..., examples='mixed'\) if each device's own tokens are meant to meet.",
        message,
    )
    whole, apart = map(float, re.findall(r"is ([\d.]+), and not the mean of theirs, ([\d.]+)\.", message)[0])
    if plan == "cp":  # two devices have all tokens
        np.testing.assert_allclose(whole, np.divide(*local_attention(PARAMS, BATCH, None)), rtol=1e-5)
    assert abs(whole - apart) > 1e-3 * whole


def local_places(params, batch, keys):
    x = embedded(params, batch) + params["places"][: batch["tokens"].shape[1]]
    return sk.Mean.of(errors(params, x, batch["targets"]))


def running_sum(params, batch, keys):
    return sk.Mean.of(errors(params, jnp.cumsum(embedded(params, batch), 1), batch["targets"]))


def shifted_inside(params, batch, keys):
    return sk.Mean.of(errors(params, embedded(params, batch)[:, :-1], batch["tokens"][:, 1:]))


def convolved(params, batch, keys):
    kernel = jnp.stack([params["places"][:D], params["places"][D:]])
    x = jax.lax.conv_general_dilated(
        embedded(params, batch), kernel, (1,), [(1, 0)], dimension_numbers=("NHC", "HIO", "NHC")
    )
    return sk.Mean.of(errors(params, x, batch["targets"]))


def of_sequences(params, batch, keys):
    """The mean over the tokens of a sequence, and then over sequences."""
    error = errors(params, embedded(params, batch), batch["targets"]) * batch["weights"]
    return sk.Mean.of(error.sum(1) / (batch["weights"].sum(1) + 1e-3))


def of_weight_at_least_one(params, batch, keys):
    """The first batch has weights on every device."""
    error = errors(params, embedded(params, batch), batch["targets"]) * batch["weights"]
    return sk.Mean(error.sum(), jnp.maximum(batch["weights"].sum(), 1.0))


@pytest.mark.parametrize(
    "loss, how",
    [
        (local_places, "add combines a token with a value that depends on its place in the sequence"),
        (running_sum, "cumsum runs over the tokens"),
        (shifted_inside, "slice takes some of the tokens"),
        (convolved, "conv_general_dilated runs over the tokens"),
        (of_sequences, "a value that does not depend on the tokens is added to a sum over them"),
        (of_weight_at_least_one, "max is applied to a sum over the tokens"),
    ],
)
def test_what_mixes_tokens_is_refused(loss, how):
    message = refused(loss)
    assert how in message
    assert (" where those of one are an eighth, and not" in message) == (loss is of_weight_at_least_one)
    without_a_word(*stepped(loss, examples="mixed"))


def of_documents(params, batch, keys):
    """Documents end where devices do, so that attention over a device's own tokens is that of each document."""
    documents = batch["documents"]
    x = embedded(params, batch)
    is_seen = (documents[:, :, None] == documents[:, None, :]) & is_earlier(x.shape[1])
    return sk.Mean.of(errors(params, attended(x, is_seen), batch["targets"]))


def from_starts(params, batch, keys):
    """A sum that begins anew with each document; the first needs no mark, so its tokens must not follow the last."""
    is_start = (batch["places"] % 2 == 0) & (batch["places"] > 0)

    def add(total, token):
        is_first, x = token
        total = jnp.where(is_first[:, None], 0, total) + x
        return total, total

    x = embedded(params, batch).swapaxes(0, 1)
    _, sums = jax.lax.scan(add, x[0] * 0, (is_start.T, x))
    return sk.Mean.of(errors(params, sums.swapaxes(0, 1), batch["targets"]))


def with_places(params, batch, keys):
    return sk.Mean.of(errors(params, embedded(params, batch) + params["places"][batch["places"]], batch["targets"]))


def flat(params, batch, keys):
    x = embedded(params, batch).reshape(-1, D)
    return sk.Mean.of(errors(params, x, batch["targets"].reshape(-1)), batch["weights"].reshape(-1))


def of_two_tokens(params, batch, keys):
    """As a user of these meshes may write it: it cannot be traced for other numbers of tokens."""
    x = embedded(params, batch).reshape(-1, 2, D)
    return sk.Mean.of(errors(params, jnp.cumsum(x, 1)[:, :1], batch["targets"].reshape(-1, 2)[:, :1]))


def written_for_these_devices(params, batch, keys):
    assert batch["tokens"].shape[1] == 2
    return plain(params, batch, keys)


# What alone finds a right loss that is refused: of documents, blocks and positions that come with the batch.
@pytest.mark.parametrize(
    "loss", [plain, flat, with_places, of_documents, from_starts, of_two_tokens, written_for_these_devices]
)
def test_what_adds_over_tokens_trains_without_a_word(loss):
    without_a_word(*stepped(loss))


def test_a_loss_that_is_written_for_so_many_examples():
    def loss(params, batch, keys):
        assert len(batch["tokens"]) == 2
        return plain(params, batch, keys)

    without_a_word(*stepped(loss, sizes={"data": 2}, plan=sk.dp("data")))


def rotated(x, places):
    angles = places[:, None] / 4 ** jnp.arange(D // 2)
    x = x.reshape(*x.shape[:2], 1, 2, -1)
    x, y = x[..., 0, :], x[..., 1, :]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate([x * cos - y * sin, x * sin + y * cos], -1)


def through_ring(order="contiguous", local=False, host=False):
    def loss(params, batch, keys):
        if order == "zigzag" and not host:
            batch = sk.layers.zigzag(batch, "context")
        x = embedded(params, batch)
        places = sk.layers.positions(x.shape[1], "context", order=order)
        if local:
            places = jnp.arange(x.shape[1])
        q = rotated(x, places)
        y = sk.layers.ring_attention(q, q, x[:, :, None], "context", order=order)
        return sk.Mean.of(errors(params, x + y[:, :, 0], batch["targets"]), batch["weights"])

    return loss


# What alone finds rotary positions that begin with 0 on each device, beside attention over all.
@pytest.mark.parametrize("plan", PLANS)
def test_a_loss_that_sends_tokens_is_compared_with_one_device(plan):
    sizes, of_plan = PLANS[plan]
    message = re.sub(r"py:\d+", "py:N", warned(through_ring(local=True), sizes=sizes, plan=of_plan))
    assert re.fullmatch(
        r"step: test_first_call_tokens.py:N \(through_ring.<locals>.loss\): the loss, which sends over 'context' here, "
        r"must be the same on every mesh; it is [\d.]+ on this one, and [\d.]+ where one device has all tokens. Attend "
        r"over the tokens of all devices, as sk.layers.ring_attention does, take the positions of a device's own from "
        r"sk.layers.positions and what stands beside them from sk.collectives.halo_exchange, put them into another "
        r"order by sk.layers.zigzag inside of the loss, or pass make_train_step\(..., examples='mixed'\) if each "
        r"device is meant to compute what it does, as of a batch that is in the order of this mesh.",
        message,
    )
    without_a_word(*stepped(through_ring(), sizes=sizes, plan=of_plan))


# What alone finds a batch that was not put into the order of its attention.
def test_zigzag_order_of_a_batch_that_is_in_order():
    two = {"sizes": {"context": 2}}
    without_a_word(*stepped(through_ring("zigzag"), **two))
    assert "sends over 'context'" in warned(through_ring("zigzag", host=True), **two)


def with_learned_places(params, batch):
    count = batch["tokens"].shape[1]
    return embedded(params, batch) + params["places"][sk.layers.positions(count, "context")]


# What alone finds a loss that knows the place of its tokens, and attends to a device's own.
def test_a_loss_that_asks_for_its_place_is_compared_with_one_device():
    def right(params, batch, keys):
        return sk.Mean.of(errors(params, with_learned_places(params, batch), batch["targets"]))

    def local(params, batch, keys):
        x = with_learned_places(params, batch)
        return sk.Mean.of(errors(params, attended(x, is_earlier(x.shape[1])), batch["targets"]))

    without_a_word(*stepped(right))
    assert "the loss, which asks for the index of a device along 'context' here, must be the same" in warned(local)


def with_dropout(local, by_device=None):
    def loss(params, batch, keys):
        x = embedded(params, batch)
        count = x.shape[1]
        places = sk.layers.positions(count, "context")
        if by_device is not None:
            keys = by_device(keys)
        x = sk.dropout(x, sk.fold_keys(keys[:, None], places[None]), 0.5)
        if local:
            x = attended(x, is_earlier(count))
        return sk.Mean.of(errors(params, x, batch["targets"]))

    return loss


# What alone finds a loss that draws by the place of its tokens, and attends to a device's own: one device draws alike.
# Keys that a device's index makes are others on each mesh, as `fold_axis` says.
def test_a_loss_that_draws_by_its_places_is_compared_with_one_device():
    without_a_word(*stepped(with_dropout(local=False)))
    assert "asks for the index of a device along 'context' here, must be the same" in warned(with_dropout(local=True))
    by_axis = with_dropout(local=False, by_device=jax.vmap(lambda key: sk.fold_axis(key, "context")))
    by_index = with_dropout(local=False, by_device=lambda keys: sk.fold_keys(keys, sk.axis_index("context")))
    for loss in (by_axis, by_index):
        without_a_word(*stepped(loss))


# What alone finds that what a `while` sends is seen: it is compared, and not refused.
def test_a_loop_that_sends_until_it_is_done_is_compared_with_one_device():
    def loss(params, batch, keys):
        x = embedded(params, batch)

        def halve(state):
            size, mean = state
            return size / 2, sk.shift(mean, "context")  # that of another device, which one device does not have

        mean = sk.vary(jnp.mean(jax.lax.stop_gradient(x), 1), "context")
        _, mean = jax.lax.while_loop(lambda state: state[0] > 1, halve, (jnp.float32(3), mean))
        return sk.Mean.of(errors(params, jnp.tanh(x + mean[:, None]), batch["targets"]))

    assert "the loss, which sends over 'context' here, must be the same" in warned(loss)


# What alone finds a right loss that is refused because a loop in Python has more rounds for more tokens.
def test_a_loop_over_a_devices_own_tokens_that_sends_is_compared_with_one_device():
    def in_chunks(of_all):
        def loss(params, batch, keys):
            x = embedded(params, batch)
            total = jnp.zeros_like(x[:, 0])
            for start in range(0, x.shape[1], 2):
                total += x[:, start : start + 2].sum(1)
            before = sk.collectives.prefix_scan(total, "context", exclusive=True)
            if not of_all:
                before = jnp.roll(before, 1, -1)
            return sk.Mean.of(errors(params, jnp.tanh(jnp.cumsum(x, 1) + before[:, None]), batch["targets"]))

        return loss

    without_a_word(*stepped(in_chunks(of_all=True)))
    assert "the loss, which sends over 'context' here, must be the same" in warned(in_chunks(of_all=False))


# What alone finds a right loss of whole sequences, equal on all devices, that is refused for a sum of equal totals.
def test_sequences_that_are_pooled_over_all_tokens():
    def loss(params, batch, keys):
        count = sk.axis_size("context") * batch["tokens"].shape[1]
        x = sk.all_reduce(jnp.sum(embedded(params, batch), 1), "context") / count
        return sk.Mean.of(errors(params, jnp.tanh(x), batch["label"]))

    trained = {}
    for number, (sizes, plan) in enumerate([({"context": 1}, sk.cp("context")), *PLANS.values()]):
        step, state, batch = stepped(loss, sizes=sizes, plan=plan)
        state, metrics = without_a_word(step, state, batch)
        trained[number] = jax.device_get((metrics["loss"], state.params))
    for number in (1, 2):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), trained[number], trained[0])


def test_a_metric_that_mixes_tokens_is_said_once():
    """Also where it mixes examples too; so does an evaluation."""

    def loss(params, batch, keys):
        mean = plain(params, batch, keys)
        return mean, {"perplexity": jnp.exp(mean.total / 8)}

    words = "the metric 'perplexity' must add over its {}s, because .* exp is applied to a sum over the {}s"
    sizes, plan = PLANS["dp and cp"]
    assert re.search(words.format("token", "token"), warned(loss))
    assert re.search(words.format("example", "example"), warned(loss, sizes=sizes, plan=plan))
    evaluate = sk.make_eval_step(loss, mesh=sk.make_mesh(jax.devices()[:2], context=2), plan=sk.cp("context"))
    with pytest.warns(UserWarning, match="evaluate: " + words.format("token", "token")):
        evaluate(PARAMS, BATCH)
