"""`deterministic=G`: the same bits on every mesh, after every step, and after a restart on another one."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit._jax.jaxprs import walk
from shardkit.models import transformer
from shardkit.on_device.advice import Unintended
from shardkit.testing import LAWS, Row, prove
from support.compiling import QUICK
from support.conformance import weights
from support.refusals import value_error
from support.training import lenient

KEY = jax.random.key(3)
FSDP = {"min_size": 1, "uneven": "pad"}
MESHES = {
    "dp1": ({"data": 1}, sk.dp("data")),
    "dp2": ({"data": 2}, sk.dp("data")),
    "dp4": ({"data": 4}, sk.dp("data")),
    "dp8": ({"data": 8}, sk.dp("data")),
    "zero1": ({"data": 8}, sk.zero1("data", min_size=1)),
    "fsdp": ({"data": 8}, sk.fsdp("data", **FSDP)),
    "hsdp": ({"data": 2, "shard": 4}, sk.chain(sk.dp("data"), sk.fsdp("shard", min_size=1))),
    "hsdp, the other order": ({"shard": 4, "data": 2}, sk.chain(sk.dp("data"), sk.fsdp("shard", min_size=1))),
    "fsdp and zero1": ({"data": 2, "zero": 4}, sk.chain(sk.fsdp("data", **FSDP), sk.zero1("zero", min_size=1))),
    "dp3": ({"data": 3}, sk.dp("data")),
    "fsdp6": ({"data": 6}, sk.fsdp("data", **FSDP)),
    "hsdp6": ({"data": 2, "shard": 3}, sk.chain(sk.dp("data"), sk.fsdp("shard", **FSDP))),
}


def loss_fn(params, batch, keys):
    """Products before sums everywhere, dropout, weights, and leaves of every size."""
    h = sk.dropout(jnp.tanh(batch["x"] @ params["up"] + params["bias"][None]), keys, 0.1)
    each = jnp.sum(jnp.tanh(batch["x"] * params["each"][None]), -1) * params["odd"][1] + params["odd"][2]
    y = h @ params["down"] + (params["square"] ** 2)[None] * params["gain"] + each[:, None]
    return sk.Mean.of(jnp.sum((y - batch["y"]) ** 2, -1), batch["weight"]), {"size": sk.Mean.of(jnp.abs(h))}


def make_params():
    up, down = jax.random.normal(KEY, (16, 24)) / 4, jax.random.normal(jax.random.key(1), (24, 8)) / 5
    small = {"bias": jnp.zeros(24), "square": jnp.ones(8), "odd": jnp.ones(3), "each": jnp.ones(16)}
    return {"up": up, "down": down, "gain": jnp.float32(0.3), **small}


def make_batch(seed, size=24):
    rng = np.random.default_rng(seed)
    x, y, weight = rng.normal(size=(size, 16)), rng.normal(size=(size, 8)), rng.integers(1, 5, size)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "weight": weight.astype(np.float32)}


@functools.cache
def built(name, groups=8, optimizer=None, **options):
    sizes, plan = MESHES[name]
    mesh = sk.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
    optimizer = lenient(optimizer or optax.adamw(1e-2))
    return sk.make_train_step(
        sk.value_and_grad(loss_fn), optimizer, mesh=mesh, plan=plan, deterministic=groups, **options
    )


def bits(*trees):
    return {
        jax.tree_util.keystr(path): np.asarray(x).tobytes()
        for path, x in jax.tree_util.tree_leaves_with_path(sk.unpadded(trees))
    }


def trained(name, steps=3, **options):
    """The bits of the metrics of each step, and of what the last one leaves."""
    init, step = built(name, **options)
    state, found = init(make_params(), KEY), []
    for seed in range(steps):
        state, metrics = step(state, make_batch(seed))
        found.append(bits(metrics))
    return [*found, bits(state.params, state.opt_state)]


def compare(names, **options):
    first, *others = names
    wanted = trained(first, **options)
    for name in others:
        for i, (got, want) in enumerate(zip(trained(name, **options), wanted, strict=True)):
            assert [leaf for leaf in want if got[leaf] != want[leaf]] == [], (name, f"step {i}")


# proves N4; F77 in part: no catalogue of operations
@pytest.mark.optimized
def test_the_bits_are_the_same_on_every_mesh_and_under_every_plan():
    compare(["dp1", "dp8", "zero1", "fsdp"])
    # An ordinary step adds in another order on every mesh.
    assert trained("dp1", groups=None) != trained("dp8", groups=None)


def test_a_restart_on_another_number_of_devices(tmp_path):
    init, step = built("zero1")
    state = init(make_params(), KEY)
    state, _ = step(state, make_batch(0))
    with sk.runtime.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
    state, metrics = step(state, make_batch(1))
    wanted = bits(metrics, state.params, state.opt_state)
    init, step = built("dp2")
    with sk.runtime.Checkpoints(tmp_path) as checkpoints:
        state, _ = checkpoints.restore(init(make_params(), KEY))
    state, metrics = step(state, make_batch(1))
    assert bits(metrics, state.params, state.opt_state) == wanted


# The rest of this file compiles quickly, without the fused multiply-adds that a user's compiler makes.
@pytest.mark.deep
def test_the_bits_are_the_same_as_users_compile():
    options = {"xla_backend_optimization_level": 3}
    if "fusion_emitters" in QUICK:
        options["xla_cpu_use_fusion_emitters"] = True
    found = []
    for name in ("dp1", "dp8", "fsdp"):
        init, step = built(name)
        state = init(make_params(), KEY)
        compiled = step.lower(state, make_batch(0)).compile(compiler_options=options)
        key, state = state.key, state._replace(key=None)
        for seed in range(10):
            state, metrics = compiled(state, key, jax.device_put(make_batch(seed), compiled.input_shardings[0][2]))
        found.append(bits(metrics, state.params, state.opt_state))
    assert found[0] == found[1] == found[2]


# proves S58, S63, F60: against one device, with the bytes of the closed form; lint and the compiler are silent
@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_the_laws(scaled):
    options = {"precision": sk.Precision(loss_scale=1024.0), "deterministic": 12}
    hybrid = sk.chain(sk.dp("data"), sk.fsdp("shard", **FSDP))
    one = Row({"data": 2}, sk.zero1("data", min_size=30), **options)
    rows = [one if scaled else Row({"data": 2, "shard": 4}, hybrid, deterministic=8)]
    batches = [make_batch(seed) for seed in range(2)]
    optimizer, grad_fn = lenient(optax.sgd(0.01, momentum=0.9)), sk.value_and_grad(loss_fn)
    given = {"params": make_params(), "batches": batches, "key": KEY, "laws": LAWS}
    prove(grad_fn, grad_fn, optimizer=optimizer, rows=rows, **given)


# Of 24 groups a device has one run that is a subtree, or two. The batch's axes come in any order.
@pytest.mark.deep
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"precision": "fp16"}], ids=str)
def test_twenty_steps_on_every_mesh(options):
    eights = [name for name, (sizes, _) in MESHES.items() if 8 % math.prod(sizes.values()) == 0]
    compare(eights, steps=20, **options)
    compare(list(MESHES), steps=20, groups=24, **options)


@pytest.mark.deep
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_twenty_steps_of_a_transformer(precision):
    config = transformer.Config(vocabulary=64, layers=2, dim=32, heads=4, dropout=0.1)
    grad_fn, params = sk.value_and_grad(transformer.loss_fn(config)), weights(config)
    tokens = [np.random.default_rng(seed).integers(0, 64, (16, 17)).astype(np.int32) for seed in range(20)]
    found = {}
    for name, (sizes, plan) in MESHES.items():
        if 8 % math.prod(sizes.values()) == 0:
            mesh = sk.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
            options = {"mesh": mesh, "plan": plan, "precision": precision, "deterministic": 8}
            init, step = sk.make_train_step(grad_fn, lenient(optax.adamw(1e-2)), **options)
            state = init(params, KEY)
            for each in tokens:
                state, metrics = step(state, {"tokens": each[:, :-1], "targets": each[:, 1:]})
            found[name] = bits(metrics, state.params, state.opt_state)
    assert [name for name in found if found[name] != found["dp1"]] == []


def grouped(plan=None, loss=loss_fn, optimizer=None, traced=jax.eval_shape, **options):
    """What a step over an abstract mesh returns, traced with the batch of `size` examples."""
    size = options.pop("size", 24)
    mesh, plan = sk.abstract_mesh(data=2, model=4), plan or sk.dp("data")
    options = {"deterministic": 8} | options
    init, step = sk.make_train_step(
        sk.value_and_grad(loss), lenient(optimizer or optax.adamw(1e-2)), mesh=mesh, plan=plan, **options
    )
    carried = [np.float32(0)] * ("carry" in options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Unintended)  # an axis does nothing under plans of the other alone
        return traced(
            step,
            init.abstract(jax.eval_shape(make_params), *carried),
            jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_batch(0, size))),
        )


def summing(params, batch, keys):
    return sk.all_reduce(loss_fn(params, batch, keys)[0].total, "data")


def placed(params, batch, keys):
    return jnp.mean(batch["x"] @ params["up"]) * sk.axis_index("data").astype(jnp.float32)


def added_up(carried, metrics, params):
    return carried + jnp.sum(params["bias"])


BY_NORM = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
REFUSED = {
    "deterministic must be at least 1; got 0. Pass deterministic=1 or more.": {"deterministic": 0},
    "with deterministic=8 the groups are the microbatches; got accumulate=2 too. Leave accumulate at 1, and pass more "
    "groups for smaller microbatches.": {"accumulate": 2},
    "with deterministic=8 gradients are summed in float32; got a precision with reduce=bfloat16. Pass one with "
    "reduce=jnp.float32.": {"precision": sk.Precision(reduce=jnp.bfloat16)},
    "with deterministic=8 every strategy must split the examples of the batch, because sums inside the loss depend on "
    "the mesh; tp('model') does not. Use dp, zero1 and fsdp alone.": {
        "plan": sk.chain(sk.dp("data"), sk.tp("model", lambda path, leaf: None))
    },
    "with deterministic=8 every strategy must split the examples of the batch, because sums inside the loss depend on "
    "the mesh; cp('model') does not. Use dp, zero1 and fsdp alone.": {"plan": sk.chain(sk.dp("data"), sk.cp("model"))},
    "with deterministic=8 the step fixes the order of its sums; dp('data') has reduce=ring(). Leave out reduce=.": {
        "plan": sk.dp("data", reduce=sk.algorithms.ring())
    },
    "with deterministic=8 the step fixes the order of its sums; fsdp('data') has gather=ring(). Leave out gather=.": {
        "plan": sk.fsdp("data", gather=sk.algorithms.ring())
    },
    "deterministic must be a multiple of the devices that split the batch; got 4 groups over 8 devices of axes 'data', "
    "'model'. Pass for example deterministic=8, on every mesh that is to have the same bits.": {
        "plan": sk.dp(("data", "model")),
        "deterministic": 4,
    },
    "batch dim 0 must be divisible by deterministic; leaf weight has size 20 over 8 groups. Choose another size, or "
    "pad with examples of weight 0.": {"size": 20},
    "with deterministic= every gradient must be summed at the end of the step; the gradient of leaf bias is not. Use "
    "dp, "
    "zero1, or fsdp without layerwise=.": {"plan": sk.zero2("data", min_size=1)},
    "with deterministic= every gradient must be summed at the end of the step; the gradient of leaf up is not. Use "
    "dp, zero1, "
    "or fsdp without layerwise=.": {"plan": sk.fsdp("data", min_size=1, layerwise=("up",))},
    "with deterministic= the loss must not depend on the mesh; it calls all_reduce over 'data'. Return Mean(total, "
    "weight) of the examples that it gets, and let the step sum it.": {"loss": summing},
    "with deterministic= the loss must not depend on the mesh; it calls axis_index over 'data'. Return Mean(total, "
    "weight) of the examples that it gets, and let the step sum it.": {"loss": placed},
    "with deterministic= an optimizer that sums over elements (reduce_sum) must have whole leaves, because the order "
    "of its sums depends on the mesh; leaf bias is split over 'data'. Use dp, or an optimizer without it: clip by "
    "value, not by norm.": {"plan": sk.zero1("data", min_size=1), "optimizer": BY_NORM},
    "with deterministic= an optimizer must not multiply matrices, because the compiler orders their sums by the "
    "program around them; got dot_general. Leave out deterministic=, or use one without it.": {
        "optimizer": optax.contrib.muon(1e-2)
    },
    "with deterministic= a carry= that sums over elements (reduce_sum) must have whole leaves, because the order of "
    "its sums depends on the mesh; leaf bias is split over 'data'. Use dp or zero1, or sum in the loss, as an "
    "auxiliary Mean.": {"plan": sk.fsdp("data", min_size=1), "carry": added_up},
}


@pytest.mark.check
@pytest.mark.parametrize("words", REFUSED, ids=lambda words: words[:60])
def test_what_would_depend_on_the_mesh_is_refused(words):
    with value_error(f"make_train_step: {words}"):
        grouped(**REFUSED[words])


@pytest.mark.optimized
def test_an_optimizer_that_clips_by_the_norm_has_the_same_bits():
    """What it computes of gradients alone must not be compiled with the code that made them."""
    optimizer, found = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)), []
    for devices in (1, 2):
        mesh = sk.make_mesh(jax.devices()[:devices], data=devices)
        options = {"mesh": mesh, "plan": sk.dp("data"), "deterministic": 2, "carry": added_up}
        init, step = sk.make_train_step(sk.value_and_grad(loss_fn), lenient(optimizer), **options)
        state = init(make_params(), jax.random.key(0), jnp.float32(0))
        for seed in range(3):
            state, metrics = step(state, make_batch(seed))
        found.append(bits(state.params, state.opt_state, state.carried, metrics))
    assert [name for name in found[0] if found[0][name] != found[1][name]] == []


@pytest.mark.check
def test_the_compiler_cannot_decide_what_is_compiled_on_its_own():
    """It alone sees, without a user's optimizations, a condition or a count of turns that is a constant."""
    sites = list(walk(grouped(traced=lambda step, *args: jax.make_jaxpr(step)(*args)).jaxpr))
    conditions = [site.equation.invars[0] for site in sites if site.name == "cond"]
    assert conditions and not [x for x in conditions if hasattr(x, "val")]
    assert [site.name for site in sites].count("while") == 1  # with a constant number of turns it were a scan
