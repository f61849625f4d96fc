"""config.py: a job is described once, refused early, and turned into a mesh in one call."""

import dataclasses

import jax
import pytest

from shardkit import DistributedConfig

pytestmark = pytest.mark.check


def test_fields_and_defaults():  # proves S1
    assert dataclasses.asdict(DistributedConfig()) == {
        "enabled": True,
        "world_size": 1,
        "backend": "nccl",
        "rank": 0,
        "local_rank": 0,
        "num_nodes": 1,
        "num_processes_per_node": 1,
        "master_addr": "localhost",
        "master_port": 29500,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "mesh_shape": None,
        "mesh_axis_names": None,
        "mixed_precision": "no",
    }


def test_processes_per_node_follow_from_the_world():
    assert DistributedConfig(world_size=8, num_nodes=2).num_processes_per_node == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        DistributedConfig().rank = 1


PRODUCT = "DistributedConfig: tensor_parallel_size x pipeline_parallel_size must"
ERRORS = [
    (
        {"world_size": 8, "num_nodes": 2, "num_processes_per_node": 3},
        "DistributedConfig: world_size must equal num_nodes x num_processes_per_node; "
        "got world_size=8 for 2 x 3 = 6. Change one.",
    ),
    (
        {"world_size": 5, "num_nodes": 2},
        "DistributedConfig: world_size must equal num_nodes x num_processes_per_node; "
        "got world_size=5 for 2 x 2 = 4. Change one.",
    ),
    (
        {"world_size": 8, "tensor_parallel_size": 4, "pipeline_parallel_size": 4},
        f"{PRODUCT} not exceed world_size; got 4 x 4 = 16 for world_size=8. "
        "Lower one of the sizes, or raise world_size.",
    ),
    (
        {"world_size": 8, "tensor_parallel_size": 3},
        f"{PRODUCT} divide world_size; got 3 x 1 = 3 for world_size=8. Pass sizes whose product divides it.",
    ),
    (
        {"world_size": 12, "tensor_parallel_size": 2, "pipeline_parallel_size": 4},
        f"{PRODUCT} divide world_size; got 2 x 4 = 8 for world_size=12. Pass sizes whose product divides it.",
    ),
    (
        {"world_size": 8, "rank": 8},
        "DistributedConfig: rank must be at least 0 and below world_size; got rank=8 for world_size=8. Pass 0 to 7.",
    ),
    (
        {"world_size": 8, "rank": -1},
        "DistributedConfig: rank must be at least 0 and below world_size; got rank=-1 for world_size=8. Pass 0 to 7.",
    ),
    (
        {"world_size": 8, "num_nodes": 2, "local_rank": 4},
        "DistributedConfig: local_rank must be at least 0 and below num_processes_per_node; "
        "got local_rank=4 for num_processes_per_node=4. Pass 0 to 3.",
    ),
    (
        {"backend": "smoke-signals"},
        "DistributedConfig: backend must be 'nccl', 'gloo' or 'mpi'; got 'smoke-signals'. "
        "Pass for example backend='nccl'.",
    ),
    (
        {"mixed_precision": "fp8"},
        "DistributedConfig: mixed_precision must be 'no', 'fp16' or 'bf16'; got 'fp8'. "
        "Pass for example mixed_precision='no'.",
    ),
    (
        {"master_port": 0},
        "DistributedConfig: master_port must be from 1 to 65535; got 0. Pass a free one.",
    ),
    (
        {"master_port": 65536},
        "DistributedConfig: master_port must be from 1 to 65535; got 65536. Pass a free one.",
    ),
    (
        {"world_size": 8, "mesh_shape": (2, 4), "mesh_axis_names": ("data",)},
        "DistributedConfig: mesh_shape and mesh_axis_names must have equal length; got (2, 4) and ('data',). "
        "Pass one size and one name per axis.",
    ),
    (
        {"world_size": 8, "mesh_shape": (8,)},
        "DistributedConfig: mesh_shape and mesh_axis_names must have equal length; got (8,) and None. "
        "Pass one size and one name per axis.",
    ),
    (
        {"world_size": 8, "mesh_axis_names": ("data",)},
        "DistributedConfig: mesh_shape and mesh_axis_names must have equal length; got None and ('data',). "
        "Pass one size and one name per axis.",
    ),
    (
        {"world_size": 8, "mesh_shape": (2, 2), "mesh_axis_names": ("data", "model")},
        "DistributedConfig: the product of mesh_shape must equal world_size; got (2, 2), which is 4, "
        "for world_size=8. Change a size or world_size.",
    ),
    (
        {"world_size": 8, "mesh_shape": (1, 8), "mesh_axis_names": ("data", "data")},
        "DistributedConfig: mesh_axis_names must be distinct; got ('data', 'data') with 'data' twice. Rename one.",
    ),
    (
        {"world_size": 8, "mesh_shape": (-2, -4), "mesh_axis_names": ("data", "model")},
        "DistributedConfig: the sizes in mesh_shape must be at least 1; got (-2, -4). Change the size.",
    ),
    *(
        ({field: 0}, f"DistributedConfig: {field} must be at least 1; got 0. Correct {field}.")
        for field in ("world_size", "num_nodes", "tensor_parallel_size", "pipeline_parallel_size")
    ),
]


# proves S2, S3, S4, S5, S6, S7, S13: the field, the numbers and the remedy
@pytest.mark.parametrize(("fields", "message"), ERRORS)
def test_errors(fields, message):
    with pytest.raises(ValueError) as error:
        DistributedConfig(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("nccl", {}),
        ("gloo", {"jax_cpu_collectives_implementation": "gloo"}),
        ("mpi", {"jax_cpu_collectives_implementation": "mpi"}),
    ],
)
def test_backends_are_jax_settings(backend, settings):  # proves S5
    assert DistributedConfig(backend=backend).jax_settings() == settings
    for name, value in settings.items():
        before = jax.config._read(name)
        try:
            jax.config.update(name, value)  # jax knows the setting and takes the value
            assert jax.config._read(name) == value
        finally:
            jax.config.update(name, before)


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_precisions_are_kept(precision):  # proves S6
    assert DistributedConfig(mixed_precision=precision).mixed_precision == precision


def test_data_parallel_size():  # proves S8
    config = DistributedConfig(world_size=8, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert config.get_data_parallel_size() == 2
    assert DistributedConfig(world_size=8).get_data_parallel_size() == 8
    assert DistributedConfig(world_size=8, enabled=False).get_data_parallel_size() == 1


def test_main_processes():  # proves S9
    def mains(rank):
        config = DistributedConfig(world_size=4, num_nodes=2, rank=rank, local_rank=rank % 2)
        return config.is_main_process(), config.is_local_main_process()

    assert [mains(rank) for rank in range(4)] == [(True, True), (False, False), (False, True), (False, False)]


def test_from_the_environment(monkeypatch):  # proves S11
    assert DistributedConfig.from_environment({}) == DistributedConfig()
    variables = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234", "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}
    expected = DistributedConfig(
        master_addr="10.0.0.7", master_port=1234, world_size=8, rank=5, local_rank=1, num_nodes=2, backend="gloo"
    )
    assert DistributedConfig.from_environment(variables, num_nodes=2, backend="gloo") == expected
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert DistributedConfig.from_environment(num_nodes=2, backend="gloo") == expected
    assert DistributedConfig.from_environment(rank=2).rank == 2


@pytest.mark.parametrize("name", ["MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"])
def test_a_variable_that_is_no_number(name):
    with pytest.raises(ValueError) as error:
        DistributedConfig.from_environment({name: "eight"})
    assert str(error.value) == (
        f"DistributedConfig: the variable {name} must be a whole number; got 'eight'. Correct or unset the variable."
    )


@pytest.mark.parametrize("shape", [(8,), (2, 4), (4, 2), (2, 2, 2)])
def test_mesh_in_one_call(shape):  # proves S12
    names = ("data", "model", "stage")[: len(shape)]
    mesh = DistributedConfig(world_size=8, mesh_shape=shape, mesh_axis_names=names).mesh()
    assert tuple(mesh.shape.items()) == tuple(zip(names, shape, strict=True))
    assert [d.id for d in mesh.devices.flat] == list(range(8))


def test_mesh_of_two_by_two(monkeypatch):  # proves S12
    config = DistributedConfig(world_size=4, mesh_shape=(2, 2), mesh_axis_names=("data", "model"))
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda: four)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert dict(config.mesh().shape) == {"data": 2, "model": 2}


def test_mesh_from_the_parallel_sizes():
    config = DistributedConfig(world_size=8, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert tuple(config.mesh().shape.items()) == (("data", 2), ("model", 2), ("stage", 2))


def test_mesh_of_another_world():
    with pytest.raises(ValueError) as error:
        DistributedConfig(world_size=16).mesh()
    assert str(error.value) == (
        "DistributedConfig: world_size must equal the number of devices; got world_size=16 and 8 devices. "
        "Change world_size, or call simulate_devices(16) first."
    )
