"""mesh.py: meshes and their coordinates, simulated devices, and the threads that those need."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import shardkit as sk
from support.refusals import raises, type_error, value_error

ROOT = Path(__file__).parents[2]
TASKS = Path("/proc/self/task")
needs_threads = pytest.mark.skipif(not TASKS.exists(), reason="the system does not show a process's threads")
POOL = """
def pool():
    from pathlib import Path
    return [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")].count("tf_XLAEigen")
"""
SHAPES = [({"data": 8}, (8,)), ({"data": -1}, (8,)), ({"data": 2, "model": -1}, (2, 4))]
SHAPES += [({"data": -1, "model": 8}, (1, 8)), ({"data": 2, "model": 2, "pipeline": 2}, (2, 2, 2))]
SHAPES += [({"a": 2, "b": 1, "c": -1, "d": 2}, (2, 1, 2, 2))]


def ids(mesh):
    return np.vectorize(lambda d: d.id)(mesh.devices).tolist()


def fresh(program, **environment):
    """What a program prints as JSON in a Python of its own, in which every unexpected warning is an error."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": "", "NPROC": "", "JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-W", "error", "-c", "import json, os\n" + POOL + program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_threads
def test_simulated_devices_in_a_fresh_process():  # proves S34, F6
    got = fresh(
        """
import shardkit as sk
sk.simulate_devices(3)
sk.simulate_devices(6)
import jax
devices = jax.devices()
sk.simulate_devices(6)
same = jax.devices() == devices
mesh = sk.make_mesh(data=6)
total = jax.shard_map(lambda: sk.all_reduce(1, "data"), mesh=mesh, in_specs=(), out_specs=jax.P())()
print(json.dumps([[d.id for d in devices], devices[0].platform, same, int(total), os.environ["XLA_FLAGS"], pool()]))
""",
        XLA_FLAGS="--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2",
        NPROC="5",
    )
    *got, threads = got
    assert got == [[0, 1, 2, 3, 4, 5], "cpu", True, 6, "--xla_cpu_enable_fast_math=false"]
    assert threads >= 2 * 6


@needs_threads
def test_make_mesh_widens_the_thread_pool_before_jax_starts():
    program = """
import shardkit as sk
mesh = sk.make_mesh(data=8)
print(json.dumps([mesh.size, os.environ["NPROC"], pool()]))
"""
    flag = "--xla_force_host_platform_device_count=8"
    size, nproc, threads = fresh(program, XLA_FLAGS=flag, NPROC="8")
    assert (size, nproc) == (8, "32")
    assert threads >= 2 * 8
    assert fresh(program, XLA_FLAGS=flag, NPROC="40")[1] == "40"  # a larger one is kept


@needs_threads
@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="later runtimes launch each device's program from a pool of its own"
)
def test_too_few_threads_are_reported():
    got = fresh(
        """
import warnings
import jax
jax.devices()
import shardkit as sk
calls = [
    lambda: sk.make_mesh(data=8),
    lambda: sk.make_hybrid_mesh(fast={"model": 4}, slow={"data": 2}, group_of=lambda d: d.id // 4),
    lambda: sk.simulate_devices(8),
    lambda: sk.make_mesh(jax.devices()[:4], data=4),
    lambda: sk.make_mesh(jax.devices()[:5], data=5),
]
rows = []
for call in calls:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    rows.append([[w.category.__name__, str(w.message), w.filename] for w in caught])
print(json.dumps(rows))
""",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
        NPROC="8",
    )

    def warned(n):
        message = (
            f"{n} simulated devices share 8 threads of jax's CPU runtime; below {2 * n}, steps dispatched "
            f"asynchronously can deadlock. Call shardkit.simulate_devices({n}) before jax starts, or start python with "
            f"NPROC={4 * n}."
        )
        return [["RuntimeWarning", message, "<string>"]]  # it points at the caller

    assert got == [warned(8), warned(8), warned(8), [], warned(5)]


def test_simulating_the_devices_there_are_does_nothing():
    before, flags = jax.devices(), dict(os.environ)
    sk.simulate_devices(8)
    assert jax.devices() == before
    assert dict(os.environ) == flags


def test_jax_cannot_simulate_what_it_has_started_without():  # proves S34
    with raises(
        RuntimeError,
        "simulate_devices: jax has already started with 8 cpu devices, so it cannot simulate 4. Call "
        "simulate_devices(4) at the start of the program, before jax initializes its devices, or start python with "
        "XLA_FLAGS=--xla_force_host_platform_device_count=4 NPROC=16.",
    ):
        sk.simulate_devices(4)


@pytest.mark.parametrize(("sizes", "shape"), SHAPES)
def test_sizes(sizes, shape):  # proves S14, S19, S36, F1, F2
    mesh = sk.make_mesh(**sizes)
    assert mesh.devices.shape == shape
    assert mesh.axis_names == tuple(sizes)
    assert dict(mesh.shape) == dict(zip(sizes, shape, strict=True))
    assert sorted(d.id for d in mesh.devices.flat) == sorted(d.id for d in jax.devices())


def test_row_major_coordinates_in_the_order_given():  # proves S30, S15
    assert ids(sk.make_mesh(i=4, j=2)) == [[2 * i + j for j in range(2)] for i in range(4)]
    assert ids(sk.make_mesh(jax.devices(), i=4, j=2)) == np.arange(8).reshape(4, 2).tolist()
    # proves S36
    devices = jax.devices()
    assert ids(sk.make_mesh([devices[i] for i in (7, 1, 4, 2)], a=2, b=-1)) == [[7, 1], [4, 2]]
    assert ids(sk.make_mesh(devices[:3], a=-1)) == [0, 1, 2]
    assert ids(sk.make_mesh(devices[5:6], a=1)) == [5]


@pytest.mark.check
def test_devices_as_an_array():  # whose truth value is an error of NumPy's
    devices = np.array(jax.devices())
    assert sk.make_mesh(devices[::-1], data=8).devices.tolist() == devices[::-1].tolist()
    rule = "make_mesh: devices must be a sequence of jax devices or None; got "
    remedy = ". Write make_mesh(data=8), or pass for example devices=jax.devices()[:8]."
    with type_error(f"{rule}a ndarray{remedy}"):
        sk.make_mesh(devices.reshape(2, 4), data=8)
    for sizes in ({"data": 8}, (8,), 8, "data"):  # as other libraries are called
        with type_error(f"{rule}{sizes!r}{remedy}"):
            sk.make_mesh(sizes)
    with value_error(
        "make_mesh: the product of the axis sizes must be the number of devices; got data=8, which needs 8, for 0 "
        "devices. Change a size, pass -1 for one size, or simulate_devices(8)."
    ):
        sk.make_mesh(devices[:0], data=8)


def test_axis_types():  # proves S36, F7
    assert sk.make_mesh(a=2, b=4).axis_types == (AxisType.Auto, AxisType.Auto)
    assert sk.make_mesh(a=2, b=4, axis_types=AxisType.Explicit).axis_types == (AxisType.Explicit,) * 2
    mixed = (AxisType.Explicit, AxisType.Auto)
    assert sk.make_mesh(a=2, b=4, axis_types=list(mixed)).axis_types == mixed


PRODUCT = "make_mesh: the product of the axis sizes must be the number of devices; got"
ERRORS = {
    "make_mesh: at least one axis is needed; got none. Pass for example make_mesh(data=-1).": {},
    f"{PRODUCT} data=2, model=2, which needs 4, for 8 devices. "
    "Change a size, pass -1 for one size, or pass devices=jax.devices()[:4].": {"data": 2, "model": 2},
    f"{PRODUCT} data=16, which needs 16, for 8 devices. "
    "Change a size, pass -1 for one size, or simulate_devices(16).": {"data": 16},
    "make_mesh: only one axis size may be -1; got -1 for 'data', 'stage'. Pass a size for all but one.": {
        "data": -1,
        "model": 2,
        "stage": -1,
    },
    "make_mesh: an axis size must be at least 1, or -1 to infer it; got data=0, stage=-2. Change the size.": {
        "data": 0,
        "model": 8,
        "stage": -2,
    },
    "make_mesh: the product of the other sizes must divide the number of devices to infer axis 'model'; got 3 for "
    "8 devices. Change a size.": {"data": 3, "model": -1},
}


@pytest.mark.parametrize("message, sizes", ERRORS.items())
def test_errors_of_make_mesh(sizes, message):
    with value_error(message):
        sk.make_mesh(**sizes)


def test_fast_axes_stay_inside_a_group():  # proves F3
    def group_of(device):  # even devices on one host, odd ones on the other
        return device.id % 2

    mesh = sk.make_hybrid_mesh(fast={"fsdp": 2, "model": 2}, slow={"data": 2}, group_of=group_of)
    assert mesh.axis_names == ("data", "fsdp", "model")
    assert ids(mesh) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    assert mesh.axis_types == (AxisType.Auto,) * 3
    for place in mesh.devices:
        assert len({group_of(d) for d in place.flat}) == 1

    subset = sk.make_hybrid_mesh(fast={"f": 2}, slow={"s": 2}, devices=jax.devices()[4:], group_of=group_of)
    assert ids(subset) == [[4, 6], [5, 7]]
    backwards = sk.make_hybrid_mesh(fast={"f": 4}, slow={"s": 2}, devices=jax.devices()[::-1], group_of=group_of)
    assert ids(backwards) == [[6, 4, 2, 0], [7, 5, 3, 1]]  # groups by their number, and not as they come
    one_process = sk.make_hybrid_mesh(fast={"f": 8}, slow={"s": 1})
    assert ids(one_process) == [list(range(8))]


def test_an_axis_in_both_maps_is_slow_outside():
    mesh = sk.make_hybrid_mesh(fast={"model": 2, "data": 2}, slow={"data": 2}, group_of=lambda d: d.id // 4)
    assert mesh.axis_names == ("data", "model")
    assert ids(mesh) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    for half in (mesh.devices[:2], mesh.devices[2:]):  # neighbors along data are in one group, except for one step
        assert len({d.id // 4 for d in half.flat}) == 1


@pytest.mark.parametrize(
    "message, refusal",
    {
        "make_hybrid_mesh: slow axes data=3 over fast axes model=4 need 3 group(s) of 4 devices; "
        "got group sizes [2, 6]. Change the sizes or pass group_of.": ({"model": 4}, {"data": 3}),
        "make_hybrid_mesh: slow axes data=2 over fast axes model=4 need 2 group(s) of 4 devices; "
        "got group sizes [2, 6]. Change the sizes or pass group_of.": ({"model": 4}, {"data": 2}),
        "make_hybrid_mesh: slow axes none over fast axes model=8 need 1 group(s) of 8 devices; "
        "got group sizes [2, 6]. Change the sizes or pass group_of.": ({"model": 8}, {}),
    }.items(),
)
def test_errors_of_make_hybrid_mesh(refusal, message):
    fast, slow = refusal
    with value_error(message):
        sk.make_hybrid_mesh(fast=fast, slow=slow, group_of=lambda d: int(d.id > 5))


PICTURES = {
    """\
mesh data=3: 3 cpu devices, 1 process
  data=0  data=1  data=2
       0       1       2""": {"data": 3},
    """\
mesh data=2 x model=4: 8 cpu devices, 1 process
        model=0  model=1  model=2  model=3
data=0        0        1        2        3
data=1        4        5        6        7""": {"data": 2, "model": 4},
    """\
mesh data=2 x model=1 x stage=2: 4 cpu devices, 1 process
data=0
         stage=0  stage=1
model=0        0        1
data=1
         stage=0  stage=1
model=0        2        3""": {"data": 2, "model": 1, "stage": 2},
    """\
mesh a=1 x b=2 x c=2 x d=2: 8 cpu devices, 1 process
a=0, b=0
     d=0  d=1
c=0    0    1
c=1    2    3
a=0, b=1
     d=0  d=1
c=0    4    5
c=1    6    7""": {"a": 1, "b": 2, "c": 2, "d": 2},
}


@pytest.mark.parametrize("picture, sizes", PICTURES.items())
def test_describe_a_mesh(sizes, picture):  # proves S16
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    assert sk.describe(sk.make_mesh(devices, **sizes)) == picture


def test_a_mesh_without_devices():
    mesh = sk.abstract_mesh(data=64, fsdp=8, model=8)
    assert dict(mesh.shape) == {"data": 64, "fsdp": 8, "model": 8} and mesh.size == 4096
    spec = jax.sharding.PartitionSpec("data")
    f = jax.shard_map(
        lambda x: sk.all_reduce(x, "data"), mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()
    )
    assert sk.census(f, jax.ShapeDtypeStruct((64,), "float32")).count() == 1
    with value_error("abstract_mesh: at least one axis is needed; got none. Pass for example abstract_mesh(x=8)."):
        sk.abstract_mesh()
    with value_error(
        "abstract_mesh: the size of axis 'data' must be at least 1; got -1. Pass the size: there are no devices to "
        "infer it from."
    ):
        sk.abstract_mesh(data=-1)
