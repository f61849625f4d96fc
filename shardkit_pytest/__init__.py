"""The pytest plugin of shardkit: fixtures `mesh` and `prove`, and a mark that runs a test on several meshes.

    @pytest.mark.meshes({"data": 8}, {"data": 2, "model": 4})
    def test_kernel(mesh): ...

    def test_step(prove):  # every law on every row
        prove(grad_fn, grad_fn, rows=rows, params=params, batches=batches)

It is a package of its own because importing anything from `shardkit` imports jax, which a suite that does not use the
fixture must not pay for. Eight devices are simulated when the first test asks for a mesh; set the ini option
`shardkit_devices` (or call `shardkit.simulate_devices` in conftest.py) where a test may touch jax before that.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import pytest

_DEVICES = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("shardkit_devices", "CPU devices that shardkit simulates, before any test runs", default="")


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
            f"meshes: {metafunc.definition.name} must take the fixture `mesh`, and the mark one mapping of axis sizes "
            f"or more; got {mark.args!r}. Write @pytest.mark.meshes({{'data': 8}}) and def test(mesh)."
        )
    metafunc.parametrize("mesh", mark.args, indirect=True, ids=_name)


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Any:
    """The mesh of the mark `meshes`; without the mark, all devices along "data"."""
    _start(int(request.config.getini("shardkit_devices") or _DEVICES))
    from shardkit.testing import plugin

    return plugin.mesh_of(getattr(request, "param", None))


@pytest.fixture
def prove(request: pytest.FixtureRequest) -> Any:
    """`shardkit.testing.prove`, with the simulated devices that its rows need."""
    _start(int(request.config.getini("shardkit_devices") or _DEVICES))
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
        else:  # these stand above the lines
            arguments.args = [("mesh", text), *(pair for pair in arguments.args if pair[0] != "mesh")]
    return report


def _name(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def _start(devices: int) -> None:
    from shardkit.testing import plugin

    plugin.start(devices)
