"""Mixtures of experts on a mesh against plain jax on one device, where each token meets all experts."""

import math
from functools import cache, partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import collectives, cost
from shardkit.layers.routing import RoutingStats, balance_bias, ranks
from support.refusals import raises, refusals, unbound_axis
from support.tiers import DEEP

B, T, D, F = 8, 6, 5, 7
OVER = P("expert")
PATHS = {"capacity": sk.layers.Capacity(8), "dense": sk.layers.Dropless(True)}  # none of them drops


def own(x_ND, routing, run, axis, count):
    """An exchange as a user writes one: every choice to every device, the experts' outputs summed over devices."""
    x, expert, gate = sk.all_gather((x_ND, routing.expert, routing.gate), axis)
    here = expert.ravel() - sk.axis_index(axis) * count
    here = jnp.where((here >= 0) & (here < count), here, count)
    order = jnp.argsort(here)
    token, counts = order // expert.shape[1], jnp.sum(here[:, None] == jnp.arange(count)[None], axis=0)
    weight = jnp.where(here < count, gate.ravel(), 0)[order]
    rows = run(x[token], counts).astype(jnp.float32) * weight[:, None]
    return sk.reduce_scatter(jnp.zeros(x.shape).at[token].add(rows).astype(x.dtype), axis)


PATHS |= {impl: sk.layers.Dropless(impl=impl) for impl in ("gather", "ring", own)}
PATHS["own"] = PATHS.pop(own)


def swiglu(w, x_SD, dot):
    return dot(jax.nn.silu(dot(x_SD, w["gate"])) * dot(x_SD, w["up"]), w["down"])


def values(experts, examples=B, dtype=jnp.float32, seed=0):
    """Tokens, router and experts; the logits are far enough from equal that rounding changes no choice."""
    shapes = {"gate": (experts, D, F), "up": (experts, D, F), "down": (experts, F, D)}
    rng = np.random.default_rng(seed)
    weights = {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}
    x, router = rng.normal(size=(examples, T, D)), rng.normal(size=(D, experts))
    return jax.tree.map(lambda a: a.astype(dtype), (x, router, weights))


def dense_moe(x, router, w, top_k, *, normalize_gates=None, kept=None, weights=None, bias=0.0):
    """Every token through every expert, in the order of the batch; `kept` [N, top_k] says which answers count."""
    rows, router = x.reshape(-1, D).astype(jnp.float32), router.astype(jnp.float32)
    w = jax.tree.map(lambda a: a.astype(jnp.float32), w)
    scores = jax.nn.softmax(jnp.dot(rows, router, precision="highest"))
    expert = lax.top_k(scores + jnp.broadcast_to(bias, scores.shape), top_k)[1]
    gate = jnp.take_along_axis(scores, expert, 1)
    if top_k > 1 if normalize_gates is None else normalize_gates:
        gate = gate / jnp.sum(gate, axis=1, keepdims=True)
    hidden = jax.nn.silu(jnp.einsum("nd,edf->nef", rows, w["gate"])) * jnp.einsum("nd,edf->nef", rows, w["up"])
    every = jnp.einsum("nef,efd->ned", hidden, w["down"])
    gate = gate if kept is None else jnp.where(kept, gate, 0.0)
    gate = gate if weights is None else jnp.where(weights.reshape(-1, 1) > 0, gate, 0.0)
    return jnp.sum(jnp.take_along_axis(every, expert[:, :, None], 1) * gate[:, :, None], axis=1).reshape(x.shape)


def kept_by_hand(expert, group, capacity):
    """Algorithm 1 of GShard, one choice after the other."""
    expert, kept = np.asarray(expert), np.zeros(expert.shape, bool)
    for start in range(0, len(expert), group):
        used = dict.fromkeys(range(expert.max() + 1), 0)
        for choice in range(expert.shape[1]):
            for token in range(start, start + group):
                e = expert[token, choice]
                kept[token, choice] = used[e] < capacity
                used[e] += 1
    return kept


RAGGED = sk.layers.Dropless(False)  # a native exchange, which CPUs have in `emulate` alone


def on_mesh(mesh, axis="expert", batch=None, expert_fn=swiglu, spec=OVER, emulated=False, **options):
    """`moe` over a mesh, tokens split over `batch` (by default the axis itself)."""
    batch = batch or axis
    means = RoutingStats(P(), P(), P(), *[sk.Mean(P(batch), P(batch))] * 2)

    def kernel(x, router, w, weights=None, bias=None):
        y, stats = sk.layers.moe(x, router, w, expert_fn, axis, weights=weights, bias_E=bias, **options)
        return y, RoutingStats(*stats[:3], *jax.tree.map(lambda m: m[None], stats[3:]))

    def run(x, router, w, weights=None, bias=None):
        specs, args = (P(batch), P(), spec), (x, router, w)
        if weights is not None:
            specs, args = (*specs, P(batch)), (*args, weights)
        if bias is not None:
            specs, args = (*specs, P()), (*args, bias)
        out_specs = (P(batch), means)
        if emulated:
            return sk.testing.emulate(kernel, dict(mesh.shape), specs, out_specs)(*args)
        return jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=out_specs)(*args)

    return run


def expert_mesh(n):
    return sk.make_mesh(jax.devices()[:n], expert=n)


def assert_near(got, wanted, relative):
    for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        gap, bound = np.max(np.abs(a - b)), relative * max(np.max(np.abs(b)), 1e-3)
        assert gap <= bound, f"{jax.tree_util.keystr(path)}: differs by {gap:.3g}, allowed {bound:.3g}"


# proves F33, F34
@pytest.mark.quick(
    "3-6-2-dense", "3-6-2-gather", "3-6-2-ring", "3-6-2-own"
)  # testing/exact/test_kernels.py proves what is dropped
@pytest.mark.parametrize("routing", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize(("n", "experts", "top_k"), [(1, 4, 2), (2, 6, 1), (3, 6, 2), (4, 4, 4), (8, 16, 3)])
def test_forward_and_gradients_are_those_of_one_device(routing, n, experts, top_k):
    x, router, w = values(experts, examples=12 if n == 3 else B)
    moved = jax.random.normal(jax.random.key(9), x.shape)
    run = on_mesh(expert_mesh(n), top_k=top_k, routing=routing)

    def total(moe, *args):
        return jnp.sum(moe(*args) * moved)

    def both(x, router, w):
        forms = partial(dense_moe, top_k=top_k), lambda *a: run(*a)[0]
        return [jax.value_and_grad(partial(total, form), argnums=(0, 1, 2))(x, router, w) for form in forms]

    wanted, got = jax.jit(both)(x, router, w)
    assert_near(got, wanted, 1e-5)


@pytest.mark.quick("dropless-2")
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("path", ["capacity", "dropless"])
def test_one_text_runs_on_one_device_without_an_axis(path, top_k):
    options = {"routing": sk.layers.Dropless() if path == "dropless" else sk.layers.Capacity(3)}
    x, router, w = values(3)
    layer = partial(sk.layers.moe, expert_fn=swiglu, axis=None, top_k=top_k, **options)

    @jax.jit
    def everything(x, router, w):
        return layer(x, router, w), layer(x[0, 0], router, w)[0], dense_moe(x, router, w, top_k)

    (y, stats), flat, wanted = everything(x, router, w)
    assert_near(y, wanted, 1e-5)
    assert_near(flat, y[0, 0], 1e-5)
    assert stats.dropped.total == 0
    assert stats.dropped.weight == B * T * top_k


# proves F33
@pytest.mark.quick("3")
@pytest.mark.parametrize("group", [None, 3])
def test_what_is_dropped_is_the_same_on_every_mesh(group):
    x, router, w = values(8)
    capacity = sk.layers.Capacity(1).places(group or T, 8, 2)
    _, expert = lax.top_k(jnp.dot(x.reshape(-1, D), router, precision="highest"), 2)
    kept = kept_by_hand(expert, group or T, capacity)
    assert 0.05 < 1 - kept.mean() < 0.5

    def gradient(moe):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(moe(*a)[0])), argnums=(0, 1, 2))(x, router, w)

    runs = [on_mesh(expert_mesh(n), routing=sk.layers.Capacity(1, group)) for n in (1, 8)]
    plain = lambda *a: (dense_moe(*a, 2, kept=kept),)  # noqa: E731
    # One program for each mesh: a jit has one set of devices.
    (wanted,), wanted_grads = jax.jit(lambda: (plain(x, router, w), gradient(plain)))()
    for run, what in zip(runs, (lambda run: (), gradient), strict=True):
        (y, stats), grads = jax.jit(lambda run=run, what=what: (run(x, router, w), what(run)))()
        assert_near(y, wanted, 1e-5)
        assert float(jnp.sum(stats.dropped.total)) == (~kept).sum()
        assert float(jnp.sum(stats.dropped.weight)) == kept.size
    assert_near(grads, wanted_grads, 1e-5)


def stats_by_hand(x, router, top_k, weights):
    logits = np.asarray(x, np.float64).reshape(-1, D) @ np.asarray(router, np.float64)
    p = np.exp(logits - logits.max(1, keepdims=True))
    z = np.log(p.sum(1)) + logits.max(1)
    p, weights = p / p.sum(1, keepdims=True), np.asarray(weights, np.float64).reshape(-1)
    expert = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    load = np.zeros(router.shape[1])
    for choices, weight in zip(expert, weights, strict=True):
        load[choices] += weight / top_k / weights.sum()
    mean_p = (p * weights[:, None]).sum(0) / weights.sum()
    return len(load) * (load * mean_p).sum(), (z**2 * weights).sum() / weights.sum(), load


# proves F33
@pytest.mark.quick("False")
@pytest.mark.parametrize("dropless", [False, True])
def test_losses_and_loads_are_global_and_padding_counts_for_nothing(dropless):
    x, router, w = values(8)
    weights = (np.arange(B * T).reshape(B, T) % 5).astype(np.float32)  # far from equal between devices, some zero
    balance, z, load = stats_by_hand(x, router, 2, weights)
    noise = np.where(weights[:, :, None] > 0, x, np.float32(100))
    wanted = jax.jit(lambda *args: dense_moe(*args, 2, weights=weights))(x, router, w)
    for n in (8,) if dropless else (1, 8):
        run = jax.jit(on_mesh(expert_mesh(n), routing=sk.layers.Dropless() if dropless else sk.layers.Capacity(8)))
        y, stats = run(x, router, w, weights)
        assert_near(stats[:3], (balance, z, load), 1e-5)
        assert np.asarray(stats.dropped.weight).sum() == 2 * (weights > 0).sum()
        assert_near(y, wanted, 1e-5)
        # what the padding holds changes nothing, and takes nobody's place
        tight = jax.jit(on_mesh(expert_mesh(n), routing=sk.layers.Dropless() if dropless else sk.layers.Capacity(1)))
        assert_near(tight(x, router, w, weights), tight(noise, router, w, weights), 1e-5)


def test_nothing_but_padding_gives_zeros_and_balanced_tokens_a_loss_of_one():
    x, router, w = values(4)
    for routing in (sk.layers.Capacity(), sk.layers.Dropless()):
        layer = jax.jit(partial(sk.layers.moe, expert_fn=swiglu, axis=None, routing=routing))
        y, stats = layer(x, router, w, weights=jnp.zeros((B, T)))
        assert not np.any(y)
        assert stats.balance_loss == stats.z_loss == stats.dropped.weight == 0
    logits = 30 * np.eye(4, dtype=np.float32)[np.arange(32) % 4]
    stats = jax.jit(lambda x: sk.layers.routing_stats(x, sk.layers.route(x, top_k=1)))(logits)
    assert stats.balance_loss == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(stats.load, 0.25)


@cache
def routed(top_k, capacity, group):
    return jax.jit(partial(sk.layers.route, top_k=top_k, capacity=capacity, group=group))


@given(
    st.integers(0, 2**32 - 1), st.sampled_from([(1, 4, 2, 3), (9, 3, 3, 1), (6, 6, 1, 4), (8, 5, 2, 2), (5, 1, 1, 2)])
)
def test_routes_fill_the_places_in_order(seed, sizes):
    group, experts, top_k, groups = sizes
    logits = np.random.default_rng(seed).integers(0, 3, (groups * group, experts)).astype(np.float32)  # many ties
    capacity = 1 + seed % 2 * 2
    routing = routed(top_k, capacity, group)(jnp.asarray(logits))
    np.testing.assert_array_equal(routing.kept, kept_by_hand(routing.expert, group, capacity))
    assert all(len(set(row)) == top_k for row in np.asarray(routing.expert))
    for start in range(0, groups * group, group):
        for e in range(experts):
            mine = np.asarray(routing.expert)[start : start + group] == e
            taken = np.asarray(routing.position)[start : start + group][mine]
            assert sorted(taken) == list(range(mine.sum()))


def test_gates_are_normalised_where_there_are_several_and_ranks_are_stable():
    logits = np.random.default_rng(3).normal(size=(10, 4)).astype(np.float32)
    ways = [{"top_k": 1}, {"top_k": 2}, {"top_k": 2, "normalize_gates": False}, {"top_k": 1, "normalize_gates": True}]
    *gates, one = jax.jit(lambda x: [sk.layers.route(x, **way).gate for way in ways])(logits)
    p = np.sort(jax.nn.softmax(logits), axis=1)[:, ::-1]
    for gate, wanted in zip(gates, (p[:, :1], p[:, :2] / p[:, :2].sum(1, keepdims=True), p[:, :2]), strict=True):
        np.testing.assert_allclose(gate, wanted, rtol=1e-6)
    np.testing.assert_array_equal(one, np.ones((10, 1)))
    keys = jnp.asarray([[3, 1, 3, 0], [0, 0, 0, 0]], jnp.int32)
    np.testing.assert_array_equal(ranks(keys), [[2, 1, 3, 0], [0, 1, 2, 3]])


# proves F33, F34
@pytest.mark.quick("dense", "gather", "ring")
@pytest.mark.parametrize("routing", PATHS.values(), ids=PATHS)
def test_bfloat16_tokens_are_summed_in_float32(routing):
    x, router, w = values(8, dtype=jnp.bfloat16)
    run = on_mesh(expert_mesh(4), routing=routing)

    @jax.jit
    def both(*args):
        def summed(moe, *args):
            y = moe(*args)
            return jnp.sum(y.astype(jnp.float32)), y

        forms = (lambda *a: run(*a)[0]), partial(dense_moe, top_k=2)
        return [jax.grad(partial(summed, moe), argnums=(0, 1, 2), has_aux=True)(*args) for moe in forms]

    (grads, y), (wanted_grads, wanted) = both(x, router, w)
    assert y.dtype == jnp.bfloat16
    assert_near(y, wanted, 2e-2)
    assert_near(grads, wanted_grads, 3e-2)


@pytest.mark.quick("capacity", "ring")
@pytest.mark.parametrize("routing", PATHS.values(), ids=PATHS)
def test_experts_beside_data_and_tensor_parallelism(routing):
    """Tokens over data and expert, each expert's hidden dim over model; summed inside the experts or after."""
    mesh = sk.make_mesh(data=2, expert=2, model=2)
    x, router, w = values(4)
    w = {name: leaf[:, :, :6] if name != "down" else leaf[:, :6] for name, leaf in w.items()}
    spec = {"gate": P("expert", None, "model"), "up": P("expert", None, "model"), "down": P("expert", "model")}

    def summed(w, rows, dot):
        return sk.all_reduce(swiglu(w, rows, dot), "model")

    options = {"routing": routing, "batch": ("data", "expert"), "spec": spec}
    inside = on_mesh(mesh, expert_fn=summed, **options)

    def after(x, router, w):
        return sk.all_reduce(sk.layers.moe(x, router, w, swiglu, "expert", routing=routing)[0], "model")

    specs = (P(("data", "expert")), P(), spec)
    run = jax.shard_map(after, mesh=mesh, in_specs=specs, out_specs=P(("data", "expert")))
    forms = partial(dense_moe, top_k=2), (lambda *a: inside(*a)[0]), run

    @jax.jit
    def everything(*args):
        return [jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1, 2))(*args) for f in forms]

    wanted, *found = everything(x, router, w)
    for got in found:
        assert_near(got, wanted, 1e-5)


# proves F33, F34
@pytest.mark.quick("3")
@pytest.mark.parametrize("n", [2, 3, 8])
def test_bytes_are_the_closed_forms(n):
    E, top_k, examples = 24, 2, 24
    x, router, w = values(E, examples)
    tokens = examples // n * T

    def sent(backward, *kinds, args=(x, router, w), **options):
        run = on_mesh(expert_mesh(n), top_k=top_k, **options)
        call = jax.grad(lambda *a: jnp.sum(run(*a)[0]), argnums=(0, 1, 2)) if backward else run
        census = sk.census(call, *args)
        return sum(census.sent(kind=kind) for kind in kinds or ("all_to_all",))

    for factor in (1.0, 1.25, 30.0):
        room = sk.layers.Capacity(factor).places(T, E, top_k) * E / (top_k * T)  # the factor after rounding up
        form = cost.expert_volume(tokens=tokens, hidden=D, ways=n, top_k=top_k, capacity_factor=room, value_bytes=4)
        assert float(sent(False, routing=sk.layers.Capacity(factor))) == pytest.approx(form.forward)
        assert float(sent(True, routing=sk.layers.Capacity(factor))) == pytest.approx(form.total)
    form = cost.expert_volume(
        tokens=tokens, hidden=D, ways=n, top_k=min(top_k, E // n), capacity_factor=n, value_bytes=4
    )
    assert float(sent(False, routing=sk.layers.Dropless())) == pytest.approx(form.forward)
    assert float(sent(True, routing=sk.layers.Dropless())) == pytest.approx(form.total)
    half = values(E, examples, dtype=jnp.bfloat16)
    for impl, over in {"gather": ("all_gather", "reduce_scatter"), "ring": ("ppermute",)}.items():
        for backward, gates in ((False, 8), (True, 12)):
            found = sent(backward, *over, args=half, routing=sk.layers.Dropless(impl=impl))
            assert found == (n - 1) * tokens * (2 * D * 2 * (1 + backward) + gates * top_k)
    counts = sk.census(on_mesh(expert_mesh(n), routing=sk.layers.Dropless()), x, router, w)
    assert counts.sent(kind="all_gather") == (n - 1) * E * 4
    assert counts.sent(kind="all_reduce") == cost.wire("all_reduce", 8 * (E + 1), n).sent


@pytest.mark.parametrize("n", [2])
def test_a_device_of_one_expert_gets_each_token_once(n):
    """Of two choices at most one is its expert: blocks of twice the rows would be sent half empty."""
    run = on_mesh(expert_mesh(n), top_k=2, routing=sk.layers.Dropless())
    form = cost.expert_volume(tokens=T, hidden=D, ways=n, top_k=1, capacity_factor=n, value_bytes=4)
    assert float(sk.census(run, *values(n, n)).sent(kind="all_to_all")) == pytest.approx(form.forward)


def test_one_device_sends_nothing():
    x, router, w = values(4)
    for options in ({"routing": sk.layers.Dropless()}, {}):
        assert sk.census(on_mesh(expert_mesh(1), **options), x, router, w).sent() == 0
        assert sk.census(partial(sk.layers.moe, expert_fn=swiglu, axis=None, **options), x, router, w).count() == 0


# Catches rows for which a device has no place, and tokens of weight 0 that go somewhere: all go to one expert, to none,
# or from some devices to one.
# proves F34
@pytest.mark.quick("dense", "ring", "ragged")
@pytest.mark.parametrize("routing", [*PATHS.values(), RAGGED], ids=[*PATHS, "ragged"])
def test_every_exchange_of_uneven_choices_gives_one_devices_numbers(routing):
    given = np.ones((3, B, T), "f") * np.float32([1, 0, 1])[:, None, None], 9 * np.eye(3, 8, dtype="f")
    given[0][2] = np.arange(B)[:, None] % 6 // 2

    def everything(layer, *args):
        total = jax.checkpoint(lambda args, given: jnp.sum(jnp.sin(layer(*args, *given)[0])))
        return lax.map(partial(jax.value_and_grad(total), args), given)

    plain = lambda *args: (dense_moe(*args[:3], 1, weights=args[3], bias=args[4]),)  # noqa: E731
    run = on_mesh(expert_mesh(4), emulated=routing == RAGGED, top_k=1, routing=routing)
    assert_near(*(jax.jit(partial(everything, each))(*values(8)) for each in (run, plain)), 1e-5)


@cache
def exchange(n):
    kernel = lambda x, counts: collectives.ragged_all_to_all(x, counts, "expert", rows=16, limit=3)  # noqa: E731
    return jax.jit(jax.shard_map(kernel, mesh=expert_mesh(n), in_specs=(OVER, P()), out_specs=OVER))


@given(st.sampled_from([1, 2, 5] if not DEEP else range(1, 6)), st.lists(st.integers(0, 3), min_size=25, max_size=25))
def test_rows_arrive_in_the_order_of_their_senders(n, numbers):
    counts = np.asarray(numbers[: n * n], np.int32).reshape(n, n)
    x = np.arange(1, n * 15 * 2 + 1, dtype=np.float32).reshape(n, 15, 2)
    out = exchange(n)(x.reshape(-1, 2), jnp.asarray(counts))
    for receiver, got in enumerate(np.asarray(out).reshape(n, 16, 2)):
        rows = [x[i, counts[i, :receiver].sum() :][: counts[i, receiver]] for i in range(n)]
        wanted = np.concatenate(rows)
        np.testing.assert_array_equal(got[: len(wanted)], wanted)
        assert not got[len(wanted) :].any()


CANNOT = {
    "beyond limit": [[1, 4], [2, 2]],
    "more than a device has": [[3, 3], [2, 1]],
    "more than rows hold": [[1, 3], [1, 3]],
    "negative": [[-1, 3], [2, 2]],
}


# Rows were lost, or read from where another device's lie; on a GPU they would be written behind the buffer.
@pytest.mark.quick("False")
@pytest.mark.parametrize("dense", [True, False])
def test_counts_that_cannot_be_are_seen_in_the_result(dense):
    over = ("data", "expert")
    mesh, dtypes = sk.make_mesh(jax.devices()[:4], data=2, expert=2), (np.float32, np.int32, np.uint8, np.bool_)

    def kernel(x, counts):
        send = lambda x: collectives.ragged_all_to_all(x, counts, "expert", rows=5, limit=3, dense=dense)  # noqa: E731
        total = lambda x: jnp.sum(send(x))  # noqa: E731
        return [send(x.astype(dtype)) for dtype in dtypes], jax.grad(total)(x)

    run = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=(P(over), P()), out_specs=P(over)))
    if not dense:  # no CPU has the exchange
        run = sk.testing.emulate(kernel, dict(mesh.shape), (P(over), P()), P(over))
    x = np.arange(1, 21, dtype=np.float32).reshape(20, 1)
    for counts in CANNOT.values():
        (floats, ints, bytes_, bools), grads = run(x, jnp.asarray(counts, jnp.int32))
        assert np.isnan(floats).all() and not np.isnan(grads).any()
        assert (np.asarray(ints) == np.iinfo(np.int32).min).all()
        assert (np.asarray(bytes_) == 255).all() and np.asarray(bools).all()
    (floats, *_), grads = run(x, jnp.asarray([[1, 3], [2, 2]], jnp.int32))
    np.testing.assert_array_equal(np.ravel(floats[:10]), [1, 6, 7, 0, 0, 2, 3, 4, 8, 9])
    np.testing.assert_array_equal(np.ravel(grads), [1, 1, 1, 1, 0] * 4)


WRONG_COUNTS = {
    "counts must have shape (2, 2): rows from each of 2 devices to each; got shape (2,). Gather them over the axis "
    "first.": np.ones(2, np.int32)
} | {
    "every count must be from 0 to limit=3, and a device must send at most its 5 rows and receive at most rows=5; got "
    f"{counts}. Lower the counts, or raise limit or rows.": np.array(counts)
    for counts in CANNOT.values()
}
NO_INTEGERS = "counts must be integers; got float32. Convert them with astype(jnp.int32)."


@pytest.mark.check
@pytest.mark.parametrize("kind, message, counts", refusals(WRONG_COUNTS, {NO_INTEGERS: np.ones((2, 2), "f")}))
def test_counts_that_are_known_to_be_wrong_are_refused(kind, message, counts):
    kernel = lambda x: collectives.ragged_all_to_all(x, counts, "expert", rows=5, limit=3)  # noqa: E731
    run = jax.shard_map(kernel, mesh=expert_mesh(2), in_specs=OVER, out_specs=OVER)
    with raises(kind, f"ragged_all_to_all: {message}"):
        jax.eval_shape(run, jax.ShapeDtypeStruct((10, 1), jnp.float32))


def absent(n, **options):
    """A dropless layer with its gradient over devices that are not there, and the shapes of its arguments."""
    mesh = sk.abstract_mesh(expert=n)
    run = on_mesh(mesh, **options)
    shape = lambda spec, *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))  # noqa: E731
    w = {name: shape(OVER, 2 * n, 128, 128) for name in ("gate", "up", "down")}
    args = (shape(OVER, n, 32, 128), shape(P(), 128, 2 * n), w)
    return jax.jit(jax.grad(lambda *a: jnp.sum(run(*a)[0].astype(jnp.float32)), argnums=(0, 1, 2))), args


# proves F34
def test_devices_with_a_ragged_exchange_use_it():
    step, args = absent(4, routing=sk.layers.Dropless())
    text = step.trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@ragged_all_to_all(") == 4
    form = cost.expert_volume(tokens=32, hidden=128, ways=4, top_k=2)  # n int32 beside each in the backward pass
    assert float(sk.census(step, *args).sent(kind="all_to_all")) == form.total + 4 * 3 / 4 * 4 * 4
    step, args = absent(4, routing=sk.layers.Dropless(impl="dense"))
    assert "ragged_all_to_all" not in step.trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    x, router, w = values(4)
    assert "ragged_all_to_all" not in str(
        jax.make_jaxpr(on_mesh(expert_mesh(2), routing=sk.layers.Dropless()))(x, router, w)
    )


@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed: shardkit[aot]")
@pytest.mark.deep
def test_the_tpu_compiles_the_ragged_exchange():
    step, args = absent(4, routing=sk.layers.Dropless())
    report = sk.aot.compile(step, args, topology="v5e:2x2")
    rows = [row for row in report.rows if row.kind == "all_to_all" and row.bytes_in > 1000]
    assert sum(row.count for row in rows) == 4
    written = [row for row in sk.census(step, *args).select(kind="all_to_all") if row.bytes_in > 1000]
    # Not the buffers that hold the worst case; v5e widens rows of 128 in bfloat16 to two.
    assert sum(row.total for row in rows) == 2 * sum(row.total for row in written)


def test_dropped_choices_are_a_metric():
    def loss(params, x, keys):
        layer = partial(sk.layers.moe, expert_fn=swiglu, axis="expert", routing=sk.layers.Capacity(1))
        y, stats = layer(x, params["router"], params["experts"])
        return sk.Mean.of(y), {"dropped": stats.dropped}

    x, router, w = values(8)
    seen = []
    for sizes in ({"data": 1, "expert": 1}, {"data": 2, "expert": 4}):
        mesh = sk.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
        evaluate = sk.make_eval_step(loss, mesh=mesh, plan=sk.chain(sk.dp("data"), sk.ep("expert")))
        seen.append(float(evaluate({"router": router, "experts": w}, x)["dropped"]))
    assert 0 < seen[0] < 1
    assert seen[0] == seen[1]


def test_the_plan_splits_the_experts_and_nothing_else():
    mesh = sk.make_mesh(data=2, expert=4)
    layers = {"router": jnp.zeros((2, D, 4)), "experts": {"down": jnp.zeros((2, 4, F, D))}}
    params = {"layers": layers, "head": jnp.zeros((D, 16)), "experts": jnp.zeros((4, 3))}
    layouts = sk.chain(sk.dp("data"), sk.ep("expert")).layouts(params, mesh)
    inside = layouts["layers"]["experts"]["down"]
    assert inside.rest == inside.seen == inside.update == P(None, "expert")
    assert layouts["experts"].rest == P("expert")
    assert layouts["layers"]["router"].rest == layouts["head"].update == P()
    assert sk.ep("expert").batch_spec(mesh) == P("expert")
    assert str(sk.ep("expert")) == "ep('expert')"
    head = sk.ep("expert", lambda path, shape: 1 if path == "head" else None).layouts(params, mesh)["head"]
    assert head.rest == P(None, "expert")
    specs = jax.tree.map(lambda _: P(), params) | {"experts": P("expert")}
    assert sk.ep("expert", specs).layouts(params, mesh)["experts"].rest == P("expert")


# A factor in place of the routing would be taken for any other option's value.
NO_ROUTING = {
    "moe: routing must be a Capacity or a Dropless; got 1.25. Pass for example sk.layers.Capacity(1.25), or "
    "sk.layers.Dropless().": lambda *given: sk.layers.moe(*given, swiglu, None, routing=1.25),
    "route: bias_E must be floating-point; got int32. Pass for example jnp.zeros((5,)).": lambda x, *_: sk.layers.route(
        x[0], top_k=1, bias_E=np.ones(5, "i")
    ),
    "moe: x must be floating-point, as the experts' outputs are; got int32. Pass x.astype(...).": lambda x, *given: (
        sk.layers.moe(x.astype("i"), *given, swiglu, None)
    ),
    "moe: an exchange must return the sum of each token's experts, float32[24,5]; got NoneType. Return it in "
    "the shape and dtype of its tokens.": lambda *given: jax.eval_shape(
        on_mesh(expert_mesh(2), routing=sk.layers.Dropless(impl=lambda *_: None)), *given
    ),
    "Capacity: factor must be a number; got '1.25'. Pass for example factor=1.0.": lambda *_: sk.layers.Capacity(
        "1.25"
    ),
}
BAD = {
    "Dropless: only one of impl and dense may be given; got impl='ring', dense=False. Leave out dense.": lambda *_: (
        sk.layers.Dropless(False, impl="ring")
    ),
    "route: bias_E must have the shape [E], E=5; got (4,). Pass an array of that shape.": lambda x, *_: sk.layers.route(
        x[0], top_k=1, bias_E=np.ones(4, "f")
    ),
    "balance_bias: bias_E and choices_E must have one shape, [.., E]; got (4,) and (5,). Pass the choices of each "
    "expert that has a bias.": lambda *_: balance_bias(np.ones(4, "f"), np.ones(5, "f")),
    "balance_bias: rate must be finite and at least 0; got -0.1. Pass for example rate=0.001.": lambda x, *_: (
        balance_bias(x, x, rate=-0.1)
    ),
    "route: top_k must be between 1 and the number of experts; got 7 for 6 experts. "
    "Lower top_k.": lambda x, router, w: sk.layers.moe(x, router, w, swiglu, None, top_k=7),
    "Capacity: factor must be positive and finite; got 0. Pass 1 for balanced tokens, or Dropless() to drop "
    "none.": lambda *_: sk.layers.Capacity(0),
    "route: group must divide the tokens of a device; got groups of 7 for 48 tokens. Choose a "
    "divisor.": lambda x, router, w: sk.layers.moe(x, router, w, swiglu, None, routing=sk.layers.Capacity(group=7)),
    "moe: dim 0 of every leaf must count this device's experts, 6 of 6; got shape (3, 7, 5) for down. "
    "Shard the experts over the axis, with ep or P(axis).": lambda x, router, w: sk.layers.moe(
        x, router, w | {"down": w["down"][:3]}, swiglu, None
    ),
    "moe: the number of experts must be divisible by axis 'expert'; got 6 experts over 4 devices. "
    "Choose another number of experts or a smaller axis.": lambda *args: on_mesh(expert_mesh(4), spec=P())(*args),
    "route: capacity must be at least 1; got 0. Pass None to drop nothing.": lambda x, router, w: sk.layers.route(
        x[0], top_k=1, capacity=0
    ),
    "ep: the experts, dim 1 of leaf layers.experts.down, must be divisible by axis 'expert'; got shape (2, 6, "
    "7, 5) over 4 devices. Choose another number of experts or a smaller axis.": lambda *_: sk.ep("expert").layouts(
        {"layers": {"experts": {"down": jnp.zeros((2, 6, 7, 5))}}}, expert_mesh(4)
    ),
}


# proves F33
@pytest.mark.parametrize("kind, message, call", refusals(BAD, NO_ROUTING))
def test_errors_name_rule_values_and_remedy(kind, call, message):
    with raises(kind, message):
        call(*values(6))


def test_an_axis_that_is_not_bound_is_refused():
    with unbound_axis(
        "moe: axis 'expert' is not bound here, because no shard_map surrounds this call. Call it inside jax.shard_map "
        "over a mesh with that axis."
    ):
        sk.layers.moe(*values(6), swiglu, "expert")
