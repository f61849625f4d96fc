"""rng.py: folded keys, one key an example, and dropout that does not know the mesh."""

import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from support.commands import deep
from support.refusals import raises, refusals, unbound_axis, value_error

KINDS = {"raw": jax.random.PRNGKey, "typed": jax.random.key}
# fold_in(PRNGKey(0), i) for i = 0..3, as measured under both jax versions
FOLDED = [[1797259609, 2579123966], [928981903, 3453687069], [4146024105, 2718843009], [2467461003, 3840466878]]

kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def bits(key):
    """The two integers of every key, in the order of its shape."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(key) if typed else key).reshape(-1, 2).tolist()


def on_devices(make, fold, mesh, *axes):
    """The bits of a folded key on every device, in mesh order; the type of the result must vary over `axes` alone."""

    def device():
        key = fold(make(0))
        assert key.dtype == make(0).dtype
        return (jax.random.key_data(key) if key.ndim == 0 else key)[None]

    return bits(jax.jit(jax.shard_map(device, mesh=mesh, in_specs=(), out_specs=P(axes)))())


@kinds
@pytest.mark.parametrize("partitionable", [True, False])
def test_the_plain_rule_gives_the_known_numbers(make, partitionable):  # proves S56
    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    with jax.threefry_partitionable(partitionable):
        assert on_devices(make, lambda key: sk.fold_axis(key, "data"), mesh, "data") == FOLDED
        assert [bits(jax.random.fold_in(make(0), i))[0] for i in range(4)] == FOLDED


@kinds
def test_fold_axis_differs_along_its_axis_alone_and_over_a_tuple_by_the_joint_index(make, mesh2x4):  # proves S53, F43
    along = on_devices(make, lambda key: sk.fold_axis(key, "model"), mesh2x4, "model")
    assert along == FOLDED  # out_specs=P("model") is accepted: the key is typed as equal over data

    def everywhere(key):
        return sk.vary(sk.fold_axis(key, "model"), ("data", "model"))

    assert on_devices(make, everywhere, mesh2x4, "data", "model") == FOLDED + FOLDED
    one_device = [bits(jax.random.fold_in(make(0), i))[0] for i in range(8)]
    both = ("data", "model")
    assert on_devices(make, lambda key: sk.fold_axis(key, both), mesh2x4, *both) == one_device
    turned = on_devices(make, lambda key: sk.fold_axis(key, both[::-1]), mesh2x4, *both)
    assert turned == [one_device[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]


@pytest.mark.quick("typed")
@kinds
def test_two_axes_share_a_stream_unless_salted(make, mesh2x4):
    def keys(fold, axis):
        return on_devices(make, lambda key: fold(key, axis), mesh2x4, axis)

    assert keys(sk.fold_axis, "data") == keys(sk.fold_axis, "model")[:2]  # the trap of the plain rule
    salted = keys(sk.fold_axes, "data") + keys(sk.fold_axes, "model")
    assert len({tuple(key) for key in salted}) == 6


@pytest.mark.quick("typed")
@kinds
def test_fold_axes_is_order_free_and_never_repeats(make):  # proves S54
    mesh = sk.make_mesh(data=2, model=2, stage=2)
    names = mesh.axis_names
    orders = [order for count in (1, 2, 3) for order in itertools.permutations(names, count)]

    def device():
        keys = [sk.vary(sk.fold_axes(make(0), order), names) for order in orders]
        return jnp.stack([jax.random.key_data(key) if key.ndim == 0 else key for key in keys])[None]

    f = jax.shard_map(device, mesh=mesh, in_specs=(), out_specs=P(names))
    by_device = np.asarray(jax.jit(f)()).tolist()
    seen = {}  # the key for each set of axes and each place along them
    for order, *keys in zip(orders, *by_device, strict=True):
        for place, key in zip(np.ndindex(2, 2, 2), keys, strict=True):
            at = tuple((name, i) for name, i in zip(names, place, strict=True) if name in order)
            assert seen.setdefault(at, tuple(key)) == tuple(key)
    assert len(set(seen.values())) == len(seen) == 3 * 2 + 3 * 4 + 8


@kinds
def test_fold_axes_can_be_written_on_one_device(make, mesh2x4):
    def by_hand(data, model):
        key = make(0)
        for name, index in (("data", data), ("model", model)):  # in alphabetical order
            key = jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(name.encode())), index)
        return bits(key)[0]

    got = on_devices(make, lambda key: sk.fold_axes(key, ("model", "data")), mesh2x4, "data", "model")
    assert got == [by_hand(i // 4, i % 4) for i in range(8)]


def test_parameters_agree_and_masks_differ(mesh2x4):  # proves S55
    def device():
        key = jax.random.key(3)
        w = jax.random.normal(key, (4,))
        keep = jax.random.bernoulli(sk.fold_axis(key, "data"), 0.5, (1, 32))
        return w, keep

    f = jax.shard_map(device, mesh=mesh2x4, in_specs=(), out_specs=(P(), P("data")))
    w, keep = jax.jit(f)()
    np.testing.assert_array_equal(w, jax.random.normal(jax.random.key(3), (4,)))
    assert len(w.sharding.device_set) == 8
    assert (np.asarray(keep[0]) != np.asarray(keep[1])).any()


def test_a_stage_starts_from_its_own_key():  # proves S57
    mesh = sk.make_mesh(stage=4, data=2)

    def device():
        return jax.random.normal(sk.fold_axis(jax.random.key(7), "stage"), (1, 3, 2))

    layers = jax.jit(jax.shard_map(device, mesh=mesh, in_specs=(), out_specs=P("stage")))()
    by_hand = [jax.random.normal(jax.random.fold_in(jax.random.key(7), i), (3, 2)) for i in range(4)]
    np.testing.assert_array_equal(layers, np.stack(by_hand))


@pytest.mark.quick("True-typed", "False-raw")
@kinds
@pytest.mark.parametrize("partitionable", [True, False])
def test_example_keys_do_not_depend_on_how_many(make, partitionable):
    with jax.threefry_partitionable(partitionable):  # without it, the first keys of a split depend on how many
        keys = sk.example_keys(make(0), 8)
        assert keys.shape == ((8,) if make is jax.random.key else (8, 2))
        assert bits(keys)[:4] == FOLDED
        assert bits(sk.example_keys(make(0), 3)) == FOLDED[:3]
        assert bits(sk.example_keys(make(0), 0)) == []


@kinds
def test_fold_keys_folds_each(make):
    one, many = make(0), sk.example_keys(make(5), 3)
    folded = [bits(jax.random.fold_in(many[i], 9))[0] for i in range(3)]
    assert bits(sk.fold_keys(many, 9)) == folded
    assert bits(sk.fold_keys(one, jnp.arange(4))) == FOLDED
    numbers = jnp.array([2, 0, 1])
    assert bits(sk.fold_keys(many, numbers)) == [
        bits(jax.random.fold_in(many[i], int(n)))[0] for i, n in enumerate(numbers)
    ]


@pytest.mark.quick("typed-8", "raw-1")
@pytest.mark.parametrize("devices", [1, deep(2), deep(4), 8])
@kinds
def test_initialisation_and_dropout_are_the_same_on_every_mesh(make, devices):  # proves F44, F45
    mesh = sk.make_mesh(jax.devices()[:devices], data=devices)
    keys = sk.example_keys(make(1), 8)

    def rows_and_dropout(keys_b):
        rows = jax.vmap(lambda key: jax.random.normal(key, (16,)))(keys_b)
        return rows, sk.dropout(rows, sk.fold_keys(keys_b, 1), 0.5)

    split = jax.shard_map(rows_and_dropout, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for got, wanted in zip(jax.jit(split)(keys), jax.jit(rows_and_dropout)(keys), strict=True):
        assert len(got.sharding.device_set) == devices
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.quick("typed")
@kinds
def test_tokens_with_keys_of_their_own_drop_the_same_however_they_are_split(make):  # proves F44
    keys, x = sk.example_keys(make(1), 4), np.ones((4, 8, 16), np.float32)

    def per_token(x_bt, keys_b, positions_t):
        keys_bt = sk.fold_keys(keys_b[:, None], positions_t[None])
        return sk.dropout(x_bt, keys_bt, 0.5)

    wanted = jax.jit(per_token)(x, keys, np.arange(8))
    assert bits(sk.fold_keys(keys[:, None], jnp.arange(8)[None]))[13] == bits(jax.random.fold_in(keys[1], 5))[0]
    assert len({row.tobytes() for row in np.asarray(wanted).reshape(32, 16)}) == 32  # no two tokens alike
    for sizes in ({"data": 2, "tokens": 4}, {"data": 4, "tokens": 2}, {"data": 1, "tokens": 8}):
        mesh = sk.make_mesh(jax.devices(), **sizes)
        specs = (P("data", "tokens"), P("data"), P("tokens"))
        split = jax.shard_map(per_token, mesh=mesh, in_specs=specs, out_specs=P("data", "tokens"))
        np.testing.assert_array_equal(jax.jit(split)(x, keys, np.arange(8)), wanted)


def test_recomputation_draws_the_same(data8):  # proves F46
    keys, x = sk.example_keys(jax.random.key(2), 16), np.ones((16, 64), np.float32)

    def gradient(layer):
        def local(w, x_b, keys_b):
            return jax.grad(lambda w: layer(w * x_b, keys_b).sum())(w)

        f = jax.shard_map(local, mesh=data8, in_specs=(P(), P("data"), P("data")), out_specs=P())
        return np.asarray(jax.jit(f)(np.ones((1, 64), np.float32), x, keys))

    def layer(x_b, keys_b):
        return jnp.tanh(sk.dropout(x_b, keys_b, 0.25))

    plain = gradient(layer)
    np.testing.assert_array_equal(gradient(jax.checkpoint(layer)), plain)
    kept = (np.asarray(sk.dropout(x, keys, 0.25)) != 0).sum(0)
    np.testing.assert_allclose(plain[0], kept * (1 - np.tanh(4 / 3) ** 2) * 4 / 3, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dropout_drops_the_share_and_scales_the_rest(dtype):
    x = jnp.ones((40, 1000), dtype)
    y = sk.dropout(x, sk.example_keys(jax.random.key(0), 40), 0.25)
    assert y.dtype == x.dtype
    assert set(np.unique(np.asarray(y, np.float32))) == {0, np.float32(jnp.ones((), dtype) / jnp.asarray(0.75, dtype))}
    share = float((y == 0).mean())
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / x.size) ** 0.5
    rows = {tuple(row) for row in (np.asarray(y, np.float32) == 0).tolist()}
    assert len(rows) == 40  # no two examples share a mask


def test_dropout_scales_its_gradient_by_its_mask_and_does_nothing_in_evaluation_or_at_rate_zero():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert sk.dropout(x, None, 0.5) is x
    assert sk.dropout(x, sk.example_keys(jax.random.key(0), 2), 0.0) is x
    x, keys = jnp.full((4, 8), 3.0), sk.example_keys(jax.random.key(0), 4)
    y, back = jax.vjp(lambda x: sk.dropout(x, keys, 0.5), x)
    np.testing.assert_array_equal(back(jnp.ones_like(x))[0], y / 3)
    assert 0 < (np.asarray(y) == 0).sum() < 32


ERRORS = {
    "dropout: rate must be at least 0 and below 1; got 1.0. Pass for example rate=0.1.": lambda: sk.dropout(
        jnp.ones((2, 3)), None, 1.0
    ),
}
INTEGERS = "dropout: x_b must be floating-point; got int32. Apply dropout after the embedding."
TYPES = {INTEGERS: lambda: sk.dropout(jnp.ones((2, 3), jnp.int32), None, 0.5)}


@pytest.mark.parametrize("kind, message, call", refusals(ERRORS, TYPES))
def test_errors(kind, call, message):
    with raises(kind, message):
        call()


def test_an_axis_that_is_not_bound_is_refused():
    with unbound_axis(
        "fold_axis: axis 'data' is not bound here, because no shard_map surrounds this call. Call it inside "
        "jax.shard_map over a mesh with that axis."
    ):
        sk.fold_axis(jax.random.key(0), "data")


@kinds
def test_dropout_takes_a_key_for_each_example(make):
    for keys in (make(0), sk.example_keys(make(0), 4)):
        with value_error(
            f"dropout: keys_b must have one key per example; got keys of shape {keys.shape} for examples of shape "
            "(2, 3). Pass the keys that the loss function receives with the batch."
        ):
            sk.dropout(jnp.ones((2, 3)), keys, 0.5)


def test_no_keys_fold_to_none():
    """An evaluation has no keys, and `dropout` takes None."""
    assert sk.fold_keys(None, 1) is None
