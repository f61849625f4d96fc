"""The page of a step holds all that was read of it, and says what is wrong in a sentence."""

import sys
from base64 import b64decode
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import cost
from shardkit.analysis import Audit, Census
from shardkit.analysis.hlo.collectives import CompiledRow
from shardkit.analysis.hlo.compute import Work
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import Report
from shardkit.reporting import page as page_module
from shardkit.reporting.page import page_of
from shardkit.reporting.read import ArgumentLeaf, Facts, StepReport
from shardkit.reporting.sections import flops
from shardkit.viz.bars import duration
from support.compilers import tpu
from support.pages import assert_self_contained

HOSTILE = "<script>alert('x')</script>"


def small_step(mesh):
    """A jitted step with two collectives, one of them useless, and a leaf whose name is markup."""

    def local(params, x):
        swapped = jax.lax.ppermute(x @ params[HOSTILE], "model", [(0, 1), (1, 0)])
        return sk.all_reduce(jnp.sum(swapped), ("data", "model"))

    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data", None)), out_specs=P())
    params = {HOSTILE: jax.device_put(jnp.ones((4, 4)), jax.NamedSharding(mesh, P()))}
    return jax.jit(step), params, jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, P("data")))


def shown_on(page, found):
    """Every leaf, every collective as written and every finding, where a reader looks for them."""
    flat = [cell for table in page.tables for row in table for cell in row]
    for leaf in found.leaves:
        assert any(row[:4] == [leaf.name, leaf.shape, leaf.dtype, leaf.spec] for t in page.tables for row in t), leaf
    for row in found.census.rows:
        assert f"{row.bytes_in:,}" in flat and any(cell.startswith(row.source) for cell in flat), row
    for each in found.findings:
        assert all(word in page.text for word in (each.rule, each.source, each.message, each.remedy)), each
    [written] = [t for t in page.tables if t[0][:4] == ["kind", "axes", "times", "bytes in"]] or [[[]]]
    assert len(written) - 1 == len(found.census.rows)


def test_the_page_of_a_step_holds_all_that_was_read_of_it(mesh2x4, tmp_path):
    file = tmp_path / "new" / "step.html"
    found = sk.report(*small_step(mesh2x4), file=file, command="python <train>.py")
    assert found.file == file and file.read_text() == found.html
    page = assert_self_contained(found.html)
    assert [leaf.name for leaf in found.leaves] == [HOSTILE, "x"] and len(found.census.rows) == 2
    assert [each.rule for each in found.findings] == ["incomplete-permutation"]
    shown_on(page, found)
    assert page.column("bytes sent", 0) == [f"{int(found.census.sent(axis=axis)):,}" for axis in ("data", "model")]
    assert "command" in [given.get("aria-label") for _, given in page.elements]
    assert "python <train>.py" in page.text and jax.__version__ in page.text
    pictures = [given["alt"] for tag, given in page.elements if tag == "img"]
    assert [each.split()[0] for each in pictures] == ["The", "Bytes", "Memory"] and HOSTILE in page.text
    assert found.audit.skipped == ("second-compile: call is False",) and "Not tried: second-compile" in page.text
    assert found._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')


def test_a_train_steps_page_has_its_plan(mesh2x4):
    loss_fn = lambda params, batch, keys: jnp.mean((batch @ params["w"]) ** 2)  # noqa: E731
    plan = sk.chain(sk.dp("data"), sk.fsdp("model", min_size=1))
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh2x4, plan=plan)
    params = {"w": jnp.ones((8, 4))}
    batch = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    found = sk.report(step, init.abstract(params), batch, file=None)
    page = assert_self_contained(found.html)
    assert found.step == "train step: fsdp('model') + dp('data')" and found.file is None
    shown_on(page, found)
    said = sk.describe(plan, params, mesh2x4)
    assert all(why in said for why in page.column("why", 1)) and said.splitlines()[-1] in page.text
    assert [leaf.spec for leaf in found.leaves if leaf.argument == "batch"] == ["the compiler's choice"]


def facts(*, fits=True, rows=(), chip="v5e", schedule=None):
    """A step that no compiler has seen: its figures are the test's own."""
    memory = Memory(argument=4096, output=1024, alias=512, temp=2048, generated_code=256, host_temp=0)
    leaf = ArgumentLeaf("w", "w", "8x8", "float32", "P('data')", "1x8", "8", 32)
    message = "Ran out of memory: used 20.00G of 15.75G hbm <here>"
    work = Work(flops=2 * 10**9, bytes=10**6)
    report = Report("v5e:2x4", {"data": 8}, fits, "" if fits else message, memory if fits else None, 16 * 2**30,
                    Census(()), 0.1, tuple(rows), work)  # fmt: skip
    audit = Audit("step", "v5e:2x4", {"data": 8}, 8, memory, Census(()), tuple(rows), (), (), {"jax": "1"})
    found = StepReport(
        "step (a.py:1)", "v5e:2x4", {"data": 8}, (leaf,), Census(()), (), audit if fits else None, report
    )
    return Facts(found, None, None, chip and cost.chip(chip), work, None, schedule)


def row(kind, size, sent, *, count=1, asynchronous=False):
    return CompiledRow(kind, "r.1", ("data",), 8, count, 1, size, size, Fraction(sent), asynchronous, 3 * 10**9,
                       2e-6, 1e-6, "", "a.py:2", "")  # fmt: skip


# Alone catches a time of a collective that is not that of cost.collective_time.
@pytest.mark.check
def test_times_are_those_of_the_closed_forms():
    sizes = {"all_reduce": 8000, "all_gather": 1000, "all_to_all": 8000, "ppermute": 500}
    rows = [row(kind, size, cost.wire(kind, size, 8).sent, count=3) for kind, size in sizes.items()]
    page = assert_self_contained(page_of(facts(rows=rows), "made"))
    link = cost.links("v5e").link
    table = next(i for i, t in enumerate(page.tables) if t[0][:4] == ["kind", "axes", "times", "sent/device"])
    expected = [
        3 * cost.collective_time(kind, size, 8, bandwidth=link.bandwidth, latency=link.latency)
        for kind, size in sizes.items()
    ]
    assert page.column("both", table) == [duration(each) for each in expected]
    line = cost.roofline(2e9, 1e6, "v5e", sent=float(sum(r.total for r in rows)))
    assert page.column("at least", table - 1) == [
        duration(each) for each in (line.compute_seconds, line.memory_seconds, line.network_seconds)
    ]
    assert f"bound by {line.bound}" in page.text


@pytest.mark.check
def test_the_compiled_program_is_shown_as_it_runs():
    rows = [row("all_reduce", 800, 1400, count=2, asynchronous=True), row("ppermute", 800, 800, count=None)]
    page = assert_self_contained(page_of(facts(rows=rows), "made"))
    at = next(i for i, t in enumerate(page.tables) if "exposed" in t[0])
    assert page.tables[at][1:] == [
        ["all_reduce", "data=8", "2", "1", "800", "2,800", "overlapped", "6 GFLOP", "4 us", "2 us", "a.py:2", ""],
        ["ppermute", "data=8", "1?", "1", "800", "800", "synchronous", "", "2 us", "1 us", "a.py:2", ""],
    ]
    assert page.column("bytes", at - 1) == ["4,096", "512", "2,048", "256", "0"]
    assert "added: 2 x all_reduce over 'data', 2,800 bytes at a.py:2" in page.text


# Alone catches a step that does not fit, for which there is no program to read, without a page.
@pytest.mark.check
def test_a_step_that_does_not_fit_has_a_page_that_says_so():
    page = assert_self_contained(page_of(facts(fits=False), "made"))
    [picture] = [given["src"] for tag, given in page.elements if tag == "img"]
    assert b"15.75 GiB on a device" in b64decode(picture.partition(",")[2])
    assert "NO, 20.00 GiB of 15.75 GiB" in page.text and "used 20.00G of 15.75G hbm <here>" in page.text


@pytest.mark.check
def test_without_a_chips_figures_the_page_says_what_to_pass():
    page = assert_self_contained(page_of(facts(chip=None), ""))
    assert "command" not in [given.get("aria-label") for _, given in page.elements]
    assert "There are no figures of the links and the peak of v5e:2x4 devices: name chips as target." in page.text


# Alone catches a pipeline's step that does not know its schedule.
@pytest.mark.check
def test_a_pipelines_page_has_its_schedule(mesh2x4):
    pipe = sk.pipeline(sk.schedules.one_f_one_b(devices=4, microbatches=8), "model")
    both = lambda layers, x, keys: x  # noqa: E731
    grad_fn = pipe.value_and_grad(lambda s, b, k: b, both, lambda s, x, b, k: jnp.sum(x))
    _, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh2x4, plan=sk.chain(sk.dp("data"), pipe.plan))
    assert step.schedule is pipe.schedule
    page = assert_self_contained(page_of(facts(schedule=step.schedule), "made"))
    assert "one_f_one_b: 4 devices, 8 microbatches; makespan 33, bubble 37.5% of the work" in page.text
    assert str(pipe.schedule) in page.text


@pytest.mark.check
def test_units():
    assert [flops(each) for each in (0, 5e6, 7e9, 2e12)] == ["0 kFLOP", "5 MFLOP", "7 GFLOP", "2 TFLOP"]


@pytest.mark.check
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"file": "step.pdf"}, "report: file must end in .html; got 'step.pdf'. Pass for example 'step.html'."),
        (
            {"file": "taken/step.html"},
            "report: file must be one that can be written; 'taken/step.html' cannot (FileExistsError). Pass another "
            "path.",
        ),
        (
            {"file": "folder.html"},
            "report: file must be one that can be written; 'folder.html' cannot (IsADirectoryError). Pass another "
            "path.",
        ),
        ({"target": "v5e"}, "aot: topology 'v5e' must give a valid shape. After 'v5e' write the torus, as 'v5e:2x4'."),
        (
            {},
            "report: the step must be traced and compiled with these arguments; it raises TypeError: no program. Check "
            "the arguments, and the mesh context that the step needs.",
        ),
        ({"small": -1}, "report: small must be at least 0; got -1. Pass small=0 or more."),
    ],
)
def test_bad_use(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    (tmp_path / "folder.html").mkdir()

    def broken(x):
        raise TypeError("no program\nat all")

    with pytest.raises(ValueError) as error:
        sk.report(jax.jit(broken), np.ones(2), **options)
    assert str(error.value) == message
    assert not (tmp_path / "step.html").exists()


@pytest.mark.check
def test_without_matplotlib_nothing_is_compiled(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError) as error:
        sk.report(jax.jit(jnp.sum), np.ones(2), target="v5e:2x4", file=None)
    assert str(error.value) == (
        "viz: pictures need matplotlib, which is not installed. Install it with: pip install 'shardkit[viz]'"
    )


@pytest.mark.check
def test_a_file_that_cannot_be_written_at_the_end_is_one_sentence(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError

    monkeypatch.setattr(page_module.Path, "write_text", refuse)
    with pytest.raises(ValueError) as error:
        page_module.write(tmp_path / "step.html", "text")
    assert str(error.value) == (
        f"report: file must be one that can be written; '{tmp_path}/step.html' cannot (PermissionError). Pass another "
        "path."
    )


@pytest.mark.check
def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match=r"^report: ignore must name rules, .*; got 'nothing'\. Pass some of them\.$"):
        sk.report(jax.jit(jnp.sum), np.ones(2), file=None, ignore=("nothing",))


# Alone catches what only a whole model and a chip's compiler show: sizes, overlapped collectives, times.
@pytest.mark.deep
@tpu
def test_the_page_of_a_transformer_on_a_tpu(tmp_path):
    from shardkit.models import transformer

    config = transformer.Config(vocabulary=256, layers=4, dim=64, heads=4, kv_heads=2, hidden=128)
    mesh = sk.make_mesh(data=2, fsdp=2, model=2)
    rules = transformer.tensor_rules(config, "model", 2)
    plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp", layerwise=("layers",)), sk.tp("model", rules))
    grad_fn = sk.value_and_grad(transformer.loss_fn(config, transformer.Axes(model="model")))
    init, step = sk.make_train_step(grad_fn, optax.adamw(3e-4), mesh=mesh, plan=plan)
    params = jax.eval_shape(lambda key: transformer.init(key, config), jax.random.key(0))
    spec = jax.NamedSharding(mesh, plan.batch_spec(mesh))
    batch = {name: jax.ShapeDtypeStruct((16, 32), jnp.int32, sharding=spec) for name in ("tokens", "targets")}
    with jax.numpy_dtype_promotion("standard"):  # as users have it: adamw counts in integers
        found = sk.report(step, init.abstract(params), batch, target="v5e:2x4", file=tmp_path / "step.html")
    assert (tmp_path / "step.html").stat().st_size < 300_000
    page = assert_self_contained(found.html)
    shown_on(page, found)
    assert "Compute and collectives of one step" in page.text
    assert found.compiled.fits and all(line in page.text for line in found.compiled.differences())
    assert len(found.leaves) == 41 and found.audit is not None
