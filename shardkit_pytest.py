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
    asked = config.getini("shardkit_devices")
    controls_workers = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if asked and not controls_workers:
        if not asked.isdigit() or not int(asked):
            raise pytest.UsageError(
                f"shardkit_devices: it must be a number of devices, at least 1; got {asked!r}. Write for example 8."
            )
        _start(int(asked))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("meshes")
    if mark is None:
        return
    if "mesh" not in metafunc.fixturenames or not mark.args or not all(isinstance(s, Mapping) for s in mark.args):
        raise pytest.UsageError(
            f"meshes: {metafunc.definition.name} must take the fixture `mesh`, and the mark one or more mappings of "
            f"axis sizes; got {mark.args!r}. Write @pytest.mark.meshes({{'data': 8}}) and def test(mesh)."
        )
    metafunc.parametrize("mesh", mark.args, indirect=True, ids=_name)


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Any:
    """The mesh of the mark `meshes`, over the first devices; without the mark, all devices along "data"."""
    _start(_devices(request.config))
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
    return make_mesh(available[:needed] if needed > 0 else available, **sizes)


@pytest.fixture
def prove(request: pytest.FixtureRequest) -> Any:
    """`shardkit.testing.prove`, with the simulated devices that its rows need."""
    _start(_devices(request.config))
    from shardkit import testing

    return testing.prove


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    sizes = getattr(getattr(item, "callspec", None), "params", {}).get("mesh")
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", None)
    if report.failed and item.get_closest_marker("meshes") and isinstance(sizes, Mapping) and entries:
        text, arguments = _name(sizes), getattr(entries[0], "reprfuncargs", None)
        if arguments is None:
            entries[0].lines.insert(0, f"mesh = {text}")
        else:  # these are printed above the lines
            arguments.args = [("mesh", text), *(pair for pair in arguments.args if pair[0] != "mesh")]
    return report


def _name(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def _devices(config: pytest.Config) -> int:
    return int(config.getini("shardkit_devices") or _DEVICES)


def _start(devices: int) -> None:
    """Simulates devices, with short collective time-outs, unless jax has already started."""
    from shardkit._jax.backends import jax_has_started
    from shardkit.meshes.simulated import simulate_devices

    if jax_has_started():
        return
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [f"--{name}={seconds}" for name, seconds in _TIMEOUTS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    simulate_devices(devices)
