"""Eight simulated devices, a hang that fails in seconds, strict promotion, and two hypothesis profiles."""

import gc
import os
import random
import sys
import time
import zlib

import pytest

pytest.register_assert_rewrite("support")

from support.compiling import QUICK

# What surrounds the tests is no part of them: inside of a scheduler's job, jax and the library would join that job.
_AROUND = ("SLURM_", "OMPI_", "PMI", "KUBERNETES_", "JOB_COMPLETION_", "TPU_", "MEGASCALE_", "JAX_", "SHARDKIT_")
_AROUND += ("MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "NPROC")
_AROUND += ("COLUMNS", "NO_COLOR", "FORCE_COLOR")
for name in [name for name in os.environ if name.startswith(_AROUND) or name.lower().endswith("_proxy")]:
    del os.environ[name]

# A collective that waits for a device that never comes must end the run, not stall it.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_cpu_collective_timeout_seconds=60",
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=20",
        "--xla_cpu_collective_call_terminate_timeout_seconds=60",
        QUICK,
    ]
)

import hypothesis
import jax

import shardkit as sk

sk.simulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# ci is bounded and always draws the same examples; deep is for long runs (make test-deep).
_COMMON = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck), "print_blob": True}
hypothesis.settings.register_profile("ci", max_examples=20, derandomize=True, database=None, **_COMMON)
hypothesis.settings.register_profile("deep", max_examples=100, **_COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

COMPILED = [0]
BEGUN = time.monotonic()


def _heard(event, duration_secs, **_):
    COMPILED[0] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_heard)


def pytest_addoption(parser):
    parser.addoption("--rows", type=int, help="of every parametrized test, run at most this many rows, spread evenly")
    parser.addoption("--shuffle", type=int, help="run the tests in an order drawn from this number")
    parser.addoption("--shard", help="i/n: of the deep tier's tests, run the i-th of n parts, from 0")
    parser.addoption("--limit", type=float, default=0, help="skip what has not begun after so many seconds; 0: none")


def pytest_xdist_auto_num_workers():
    """Three workers for two cores, because tests of several processes wait for much of their time; 3 GiB for each."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**32
    return max(1, min(cores + cores // 2, memory // (3 * 2**30)))


def of_the_deep_tier(item):
    """Marked `deep` or `optimized`, or with examples that hypothesis draws: all else runs alike in the default tier."""
    marked = item.get_closest_marker("deep") or item.get_closest_marker("optimized")
    return bool(marked) or hasattr(item.obj, "hypothesis")


def pytest_terminal_summary(terminalreporter):
    """A command that repeats each test that failed, as it ran."""
    profile = os.environ.get("HYPOTHESIS_PROFILE")
    before = f"HYPOTHESIS_PROFILE={profile} " if profile else ""
    for report in terminalreporter.stats.get("failed", []):
        terminalreporter.write_line(f"repeat: {before}{sys.executable} -m pytest '{report.nodeid}'")


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")  # before -m looks at the marks
def pytest_mark_deep_rows(config, items):
    """Of a test marked `quick`, the rows that it does not name are deep."""
    left = {}
    for item in items:
        mark = item.get_closest_marker("quick")
        if mark and hasattr(item, "callspec"):  # the deep profile draws the others
            left.setdefault(item.nodeid.partition("[")[0], set(mark.args)).discard(item.callspec.id)
            if item.callspec.id not in mark.args:
                item.add_marker("deep")
    unknown = {name: ids for name, ids in left.items() if ids}
    if unknown and not any("::" in arg for arg in config.args):
        raise pytest.UsageError(f"marked quick, but no such row: {unknown}")


@pytest.hookimpl(trylast=True)  # among the rows that the options -m and -k have left
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.get_closest_marker("check") is None)  # what takes no time tells first
    most, shard = config.getoption("rows"), config.getoption("shard")
    tests = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    few = [rows[i * len(rows) // most] for rows in tests.values() for i in range(most)] if most else items
    if shard:
        part, parts = map(int, shard.split("/"))
        # By name, so that a part stays the same when other tests come and go.
        few = [x for x in few if of_the_deep_tier(x) and zlib.crc32(x.nodeid.encode()) % parts == part]
    chosen = {item.nodeid for item in few}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]
    if (seed := config.getoption("shuffle")) is not None:
        random.Random(seed).shuffle(items)


def pytest_collection_finish(session):
    """Tracing makes many small objects that live on: looking through all of them again and again took a tenth of it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


def pytest_runtest_setup(item):
    # Ending the run from outside would hide whether what ran has passed.
    if 0 < (limit := item.config.getoption("limit")) < time.monotonic() - BEGUN:
        pytest.skip(f"not begun within the limit of {limit:g} s: whether it passes is not known")
    item.compiled_before = COMPILED[0]


def pytest_runtest_teardown(item):
    before = getattr(item, "compiled_before", COMPILED[0])  # a test that a mark skips is not set up
    if item.get_closest_marker("check") and COMPILED[0] > before:
        pytest.fail("a test marked check must not compile: take the mark away, or trace only", pytrace=False)


@pytest.fixture
def standard_promotion():
    """Dtypes are promoted as users have it: optax's Adam promotes its count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def any_promotion(standard_promotion):
    """Ranks too, as other libraries need it."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="session")
def data8():
    """A mesh of eight devices along one axis."""
    return sk.make_mesh(data=8)


@pytest.fixture(scope="session")
def mesh2x4():
    """A mesh of two axes."""
    return sk.make_mesh(data=2, model=4)
