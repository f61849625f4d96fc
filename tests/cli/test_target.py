"""`shardkit audit` of a trace as a user runs it, and how a command is pointed at a function."""

import json
import subprocess
import sys

import jax
import pytest

from shardkit.cli import target
from support.commands import command, environment
from support.refusals import refused
from support.tables import indented

PROGRAM = """
import jax, jax.numpy as jnp
from jax import lax
import shardkit as sk

NUMBER = 3

def kernel(x):
    return lax.cond(sk.axis_index("data") == 0, lambda x: sk.shift(x, "data"), lambda x: x, x)

def over(kernel):
    mesh = sk.make_mesh(data=-1)
    return jax.shard_map(kernel, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))

def hangs(x):
    return over(kernel)(x)

def clean(x, key):
    return over(lambda x: sk.shift(x, "data"))(x + jax.random.normal(key, x.shape))

def gradient():
    step = jax.grad(lambda w, x: jnp.sum(over(lambda x: x * w)(x)))
    return step, jnp.float32(2), jax.ShapeDtypeStruct((8,), jnp.float32)

def nothing():
    return None

def broken(x):
    raise TypeError("this is\\nno program")
"""
ARGUMENTS = [("f32[8,128]", "float32", (8, 128)), ("bf16[4]", "bfloat16", (4,))]
ARGUMENTS += [("i32[]", "int32", ()), ("u8", "uint8", ()), ("pred[2]", "bool", (2,))]
ARGUMENTS += [("i64[2]", "int64", (2,)), ("f32[ ]", "float32", ())]
ARGUMENTS += [("float8_e4m3fn[3, 1]", "float8_e4m3fn", (3, 1)), ("key", "key<fry>", ())]


def test_findings_are_printed_and_counted(program, inside):
    words = command("audit", "program:hangs", "--args", "f32[8,4]", "--devices", 4)
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, env=environment(), cwd=program.parent, check=False
    )
    assert done.returncode == 1, done.stderr
    first, *_, count, finding = done.stdout.strip().splitlines()
    assert first.startswith("hangs (program.py:15 (hangs)) on 4 devices as traced (jax ")
    assert count == "1 finding"
    assert finding.startswith("program.py:9 (kernel.<locals>.<lambda>): divergent-collective: ppermute over 'data' ")
    ignored = inside("audit", f"{program}:hangs", "--args", "f32[8,4]", "--ignore", "divergent-collective")
    assert ignored.stdout.endswith("\nno findings\n")


def test_a_clean_program_its_explanation_and_a_mistake_in_one_sentence(program, inside):
    done = inside("audit", f"{program}:clean", "--args", "f32[8,4]", "key")
    assert done.stdout.endswith("\nno findings\n")
    done = inside("audit", f"{program}:gradient", "--explain", "--devices", 4)
    *_, count, last = done.stdout.strip().splitlines()
    assert count == "no findings" and last == (
        "all_reduce over 'data' of 4 bytes, at program.py:22 (gradient.<locals>.<lambda>.<locals>.<lambda>): w is "
        "invariant over 'data' and is used with x, which varies over it; the gradient of the cast is a sum."
    )
    done = inside("audit", f"{program}:broken", "--args", "f32[8]", code=2)
    assert done.stderr == (
        "error: audit: the step must be traced with these arguments; it raises TypeError: this is. Check the "
        "arguments, and the mesh context that the step needs.\n"
    )
    done = inside("audit", f"{program}:hangs", "--args", "f32[8]", "--ignore", "hangs", code=2)
    assert done.stderr.startswith("error: audit: ignore must name rules, 'divergent-collective', ")


@pytest.mark.parametrize(("text", "dtype", "shape"), ARGUMENTS)
def test_arguments_are_read(text, dtype, shape, program):
    fn, (struct,) = target.load(f"{program}:hangs", [text])
    assert (fn.__name__, str(struct.dtype), struct.shape) == ("hangs", dtype, shape)


def test_a_function_may_bring_its_arguments(program):
    fn, (w, x) = target.load(f"{program}:gradient")
    assert callable(fn) and float(w) == 2 and x.shape == (8,)
    assert target.load("json:dumps", ["i32[]"])[0] is json.dumps


MISTAKES = """
train
    target: the function must be given as MODULE:FUNCTION or FILE.py:FUNCTION; got 'train'. Write for example
    train.py:step.
no_such_module:step
    target: module 'no_such_module' must be importable from here; it is not found. Check the name, or pass a path
    that ends in .py.
no/such.py:step
    target: the file must exist; no/such.py does not. Check the path.
{}:step
    target: {} has no 'step'; its functions are kernel, over, hangs, clean, gradient, nothing, broken. Write for
    example {}:kernel.
{}:NUMBER
    target: {}:NUMBER must be callable; got int. Name a function or another callable.
{}:clean
    target: without --args the function must take no parameters and return (fn, *args); {}:clean takes x, key. Pass
    --args with a type for each, such as 'f32[8,128]'.
{}:nothing
    target: a function without parameters must return (fn, *args); {}:nothing returned NoneType. Return the function
    to trace, followed by its arguments.
{}:hangs f32[8
    target: each of --args must be DTYPE[SIZES] or key; got 'f32[8'. Write for example 'f32[8,128]'.
{}:hangs f32[8,,8]
    target: each of --args must be DTYPE[SIZES] or key; got 'f32[8,,8]'. Write for example 'f32[8,128]'.
{}:hangs f32[,]
    target: each of --args must be DTYPE[SIZES] or key; got 'f32[,]'. Write for example 'f32[8,128]'.
{}:hangs float33
    target: each of --args must be DTYPE[SIZES] or key; got 'float33'. Write for example 'f32[8,128]'.
"""


@pytest.mark.parametrize(("words", "message"), indented(MISTAKES))
def test_mistakes_in_the_target(words, message, program):
    text, *args = words.replace("{}", str(program)).split()
    assert refused(lambda: target.load(text, args)) == message.replace("{}", str(program))


def test_a_module_that_cannot_be_imported(tmp_path):
    for name, text, says in (
        ("one.py", "import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing'"),
        ("two.py", "raise ValueError('bad')", "ValueError: bad"),
        ("three.py", "1 / 0", "ZeroDivisionError: division by zero"),
    ):
        path = tmp_path / name
        path.write_text(text)
        assert refused(lambda: target.load(f"{path}:step")) == (
            f"target: {path} cannot be imported; it raises {says}. Run it with python to see the traceback."
        )


def test_nothing_is_drawn_for_a_key():
    _, (key,) = target.load("json:dumps", ["key"])
    assert isinstance(key, jax.ShapeDtypeStruct)


def test_a_file_that_is_called_as_a_module_does_not_take_its_place(tmp_path):
    """`shardkit audit json.py:f` gave all that came after another json."""
    (tmp_path / "json.py").write_text("def f():\n    return f,\n")
    before = list(sys.path)
    fn, _ = target.load(f"{tmp_path / 'json.py'}:f")
    assert fn.__name__ == "f" and sys.modules["json"] is json
    sys.path[:] = before
