"""The pytest plugin of shardkit: fixtures `mesh` and `prove`, and the mark `meshes` to run a test on several.

    @pytest.mark.meshes({"data": 8}, {"data": 2, "model": 4})
    def test_kernel(mesh): ...

    def test_step(prove):  # every law on every row
        prove(grad_fn, grad_fn, rows=rows, params=params, batches=batches)

pytest imports its plugins at the start of every run, and importing `shardkit.testing` imports jax. The plugin is
therefore a module beside the package, which imports `shardkit` only when a test asks for a fixture: pytest starts in
0.1 s with it, and would in 0.8 s if it were inside.

Eight CPU devices are simulated when the first test asks for a fixture. Where a test may start jax before that, set the
ini option `shardkit_devices`, or call `shardkit.simulate_devices` in conftest.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Mapping
from typing import Any

import pytest

_DEVICES = 8
_TIMEOUTS = {  # seconds, so that a collective which waits for a missing device ends the run
    "xla_cpu_collective_timeout_seconds": 60,
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 20,
    "xla_cpu_collective_call_terminate_timeout_seconds": 60,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("shardkit_devices", "number of CPU devices to simulate before any test runs", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "meshes(*sizes): run the test on each of these meshes, for example {'data': 2, 'model': 4}"
    )
    devices = config.getini("shardkit_devices")
    # pytest-xdist: the process that controls workers runs no test, and jax would only take its memory.
    has_workers = bool(getattr(config.option, "numprocesses", None))
    is_worker = hasattr(config, "workerinput")
    if not devices or (has_workers and not is_worker):
        return
    if not devices.isdigit() or not int(devices):
        raise pytest.UsageError(
            f"shardkit_devices: it must be a number of devices, at least 1; got {devices!r}. Write for example 8."
        )
    _start_jax(int(devices))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("meshes")
    if mark is None:
        return
    has_sizes = bool(mark.args) and all(isinstance(sizes, Mapping) for sizes in mark.args)
    if "mesh" not in metafunc.fixturenames or not has_sizes:
        raise pytest.UsageError(
            f"meshes: {metafunc.definition.name} must take the fixture `mesh`, and the mark one or more mappings of "
            f"axis sizes; got {mark.args!r}. Write @pytest.mark.meshes({{'data': 8}}) and def test(mesh)."
        )
    metafunc.parametrize("mesh", mark.args, indirect=True, ids=_format_sizes)


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Any:
    """The mesh of the mark `meshes`, over the first devices; without the mark, all devices along "data"."""
    _start_jax(_count_devices(request.config))
    import jax

    from shardkit.meshes.mesh import make_mesh

    available = jax.devices()
    sizes: dict[str, Any] = dict(getattr(request, "param", {"data": len(available)}))
    needed = math.prod(sizes.values())
    if needed > len(available):
        raise pytest.UsageError(
            f"meshes: a mesh must fit the devices; {sizes} needs {needed} and there are {len(available)}. Set "
            f"shardkit_devices = {needed} in pytest's configuration, and let nothing start jax before."
        )
    devices = available
    if needed > 0:  # a size of -1 takes all of them
        devices = available[:needed]
    return make_mesh(devices, **sizes)


@pytest.fixture
def prove(request: pytest.FixtureRequest) -> Any:
    """`shardkit.testing.prove`, with the simulated devices that its rows need."""
    _start_jax(_count_devices(request.config))
    from shardkit import testing

    return testing.prove


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if not report.failed or not item.get_closest_marker("meshes"):
        return report
    sizes = getattr(getattr(item, "callspec", None), "params", {}).get("mesh")
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", None)
    if isinstance(sizes, Mapping) and entries:
        _print_mesh(entries[0], _format_sizes(sizes))
    return report


def _print_mesh(entry: Any, text: str) -> None:
    """Writes the mesh of a failed test above its first traceback entry, where pytest would print the fixture."""
    arguments = getattr(entry, "reprfuncargs", None)
    if arguments is None:
        entry.lines.insert(0, f"mesh = {text}")
    else:  # these are printed above the lines
        others = [(name, value) for name, value in arguments.args if name != "mesh"]
        arguments.args = [("mesh", text), *others]


def _format_sizes(sizes: Mapping[str, int]) -> str:
    """`data=2,model=4`."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def _count_devices(config: pytest.Config) -> int:
    return int(config.getini("shardkit_devices") or _DEVICES)


def _start_jax(devices: int) -> None:
    """Simulates devices, with short collective time-outs, unless jax has already started."""
    from shardkit._jax.backends import jax_has_started
    from shardkit.meshes.simulated import simulate_devices

    if jax_has_started():
        return
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}={seconds}" for name, seconds in _TIMEOUTS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    simulate_devices(devices)
