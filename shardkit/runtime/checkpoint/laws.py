"""A law for `testing.prove` that needs checkpoints, beside its own: `laws=(*testing.LAWS, restores_elsewhere)`."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import jax
import numpy as np

from shardkit.layout import path_name
from shardkit.mesh import make_mesh
from shardkit.partitioning.gradient import value_and_grad
from shardkit.partitioning.storage import unpadded
from shardkit.runtime.checkpoint.checkpoints import Checkpoints
from shardkit.strategies.data import dp
from shardkit.testing import Program, Reference
from shardkit.train import make_train_step


def restores_elsewhere(program: Program, reference: Reference) -> str | None:
    """What the run saves after its last step is restored on one device, the same in every bit.

    The parameters come back in natural shapes and order, whatever plan, padding or stages held them, and so do the
    optimizer's state, the step and the key. A step of one's own has a state of its own, which is not restored: the
    proof says so.

    Cost: one checkpoint is written and read, in a directory for temporary files.
    """
    if program.row.grad_fn is None:
        return "a step of one's own: its state is not restored elsewhere"
    state = program.ran.state
    nothing = value_and_grad(lambda params, batch, keys: math.nan)  # never traced: it is the layout that is asked for
    init: Any
    init, _ = make_train_step(
        nothing,
        program.row.optimizer,
        mesh=make_mesh(jax.devices()[-1:], alone=1),
        plan=dp("alone"),
        precision=program.row.precision,
    )
    with tempfile.TemporaryDirectory(prefix="shardkit-law-") as directory, Checkpoints(directory) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        restored, _ = checkpoints.restore(init.abstract(program.params))
    found, wanted = _leaves(restored), _leaves(state)
    if found.keys() != wanted.keys():
        lost = ", ".join(sorted(found.keys() ^ wanted.keys()))
        raise AssertionError(
            f"the state restored on one device must have the leaves that were saved; differing: {lost}"
        )
    for path, saved in wanted.items():
        back = found[path]
        if (back.shape, back.dtype) != (saved.shape, saved.dtype):
            differs = f"is {back.dtype}{list(back.shape)} and was {saved.dtype}{list(saved.shape)}"
        elif back.tobytes() != saved.tobytes():
            differs = f"has other bits; {np.sum(back != saved)} of {back.size} elements differ"
        else:
            continue
        raise AssertionError(f"the state restored on one device must be that which was saved; leaf {path} {differs}")
    return None


def _leaves(state: Any) -> dict[str, np.ndarray]:
    """Each leaf in its natural form, by path."""
    plain = jax.tree.map(
        lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, unpadded(state)
    )
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(plain))
    return {path_name(path): np.asarray(x) for path, x in leaves}
