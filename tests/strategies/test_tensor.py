"""Tensor and sequence parallelism: kernels against one device, what they and a step send, what is refused."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import cost
from shardkit.layers.vocabulary import vocab_cross_entropy_and_hits
from shardkit.models import blocks, transformer
from shardkit.testing import assert_matches_reference, covering
from support.conformance import weights
from support.layouts import MODEL_MESHES as MESHES
from support.layouts import Specs, mesh_of, specs
from support.refusals import raises, refusals, value_error
from support.tiers import covered

B, T, D, H, K = 2, 120, 6, 120, 2  # tokens and heads divide by every axis
DTYPES, IMPLS = ["float32", "bfloat16"], ["gather", "ring", "auto"]
GROUPS = [(1, 6, 3, 3), (4, 8, 2, 1), (8, 8, 1, 1), (2, 6, 3, 3), (4, 12, 3, 3)]
GROUPS += [(3, 12, 4, 4), (3, 12, 2, 2), (2, 8, 4, 2), (5, 5, 5, 1)]


def normal(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape).astype(np.float32), dtype) for shape in shapes]


# ---- kernels


@pytest.mark.quick("9", "5", "6", "7", "1")
@covered(
    [  # impl is about sequence parallelism alone
        row | {"seed": i}
        for i, row in enumerate(
            covering(
                {"mesh": MESHES[1::2] + MESHES[4:], "dtype": DTYPES, "sequence": [True, False], "impl": IMPLS},
                lambda row: row.get("sequence", True) or row.get("impl", "auto") == "auto",
            )
        )
    ],
    mesh=st.sampled_from(MESHES),
    dtype=st.sampled_from(DTYPES),
    sequence=st.booleans(),
    impl=st.sampled_from(IMPLS),
    seed=st.integers(0, 9),
)
def test_a_column_and_a_row_are_one_block(mesh, dtype, sequence, impl, seed):  # proves F24, F25
    sizes, axis = mesh
    data = "data" if "data" in sizes else None
    x, gate, up, out = normal(seed, (B, T, D), (D, H, K), (D, H, K), (H, K, D), dtype=dtype)

    def block(x, gate, up, out, axis=None, **options):
        h = sk.layers.column_linear(x, {"gate": gate, "up": up}, axis, **options)
        return sk.layers.row_linear(jnp.tanh(h["gate"]) * h["up"], out, axis, **options)

    def reference(x, gate, up, out):
        gate, up = (jnp.einsum("bTD,DHK->bTHK", x, each) for each in (gate, up))
        return jnp.einsum("bTHK,HKD->bTD", jnp.tanh(gate) * up, out)

    tokens = P(data, axis if sequence else None)
    assert_matches_reference(
        lambda *args: block(*args, axis, sequence=sequence, impl=impl),
        jax.jit(reference),
        mesh=mesh_of(**sizes),
        in_specs=(tokens, P(None, axis), P(None, axis), P(axis)),
        out_specs=tokens,  # without sequence parallelism typed as equal over the axis
        args=(x, gate, up, out),
        eager=False,
    )
    assert jax.eval_shape(block, x, gate, up, out).dtype == x.dtype  # one device, no mesh


def grouped(heads, kv_heads):
    """Attention scores' sums, as each query head meets the key head of its group."""

    def reference(x, query, key):
        q = jnp.einsum("bTD,DHK->bTHK", x, query)
        k = jnp.einsum("bTD,DGK->bTGK", x, jnp.repeat(key, heads // kv_heads, axis=1))
        return jnp.sum(q * k, axis=-1)

    def kernel(x, query, key):
        key = sk.layers.local_groups(key, "model", heads=heads, kv_heads=kv_heads)
        q, k = sk.layers.column_linear(x, (query, key), "model")
        return jnp.sum(q * jnp.repeat(k, q.shape[2] // k.shape[2], axis=2), axis=-1)

    return kernel, reference


# devices, query heads, key/value heads, and how many of these a device takes
@pytest.mark.quick("1-6-3-3", "3-12-2-2", "4-8-2-1")
@pytest.mark.parametrize("n, heads, kv_heads, taken", GROUPS)
def test_each_device_takes_the_groups_of_its_query_heads(n, heads, kv_heads, taken):  # proves F24
    x, query, key = normal(n, (B, 3, D), (D, heads, K), (D, kv_heads, K))
    kernel, reference = grouped(heads, kv_heads)
    for split in [P()] if kv_heads % n else [P(), P(None, "model")]:
        given = {"mesh": sk.make_mesh(jax.devices()[:n], model=n), "out_specs": P(None, None, "model"), "eager": False}
        assert_matches_reference(
            kernel, jax.jit(reference), in_specs=(P(), P(None, "model"), split), args=(x, query, key), **given
        )
    options = {"mesh": sk.abstract_mesh(model=n), "in_specs": P(), "out_specs": P(None, "model") if n > 1 else P()}
    own = jax.shard_map(lambda key: sk.layers.local_groups(key, "model", heads=heads, kv_heads=kv_heads), **options)
    assert jax.eval_shape(own, key).shape == (D, n * taken, K)
    np.testing.assert_array_equal(sk.layers.local_groups(key, None, heads=heads, kv_heads=kv_heads), key)


@pytest.mark.quick("3-6-3")
@pytest.mark.parametrize("n, heads, kv_heads", [(1, 4, 4), (2, 4, 2), (4, 8, 8), (3, 6, 3)])
def test_a_fused_weight_is_the_three_unfused_ones(n, heads, kv_heads):  # proves F24
    widths = (heads * K, kv_heads * K, kv_heads * K)
    # integers, so that every sum is exact
    query, key, value, x = (jnp.round(3 * each) for each in normal(n, *[(D, each) for each in widths], (B, 3, D)))
    fused = jnp.concatenate([query, key, value], axis=1)
    ordered = sk.layers.device_major_qkv(fused, n, heads=heads, kv_heads=kv_heads)
    back = sk.layers.device_major_qkv(ordered, n, heads=heads, kv_heads=kv_heads, inverse=True)
    np.testing.assert_array_equal(back, fused)
    h, g = heads // n, kv_heads // n

    def kernel(x, w):
        y = sk.layers.column_linear(x, w, "model")
        return tuple(jnp.split(y.reshape(*y.shape[:-1], -1, K), [h, h + g], axis=-2))

    mesh = sk.make_mesh(jax.devices()[:n], model=n)
    split = jax.shard_map(kernel, mesh=mesh, in_specs=(P(), P(None, "model")), out_specs=P(None, None, "model"))
    for each, w in zip(jax.jit(split)(x, ordered), (query, key, value), strict=True):
        np.testing.assert_array_equal(each, jnp.einsum("bTD,DC->bTC", x, w).reshape(B, 3, -1, K))
    if kv_heads == heads:
        np.testing.assert_array_equal(sk.layers.device_major_qkv(fused[0], n, heads=heads, dim=0), ordered[0])


# ---- a transformer's block made of the kernels


CONFIG = transformer.Config(vocabulary=24, layers=2, dim=16, heads=4, kv_heads=2, hidden=24)
AXES = transformer.logical_axes(CONFIG)
RULES = dict.fromkeys(["layers", "embed", "kv_heads", "head_size"]) | dict.fromkeys(
    ["vocabulary", "heads", "hidden"], "model"
)


def rules(**changed):
    return sk.specs_from_rules(AXES, RULES | changed)


def block(w, x, axis, sequence=False, keep=False):
    """A layer of models/transformer.py, without rotary positions."""

    def columns(x, weights):
        if keep:
            return sk.layers.column_linear(sk.all_gather(x, axis, dim=-2), weights, axis)
        return sk.layers.column_linear(x, weights, axis, sequence=sequence)

    sizes = {"heads": CONFIG.heads, "kv_heads": CONFIG.groups, "dim": 1}
    key, value = (sk.layers.local_groups(w[name], axis, **sizes) for name in ("key", "value"))
    q, k, v = columns(blocks.rms_norm(x, w["attention_norm"]), (w["query"], key, value))
    k, v = (jnp.repeat(each, q.shape[2] // each.shape[2], axis=2) for each in (k, v))
    s = jax.nn.softmax(jnp.einsum("bTHK,bSHK->bHTS", q, k), axis=-1)
    x = x + sk.layers.row_linear(jnp.einsum("bHTS,bSHK->bTHK", s, v), w["attention_out"], axis, sequence=sequence)
    gate, up = columns(blocks.rms_norm(x, w["mlp_norm"]), (w["gate"], w["up"]))
    return x + sk.layers.row_linear(jax.nn.silu(gate) * up, w["down"], axis, sequence=sequence)


def params():
    return jax.tree.map(lambda x: 3 * x, weights(CONFIG, 0))


def shapes():
    return jax.eval_shape(lambda: transformer.init(jax.random.key(0), CONFIG))


# ---- what is sent


@pytest.mark.parametrize(
    "options, forward, backward, volume",
    [
        ({}, {"all_reduce": 2}, {"all_reduce": 2}, {}),
        (
            {"sequence": True},
            {"all_gather": 2, "reduce_scatter": 2},
            {"all_gather": 4, "reduce_scatter": 2},
            {"sequence_parallel": True, "regather": True},
        ),
        (
            {"sequence": True, "keep": True},
            {"all_gather": 2, "reduce_scatter": 2},
            {"all_gather": 2, "reduce_scatter": 2},
            {"sequence_parallel": True},
        ),
    ],
)
def test_a_layer_sends_what_megatron_sends(options, forward, backward, volume):  # proves F24, F25
    n, sequence = 2, options.get("sequence", False)  # two key/value heads divide by two devices
    mesh = sk.abstract_mesh(model=n)
    layer = jax.tree.map(lambda x: x[0], params()["layers"])
    specs = jax.tree.map(lambda spec: P(*spec[1:]), rules(kv_heads="model")["layers"])
    tokens = P(None, "model") if sequence else P()

    def gradients(w, x):
        norms = {name: sk.vary(w[name], "model" if sequence else ()) for name in ("attention_norm", "mlp_norm")}
        y, backward = jax.vjp(lambda w, x: block(w, x, "model", **options), w | norms, x)
        dw, dx = backward(y)
        return {name: dw[name] for name in specs if name not in norms}, dx

    out = {name: spec for name, spec in specs.items() if not name.endswith("norm")}
    f = jax.shard_map(gradients, mesh=mesh, in_specs=(specs, tokens), out_specs=(out, tokens))
    found = sk.census(f, layer, jax.ShapeDtypeStruct((B, T, CONFIG.dim), jnp.float32))
    for passed, expected in ((False, forward), (True, backward)):
        rows = [row for row in found.rows if row.backward == passed]
        assert {kind: sum(row.count for row in rows if row.kind == kind) for kind in {r.kind for r in rows}} == expected
    closed = cost.tensor_volume(batch=B, sequence=T, hidden=CONFIG.dim, ways=n, value_bytes=4, **volume)
    assert found.sent() == closed.total
    assert sum(row.total for row in found.rows if row.backward) == closed.backward


@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradients_of_gains_are_summed_once_a_step(accumulate):  # proves F25
    def loss(params, batch, keys):
        x = sk.layers.vocab_embed(batch["tokens"], params["embed"], "model", sequence=True)
        layer = sk.gathered(lambda w, x: block(w, x, "model", True))
        x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, params["layers"])
        x = blocks.rms_norm(x, params["final_norm"])
        return sk.Mean.of(sk.layers.vocab_cross_entropy(x, params["head"], batch["targets"], "model", sequence=True))

    mesh, batch = sk.abstract_mesh(data=2, model=2), dict.fromkeys(["tokens", "targets"], np.zeros((8, 12), np.int32))
    plan = sk.chain(sk.dp("data"), sk.tp("model", rules(kv_heads="model"), sequence=True))
    init, step = sk.make_train_step(
        sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=plan, accumulate=accumulate
    )
    state = init.abstract(shapes())
    small = sk.census(step, state, batch).select(axis="model", kind="all_reduce")
    gains = [row for row in small if row.bytes_in in (4 * CONFIG.dim, 4 * CONFIG.layers * CONFIG.dim)]
    assert sorted((row.axes, row.bytes_in, row.count) for row in gains) == [
        (("data", "model"), 4 * CONFIG.dim, 1),
        *[(("data", "model"), 4 * CONFIG.layers * CONFIG.dim, 1)] * 2,
    ]


# ---- the plan, and what is refused


def test_leaves_stay_split_and_whole_ones_are_marked_under_sequence_parallelism():
    tree = shapes()
    mesh = sk.abstract_mesh(data=2, model=2)
    plain, sequence = (sk.tp("model", rules(), sequence=each) for each in (False, True))
    assert str(plain) == "tp('model')" and plain.batch_spec(mesh) == P()
    up, head = P(None, None, "model"), P(None, "model")
    for plan, varies in ((plain, ()), (sequence, ("model",))):
        found = specs(plan.layouts(tree, mesh))
        assert found["layers"]["up"] == Specs(up, up, up) and found["head"] == Specs(head, head, head)
        assert found["final_norm"] == found["layers"]["key"] == Specs(P(), P(), P(), varies=varies)
    whole = Specs(P(), P(), P())
    alone = specs(sequence.layouts(tree, sk.abstract_mesh(data=2, model=1)))
    assert set(jax.tree.leaves(alone, is_leaf=lambda x: isinstance(x, Specs))) == {whole}
    chosen = sk.tp("model", lambda path, shape: -1 if path == "layers.up" else None)
    assert specs(chosen.layouts(tree, mesh))["layers"]["up"] == Specs(up, up, up)
    both = specs(sk.chain(sk.zero1("data", min_size=1), sequence).layouts(tree, mesh))
    assert both["final_norm"] == Specs(P(), P(), P("data"), varies=("model",))
    assert both["layers"]["up"].update == P(None, "data", "model")


def laid_out(plan, **sizes):
    return plan.layouts(shapes(), sk.abstract_mesh(**sizes))


def on_two(fn, *args):
    return jax.eval_shape(jax.shard_map(fn, mesh=sk.abstract_mesh(model=2), in_specs=P(), out_specs=P()), *args)


@pytest.mark.parametrize(
    "kind, message, make",
    refusals(
        {
            "tp: dim 0 of leaf embed must be divisible by axis 'model'; got size 24 over 5 devices. Pad it to 25 (a "
            "vocabulary; then pass vocab_cross_entropy(vocabulary=24)), leave the leaf whole "
            "(key/value heads), or use a smaller axis.": lambda: laid_out(sk.tp("model", rules()), model=5),
            "tp: dim 1 of leaf layers.key must be divisible by axes 'a', 'b'; got size 16 over 32 devices. Pad it to "
            "32 (a vocabulary; then pass vocab_cross_entropy(vocabulary=16)), leave the leaf whole "
            "(key/value heads), or use a smaller axis.": lambda: laid_out(
                sk.tp(("a", "b"), lambda path, shape: 1 if path == "layers.key" else None), a=2, b=16
            ),
            "tp: leaf embed: dim must name a dimension of the array; got 2 for an array of rank 2. "
            "Choose 0 to 1.": lambda: laid_out(sk.tp("model", lambda path, shape: 2), model=2),
            "tp: the rules must put axis 'modell' on some dim; the axes that they name are 'model'. Map a logical "
            "axis to 'modell', or pass the axis of the rules to tp.": lambda: sk.tp("modell", rules()),
            "tp: the rules have no spec for leaf final_norm; theirs are for the leaves 'embed'. Add \"final_norm\": "
            "P(), with which it stays whole, or make the rules from the logical axes of these parameters.": lambda: (
                laid_out(sk.tp("model", {"embed": P("model")}), model=2)
            ),
            "local_groups: heads must be divisible by the devices that share them; got 5 heads over 2 devices. Change "
            "the heads, or use fewer devices.": lambda: on_two(
                lambda w: sk.layers.local_groups(w, "model", heads=5, kv_heads=1), jnp.ones((D, 1, K))
            ),
            "local_groups: kv_heads must divide heads; got 4 and 6. Change one of them.": lambda: (
                sk.layers.local_groups(jnp.ones((D, 4, K)), None, heads=6, kv_heads=4)
            ),
            "local_groups: dim 1 must hold all key/value heads, or this device's share of them; got size 3 for 4 "
            "key/value heads over 2 devices. Pass the dim of the heads.": lambda: on_two(
                lambda w: sk.layers.local_groups(w, "model", heads=8, kv_heads=4), jnp.ones((D, 3, K))
            ),
            "device_major_qkv: heads must be divisible by the devices that share them; got 6 heads over 4 devices. "
            "Change the heads, or use fewer devices.": lambda: sk.layers.device_major_qkv(
                jnp.ones((D, 24)), 4, heads=6
            ),
            "device_major_qkv: kv_heads must be divisible by the devices that share them; got 2 kv_heads over 4 "
            "devices. Change the heads, or use fewer devices.": lambda: sk.layers.device_major_qkv(
                jnp.ones((D, 24)), 4, heads=8, kv_heads=2
            ),
            "device_major_qkv: dim 1 must hold heads + 2 kv_heads heads of equal size; got size 25 for 24 heads. Pass "
            "the fused dim and its heads.": lambda: sk.layers.device_major_qkv(jnp.ones((D, 25)), 2, heads=8),
        },
        {
            "tp: rules must be a function of path and shape, or a tree of PartitionSpecs; got 'vocabulary' for "
            "embed.0. Make the tree with specs_from_rules.": lambda: sk.tp("model", {"embed": ("vocabulary", "embed")})
        },
    ),
)
def test_bad_use_is_refused(kind, make, message):
    with raises(kind, message):
        make()


# proves F49: a policy that saves matmuls finds those of the kernels, so that nothing is made or gathered twice for it
@pytest.mark.parametrize("sequence", [False, True])
def test_a_policy_that_saves_matmuls_saves_those_of_the_kernels(sequence):
    mesh, share = sk.make_mesh(jax.devices()[:2], model=2), {"sequence": sequence, "impl": "gather"}
    tokens, halves = P("model" if sequence else None), (P(None, "model"), P("model"))

    def block(x, up, down):
        return sk.layers.row_linear(jnp.sin(sk.layers.column_linear(x, up, "model", **share)), down, "model", **share)

    def gradients(block):
        grad = jax.grad(lambda *args: jnp.sum(block(*args)), argnums=(0, 1, 2))
        return jax.shard_map(grad, mesh=mesh, in_specs=(tokens, *halves), out_specs=(tokens, *halves))

    def matmuls_and_bytes(block):
        args = [jnp.ones(shape) for shape in ((4, 6), (6, 8), (8, 6))]
        return str(jax.make_jaxpr(gradients(block))(*args)).count("dot_general["), sk.census(
            gradients(block), *args
        ).sent()

    saved = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    assert matmuls_and_bytes(saved) == matmuls_and_bytes(block)


# Each device would add the whole product, and count every class of a head: the sums were n times too large.
@pytest.mark.check
def test_weights_that_are_summed_over_an_axis_must_be_split_over_it():
    mesh = sk.make_mesh(jax.devices()[:4], data=2, model=2)
    h, w, targets = np.ones((2, 3, 4), np.float32), np.ones((4, 8), np.float32), np.zeros((2, 3), np.int32)
    calls = {
        "row_linear: w": lambda h, w, t: sk.layers.row_linear(sk.vary(h, "model"), w, "model"),
        "vocab_cross_entropy: head": lambda h, w, t: sk.layers.vocab_cross_entropy(h, w, t, "model"),
        "vocab_cross_entropy_and_hits: head": lambda h, w, t: vocab_cross_entropy_and_hits(h, w, t, "model"),
    }
    for name, call in calls.items():
        kernel = jax.shard_map(call, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data"))
        with value_error(
            f"{name} must be sharded over axis 'model', because the product is summed there; got one that is "
            "invariant over axis 'model'. Shard it, with tp for example, or pass another axis."
        ):
            jax.eval_shape(kernel, h, w, targets)


@pytest.mark.check
def test_a_loss_of_plain_products_is_told_of_those_of_parts():
    """The ends of a loss that knows of no axis: shapes that differ, partial sums, and an error of another reason."""
    shapes = {"w": jax.ShapeDtypeStruct((8, 16), jnp.float32), "v": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    mesh = sk.abstract_mesh(data=2, model=4)

    def loss_fn(params, batch, keys):
        return jnp.mean(jnp.tanh(batch @ params["w"]) @ params["v"])

    def traced(loss_fn, **dims):
        plan = sk.chain(sk.dp("data"), sk.tp("model", lambda path, shape: dims[path]))
        options = {"mesh": mesh, "plan": plan}
        init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(1.0), **options)
        yield lambda: step.trace(init.abstract(shapes), x)
        evaluate = sk.make_eval_step(loss_fn, **options)
        yield lambda: jax.eval_shape(evaluate, evaluate.abstract(shapes), x)

    for trace in traced(loss_fn, w=1, v=1):
        with pytest.raises(TypeError, match=r"got \(4,\) and \(16,\)") as found:
            trace()
        assert (
            "make_train_step: the plan passes the loss a part of leaf v, and the loss takes it whole. Multiply by "
            "parts with sk.layers.column_linear and row_linear, or let the rules of the plan keep the leaf whole."
        ) in found.value.__notes__
    for trace in traced(loss_fn, w=1, v=0):
        with value_error(
            "Mean 'loss': total and weight must vary over the same axes; the total varies over 'data', 'model' and the "
            "weight over none, which differ in 'model'. Compute both from the same shards, or reduce both alike, as "
            "row_linear over a tp axis."
        ):
            trace()
    for trace in traced(lambda params, batch, keys: jnp.mean(batch @ params["v"]), w=1, v=0):
        with pytest.raises(TypeError, match=r"got \(8,\) and \(4,\)") as found:
            trace()
        assert not [note for note in getattr(found.value, "__notes__", ()) if "make_train_step" in note]
