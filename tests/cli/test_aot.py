"""`shardkit aot` as a user runs it; the compiler always has a process of its own."""

import json

import pytest

from shardkit._arguments.checks import quote
from shardkit.cost import chips
from support.compilers import tpu

PROGRAM = """
import jax, jax.numpy as jnp
import shardkit as sk

def make():
    mesh = sk.abstract_mesh(data=8)
    spec = jax.sharding.NamedSharding(mesh, jax.P("data"))
    f = jax.shard_map(lambda x: sk.all_reduce(x @ x.T, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    return f, jax.ShapeDtypeStruct((2048, 256), jnp.bfloat16, sharding=spec)

def too_large():
    f, x = make()
    return (lambda x: x * 2), jax.ShapeDtypeStruct((8 * 2**21, 2**13), jnp.bfloat16, sharding=x.sharding)

def alone(x):
    return x @ x
"""


@tpu
def test_a_report_is_printed_and_written(inside, program, tmp_path):  # proves F86
    file = tmp_path / "reports" / "v5e.json"
    done = inside("aot", f"{program}:make", "--topology", "v5e:2x4", "--json", file)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("v5e:2x4, mesh data=8 (jax ") and lines[1].startswith("fits: yes, ")
    assert any(line.startswith("all_reduce  data=8") for line in lines) and lines[-1] == "as written"
    assert json.loads(file.read_text())["rows"][0]["derived"]["held"] >= 2048 * 256 * 2 // 8


@tpu
def test_what_does_not_fit_ends_with_code_1(inside, program):
    done = inside("aot", f"{program}:too_large", "--topology", "v5e:2x4", code=1)
    assert "does not fit: " in done.stdout and "of 15.75 GiB per device" in done.stdout


@tpu
@pytest.mark.deep
def test_types_on_the_command_line(inside, program):
    done = inside("aot", f"{program}:alone", "--args", "f32[256,256]", "--topology", "v5e:2x2")
    assert "v5e:2x2, mesh none" in done.stdout and "no collectives" in done.stdout


def test_mistakes_are_one_sentence(inside, program):
    done = inside("aot", f"{program}:make", "--topology", "v5", code=2)
    assert done.stderr == (
        f"error: aot: unknown chip 'v5' in topology 'v5'; known are {quote(chips)}. Pass for example 'v5p:8x8x8' or "
        "'h100:1x1x8'.\n"
    )


@tpu
@pytest.mark.deep
def test_a_program_that_cannot_be_compiled_is_one_sentence(inside, program):
    done = inside("aot", f"{program}:make", "--topology", "v5e:2x2", code=2)
    assert done.stderr == (
        "error: aot.compile: topology 'v5e:2x2' has 4 devices, fewer than the 8 of the mesh data=8. "
        "Pass a larger topology or a smaller mesh.\n"
    )
    done = inside("aot", f"{program}:alone", "--args", "f32[2,3]", "--topology", "v5e:2x2", code=2)
    assert done.stderr.startswith(
        "error: aot.compile: the function cannot be traced with these arguments: TypeError: dot_general requires"
    )
    assert done.stderr.count("\n") == 1
