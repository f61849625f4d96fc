"""config.py: a job is described once, refused early, and turned into a mesh in one call."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import DistributedConfig
from support.refusals import value_error

pytestmark = pytest.mark.check
BACKENDS = [("nccl", {}), ("gloo", {"jax_cpu_collectives_implementation": "gloo"})]
BACKENDS += [("mpi", {"jax_cpu_collectives_implementation": "mpi"})]


def test_fields_and_defaults_and_what_follows_from_the_world():  # proves S1
    processes = {"enabled": True, "world_size": 1, "backend": "nccl", "rank": 0, "local_rank": 0, "num_nodes": 1}
    processes |= {"num_processes_per_node": 1, "devices_per_process": 1, "master_addr": "localhost"}
    plan = {"master_port": 29500, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_strategy": "dp"}
    plan |= {"mesh_shape": None, "mesh_axis_names": None, "mixed_precision": "no"}
    assert dataclasses.asdict(DistributedConfig()) == processes | plan
    assert DistributedConfig(world_size=8, num_nodes=2).num_processes_per_node == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        DistributedConfig().rank = 1


PRODUCT = "tensor_parallel_size x pipeline_parallel_size must"
ERRORS = {
    "world_size must equal num_nodes x num_processes_per_node x devices_per_process; got world_size=8 for 2 x 3 x 1 = "
    "6. Change one.": {"num_nodes": 2, "num_processes_per_node": 3},
    "world_size must equal num_nodes x num_processes_per_node x "
    "devices_per_process; got world_size=5 for 2 x 2 x 1 = 4. Change one.": {"world_size": 5, "num_nodes": 2},
    "world_size must equal num_nodes x num_processes_per_node x "
    "devices_per_process; got world_size=8 for 1 x 2 x 3 = 6. Change one.": {"devices_per_process": 3},
    "rank must be at least 0 and below num_processes; got rank=4 for num_processes=4. Pass 0 to 3.": {
        "devices_per_process": 2,
        "rank": 4,
    },
    "tensor_parallel_size must be the size of the mesh axis 'model'; got 2 and size 4. Change one.": {
        "tensor_parallel_size": 2,
        "mesh_shape": (2, 4),
        "mesh_axis_names": ("data", "model"),
    },
    "pipeline_parallel_size must be the size of the mesh axis 'stage'; got 2 and no such axis "
    "in ('data',). Change one.": {"pipeline_parallel_size": 2, "mesh_shape": (8,), "mesh_axis_names": ("data",)},
    f"{PRODUCT} not exceed world_size; got 4 x 4 = 16 for world_size=8. Lower one of the sizes, or raise world_size.": {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 4,
    },
    f"{PRODUCT} divide world_size; got 3 x 1 = 3 for world_size=8. Pass sizes whose product divides it.": {
        "tensor_parallel_size": 3
    },
    "rank must be at least 0 and below num_processes; got rank=8 for num_processes=8. Pass 0 to 7.": {"rank": 8},
    "local_rank must be at least 0 and below num_processes_per_node; "
    "got local_rank=4 for num_processes_per_node=4. Pass 0 to 3.": {"num_nodes": 2, "local_rank": 4},
    "master_port must be from 1 to 65535; got 0. Pass a free one.": {"master_port": 0},
    "mesh_shape and mesh_axis_names must have equal length; got (2, 4) and ('data',). "
    "Pass one size and one name per axis.": {"mesh_shape": (2, 4), "mesh_axis_names": ("data",)},
    "mesh_shape and mesh_axis_names must have equal length; got (8,) and None. Pass one size and one name per axis.": {
        "mesh_shape": (8,)
    },
    "the product of mesh_shape must equal world_size; got (2, 2), which is 4, "
    "for world_size=8. Change a size or world_size.": {"mesh_shape": (2, 2), "mesh_axis_names": ("data", "model")},
    "mesh_axis_names must be distinct; got ('data', 'data') with 'data' twice. Rename one.": {
        "mesh_shape": (1, 8),
        "mesh_axis_names": ("data", "data"),
    },
    "the sizes in mesh_shape must be at least 1; got (-2, -4). Change the size.": {
        "mesh_shape": (-2, -4),
        "mesh_axis_names": ("data", "model"),
    },
} | {
    f"{field} must be at least 1; got 0. Pass {field}=1 or more.": {field: 0}
    for field in ("world_size", "num_nodes", "devices_per_process", "tensor_parallel_size", "pipeline_parallel_size")
}


# proves S2, S3, S4, S5, S6, S7, S13: the field, the numbers and the remedy
@pytest.mark.parametrize("message, fields", ERRORS.items())
def test_errors(fields, message):
    with value_error(f"DistributedConfig: {message}"):
        DistributedConfig(**{"world_size": 8} | fields)


@pytest.mark.parametrize(("backend", "settings"), BACKENDS)
def test_backends_are_jax_settings(backend, settings):  # proves S5
    assert DistributedConfig(backend=backend).jax_settings() == settings
    for name, value in settings.items():
        before = jax.config._read(name)
        try:
            jax.config.update(name, value)  # jax knows the setting and takes the value
            assert jax.config._read(name) == value
        finally:
            jax.config.update(name, before)


@pytest.mark.parametrize(("precision", "dtype"), [("no", "f32"), ("fp16", "f16"), ("bf16", "bf16")])
def test_the_step_computes_in_the_precision(precision, dtype):  # proves S6
    config = DistributedConfig(world_size=8, mixed_precision=precision)
    grad_fn = sk.value_and_grad(lambda params, batch, keys: jnp.mean(batch @ params))
    options = {"mesh": config.mesh(), "plan": config.plan(), "precision": config.mixed_precision}
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), **options)
    state = init.abstract(jax.ShapeDtypeStruct((4,), "float32"))
    program = str(jax.make_jaxpr(step)(state, jax.ShapeDtypeStruct((8, 4), "float32")))
    assert re.search(rf"\b{dtype}\[\d*\]\S* = dot_general", program)


def test_data_parallel_size():  # proves S8
    config = DistributedConfig(world_size=8, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert config.get_data_parallel_size() == 2
    assert DistributedConfig(world_size=8).get_data_parallel_size() == 8
    assert DistributedConfig(world_size=8, enabled=False).get_data_parallel_size() == 1


# proves S1, S8, S97: processes, devices of a process and devices of the job are three numbers
def test_four_processes_of_two_devices_and_one_per_gpu():
    def place(rank, **fields):
        config = DistributedConfig(world_size=8, rank=rank, **fields)
        ids = config.local_device_ids()
        return config.num_processes, config.local_rank, ids, config.get_data_parallel_size()

    assert [place(rank, devices_per_process=2) for rank in range(4)] == [
        (4, rank, (2 * rank, 2 * rank + 1), 8) for rank in range(4)
    ]
    assert [place(rank, num_nodes=2) for rank in range(8)] == [(8, rank % 4, (rank % 4,), 8) for rank in range(8)]
    hosts = DistributedConfig.from_environment({"WORLD_SIZE": "4", "RANK": "3"}, devices_per_process=2, num_nodes=4)
    assert (hosts.world_size, hosts.num_processes, hosts.num_processes_per_node) == (8, 4, 1)
    assert hosts.local_rank == 0 and hosts.local_device_ids() == (0, 1) and hosts.is_local_main_process()


# proves S97: every size reaches the plan, and the mesh has its axes
def test_the_sizes_make_the_plan():
    def names(fields, *rules, **options):
        return [each.name for each in DistributedConfig(world_size=8, **fields).plan(*rules, **options).strategies]

    rules = {"w": P(None, "model")}
    grid = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert names(grid | {"data_strategy": "zero2"}, rules) == ["pp('stage')", "tp('model')", "zero2('data')"]
    assert names({}) == ["dp('data')"]
    assert names({"data_strategy": "fsdp"}) == ["fsdp('data')"]
    lazy = DistributedConfig(world_size=8, data_strategy="fsdp").plan(layerwise=("layers",))
    stack = {"layers": jax.ShapeDtypeStruct((2, 64, 64), "float32")}
    assert [split.gather for split in lazy.layouts(stack, sk.make_mesh(data=8))["layers"].splits] == ["layer"]
    shape = {"mesh_shape": (2, 2, 2), "mesh_axis_names": ("data", "fsdp", "model")}
    assert names(shape, rules) == ["tp('model')", "fsdp('fsdp')", "dp('data')"]
    config = DistributedConfig(world_size=8, **shape)
    assert config.tensor_parallel_size == 2 and config.get_data_parallel_size() == 4


@pytest.mark.parametrize(
    "message, refusal",
    {
        "DistributedConfig.plan: mesh_axis_names must be among 'data', 'fsdp', 'model', 'stage'; got 'batch'. "
        "Rename the axis, or write the plan with chain.": ({"mesh_shape": (8,), "mesh_axis_names": ("batch",)}, None),
        "DistributedConfig.plan: rules must be given with tensor_parallel_size=2; got None. Pass rules=, such as "
        "specs_from_rules returns.": ({"tensor_parallel_size": 2}, None),
        "DistributedConfig.plan: rules need a mesh axis 'model'; mesh_axis_names are ('data',). Add the axis, or "
        "leave rules out.": ({"mesh_shape": (8,), "mesh_axis_names": ("data",)}, {"w": P("model")}),
    }.items(),
)
def test_plans_that_the_fields_do_not_make(refusal, message):
    fields, rules = refusal
    with value_error(message):
        DistributedConfig(world_size=8, **fields).plan(rules)


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
    with value_error(
        f"DistributedConfig: the variable {name} must be a whole number; got 'eight'. Set for example "
        f"{name}=1, or unset it."
    ):
        DistributedConfig.from_environment({name: "eight"})


@pytest.mark.parametrize("shape", [(8,), (2, 4), (4, 2), (2, 2, 2)])
def test_mesh_in_one_call(shape):  # proves S12
    names = ("data", "model", "stage")[: len(shape)]
    mesh = DistributedConfig(world_size=8, mesh_shape=shape, mesh_axis_names=names).mesh()
    assert tuple(mesh.shape.items()) == tuple(zip(names, shape, strict=True))
    assert [d.id for d in mesh.devices.flat] == list(range(8))


def test_mesh_from_the_parallel_sizes_and_of_another_world():
    config = DistributedConfig(world_size=8, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert tuple(config.mesh().shape.items()) == (("data", 2), ("model", 2), ("stage", 2))
    with value_error(
        "DistributedConfig: world_size must equal the number of devices; got world_size=16 and 8 devices. "
        "Change world_size, or call simulate_devices(16) first."
    ):
        DistributedConfig(world_size=16).mesh()
