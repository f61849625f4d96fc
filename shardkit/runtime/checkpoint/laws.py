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
from shardkit.plans.storage import unpadded
from shardkit.runtime.checkpoint.checkpoints import Checkpoints
from shardkit.steps.builder import make_train_step
from shardkit.strategies.data import dp
from shardkit.testing import Program, Reference


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
    nothing = value_and_grad(lambda params, batch, keys: math.nan)  # never traced: only layouts are needed
    alone = make_mesh(jax.devices()[-1:], alone=1)
    options: dict[str, Any] = {"mesh": alone, "plan": dp("alone"), "precision": program.row.precision}
    with tempfile.TemporaryDirectory(prefix="shardkit-law-") as directory, Checkpoints(directory) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        with apart(alone):
            init: Any = make_train_step(nothing, program.row.optimizer, **options).init
            restored, _ = checkpoints.restore(init.abstract(program.params), residuals="reset")
    found, wanted = _leaves(restored), _leaves(state._replace(residuals=None))
    if found.keys() != wanted.keys():
        lost = ", ".join(sorted(found.keys() ^ wanted.keys()))
        raise AssertionError(
            f"the state restored on one device must have the saved leaves; these are missing on one side: {lost}"
        )
    for path, saved in wanted.items():
        back = found[path]
        if (back.shape, back.dtype) != (saved.shape, saved.dtype):
            differs = f"is {back.dtype}{list(back.shape)} and was {saved.dtype}{list(saved.shape)}"
        elif back.tobytes() != saved.tobytes():
            differs = f"has other bits; {np.sum(back != saved)} of {back.size} elements differ"
        else:
            continue
        raise AssertionError(f"the state restored on one device must be the saved one; leaf {path} {differs}")
    return None if state.residuals is None else "residuals: on one device only their sum would be left"


def _leaves(state: Any) -> dict[str, np.ndarray]:
    """The leaves by path, in their original shape and order of layers."""
    plain = jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, unpadded(state)
    )
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(plain))
    return {path: np.asarray(x) for path, x in by_path("prove", leaves).items()}
