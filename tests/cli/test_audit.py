"""`shardkit audit` as a user runs it."""

import json
from pathlib import Path

import pytest

from support.compilers import gpu, tpu

PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import shardkit as sk

def make(size=8, times=1):
    mesh = sk.make_mesh(data=4)
    place = lambda *spec: NamedSharding(mesh, P(*spec))
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=place())
    x = jax.ShapeDtypeStruct((times, 4 * size, 64), jnp.float32, sharding=place(None, "data"))

    def step(w, xs):
        def body(total, x):
            return total + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), None
        return jax.lax.scan(body, jnp.zeros_like(w), xs)[0]

    return jax.jit(step), (w, x)

def accumulate():
    return make(times=3)

def grown():
    return make(size=800)

def gathering():
    step, (w, xs) = make(times=3)

    def local(w, xs):
        @jax.checkpoint
        def loss(w, x):
            return jnp.sum(jnp.tanh(x @ jax.lax.all_gather(w, "data", tiled=True)))

        return jax.lax.scan(lambda g, x: (g + jax.grad(loss)(w, x), None), jnp.zeros_like(w), xs)[0]

    split = NamedSharding(w.sharding.mesh, P("data"))
    on_mesh = jax.shard_map(local, mesh=split.mesh, in_specs=(P("data"), P(None, "data")), out_specs=P("data"))
    return jax.jit(on_mesh), (jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=split), xs)

def plain(x, w):
    return x @ w

def broken():
    raise OSError("no disk")
"""
UNREAD = "audit: {} must be a file that --snapshot wrote; it cannot be read ({}). Check the path."


@pytest.fixture
def program(tmp_path, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return path


def test_a_snapshot_is_what_later_runs_are_held_against(program, inside):
    words = ("--compiled", "--devices", 4)
    first = inside("audit", "train.py:make", *words, "--snapshot", "kept/audit.json").stdout
    assert "step (train.py:12 (make.<locals>.step)) on 4 devices of cpu" in first and "\nno findings\n" in first
    same = inside("audit", "train.py:make", *words, "--against", "kept/audit.json").stdout
    assert same.endswith("against kept/audit.json: nothing worse\n")
    worse = inside("audit", "train.py:accumulate", *words, "--against", "kept/audit.json", code=1).stdout
    at = worse.index("against kept/audit.json: ")
    assert "\nnew: train.py:14 (make.<locals>.step.<locals>.body.<locals>.<lambda>): summed-each-it" in worse[at:]
    assert "\nsent by all_reduce over 'data': 24.00 KiB before, 72.00 KiB now\n" in worse[at:]
    grown = inside("audit", "train.py:grown", *words, "--against", "kept/audit.json", code=1).stdout
    assert "\nheld: 18.00 KiB before, 216.00 KiB now\n" in grown
    assert "\nnot proved equal to the traced program: audit: shapes must be small, because " in grown


def test_json_and_ignored_rules(program, inside):
    words = ("audit", "train.py:accumulate", "--compiled", "--devices", 4, "--json")
    done = inside(*words, code=1)  # a bare --json is --json -: text goes to standard error
    data = json.loads(done.stdout)
    assert [each["rule"] for each in data["rows"]] == ["summed-each-iteration"] and "summed-each" in done.stderr
    assert data["audit"]["derived"]["sent"] == 3 * 24576 and data["audit"]["format"] == 1
    assert data["proof"]["verdict"] == "equal"
    assert data["proof"]["lines"][0] == "proved equal to the traced program for all inputs, 3 points"
    assert json.loads(inside(*words, "--ignore", "summed-each-iteration").stdout)["rows"] == []


def test_a_function_of_given_types_is_read_and_a_make_that_fails_is_no_finding(program, inside):
    done = inside("audit", "train.py:plain", "--compiled", "--devices", 4, "--args", "f32[8,4]", "f32[4]")
    assert done.stdout.startswith("plain (train.py:") and "held: 144 B per device" in done.stdout
    assert "\nproved equal to the traced program for all inputs, 3 points\n" in done.stdout
    done = inside("audit", "train.py:broken", "--devices", 4, code=2)
    assert done.stderr == (
        "error: audit: train.py:broken must return a step and its arguments; it raises OSError: no disk. Run it with "
        "python to see the traceback.\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--against", "nowhere.json"), UNREAD.format("nowhere.json", "No such file or directory")),
        (("--against", "train.py"), UNREAD.format("train.py", "JSONDecodeError")),
        (("--against", "text.json"), UNREAD.format("text.json", "AttributeError")),
        (
            ("--target", "v5e"),
            "aot: topology 'v5e' must give a valid shape. After 'v5e' write the torus, as 'v5e:2x4'.",
        ),
        (("--growth", "-1"), ""),
        # Each was silently without effect.
        (("--growth", "0.5"), "audit: --growth must come with --against FILE; got it alone. Leave it out, or add "),
        (("--timeout", "9"), "audit: --timeout must come with --target CHIPS; got it alone. Leave it out, or add "),
        (("--no-call",), "audit: --no-call must come with --compiled; got it alone. Leave it out, or add --compiled."),
        (("--snapshot", "-", "--json"), "audit: one of --snapshot and --json may be standard output; got - for both."),
    ],
)
def test_bad_use(words, message, program, inside):
    Path("text.json").write_text('"a text"')
    if not message:
        inside("audit", "train.py:make", "--devices", 4, "--snapshot", "one.json")
        words, message = ("--against", "one.json", *words), "audit: growth must be at least 0; got -1.0."
    done = inside("audit", "train.py:make", "--devices", 4, *words, code=2)
    assert done.stderr.startswith(f"error: {message}")


# Alone catches a program of a chip's compiler that the command cannot read, or in which it misses the fault.
@pytest.mark.deep
@pytest.mark.parametrize("target", [pytest.param("v5e:2x2", marks=tpu), pytest.param("h100:1x1x4", marks=gpu)])
def test_a_fault_is_found_by_the_compiler_of_absent_chips(target, program, inside):  # proves F86
    done = inside("audit", "train.py:gathering", "--devices", 4, "--target", target, code=1)
    assert done.stdout.startswith("local (train.py:28 (gathering.<locals>.local)) on 4 devices of " + target)
    assert "\n1 finding\ntrain.py:31 (gathering.<locals>.local.<locals>.loss): gathered-each-iteration: " in done.stdout
    assert "runs 3 times in the loop at train.py:33 (gathering.<locals>.local)" in done.stdout
    assert done.stdout.endswith("not tried: second-compile: the chips are not here\n")
