"""`sk.audit` on plain jit: each fault is named with its line, and the program without it is silent."""

import inspect
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax import backends, jaxprs
from shardkit.analysis import Finding
from shardkit.analysis.compiled_rules.loops import _is_same_each_time
from shardkit.analysis.compiled_rules.second_call import _choose_next_arguments
from shardkit.analysis.jaxpr.census import Census
from shardkit.analysis.jaxpr.step import first_use, leaves_of, trace_step
from shardkit.analysis.judge import RULES, Audit, OtherFormatError
from support.compilers import gpu, tpu
from support.planted import audited
from support.planted.audited import PLANTED, Planted
from support.planted.scheduled import SCHEDULED
from support.refusals import raises, refused

VECTOR = jax.ShapeDtypeStruct((3,), jnp.float32)


def line_of(planted: Planted) -> str:
    """The line that ends in the rule's name, as a finding gives it without the function."""
    for function in (planted.wrong, audited.loss):
        lines, first = inspect.getsourcelines(function)
        marked = [first + n for n, line in enumerate(lines) if line.rstrip().endswith(f"# {planted.rule}")]
        if marked:
            return f"audited.py:{marked[0]} "
    raise AssertionError("nothing is marked")


def found(make, **options):
    step, args = make()
    return sk.audit(step, *args, compiled=True, ignore=("idle-axis",), **options)  # all are on one mesh


# proves S127: of the arguments of any step, as unplaced-leaf
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.wrong.__name__)
@pytest.mark.optimized
def test_a_fault_is_named_with_its_line(planted):
    findings = found(planted.wrong, large=planted.large).findings
    assert [f.rule for f in findings] == [planted.rule], findings
    assert findings[0].source.startswith(line_of(planted)), findings


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.right.__name__)
@pytest.mark.optimized
def test_a_right_program_is_silent(planted):
    assert found(planted.right, large=planted.large).findings == ()


@pytest.mark.check
def test_every_rule_has_a_fault_and_a_right_program():
    rules = {rule.name for rule in RULES.values() if rule.reads == "compiled"}
    assert {planted.rule for planted in (*PLANTED, *SCHEDULED)} == rules


def test_what_the_log_does_not_say_is_seen_in_the_program(monkeypatch):
    @contextmanager
    def nothing(of):
        yield []

    monkeypatch.setattr(backends, "capture_log", nothing)
    planted = next(each for each in PLANTED if each.rule == "full-rematerialization")
    (finding,) = found(planted.wrong).findings
    assert finding.source.startswith(line_of(planted))
    assert finding.message.startswith("all_gather over 'model' makes a value of 16,384 bytes, of which each device")


def test_the_log_is_taken_from_standard_error_and_the_rest_passed_on(capfd):
    import os

    with backends.capture_log("wanted") as lines:
        os.write(2, b"W1 wanted here\nnot this\n")
    os.write(2, b"after\n")
    assert lines == ["W1 wanted here"]
    assert capfd.readouterr().err == "not this\nafter\n"


# Alone catches a gather of what a loop keeps that is missed where the GPU's compiler leaves a barrier's tuple.
@pytest.mark.check
@pytest.mark.parametrize("left", ["tuple", "optimization-barrier"])
def test_what_a_barrier_kept_apart_is_the_same(left):
    behind = 2 if left == "tuple" else 3
    opcodes = [("parameter",), ("get-tuple-element", 0), ("tuple", 1), (left, 2), ("get-tuple-element", behind)]
    opcodes += [("all-gather", 4), ("tuple", 1)]
    instructions = {
        number: SimpleNamespace(id=number, opcode=opcode, operands=operands, tuple_index=0)
        for number, (opcode, *operands) in enumerate(opcodes)
    }
    for each in instructions.values():
        each.operands = tuple(each.operands)
    body = SimpleNamespace(instructions=instructions, parameters={0: instructions[0]}, root=6)
    assert _is_same_each_time(body, instructions[5])


def make_long_body(steps, element):
    """A loop's body whose all-gather takes, after so many steps, element 0 of the state, which is kept, or 1."""
    opcodes = [("parameter",), ("get-tuple-element", 0), ("get-tuple-element", 0), ("negate", 2), ("tuple", 1, 3)]
    opcodes.append(("add", 1 + element, 1 + element))
    for number in range(5, 5 + steps):
        opcodes.append(("add", number, number))
    opcodes.append(("all-gather", 5 + steps))
    instructions = {}
    for number, (opcode, *operands) in enumerate(opcodes):
        index = int(number == 2)
        instructions[number] = SimpleNamespace(id=number, opcode=opcode, operands=tuple(operands), tuple_index=index)
    return SimpleNamespace(instructions=instructions, parameters={0: instructions[0]}, root=4)


# Alone catches a recursion over the steps of a body, which Python ends at a thousand, and a walk of every path of a
# diamond after a diamond, which would not end.
@pytest.mark.check
@pytest.mark.parametrize(("element", "same"), [(0, True), (1, False)])
def test_a_long_body_is_read(element, same):
    body = make_long_body(5000, element)
    assert _is_same_each_time(body, body.instructions[5006]) is same


@pytest.mark.deep
@pytest.mark.parametrize(
    "make", ["stacked_sums_in_the_loop", "gathers_in_the_loop", "reshards_in_one_go", "holds_copies", "unplaced"]
)
@pytest.mark.parametrize("target", [pytest.param("v5e:2x4", marks=tpu), pytest.param("h100:1x1x8", marks=gpu)])
def test_the_compilers_of_chips_are_read_too(target, make):
    planted = next(each for each in PLANTED if each.wrong.__name__ == make)
    wrong, right = (found(each, target=target, large=planted.large) for each in planted[1:3])
    assert [f.rule for f in wrong.findings] == [planted.rule], wrong.findings
    assert wrong.findings[0].source.startswith(line_of(planted)), wrong.findings
    assert right.findings == () and right.memory.held > 0
    assert right.target == target and "second-compile: the chips are not here" in right.skipped


@pytest.fixture(scope="module")
def whole():
    mesh = sk.make_mesh(data=4, model=2)

    def step(w, x):
        def local(w, x):
            return jax.lax.psum(x @ w, "model")

        return jax.shard_map(local, mesh=mesh, in_specs=(P("model"), P("data", "model")), out_specs=P("data"))(w, x)

    struct = lambda shape, *spec: jax.ShapeDtypeStruct(  # noqa: E731
        shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec))
    )
    return sk.audit(jax.jit(step), struct((64, 512), "model"), struct((32, 64), "data", "model"), compiled=True)


def test_what_is_held_and_sent_is_reported_with_lines(whole):
    start = inspect.getsourcelines(test_what_is_held_and_sent_is_reported_with_lines)[1]
    assert (whole.mesh, whole.devices, whole.memory.held) == ({"data": 4, "model": 2}, 8, 64 * 512 * 2 + 8 * 32 * 4)
    (written,), (compiled,) = whole.census.rows, whole.rows
    assert (written.kind, written.axes) == (compiled.kind, compiled.axes) == ("all_reduce", ("model",))
    assert written.source == compiled.source and written.source.startswith("test_audit.py:")
    assert 0 < start - int(written.source.split(":")[1].split(" ")[0]) < 15
    assert whole.sent(axis="model") == whole.sent(kind="all_reduce") == 8 * 512 * 4
    text = str(whole)
    assert text.splitlines()[0].startswith("step (test_audit.py:")
    assert "held: 65.00 KiB per device" in text and "as written:\nkind" in text and "as compiled:\nkind" in text
    assert text.endswith("no findings\nnot tried: second-compile: the arguments hold no values")


def test_an_audit_is_written_and_read(whole):
    assert Audit.from_json(whole.to_json()) == whole
    with raises(OtherFormatError, "audit: the snapshot must have format 1; got 2. Write it again with this version."):
        Audit.from_json(whole.to_json().replace('"format": 1', '"format": 2'))


def test_only_what_is_worse_is_reported(whole):
    finding = Finding("host-transfer", "f sends.", "train.py:12 (step)", "Do not.")
    moved = finding._replace(source="train.py:40 (step)", message="f sends more.")
    one = replace(whole, findings=(finding,))
    assert whole.compare(one) == one.compare(one) == replace(whole, findings=(moved,)).compare(one) == []
    assert one.compare(whole) == ["new: train.py:12 (step): host-transfer: f sends. Do not."]
    assert replace(whole, findings=(finding, moved)).compare(one) == [f"new: {moved}"]
    (row,) = whole.rows
    more = replace(
        whole,
        memory=replace(whole.memory, argument=whole.memory.argument + 4096, temp=whole.memory.temp + 8),
        rows=(row, row),
    )
    assert whole.compare(more) == []
    assert more.compare(whole) == [
        "held: 65.00 KiB before, 69.00 KiB now",
        "sent by all_reduce over 'model': 16.00 KiB before, 32.00 KiB now",
    ]
    assert more.compare(whole, growth=0.1) == ["sent by all_reduce over 'model': 16.00 KiB before, 32.00 KiB now"]
    assert refused(lambda: replace(whole, mesh={"data": 8}).compare(whole)) == (
        "audit: the snapshot must be of the same devices; it has 8 devices of cpu, data=4, model=2, and this run 8 "
        "devices of cpu, data=8. Write a snapshot for each."
    )


# Alone catches an audit of a trace that compiles, or that says something else than lint and census.
@pytest.mark.check
def test_a_trace_is_audited_without_devices_and_compared():
    mesh = sk.abstract_mesh(data=512)

    def make(by):
        kernel = lambda x: jax.lax.ppermute(x, "data", by)  # noqa: E731
        step = jax.shard_map(kernel, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return step, jax.ShapeDtypeStruct((512, 256), jnp.float32)

    wrong, right = make([(0, 1)]), make([(i, (i + 1) % 512) for i in range(512)])
    found, clean = (sk.audit(*each) for each in (wrong, right))
    assert list(found.findings) == sk.lint(*wrong) and [f.rule for f in found.findings] == ["incomplete-permutation"]
    assert (found.memory, found.rows, found.target, found.devices) == (None, (), "", 512)
    assert found.sent() == sk.census(*wrong).sent() == clean.sent() == 1024
    assert "on 512 devices as traced (jax " in str(found) and "held" not in str(found)
    assert Audit.from_json(found.to_json()) == found
    assert clean.compare(replace(found, census=Census(()))) == [
        "sent by ppermute over 'data': 0 B before, 1.00 KiB now"
    ]
    assert [line.partition(": ")[0] for line in found.compare(clean)] == ["new"]
    assert refused(lambda: replace(found, target="cpu").compare(found)).startswith(
        "audit: the snapshot must be of the same devices; it has 512 devices as traced, data=512, and this run 512 "
        "devices of cpu, data=512."
    )


def test_the_step_of_a_builder_has_no_line_and_is_named_without_one():
    mesh = sk.abstract_mesh(data=8)
    grad_fn = sk.value_and_grad(lambda params, batch, keys: sk.Mean.of(batch @ params))
    init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
    args = init.abstract(jnp.ones(4)), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    text = str(sk.audit(step, *args))
    assert text.startswith("step on 8 devices as traced (") and "unknown" not in text


def test_a_step_that_fails_when_it_is_called_is_audited():
    def fail(x):
        raise ArithmeticError("no")

    step = jax.jit(lambda x: jax.pure_callback(fail, VECTOR, x))
    audit = sk.audit(step, jnp.ones(3), compiled=True)
    assert [f.rule for f in audit.findings] == ["host-transfer"]
    assert audit.skipped == ("second-compile: the step raises JaxRuntimeError when it is called",)


def test_a_state_that_begins_on_the_host_compiles_again():
    """The layouts of what the first call returns are new to the second one."""
    step = jax.jit(lambda state, x: {"w": state["w"] + x.sum(), "n": state["n"] + 1})
    args = {"w": np.ones((8, 4), np.float32), "n": np.int32(0)}, audited.array((8, 4), "data")
    [finding] = [f for f in sk.audit(step, *args, compiled=True).findings if f.rule == "second-compile"]
    assert "state['n'] was int32 on the host and is int32 on P(), state['w'] was float32 on the host" in finding.message


@pytest.mark.check
def test_a_result_of_another_dtype_is_not_the_next_state():
    """Logits of the shapes of a batch's tokens must not be fed back as tokens; a state of both dtypes alike is."""
    tokens = {"x": np.zeros((2, 3), np.int32), "y": np.zeros((2, 3), np.int32)}
    logits, next_tokens = ({name: np.ones((2, 3), dtype) for name in tokens} for dtype in (np.float32, np.int32))
    assert _choose_next_arguments([tokens], [tokens], [logits]) == [tokens]
    assert _choose_next_arguments([tokens], [tokens], [logits, next_tokens])[0] is next_tokens


def test_pmap_is_read():
    def step(w, x):
        return w - jax.lax.pmean(x @ w, "i")

    audit = sk.audit(jax.pmap(step, axis_name="i"), jnp.ones((8, 4, 4)), jnp.ones((8, 4, 4)), compiled=True)
    assert [f.rule for f in audit.findings] == ["pmap"]
    assert audit.findings[0].source == audit.step.split(" ", 1)[1][1:-1]
    assert [r.kind for r in audit.rows] == [r.kind for r in audit.census.rows] == ["all_reduce"]
    assert audit.memory.held == 2 * 64


@pytest.mark.check
def test_a_leaf_has_its_name_and_the_line_of_the_user_that_reads_it_first():
    def step(state, x):
        return {"w": jax.jit(lambda w: w * 2)(state["w"])}, x

    traced = trace_step(jax.jit(step), ({"w": VECTOR}, VECTOR))
    w, x = leaves_of(traced)
    assert (w.argument, w.name, x.name) == ("state", "state['w']", "x")
    assert w.source.endswith(".step.<locals>.<lambda>)") and first_use(traced.jaxpr, None) == x.source == ""
    here = __file__
    packaged = ("/x/site-packages/optax/_src/base.py", 3, "update")
    inside = (jaxprs.__file__, 4, "walk")
    assert jaxprs.own_line([packaged, inside, (jnp.__file__, 2, "f"), (here, 5, "step"), (here, 9, "main")]) == (
        "test_audit.py:5 (step)"
    )
    assert jaxprs.own_line([packaged, (inspect.__file__, 1, "f")]) == ""


@pytest.mark.check
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ignore": ["speed"]},
            "audit: ignore must name rules, 'divergent-collective', 'ppermute-in-divergent-branch', ",
        ),
        ({"large": -1}, "audit: large must be at least 0; got -1."),
        ({"target": "v9:1x1"}, "aot: unknown chip 'v9' in topology 'v9:1x1'; known are "),
    ],
)
def test_bad_options(options, message):
    assert refused(lambda: sk.audit(jax.jit(lambda x: x), VECTOR, **options)).startswith(message)


@pytest.mark.check
@pytest.mark.parametrize(("compiled", "also"), [(False, ""), (True, " and compiled")])
def test_a_step_that_cannot_be_traced_is_one_sentence(compiled, also):
    message = refused(lambda: sk.audit(jax.jit(lambda x: x["w"]), VECTOR, compiled=compiled))
    assert message.startswith(f"audit: the step must be traced{also} with these arguments; it raises TypeError: ")
    assert message.endswith(" Check the arguments, and the mesh context that the step needs.")
