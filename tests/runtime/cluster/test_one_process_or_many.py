"""Many processes compute what one does: every collective on every kind of mesh, and whole training steps."""

import json

import jax
import numpy as np
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
@pytest.mark.deep
@pytest.mark.parametrize("processes", [2, 4])
def test_every_collective(processes):
    ended = jobs.run("matrix.py", processes=processes, devices=2, timeout=500)
    assert [each.code for each in ended] == [0] * processes, ended[0].output[-3000:]
    assert {each.last for each in ended} == {"280 checks held"}


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


# That its step is the undistributed one: tests/laws/test_plans.py.
def test_disabled_is_one_device():  # proves S10
    config = sk.DistributedConfig(
        enabled=False, world_size=4, tensor_parallel_size=2, mesh_shape=(2, 2), mesh_axis_names=("data", "model")
    )
    mesh = config.mesh()
    assert dict(mesh.shape) == {"data": 1, "model": 1}
    assert list(mesh.devices.flat) == jax.local_devices()[:1]
    assert dict(sk.DistributedConfig(enabled=False).mesh().shape) == {"data": 1, "model": 1, "stage": 1}
