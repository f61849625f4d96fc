"""Steps that research writes: some of examples/, on each mesh as on one device."""

import runpy
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import shardkit as sk
from support.layouts import mesh_of

NAMES = ("contrastive", "gan", "teacher", "experts")
FILES = {name: Path(__file__).parents[1] / "examples" / f"{name}.py" for name in NAMES}
CLIP, GAN, DINO, MOE = (runpy.run_path(str(path)) for path in FILES.values())
X, WEIGHT = np.random.default_rng(0).normal(size=(5, 16, 12)).astype("f"), np.arange(80, dtype="f").reshape(5, 16) % 3
BATCHES = [{"image": x, "text": x[:, 6:], "real": x[:, :2], "weight": w} for x, w in zip(X, WEIGHT, strict=True)]
FIVE = {"real": X[..., :2], "weight": WEIGHT}
each_row = pytest.mark.parametrize("row", [{"data": 2}, {"data": 2, "fsdp": 2}], ids=["dp", "dp-fsdp"])


def on(row, *layers):
    plans = {"data": sk.dp("data"), "fsdp": sk.fsdp("fsdp", layerwise=layers, min_size=1)}
    return {"mesh": mesh_of(**row), "plan": sk.chain(*(plans[axis] for axis in row))}


@each_row
def test_the_negatives_of_all_devices_and_a_slope_in_the_loss(row):
    def clip(params, batch, keys):  # the whole matrix of pairs
        image, text = (CLIP["embedded"](params[name], batch[name], keys) for name in ("image", "text"))
        pairs = jax.numpy.exp(params["scale"]) * image @ text.T
        none = jax.numpy.where(batch["weight"] > 0, 0.0, 1e9)[None]  # a third of the examples weigh 0
        return sk.Mean.of(sum(-jax.nn.log_softmax(x - none).diagonal() / 2 for x in (pairs, pairs.T)), batch["weight"])

    same, of, key = sk.testing.assert_same_training, sk.value_and_grad, jax.random.key(0)
    given = {"optimizer": optax.sgd(0.1), "batches": BATCHES}
    critic = of(GAN["critic_loss"], trained={"critic": True, "generator": False})
    same(critic, critic, params=GAN["init"](key), **on(row, "critic.layers"), **given)
    same(of(CLIP["clip"](on(row)["plan"].batch_axes)), of(clip), params=CLIP["init"](key), **on(row), **given)


@each_row
@pytest.mark.parametrize(("example", "layers"), [(GAN, "critic.layers"), (DINO, "layers")], ids=["gan", "teacher"])
def test_two_optimizers_and_a_teacher(example, layers, row):
    def run(mesh, plan):
        step, *states = example["make"](mesh, plan)
        for x, weight in zip(X[:2, :, :8], WEIGHT[:2], strict=True):  # the label -1 is none
            *states, metrics = step(*states, FIVE if example is GAN else {"x": x, "label": np.int32(weight) - 1})
        return metrics, [(state.params, state.carried) for state in states]

    with jax.numpy_dtype_promotion("standard"):  # optax's Adam promotes its count
        runs = run(**on(row, layers)), run(**on({"data": 1}))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *jax.device_get(runs))


# Catches a bias that is another on each mesh: the shares of the whole batch are equal to the bit.
def test_experts_balanced_without_a_loss():
    def run(axis, plan, **sizes):
        step, state = MOE["make"](mesh_of(**sizes), plan, axis)
        for x in X[:3]:
            state, metrics = step(state, {"x": x[:, :8], "y": x[:, 4:]})
        return metrics.pop("choices"), state.carried, metrics, state.params

    split = sk.chain(sk.dp("data"), sk.ep("expert"))
    with jax.numpy_dtype_promotion("standard"):
        runs = run("expert", split, data=2, expert=4), run(None, sk.dp("data"), data=1)
    (choices, bias, *found), (wanted, wanted_bias, *one) = jax.device_get(runs)
    assert (choices == wanted).all() and (bias == wanted_bias).all() and bias.any()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, one)


@pytest.mark.parametrize("name", FILES)
def test_they_learn(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(FILES[name]), run_name="__main__")
