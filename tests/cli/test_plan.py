"""`shardkit plan`: the text, the module that it writes, the compiler's word beside it, and what it refuses."""

import contextlib
import io
import json

import jax
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit import planner
from shardkit.analysis.hlo.compute import Work
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.jaxpr.census import Census
from shardkit.cli.plan import Options, plan
from shardkit.models import transformer
from shardkit.planner import Layout, Model
from shardkit.planner.changes import list_changes
from shardkit.planner.source import source_of
from shardkit.testing import Row
from shardkit.testing.exact.law import equal_for_all_inputs
from shardkit.testing.one_device import Reference, Training
from shardkit.testing.program import Program
from support.compilers import tpu
from support.refusals import value_error

SMALL = Model(layers=2, hidden=16, heads=4, kv_heads=2, ffn=32, vocabulary=32)
OWN = """
import jax.numpy as jnp
import shardkit as sk

def make():
    loss_fn = lambda params, batch, keys: sk.Mean.of(jnp.tanh(batch @ params))
    return loss_fn, jnp.ones((128, 64)), jnp.ones((4, 128))
"""
LARGE = {"model": "70b", "chip": "v5p", "chips": 512, "batch": "4M-tokens"}
WRITTEN = [Layout(data=2, fsdp=2, tensor=2, accumulate=2, remat="full")]
WRITTEN += [Layout(fsdp=2, stage=2, microbatches=4), Layout(fsdp=2, tensor=2, context=2)]
WRITTEN += [Layout(fsdp=2, tensor=2, impl="ring", prefetch=True)]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    files = {"json": folder / "plan.json", "emit": folder / "train_plan.py"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert plan(Options(**LARGE, **files, rows=4, compile=0)) == 0
    return files | {"out": out.getvalue()}


# proves N35 in part: the module that is written trains as one device. Catches what it loses of plan, schedule and model
@pytest.mark.quick(*map(str, WRITTEN[:2]))
@pytest.mark.parametrize("layout", WRITTEN, ids=str)
def test_the_module_that_is_written_trains_as_one_device(layout):
    found = planner.estimate(SMALL, layout, chip="v5e", batch=16, sequence=8)
    module = {}
    exec(source_of(found, batch=16, sequence=8), module)
    assert "._" not in source_of(found, batch=16, sequence=8)  # it imports what is public
    assert module["MESH"] == layout.axes and str(module["PLAN"]) == str(found.plan())
    row = Row(module["MESH"], module["PLAN"], accumulate=module["ACCUMULATE"])
    params = transformer.init(jax.random.key(0), module["CONFIG"])
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 32, (16, 8)).astype(np.int32) for name in ("tokens", "targets")}
    alone = sk.value_and_grad(transformer.loss_fn(module["CONFIG"]))
    given = Training(alone, optax.sgd(0.1), params, (batch,), jax.random.key(1))
    program = Program.of(row, module["grad_fn"](), optax.sgd(0.1), params, [batch], jax.random.key(1))
    assert equal_for_all_inputs(program, Reference((), given)) is None


# Catches a table whose rows are of one kind, times that are not called predictions, and JSON without a figure.
def test_it_prints_layouts_of_different_kinds_and_why(large):
    out = large["out"]
    assert out.startswith(
        "70.55 billion parameters, 1,024 sequences of 4,096 tokens per step on 512 v5p. All times are"
    )
    assert all(word in out for word in (" bind", "this layout", "fsdp alone", "data alone", "does not fit"))
    rows = json.loads(large["json"].read_text())["rows"]
    assert len({frozenset(row["axes"]) for row in rows}) == len(rows) == 4
    assert all(row["fits"] and row["seconds"] > 0 for row in rows)
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)


# Catches a module of other sizes than the first row's.
def test_it_writes_the_first_row_as_a_module(large):
    module = {}
    exec(large["emit"].read_text(), module)
    _, state, batch = module["make"]()
    assert module["MESH"] == json.loads(large["json"].read_text())["rows"][0]["axes"]
    assert batch["tokens"].shape == (1024, 4096) and sum(x.size for x in jax.tree.leaves(state.params)) > 70e9


# Catches options that the module does not name, or names with values that jax does not take.
def test_the_module_names_the_options_of_the_compiler(tmp_path):
    given = ("xla_tpu_overlap_compute_collective_tc=true", "xla_latency_hiding_scheduler_rerun=2", "xla_words=A,b=c")
    given += ("xla_share=0.5", "xla_least=-3")
    job = {"model": "8b", "chip": "v5e", "chips": 64, "batch": "256", "axes": ("fsdp",)}
    assert plan(Options(**job, options=given, compile=0, emit=tmp_path / "plan.py")) == 0
    module = {}
    exec((tmp_path / "plan.py").read_text(), module)
    wanted = [("xla_tpu_overlap_compute_collective_tc", True), ("xla_latency_hiding_scheduler_rerun", 2)]
    wanted += [("xla_words", "A,b=c"), ("xla_share", 0.5), ("xla_least", -3)]
    assert list(module["COMPILER_OPTIONS"].items()) == wanted


# Catches a module that the compiler is not given, a topology of another shape, and a model of another config.json.
@tpu
@pytest.mark.parametrize("of", ["config.json", "FILE.py:FUNCTION"])
def test_the_compilers_word_stands_beside(of, tmp_path, capsys):
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_attention_heads": 4, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text(OWN)
    model = str(tmp_path / "config.json") if of == "config.json" else f"{tmp_path / 'own.py'}:make"
    job = {"chip": "v5e", "chips": 8, "batch": "16"}
    job |= {"sequence": 128, "axes": ("fsdp",)} if of == "config.json" else {}
    with jax.numpy_dtype_promotion("standard"):  # as users have it: adamw counts in integers
        assert plan(Options(model=model, **job, compile=1, json=tmp_path / "plan.json")) == 0
    layout = "data=1 fsdp=8" if of == "config.json" else "plan=fsdp data=8"
    assert f"compiling 1 of 1 for v5e:2x4: {layout}" in (out := capsys.readouterr().out) and "predicted" in out
    first = json.loads((tmp_path / "plan.json").read_text())["rows"][0]
    assert first["compiled"]["fits"] and first["compiled"]["needed"] > 0 and first["axes"] in ({"fsdp": 8}, {"data": 8})


# Catches a search that waits for no compiler though it is there, and one that asks for one that is not.
@pytest.mark.parametrize("installed", [True, False])
def test_the_first_three_are_compiled_where_the_compiler_is_installed(installed, monkeypatch, capsys):
    asked = []

    def compiled(candidates, topology, make_step, options):
        asked.extend(candidates)
        known = {"mesh": {}, "message": "", "memory": None, "limit": 2, "census": Census(()), "lowering_seconds": 0}
        reports = []
        for seconds in (3.0, 1.0, 2.0):
            work = Work(seconds=seconds)
            reports.append(Report(topology=topology, fits=True, compute=work, compile_seconds=40.0, **known))
        return reports

    monkeypatch.setattr("shardkit.cli.layouts.compile_candidates", compiled)
    monkeypatch.setattr("shardkit.analysis.hlo.topology.is_compiler_installed", lambda where: installed)
    job = {"model": "8b", "chip": "v5p", "chips": 16, "batch": "64", "axes": ("data", "fsdp", "tensor", "context")}
    assert plan(Options(**job)) == 0
    out = capsys.readouterr().out
    assert len(asked) == 3 * installed and ("fastest as compiled: " in out) == installed
    assert ("3 layouts in 120 s" in out) == installed
    if installed:
        times = [out.index(f" {ms} ", out.index("predicted")) for ms in ("1000.0", "2000.0", "3000.0")]
        assert times == sorted(times)


# Catches a module of the first row though the compiler says that another is faster, or that the first does not fit.
# If nothing fits that was compiled, a module was written all the same, and the exit code was 0.
@pytest.mark.parametrize(("peaks", "chosen"), [((1, 1, 1), 1), ((1, 3, 1), 2), ((3, 3, 3), None)])
def test_what_is_emitted_is_the_fastest_as_compiled(peaks, chosen, tmp_path, monkeypatch, capsys):
    def compiled(candidates, topology, made, options):
        for seconds, peak in zip((3.0, 1.0, 2.0), peaks, strict=True):
            memory = Memory(0, 0, 0, 0, 0, 0, compiler_peak=peak)
            known = {
                "mesh": {},
                "message": "",
                "memory": memory,
                "limit": 2,
                "census": Census(()),
                "lowering_seconds": 0,
            }
            yield Report(topology=topology, fits=peak <= 2, compute=Work(seconds=seconds), **known)

    monkeypatch.setattr("shardkit.cli.layouts.compile_candidates", lambda *given: list(compiled(*given)))
    emit, rows = tmp_path / "plan.py", tmp_path / "plan.json"
    job = {"model": "8b", "chip": "v5p", "chips": 16, "batch": "64", "axes": ("data", "fsdp", "tensor", "context")}
    code = plan(Options(**job, compile=3, emit=emit, json=rows))
    out = capsys.readouterr().out
    written = json.loads(rows.read_text())["rows"]
    assert [row["compiled"]["fits"] for row in written[:3]] == [peak <= 2 for peak in peaks]
    assert "compiled" not in written[3]
    if chosen is None:
        assert code == 1 and not emit.exists()
        assert "\nof 3 compiled layouts none fits. Pass more --chips, or compile more of the --rows.\n" in out
        return
    module = {}
    exec(emit.read_text(), module)
    assert code == 0 and module["MESH"] == written[chosen]["axes"] and "fastest as compiled: " in out


def test_nothing_fits(capsys):
    assert plan(Options(**LARGE | {"chips": 8, "batch": "8"})) == 1
    out = capsys.readouterr().out
    assert "Nothing fits; the smallest is this." in out and " does not fit: " in out and "\nchips " in out


def compile_as(seconds_of):
    """A compiler that takes the seconds of a layout and of options, or refuses where they are None."""

    def compile_candidate(candidate, topology, make_step, options, text):
        make_step(candidate)  # the module that is written for the layout runs
        seconds = seconds_of(candidate.layout, options)
        if seconds is None:
            raise RuntimeError("no such option")
        known = {"mesh": {}, "message": "", "memory": None, "limit": 2, "census": Census(()), "lowering_seconds": 0}
        return Report(topology=topology, fits=True, compute=Work(seconds=seconds), **known)

    return compile_candidate


# Catches a change that is kept though it is slower, one that is tried without those that were kept, an option that the
# compiler refuses, and a module without what was found.
def test_what_makes_a_layout_faster_stays(tmp_path, monkeypatch, capsys):
    def seconds_of(layout, options):
        offloads = "xla_tpu_enable_sparse_core_collective_offload_all_gather" in options
        if any("minor_sharding" in name for name in options):
            return None
        seconds = 4.0 if layout.context == 1 else 5.0
        if offloads:
            seconds -= 1.0
            # A ring helps only if its permutes run beside compute.
            seconds -= 0.5 * (layout.impl == "ring")
        return seconds + 0.25 * layout.prefetch + 0.1 * (layout.impl == "gather")

    monkeypatch.setattr("shardkit.cli.layouts.compile_candidate", compile_as(seconds_of))
    emit, rows = tmp_path / "plan.py", tmp_path / "plan.json"
    job = {"model": "8b", "chip": "v5p", "chips": 16, "batch": "64", "sequence": 256, "axes": ("fsdp", "tensor")}
    assert plan(Options(**job, compile=2, tune=True, emit=emit, json=rows)) == 0
    out = capsys.readouterr().out
    assert "impl=ring, 2500.0 ms" in out.replace("  ", " ") and "refused: no such option" in out
    module = {}
    exec(emit.read_text(), module)
    assert module["AXES"].impl == "ring" and not module["CONFIG"].prefetch
    assert len(module["COMPILER_OPTIONS"]) == 6
    tuned = [row["tuned"] for row in json.loads(rows.read_text())["rows"] if "tuned" in row]
    assert len(tuned) == 2 and all(attempts[0]["changes"] == [] for attempts in tuned)
    [best] = [attempt for attempts in tuned for attempt in attempts if attempt.get("seconds") == 2.5]
    assert best["changes"] == ["SparseCore", "ring"] and best["layout"]["impl"] == "ring"


# Catches a form that a layout has no use for, and that would be compiled for nothing or fail.
def test_only_changes_that_a_layout_has_a_use_for_are_tried():
    def names(layout, chip="v5p"):
        return [change.name for change in list_changes(layout, sk.cost.chip(chip))]

    assert names(Layout(data=4)) == ["SparseCore", "minor sharding"]
    assert names(Layout(fsdp=4), "h100") == ["prefetch"]
    assert names(Layout(fsdp=2, tensor=2), "v5e")[2:] == ["ring", "gather", "prefetch"]
    assert names(Layout(fsdp=2, stage=2, microbatches=2), "h100") == []


FORMS = {
    "planner: impl is a form of matmuls over tensor ways; got 'ring' and tensor=1. Leave it out.": {"impl": "ring"},
    "planner: impl must be 'auto', 'gather', 'ring' or 'bidirectional'; got 'rings'. Pass for example impl='auto'.": {
        "impl": "rings",
        "tensor": 2,
    },
    "planner: prefetch gathers the layers of fsdp ways in a loop over all layers, which a pipeline has not; got fsdp=1 "
    "and stage=1. Leave it out.": {"prefetch": True},
}


@pytest.mark.parametrize("message, layout", FORMS.items())
def test_a_form_that_a_layout_has_no_use_for_is_refused(message, layout):
    with value_error(message):
        planner.estimate(SMALL, Layout(**layout), chip="v5e", batch=16, sequence=8)


@pytest.mark.parametrize(
    "message, given",
    {
        "plan: --model must be '8b', '70b', '405b', a config.json or FILE.py:FUNCTION; got '7b'. Write for "
        "example 70b.": {"model": "7b"},
        "plan: --batch must be a number of sequences, or of tokens with -tokens; got '4M'. Write for example 1024 "
        "or 4M-tokens.": {"batch": "4M"},
        "plan: --batch must have at least one sequence; got 1k-tokens for sequences of 4096 tokens. Write more "
        "tokens or a smaller --sequence.": {"batch": "1k-tokens"},
        "plan: rows must be a whole number of at least 1; got 0. Pass rows=1 or more.": {"rows": 0},
        "plan: compile must be a whole number of at least 0; got -1. Pass compile=0 or more.": {"compile": -1},
        "plan: --compile must be at most --rows, the layouts that are shown; got 3 and 2. Pass --rows 3, or compile "
        "fewer.": {"rows": 2, "compile": 3},
        "plan: --options must be names with values, each name once; got 'xla_fast'. Write for example --options "
        "xla_enable_async_all_gather=true --options xla_latency_hiding_scheduler_rerun=2.": {
            "options": ("xla_fast",),
            "compile": 1,
        },
        "plan: --options must be names with values, each name once; got 'a=2'. Write for example --options "
        "xla_enable_async_all_gather=true --options xla_latency_hiding_scheduler_rerun=2.": {
            "options": ("a=1", "a=2"),
            "compile": 1,
        },
        "plan: --options are for --compile and --emit; got neither. Pass --compile 1 or --emit plan.py.": {
            "options": ("a=1",),
            "compile": 0,
        },
        "plan: --tune changes compiled layouts of a transformer; got none. Pass --compile 1 and the sizes of a "
        "transformer, or use sk.aot.tune.": {"tune": True, "compile": 0},
        "plan: one of --emit and --json may be standard output; got - for both. Pass a file for one.": {
            "emit": "-",
            "json": "-",
        },
        "plan: --sequence, --axes and --kernel need a transformer; got one for another model, "
        "with its examples over one axis. Leave them out.": {"model": "train.py:make", "sequence": 128},
    }.items(),
)
def test_what_it_refuses(given, message):
    with value_error(message):
        plan(Options(**LARGE | given))


def test_a_batch_of_superscripts_is_refused_beside_a_model_of_the_users(tmp_path):
    """`str.isdigit` holds of them, and `int` raised an error of its own: an unexpected one."""
    file = tmp_path / "mine.py"
    file.write_text("def make():\n    return (lambda params, batch, keys: 0.0), {}, {}\n")
    with value_error(
        "plan: --batch must be a number of examples for a model of your own; got '3\u00b2'. Write for example 256."
    ):
        plan(Options(**LARGE | {"model": f"{file}:make", "batch": "3\u00b2"}))
