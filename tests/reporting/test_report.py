"""The page of a step holds all that was read of it, says what is wrong in a sentence, and no text becomes markup."""

import errno
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.reporting import page as page_module
from support.compilers import tpu
from support.pages import assert_self_contained
from support.refusals import refused

HOSTILE = "<script>alert('x')</script>"


def small_step(mesh):
    """A jitted step with two collectives, one of them useless, and a leaf whose name is markup."""

    def local(params, x):
        swapped = jax.lax.ppermute(x @ params[HOSTILE], "model", [(0, 1), (1, 0)])
        return sk.all_reduce(jnp.sum(swapped), ("data", "model"))

    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data", None)), out_specs=P())
    params = {HOSTILE: jax.device_put(jnp.ones((4, 4)), jax.NamedSharding(mesh, P()))}
    return jax.jit(step), params, jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, P("data")))


def test_the_page_of_a_step_holds_all_that_was_read_of_it(mesh2x4, tmp_path):
    file = tmp_path / "new" / "step.html"
    found = sk.report(*small_step(mesh2x4), file=file, command="python <train>.py")
    assert found.file == file and file.read_text() == found.html
    page = assert_self_contained(found.html)
    assert [each.rule for each in found.findings] == ["incomplete-permutation"] and len(found.census.rows) == 2
    assert str(found.audit) in page.text and HOSTILE in page.text
    assert "python <train>.py" in page.text and jax.__version__ in page.text
    assert found.audit.skipped == ("second-compile: call is False",) and "not tried: second-compile" in page.text
    assert found._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')


def test_a_train_steps_page_has_its_plan(mesh2x4):
    loss_fn = lambda params, batch, keys: jnp.mean((batch @ params["w"]) ** 2)  # noqa: E731
    plan = sk.chain(sk.dp("data"), sk.fsdp("model", min_size=1))
    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh2x4, plan=plan)
    params = {"w": jnp.ones((8, 4))}
    batch = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    found = sk.report(step, init.abstract(params), batch, file=None, command="")
    page = assert_self_contained(found.html)
    assert found.step == "train step: fsdp('model') + dp('data')" and found.file is None
    assert sk.describe(plan, params, mesh2x4) in page.text and str(found.audit) in page.text
    headings = [given["aria-label"] for tag, given in page.elements if tag == "pre"]
    holds = "What it sends, holds and wastes"
    assert headings == ["Plan", "Argument state", "Argument batch", holds, "Versions and machine"]


# Alone catches a step that does not fit, for which there is no program to read, without a page.
@tpu
def test_a_step_that_does_not_fit_has_a_page_that_says_so():
    spec = jax.NamedSharding(sk.make_mesh(data=8), P("data"))
    x = jax.ShapeDtypeStruct((8 * 2**21, 2**13), jnp.bfloat16, sharding=spec)
    found = sk.report(jax.jit(lambda x: x * 2), x, target="v5e:2x4", file=None)
    page = assert_self_contained(found.html)
    assert found.audit is None and not found.compiled.fits and str(found.compiled) in page.text


# Alone catches a pipeline's step that does not know its schedule.
def test_a_pipelines_page_has_its_schedule(mesh2x4):
    pipe = sk.pipeline(sk.schedules.one_f_one_b(devices=4, microbatches=8), "model")
    stage = lambda layers, x, keys: x * jnp.mean(layers["w"])  # noqa: E731
    grad_fn = pipe.value_and_grad(lambda s, b, k: b, stage, lambda s, x, b: jnp.mean(x))
    plan = sk.chain(sk.dp("data"), pipe.plan)
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh2x4, plan=plan)
    assert step.schedule is pipe.schedule
    state = init.abstract({"layers": {"w": jnp.ones((4, 2))}})
    page = assert_self_contained(sk.report(step, state, jax.ShapeDtypeStruct((16, 2), jnp.float32), file=None).html)
    assert "one_f_one_b: 4 devices, 8 microbatches; makespan 33, bubble 37.5% of the work" in page.text
    assert str(pipe.schedule) in page.text


@pytest.mark.check
@pytest.mark.parametrize(
    "message, options",
    {
        "report: file must end in .html; got 'step.pdf'. Pass for example 'step.html'.": {"file": "step.pdf"},
        "report: file must be one that can be written; 'taken/step.html' cannot (File exists). Pass another path.": {
            "file": "taken/step.html"
        },
        "report: file must be one that can be written; 'folder.html' cannot (a directory). Pass another path.": {
            "file": "folder.html"
        },
        "aot: topology 'v5e' must give a valid shape. After 'v5e' write the torus, as 'v5e:2x4'.": {"target": "v5e"},
        "report: the step must be traced and compiled with these arguments; it raises TypeError: no program. Check "
        "the arguments, and the mesh context that the step needs.": {},
        "report: small must be at least 0; got -1. Pass small=0 or more.": {"small": -1},
    }.items(),
)
def test_bad_use(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    (tmp_path / "folder.html").mkdir()

    def broken(x):
        raise TypeError("no program\nat all")

    assert refused(lambda: sk.report(jax.jit(broken), np.ones(2), **options)) == message
    assert not (tmp_path / "step.html").exists()


@pytest.mark.check
def test_a_file_that_cannot_be_written_at_the_end_is_one_sentence(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(page_module, "open_file", refuse)
    assert refused(lambda: page_module.write(tmp_path / "step.html", "text")) == (
        f"report: file must be one that can be written; '{tmp_path}/step.html' cannot (Permission denied). Pass "
        "another path."
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
    assert found.compiled.fits and str(found.compiled) in page.text and str(found.audit) in page.text


NAMES = st.text(st.characters(), min_size=1, max_size=40)


def shown(text):
    """What a reader gets of a text: what a page cannot hold is replaced."""
    kept = "".join("\ufffd" if not re.match(r"[\t\n -~\u00a0-\ud7ff\ue000-\U0010ffff]", c) else c for c in text)
    return re.sub("[\ufdd0-\ufdef]", "\ufffd", "".join("\ufffd" if ord(c) & 0xFFFE == 0xFFFE else c for c in kept))


# Alone catches a name that becomes markup, also inside an attribute.
@pytest.mark.check
@given(NAMES)
@example("<script>alert(1)</script>")
@example('"><img src=x onerror=alert(1)>')
@example("' onload='alert(1)")
@example("&lt;b&gt; \x00 \ud800 \uffff \x85")
@example("]]></style><!--")
def test_no_name_becomes_markup(name):
    text = page_module.document(name, {name: name})
    page = assert_self_contained(text)
    text.encode("utf-8")
    [box] = [given for tag, given in page.elements if tag == "pre"]
    assert box["aria-label"] == shown(name) and page.text.count(shown(name)) >= 4
