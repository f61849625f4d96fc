"""Steps that research writes: some of examples/, on each mesh as on one device."""

import os
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit import testing
from support.layouts import mesh_of
from support.training import lenient

NAMES = ("contrastive", "gan", "teacher", "experts")
FILES = {name: Path(__file__).parents[1] / "examples" / f"{name}.py" for name in NAMES}
CLIP, GAN, DINO, MOE = (runpy.run_path(str(path)) for path in FILES.values())
X, WEIGHT = np.random.default_rng(0).normal(size=(5, 16, 12)).astype("f"), np.arange(80, dtype="f").reshape(5, 16) % 3
BATCHES = [{"image": x, "text": x[:, 6:], "real": x[:, :2], "weight": w} for x, w in zip(X, WEIGHT, strict=True)]
FIVE = {"real": X[..., :2], "weight": WEIGHT}
PAIR = pytest.param({"data": 2}, id="dp", marks=pytest.mark.deep)
each_row = pytest.mark.parametrize("row", [PAIR, pytest.param({"data": 2, "fsdp": 2}, id="dp-fsdp")])


def on(row, *layers):
    plans = {"data": sk.dp("data"), "fsdp": sk.fsdp("fsdp", layerwise=layers, min_size=1)}
    return {"mesh": mesh_of(**row), "plan": sk.chain(*(plans[axis] for axis in row))}


@each_row
def test_the_negatives_of_all_devices_and_a_slope_in_the_loss(row):
    def clip(params, batch, keys):  # the whole matrix of pairs
        image_keys, text_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
        image = CLIP["embed"](params["image"], batch["image"], image_keys)
        text = CLIP["embed"](params["text"], batch["text"], text_keys)
        pairs = jax.numpy.exp(params["scale"]) * image @ text.T
        none = jax.numpy.where(batch["weight"] > 0, 0.0, 1e9)[None]  # a third of the examples weigh 0
        return sk.Mean.of(sum(-jax.nn.log_softmax(x - none).diagonal() / 2 for x in (pairs, pairs.T)), batch["weight"])

    same, of, key = sk.testing.assert_same_training, sk.value_and_grad, jax.random.key(0)
    given = {"optimizer": optax.sgd(0.01), "batches": BATCHES}  # at 0.1 the critic diverges
    critic = of(GAN["critic_loss"], trained={"critic": True, "generator": False})
    same(critic, critic, params=jax.jit(GAN["init"])(key), **on(row, "critic.layers"), **given)
    same(
        of(CLIP["make_loss"](on(row)["plan"].batch_axes)),
        of(clip),
        params=jax.jit(CLIP["init"])(key),
        **on(row),
        **given,
    )


@each_row
def test_two_optimizers(row):
    def run(mesh, plan):
        step, *states = GAN["make"](mesh, plan)
        for _ in range(2):
            *states, metrics = step(*states, FIVE)
        return metrics, [(state.params, state.carried) for state in states]

    with jax.numpy_dtype_promotion("standard"):  # optax's Adam promotes its count
        runs = run(**on(row, "critic.layers")), run(**on({"data": 1}))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *jax.device_get(runs))


def proved(grad_fn, reference, row, example, batches, carried, **options):
    how = {
        "params": jax.jit(example["init"])(jax.random.key(0)),
        "batches": batches,
        "optimizer": lenient(optax.adam(0.01)),
    }
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        proof = testing.prove(grad_fn, reference, rows=[row], carry=example["carry"], carried=carried, **how, **options)
    return {each.law: each.note for each in proof.verdicts}


# Catches a teacher or a center that is another on each mesh, for all parameters and examples: in the third step they
# have been read, updated and read. Two means whose weights are counts were a false alarm of the proof.
# proves N55 in part
@each_row
def test_a_teacher_is_carried(row):
    grad_fn = sk.value_and_grad(DINO["loss_fn"])
    batches = [{"x": x[:, :8], "label": np.int32(weight) - 1} for x, weight in zip(X[:3], WEIGHT, strict=False)]
    given = testing.Row(row, on(row, "layers")["plan"])
    assert not proved(grad_fn, grad_fn, given, DINO, batches, DINO["init_carried"])["equal_for_all_inputs"]


# Catches a bias that is another on each mesh. What is compared in `carry=` is no number of a field.
def test_experts_balanced_without_a_loss():
    of = lambda axis: sk.value_and_grad(partial(MOE["loss_fn"], axis=axis))  # noqa: E731
    row = testing.Row({"data": 2, "expert": 4}, sk.chain(sk.dp("data"), sk.ep("expert")))
    batches, bias = [{"x": x[:, :8], "y": x[:, 4:]} for x in X[:3]], np.zeros((2, 8), "f")
    notes = proved(of("expert"), of(None), row, MOE, batches, bias, laws=[*testing.LAWS[:3]])
    assert notes["equal_for_all_inputs"] == "not for all inputs: carry= compares numbers"


def contrastive_loss_fell(run):
    """Of 32 pairs, of which one is right: it begins at log(32)."""
    return run["metrics"]["loss"] < 1


def generator_is_where_the_data_is(run):
    return np.allclose(run["generator"].params["generator"]["b"], [1, -1], atol=0.3)


def labels_are_told(run):
    """Of two classes: it begins at log(2)."""
    return run["metrics"]["classification"] < 0.5


def experts_are_chosen_evenly(run):
    """The share of the most chosen of eight experts in each layer: it began above a quarter, and fell below."""
    shares = np.stack(run["largest_shares"])
    return shares[-20:].mean(0).max() < 0.25 < shares[0].min()


LEARNED = {
    "contrastive": contrastive_loss_fell,
    "gan": generator_is_where_the_data_is,
    "teacher": labels_are_told,
    "experts": experts_are_chosen_evenly,
}


# Catches an example that runs to its end without having learned: each says so of itself, but only as long as its last
# line stands.
@pytest.mark.quick("contrastive", "teacher")  # the steps of the others are compared above
@pytest.mark.parametrize("name", FILES)
def test_they_learn(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run = runpy.run_path(str(FILES[name]), run_name="__main__")
    assert LEARNED[name](run)


# Catches a file of the template that needs another of the repository, and a test of it that fails: a researcher copies
# three files into an empty folder.
@pytest.mark.deep
def test_the_template_runs_in_an_empty_folder(tmp_path):
    template = Path(__file__).parents[1] / "examples" / "research"
    for name in ("model.py", "train.py", "test.py"):
        shutil.copy(template / name, tmp_path)
    environment = os.environ | {"PYTHONPATH": str(template.parents[1])}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 900}
    tested = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "test.py"], **options)
    assert tested.returncode == 0 and "3 passed" in tested.stdout, tested.stdout + tested.stderr
    command = [sys.executable, "train.py", "runs/a", "--simulate", "--steps", "20"]
    first = subprocess.run(command, **options)
    again = subprocess.run([*command[:-1], "40"], **options)
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    assert "step 20: trained on" in first.stderr, first.stdout
    assert "goes on after step 20" in again.stderr and "step 40" in again.stderr, again.stdout
