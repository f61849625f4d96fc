"""Trains rows of the conformance list over many processes; process 0 writes the losses and checksums of parameters."""

import json
import sys
from pathlib import Path

import jax

import shardkit as sk
from support import conformance
from support.layouts import mesh_of

if __name__ == "__main__":
    sk.runtime.initialize(timeout=300)


def losses(name, steps=3):
    """The losses of some steps, of a row of eight devices."""
    model_name, row_name = name.split(":")
    model = next(m for m in [*conformance.MODELS, *conformance.MESH_MODELS] if m.name == model_name)
    rows = conformance.PLANS if model in conformance.MODELS else conformance.mesh_rows(model_name)
    row = next(r for r in rows if r.name == row_name)
    mesh, plan = mesh_of(**row.sizes), row.plan()
    init, step = sk.make_train_step(
        sk.value_and_grad(model.loss(row.model_axis)), sk_optimizer(), mesh=mesh, plan=plan, precision=None
    )
    params = model.params()  # outside of init, which would trace what makes them
    state = init(lambda key: params, jax.random.key(7))
    found = []
    for index in range(steps):
        batch = sk.runtime.from_full(model.batch(index), mesh, plan.batch_spec(mesh))
        with jax.numpy_dtype_promotion("standard"):  # optax promotes an integer count
            state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


def sk_optimizer():
    """Large steps, so that a difference shows."""
    import optax

    return optax.adamw(3e-3, eps=1e-6)


if __name__ == "__main__":
    path, *names = sys.argv[1:]
    found = {name: losses(name) for name in names}
    if sk.runtime.is_main():
        Path(path).write_text(json.dumps(found))
