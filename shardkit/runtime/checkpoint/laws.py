"""A law for `testing.prove` that needs checkpoints: `laws=(*testing.LAWS, restores_elsewhere)`."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import jax
import numpy as np

from shardkit._arguments.checks import apart
from shardkit.meshes.layout import by_path
from shardkit.meshes.mesh import make_mesh
from shardkit.on_device.gradient import value_and_grad
from shardkit.plans.storage import to_storable, unpadded
from shardkit.runtime.checkpoint.checkpoints import Checkpoints
from shardkit.steps.builder import make_train_step
from shardkit.steps.state import TrainState
from shardkit.strategies.data import dp
from shardkit.testing.one_device import Reference
from shardkit.testing.program import Program


def restores_elsewhere(program: Program, reference: Reference) -> str | None:
    """A checkpoint of the run's last state is restored on one device, bit for bit.

    Parameters, optimizer state, step and key get their original shapes and order of layers, whatever plan, padding or
    stages stored them. The state of a custom step is not restored, nor are residuals: the result says so.

    Cost: writes and reads one checkpoint in a temporary directory.

    Example:
        As a law of a proof:

            laws = (*sk.testing.LAWS, sk.runtime.restores_elsewhere)
            proof = sk.testing.prove(step, reference, rows=rows, params=params, batches=batches, laws=laws)
    """
    if program.row.grad_fn is None:
        return "a custom step: its state is not restored elsewhere"
    state = program.ran.state
    restored = _restore_on_one_device(program)
    restored_leaves = _read_leaves(restored)
    saved_leaves = _read_leaves(state._replace(residuals=None))
    missing = sorted(restored_leaves.keys() ^ saved_leaves.keys())
    if missing:
        raise AssertionError(
            "the state restored on one device must have the saved leaves; these are missing on one side: "
            f"{', '.join(missing)}"
        )
    for path, saved in saved_leaves.items():
        difference = _describe_difference(restored_leaves[path], saved)
        if difference:
            raise AssertionError(f"the state restored on one device must be the saved one; leaf {path} {difference}")
    if state.residuals is not None:
        return "residuals: on one device only their sum would be left"
    return None


def _restore_on_one_device(program: Program) -> TrainState:
    """The last state of a run, saved, and restored on the last device alone, with its optimizer and precision."""
    # The last device, because arrays that nobody has placed are on the first.
    mesh = make_mesh(jax.devices()[-1:], alone=1)
    untraced = value_and_grad(lambda params, batch, keys: math.nan)  # only layouts are needed
    with tempfile.TemporaryDirectory(prefix="shardkit-law-") as directory, Checkpoints(directory) as checkpoints:
        checkpoints.save(program.ran.state)
        checkpoints.wait()
        with apart(mesh):
            train_step = make_train_step(
                untraced, program.row.optimizer, mesh=mesh, plan=dp("alone"), precision=program.row.precision
            )
            init: Any = train_step.init
            restored, _ = checkpoints.restore(init.abstract(program.params), residuals="reset")
    return restored


def _describe_difference(restored: np.ndarray, saved: np.ndarray) -> str:
    """How a leaf differs from what was saved; nothing if it has the same bits."""
    if restored.shape != saved.shape or restored.dtype != saved.dtype:
        return f"is {restored.dtype}{list(restored.shape)} and was {saved.dtype}{list(saved.shape)}"
    # As bytes, because NaN is unequal to itself.
    if restored.tobytes() == saved.tobytes():
        return ""
    return f"has other bits; {np.sum(restored != saved)} of {restored.size} elements differ"


def _read_leaves(state: Any) -> dict[str, np.ndarray]:
    """The leaves by path, in their original shape and order of layers; of keys their integers."""
    plain = jax.tree.map(to_storable, unpadded(state))
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(plain))
    arrays = {}
    for path, x in by_path("prove", leaves).items():
        arrays[path] = np.asarray(x)
    return arrays
