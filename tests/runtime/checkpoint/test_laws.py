"""The law that a checkpoint is restored elsewhere: on padded leaves in the order of stages, and what breaks it."""

import jax
import numpy as np
import optax

import shardkit as sk
from shardkit.runtime import Checkpoints, restores_elsewhere
from shardkit.testing import Row, prove
from support.refusals import refused
from support.training import lenient

PARAMS = {"w": np.random.default_rng(0).normal(size=(7, 4)).astype("f")}
BATCHES = [{"x": np.random.default_rng(1).normal(size=(8, 7)).astype("f")}]
ROW = Row({"data": 2}, sk.fsdp("data", min_size=1, uneven="pad"), precision="fp16")


def loss_fn(params, batch, keys):
    return sk.Mean.of((batch["x"] @ params["w"]) ** 2)


def proved(step=None, row=ROW):
    own = sk.value_and_grad(loss_fn)
    options = {"rows": [row], "params": PARAMS, "batches": BATCHES, "laws": [restores_elsewhere]}
    return prove(step or own, own, optimizer=lenient(optax.adam(0.1)), **options)


# proves F62: a padded leaf, a moment and a loss scale come back on one device
def test_a_checkpoint_is_restored_elsewhere():
    (verdict,) = proved().verdicts
    assert (verdict.broken, verdict.note) == ("", "")


def test_residuals_and_a_step_of_ones_own_are_not_restored_elsewhere():
    fed = sk.algorithms.compressed(jax.numpy.int8, feedback=True)
    (verdict,) = proved(row=Row({"data": 2}, sk.dp("data", reduce=fed))).verdicts
    assert verdict.note == "residuals: on one device only their sum would be left"

    def build(row):
        return sk.make_train_step(
            sk.value_and_grad(loss_fn), row.optimizer, mesh=sk.make_mesh(jax.devices()[:2], data=2), plan=row.plan
        )

    (verdict,) = proved(build, ROW._replace(precision=None)).verdicts
    assert verdict.note == "a custom step: its state is not restored elsewhere"


def test_what_comes_back_changed_is_named(monkeypatch):
    """A proof that compared losses alone would pass a moment that is off."""
    restore = Checkpoints.restore

    def changed(self, target, **options):
        state, run = restore(self, target, **options)
        count = lambda path, x: x + 1 if "count" in str(path) else x  # noqa: E731
        return state._replace(opt_state=jax.tree_util.tree_map_with_path(count, state.opt_state)), run

    monkeypatch.setattr(Checkpoints, "restore", changed)
    assert refused(proved, AssertionError).endswith(
        "the state restored on one device must be the saved one; leaf opt_state.inner.0.count has other bits; "
        "1 of 1 elements differ"
    )
