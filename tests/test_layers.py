"""scan_layers: the same bits however the weights travel, the traffic of each way, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit import _compat

WIDTH, HIDDEN = 16, 32
PLANS = {
    "dp": sk.dp("d"),
    "zero2": sk.zero2("d", min_size=1, layerwise=("layers",)),
    "fsdp": sk.fsdp("d", min_size=1, layerwise=("layers",)),
    "fsdp and zero2": sk.chain(
        sk.fsdp("d", min_size=1, layerwise=("layers",)), sk.zero2("z", min_size=1, layerwise=("layers",))
    ),
}
WAYS = [(False, None), (False, "full"), (False, "dots"), (False, "dots_without_batch"), (True, None), (True, "full")]


def params(layers):
    rng = np.random.default_rng(0)
    shapes = {"up": (layers, WIDTH, HIDDEN), "down": (layers, HIDDEN, WIDTH)}
    stack = {name: (0.1 * rng.normal(size=shape)).astype("f") for name, shape in shapes.items()}
    stack["gain"] = np.ones((layers, WIDTH), "f")
    return {"layers": stack, "head": rng.normal(size=(WIDTH, 3)).astype("f")}


def loss_fn(prefetch, remat):
    def loss(params, batch, keys):
        def layer(weights, x):
            w, number = weights  # integers travel along
            h = jnp.tanh((x * w["gain"][None]) @ w["up"]) @ w["down"]
            return x + h / (1 + number.astype(x.dtype))

        numbers = jnp.arange(jax.tree.leaves(params["layers"])[0].shape[0])
        x = sk.scan_layers(layer, (params["layers"], numbers), batch["x"], prefetch=prefetch, remat=remat)
        return sk.Mean.of((x @ params["head"] - batch["y"]) ** 2)

    return loss


def batch(step):
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(8, WIDTH)).astype("f"), "y": rng.normal(size=(8, 3)).astype("f")}


def trained(name, layers, way, steps=2, accumulate=1):
    mesh = sk.make_mesh(jax.devices()[:4], z=2, d=2)
    init, step = sk.make_train_step(
        sk.value_and_grad(loss_fn(*way)), optax.sgd(0.01), mesh=mesh, plan=PLANS[name], accumulate=accumulate
    )
    state = init(params(layers), jax.random.key(0))
    for index in range(steps):
        state, _ = step(state, batch(index))
    return state.params, step, state


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("name", PLANS)
def test_every_way_of_running_a_stack_gives_the_same_parameters(name, layers):  # proves F19, F23, F49
    expected = params(layers)
    with jax.default_device(jax.devices()[0]):
        for index in range(2):
            total = lambda p: loss_fn(False, None)(p, batch(index), None)  # noqa: E731
            grads = jax.grad(lambda p: total(p).total / total(p).weight)(expected)
            expected = jax.tree.map(lambda p, g: p - jnp.float32(0.01) * g, expected, grads)
    for way in WAYS if layers == 2 else WAYS[::4]:
        found, *_ = trained(name, layers, way)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_prefetching_sends_what_gathering_in_place_sends(layers):  # proves F20, F23
    def traffic(way, accumulate):
        _, step, state = trained("fsdp", layers, way, steps=0, accumulate=accumulate)
        census = sk.census(step, state, batch(0))
        return {kind: (census.count(kind=kind), census.sent(kind=kind)) for kind in ("all_gather", "reduce_scatter")}

    for k in (1, 2):
        assert traffic((False, "full"), k) == traffic((True, None), k)
        assert traffic((True, None), k)["all_gather"][0] == 1 + 2 * k * layers * 3  # the head once, three leaves twice
        assert traffic((True, None), k)["reduce_scatter"][0] == 1 + k * layers * 3


def test_a_prefetched_gather_stands_before_the_layer_that_hides_it():
    _, step, state = trained("fsdp", 5, (True, None), steps=0)
    jaxpr = step.trace(state, batch(0)).jaxpr.jaxpr

    def scans(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan":
                yield [e.primitive.name for e in equation.params["jaxpr"].jaxpr.eqns]
            for _, inner in _compat.inner_jaxprs(equation):
                yield from scans(inner)

    bodies = [names for names in scans(jaxpr) if any("custom_vjp" in n or n == "all_gather" for n in names)]
    assert len(bodies) == 2  # forward and backward
    for names in bodies:
        gather = min(i for i, n in enumerate(names) if n in ("all_gather", "custom_vjp_call", "custom_vjp_call_jaxpr"))
        assert gather < names.index("dot_general")


def test_mistakes_are_refused():
    stack = {"w": jnp.ones((3, 4, 4)), "v": jnp.ones((2, 4))}
    with pytest.raises(ValueError) as error:
        sk.scan_layers(lambda w, x: x, stack, jnp.ones(4))
    assert str(error.value) == (
        "scan_layers: all leaves must have the same number of layers along dim 0; got [2, 3]. Stack them, and pass "
        "what the layers share through layer_fn."
    )
    with pytest.raises(ValueError) as error:
        sk.scan_layers(lambda w, x: x, stack["w"], jnp.ones(4), remat="none")
    assert str(error.value) == (
        "scan_layers: remat must be None or one of 'full', 'dots', 'dots_without_batch'; got 'none'. Choose one."
    )
    with pytest.raises(ValueError) as error:
        sk.scan_layers(lambda w, x: x, stack["w"], jnp.ones(4), prefetch=True, remat="dots")
    assert str(error.value) == (
        "scan_layers: with prefetch every layer is recomputed from its input; got remat='dots'. Pass remat='full', or "
        "leave prefetch out."
    )
