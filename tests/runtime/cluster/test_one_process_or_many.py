"""Many processes compute what one does: every collective on every kind of mesh, and whole training steps."""

import json

import jax
import numpy as np
import optax
import pytest

import shardkit as sk
from support import jobs
from support.workers import rows as worker
from support.workers import trainer

ROWS = [
    "dense:data=8",
    "dense:data=2 fsdp=2 model=2 sequence ring",
    "dense:data=2 context=2 model=2",
    "dense:fsdp=4 model=2",
    "experts:data=2 expert=4",
]
GRID = {"devices_per_process": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_strategy": "zero1"}


# In loops and branches, and with gradients: one process, in tests/collectives, and the deep tier.
@pytest.mark.parametrize(
    ("forms", "processes", "devices", "checks"),
    [
        pytest.param("plain", 2, 2, 91, marks=pytest.mark.deep),
        pytest.param("all", 2, 2, 281, marks=pytest.mark.deep),
        pytest.param("all", 4, 2, 281, marks=pytest.mark.deep),
    ],
)
def test_every_collective(forms, processes, devices, checks):
    ended = jobs.run("matrix.py", forms, processes=processes, devices=devices, timeout=500)
    assert [each.code for each in ended] == [0] * processes, ended[0].output[-3000:]
    assert {each.last for each in ended} == {f"{checks} checks held"}


# proves S96, S100
@pytest.mark.parametrize(
    ("processes", "devices", "rows"),
    [
        (2, 4, ["softmax:fsdp x zero1 x dp"]),
        pytest.param(4, 2, ROWS[::2], marks=pytest.mark.deep),
        pytest.param(2, 4, ROWS[1::2], marks=pytest.mark.deep),
    ],
)
def test_training_gives_the_losses_of_one_process(processes, devices, rows, tmp_path):
    path = tmp_path / "losses.json"
    ended = jobs.run("rows.py", path, *rows, processes=processes, devices=devices, timeout=500)
    assert [each.code for each in ended] == [0] * processes, ended[0].output[-3000:]
    for name, losses in json.loads(path.read_text()).items():
        np.testing.assert_allclose(losses, worker.losses(name), rtol=1e-6, atol=0, err_msg=name)
        assert len(set(losses)) == 3


# proves S10, S11, S96, S97: one text, on one device without a job and on two processes that a config describes, with
# data, model and stage axes of two devices. Sums over two devices round in another order than those over one.
@pytest.mark.deep  # the text and the config apart: test_training_gives_the_losses, test_config.py
def test_a_trainer_is_given_a_config(tmp_path):
    port, path = jobs.free_port(), tmp_path / "losses.json"

    def described(rank):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
        unset = dict.fromkeys(("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        return place | {"LOCAL_RANK": str(rank)} | unset

    ended = jobs.run("trainer.py", path, json.dumps(GRID), processes=2, devices=4, each=described)
    assert [each.code for each in ended] == [0, 0], ended
    alone = trainer.train(
        sk.DistributedConfig(enabled=False, world_size=8, **GRID), trainer.dataset(0, 40), trainer.dataset(1, 16)
    )
    found = json.loads(path.read_text())
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["validation"], alone["validation"], rtol=1e-5)
    assert found["validation"] == sorted(found["validation"], reverse=True) and len(found["validation"]) == 2


def test_disabled_is_one_device_and_the_undistributed_step():  # proves S10
    config = sk.DistributedConfig(
        enabled=False, world_size=4, tensor_parallel_size=2, mesh_shape=(2, 2), mesh_axis_names=("data", "model")
    )
    mesh = config.mesh()
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    assert list(mesh.devices.flat) == jax.local_devices()[:1]
    assert dict(sk.DistributedConfig(enabled=False).mesh().shape) == {"data": 1, "model": 1, "stage": 1}

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 2)).astype(np.float32)}
    batch = {"x": rng.normal(size=(8, 3)).astype(np.float32), "y": rng.normal(size=(8, 2)).astype(np.float32)}
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss_fn(params, batch, keys):
        return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()

    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optimizer, mesh=mesh, plan=sk.dp("data"))
    state = init(jax.tree.map(np.copy, params), jax.random.key(0))

    @jax.jit
    def undistributed(params, moments):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, None)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    moments = optimizer.init(params)
    for _ in range(3):
        state, metrics = step(state, batch)
        params, moments, loss = undistributed(params, moments)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5, atol=1e-7)
    assert len(state.params["w"].sharding.device_set) == 1
