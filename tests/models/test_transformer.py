"""The reference transformer: shapes, names, causality, and each piece against a second way to write it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit.meshes.rng import fold_keys
from shardkit.models import blocks, transformer
from support.conformance import weights
from support.refusals import value_error

CONFIG = transformer.Config(vocabulary=40, layers=2, dim=32, heads=4, kv_heads=2, hidden=48)
KEY = jax.random.key(0)


def tokens(batch=3, length=12):
    return np.random.default_rng(1).integers(0, 40, (batch, length)).astype(np.int32)


@pytest.mark.parametrize("tied", [False, True])
def test_every_leaf_has_a_logical_name_for_every_dim(tied):
    config = transformer.Config(tied=tied)
    params = jax.eval_shape(lambda key: transformer.init(key, config), KEY)
    axes = transformer.logical_axes(config)
    is_names = lambda x: isinstance(x, tuple)  # noqa: E731
    assert jax.tree.structure(params) == jax.tree.structure(axes, is_leaf=is_names)
    jax.tree.map(lambda names, x: assert_rank(names, x), axes, params, is_leaf=is_names)
    assert ("head" in params) == (not tied)


def assert_rank(names, x):
    assert len(names) == x.ndim


# proves S24, S25: one model under two sets of rules
def test_two_sets_of_rules_give_the_same_logits(mesh2x4):
    params = weights(CONFIG)
    axes = transformer.logical_axes(CONFIG)
    none = dict.fromkeys(["vocabulary", "layers", "embed", "heads", "kv_heads", "head_size", "hidden"])
    outputs = []
    for rules in (none | {"hidden": "model", "heads": "model"}, none | {"embed": ("data", "model")}):
        placed = sk.shard(params, mesh2x4, sk.specs_from_rules(axes, rules))
        outputs.append(jax.jit(lambda p, t: transformer.apply(p, t, CONFIG))(placed, tokens()))
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-6)


def test_a_token_sees_only_what_came_before():
    params = weights(CONFIG)
    first = tokens()
    second = first.copy()
    second[:, 7] = (first[:, 7] + 1) % 40
    apply = jax.jit(transformer.apply, static_argnums=2)
    a, b = (apply(params, t, CONFIG) for t in (first, second))
    np.testing.assert_array_equal(a[:, :7], b[:, :7])
    assert np.all(np.any(np.asarray(a[:, 7:]) != np.asarray(b[:, 7:]), axis=-1))


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = np.asarray(jax.random.normal(KEY, (2, 8)))
    rotate = jax.jit(blocks.rotate)
    at = lambda x: np.asarray(rotate(np.tile(x, (1, 10, 1, 1)), np.arange(10)))[0, :, 0]  # noqa: E731
    scores = at(q) @ at(k).T
    for distance in range(-5, 6):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, np.full_like(diagonal, diagonal[0]), rtol=1e-4, atol=1e-5)
    assert np.ptp(scores[5]) > 0.1


def test_grouped_heads_equal_repeated_ones_and_rms_norm_keeps_its_statistics_in_low_precision():
    params = jax.tree.map(lambda w: w[0], weights(CONFIG)["layers"])
    x = jax.random.normal(jax.random.key(2), (2, 6, 32))
    repeated = params | {name: jnp.repeat(params[name], 2, axis=1) for name in ("key", "value")}
    full = transformer.Config(vocabulary=40, layers=2, dim=32, heads=4, hidden=48)
    attention = jax.jit(blocks.attention, static_argnums=2)
    np.testing.assert_allclose(attention(params, x, CONFIG), attention(repeated, x, full), rtol=1e-5, atol=1e-7)
    # proves F28 on one device
    x = 300 * jax.random.normal(KEY, (1, 4, 64)).astype(jnp.float16)  # squares overflow float16
    y = blocks.rms_norm(x, jnp.ones(64, jnp.float16))
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(np.mean(np.asarray(y, np.float32) ** 2, -1), np.ones((1, 4)), rtol=1e-2)


def test_the_loss_counts_weights_and_starts_at_the_entropy_of_a_guess():
    params = weights(CONFIG)
    loss_fn = jax.jit(transformer.loss_fn(CONFIG))
    batch = {"tokens": tokens(), "targets": tokens()}
    loss, aux = loss_fn(params, batch, None)
    assert float(loss.weight) == 36 == float(aux["accuracy"].weight)
    np.testing.assert_allclose(loss.total / loss.weight, np.log(40), rtol=0.01)
    half = batch | {"weights": np.repeat([[1.0, 0.0]], 6, axis=1).repeat(3, axis=0).astype(np.float32)}
    cut = {name: x[:, :6] for name, x in batch.items()}
    np.testing.assert_allclose(loss_fn(params, half, None)[0].total, loss_fn(params, cut, None)[0].total, rtol=1e-5)


# proves F46: recomputing a layer draws the same dropout
def test_remat_changes_nothing():
    config = transformer.Config(vocabulary=40, layers=1, dim=32, heads=4, dropout=0.5)
    params = weights(config)
    keys = sk.example_keys(KEY, 3)

    def total(params, apply):
        return jnp.sum(apply(params, tokens()) ** 2)

    plain = lambda p, t: transformer.apply(p, t, config, keys)  # noqa: E731
    one, two = (jax.jit(jax.grad(total), static_argnums=1)(params, apply) for apply in (plain, jax.checkpoint(plain)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.max(np.abs(b))), one, two)
    evaluation, training = jax.jit(lambda p, t: (transformer.apply(p, t, config), plain(p, t)))(params, tokens())
    assert not np.allclose(evaluation, training)


def test_tied_head_is_the_embedding():
    config = transformer.Config(vocabulary=40, layers=1, dim=32, heads=4, tied=True)
    params = weights(config)
    untied = params | {"head": params["embed"].T}
    plain = transformer.Config(vocabulary=40, layers=1, dim=32, heads=4)
    np.testing.assert_array_equal(
        transformer.apply(params, tokens(), config), transformer.apply(untied, tokens(), plain)
    )


@pytest.mark.parametrize(
    "message, sizes",
    {
        "transformer: dim must be divisible by heads into an even head size; got dim 30 over 4 heads. "
        "Change dim or heads.": {"dim": 30, "heads": 4},
        "transformer: dim must be divisible by heads into an even head size; got dim 12 over 4 heads. "
        "Change dim or heads.": {"dim": 12, "heads": 4},
        "transformer: kv_heads must divide heads; got 3 and 4. Change one of them.": {"heads": 4, "kv_heads": 3},
    }.items(),
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with value_error(message):
        transformer.Config(**sizes)


def test_a_batch_without_tokens_is_refused():
    wanted = "transformer: the batch must be a mapping with the entry 'tokens'; got {}. Pass for example "
    wanted += "{{'tokens': tokens, 'targets': targets}}."
    for batch, told in (({"targets": tokens()}, "'targets'"), (np.ones(3), "ndarray")):
        with value_error(wanted.format(told)):
            transformer.loss_fn(transformer.Config(layers=1, dim=16, heads=2))({}, batch, None)


def test_tokens_of_a_negative_target_count_for_nothing():
    config = transformer.Config(vocabulary=8, layers=1, dim=8, heads=2, hidden=8)
    params = weights(config)
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    targets = np.array([[1, 2, -1, -1], [5, -1, 7, 0]], np.int32)
    batch = {"tokens": tokens, "targets": targets}
    loss = jax.jit(transformer.loss_fn(config))
    total, weight = loss(params, batch, None)[0]
    weighed = batch | {"targets": np.maximum(targets, 0), "weights": (targets >= 0).astype(np.float32)}
    wanted = loss(params, weighed, None)[0]
    assert float(weight) == 5 == float(wanted.weight) and float(total) == pytest.approx(float(wanted.total))
    both = loss(params, batch | {"weights": np.full((2, 4), 2.0, np.float32)}, None)[0]
    assert float(both.weight) == 10 and float(both.total) == pytest.approx(2 * float(total))


def test_projections_into_the_residual_stream_start_smaller_the_deeper_the_model():
    """Nothing else notices: the model trains with other scales too, worse when it is deep."""
    params = weights(transformer.Config(vocabulary=64, layers=8, dim=64, hidden=256))
    for name in ("attention_out", "down"):
        assert float(params["layers"][name].std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert float(params["layers"]["up"].std()) == pytest.approx(0.02, rel=0.05)


def test_every_dropout_of_every_layer_has_its_own_keys(monkeypatch):
    """Shared keys drop the same places in two layers, which no comparison with the model itself can see."""
    numbers = []

    def noted(keys, number):
        if jnp.ndim(number) == 0:  # of a layer; those of examples are many
            jax.debug.callback(lambda value: numbers.append(int(value)), number)
        return fold_keys(keys, number)

    monkeypatch.setattr(transformer, "fold_keys", noted)
    config = transformer.Config(vocabulary=8, layers=3, dim=8, heads=2, hidden=8, dropout=0.5)
    params = weights(config)
    batch = {name: np.zeros((1, 2), np.int32) for name in ("tokens", "targets")}
    jax.block_until_ready(jax.jit(transformer.loss_fn(config))(params, batch, sk.example_keys(jax.random.key(0), 1)))
    jax.effects_barrier()
    assert len(numbers) == len(set(numbers)) == 2 * 3


def test_dropped_choices_are_counted_once():
    config = transformer.Config(vocabulary=8, layers=2, dim=8, heads=2, hidden=8, experts=2, top_k=1)
    params = weights(config)
    batch = {name: np.zeros((3, 4), np.int32) for name in ("tokens", "targets")}
    _, aux = jax.jit(transformer.loss_fn(config))(params, batch, None)
    assert aux["dropped"].weight == 2 * 3 * 4  # layers, examples, tokens


@pytest.mark.quick("True")
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_may_be_whole_only_where_they_are_used(tied):
    """As lazy leaves their gradients are parts in each microbatch: 26.0 GB for 28.9 of an 8B model on 8 H100."""
    config = transformer.Config(vocabulary=40, layers=2, dim=32, heads=4, hidden=48, tied=tied)
    batch = {"tokens": tokens(8), "targets": tokens(8)[:, ::-1]}

    def trained(plan, devices, axes, accumulate):
        mesh = sk.make_mesh(jax.devices()[: devices[0] * devices[1]], data=devices[0], model=devices[1])
        grad_fn = sk.value_and_grad(transformer.loss_fn(config, axes))
        init, step = sk.make_train_step(grad_fn, optax.sgd(0.5), mesh=mesh, plan=plan, accumulate=accumulate)
        state = init(weights(config), KEY)
        census = sk.census(step, state, batch)
        for _ in range(2):
            state, metrics = step(state, batch)
        return float(metrics["loss"]), jax.tree.map(np.asarray, jax.device_get(state.params)), census

    named = ("layers", "embed") if tied else ("layers", "embed", "head")
    tensor = sk.tp("model", transformer.tensor_rules(config, "model", 2))
    plan = sk.chain(sk.fsdp("data", layerwise=named, min_size=1), tensor)
    one = trained(sk.dp("data"), (1, 1), transformer.ONE_DEVICE, 1)
    many = trained(plan, (2, 2), transformer.Axes(model="model"), 2)
    np.testing.assert_allclose(many[0], one[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), many[1], one[1])
    table = [row for row in many[2].select(axis="data", kind="reduce_scatter") if row.bytes_in == 40 // 2 * 32 * 4]
    assert sum(row.times for row in table) == 2 * 2  # of a table's two uses, or of two tables, in two microbatches
