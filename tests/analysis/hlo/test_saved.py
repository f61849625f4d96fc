"""Compiled programs in files: the same bits in another process without compiling, and no file that is not one's own."""

import json
import os
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import serialize_executable

import shardkit as sk
from shardkit.analysis.hlo import saved
from shardkit.steps.step import NonFiniteError
from support.commands import environment
from support.compilers import gpu, tpu

TESTS = Path(__file__).parents[2]
BATCH = {"x": np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)}


def loss(params, batch, keys):
    hidden = sk.dropout(jnp.tanh(batch["x"] @ params["w"]), keys, 0.5)
    return jnp.mean(hidden**2) + jnp.sum(params["b"] ** 2)


def train_step(mesh, optimizer, **options):
    return sk.make_train_step(sk.value_and_grad(loss), optimizer, mesh=mesh, plan=sk.fsdp(mesh.axis_names), **options)


def params():
    return {"w": np.sin(np.arange(16 * 8, dtype=np.float32)).reshape(16, 8), "b": np.ones(8, np.float32)}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A file with a small program."""
    folder = tmp_path_factory.mktemp("programs")
    sk.analysis.compiled(jax.jit(lambda x: 2 * x), np.arange(4.0, dtype=np.float32)).save(folder / "double.program")
    return folder / "double.program"


def refused(path):
    with pytest.raises(ValueError) as caught:
        sk.aot.load(path)
    return str(caught.value)


# Alone catches a program that is compiled again where it is loaded, that has other bits there, or whose file lacks what
# the train step does around the program (the key, which stays outside).
def test_a_step_runs_in_another_process_without_compiling(tmp_path, mesh2x4):  # proves F86
    init, step = train_step(mesh2x4, optax.sgd(1e-2, momentum=0.9))
    state = init(params(), jax.random.key(0))
    sk.analysis.compiled(step, state, BATCH).save(tmp_path / "step.program")
    start = jax.tree.map(np.asarray, state._replace(key=None))
    specs = jax.tree.map(lambda x: x.sharding.spec, state._replace(key=None))
    (tmp_path / "start.pickle").write_bytes(pickle.dumps((start, specs, BATCH)))
    worker = [sys.executable, "-m", "support.workers.saved_program", str(tmp_path), "2"]
    done = subprocess.run(worker, capture_output=True, text=True, timeout=600, cwd=TESTS, env=environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["compiled"] == []
    losses = []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]).hex())
    assert found["losses"] == losses
    assert found["params"] == {name: np.asarray(x).tobytes().hex() for name, x in state.params.items()}
    assert os.stat(tmp_path / "step.program").st_mode & 0o777 == 0o600


# Alone catches a loaded step that takes a step which is not finite, where the step that was saved raises.
def test_a_loaded_step_stops_as_the_step_does(tmp_path, data8):
    init, step = train_step(data8, optax.sgd(0.1), nonfinite="stop")
    state = init(params(), jax.random.key(0))
    sk.analysis.compiled(step, state, BATCH).save(tmp_path / "step.program")
    with pytest.raises(NonFiniteError, match="is not finite"):
        sk.aot.load(tmp_path / "step.program")(state, {"x": BATCH["x"] * np.float32(np.inf)})


def test_a_function_is_called_as_it_was_compiled(program):
    assert np.array_equal(sk.aot.load(program)(np.float32([1, 2, 3, 4])), [2, 4, 6, 8])
    with pytest.raises(TypeError, match="float32"):  # jax's own
        sk.aot.load(program)(np.int32([1, 2, 3, 4]))


def test_what_calls_python_is_not_saved(tmp_path):
    shouting = sk.analysis.compiled(jax.jit(lambda x: jax.debug.print("{}", x)), np.float32(1))
    with pytest.raises(ValueError) as caught:
        shouting.save(tmp_path / "shouting.program")
    assert re.fullmatch(
        "save: the program must consist of arrays and compiled code alone; jax cannot serialize it: AttributeError: .*"
        + re.escape(
            ". Take out calls to Python (jax.debug.print, callbacks), and define the classes of arguments and "
            "results in a module."
        ),
        str(caught.value),
    )
    assert list(tmp_path.iterdir()) == []


# Alone catches a file without code: its program loads, and fails when it runs.
def test_a_program_that_may_come_from_a_compilation_cache_is_not_saved(tmp_path, monkeypatch):
    found = sk.analysis.compiled(jax.jit(lambda x: 3 * x), np.float32(1))
    with_cache = SimpleNamespace(jax_compilation_cache_dir="kept", jax_enable_compilation_cache=True)
    monkeypatch.setattr(saved.jax, "config", with_cache)
    with pytest.raises(ValueError) as caught:
        found.save(tmp_path / "triple.program")
    assert str(caught.value) == (
        "save: a program of CPUs must be compiled without a compilation cache, because jax cannot write again what it "
        "loaded from one; got kept. Compile it in a process with jax_enable_compilation_cache=False."
    )


# ---- what is refused


# Alone catches a loader that unpickles or runs anything before it knows that the file is whole, or fails otherwise.
def test_2000_damaged_files_are_refused_before_anything_is_unpickled(program, monkeypatch):  # proves F86
    whole, path = program.read_bytes(), program.with_name("damaged.program")
    for room, name in [(pickle, "loads"), (serialize_executable, "deserialize_and_load")]:
        monkeypatch.setattr(room, name, lambda *_: pytest.fail("a damaged file was opened"))
    path.touch(0o600)
    draw, seen = random.Random(0), set()
    for _ in range(1000):
        flipped = bytearray(whole)
        # Every second in front, where what the file says of itself stands.
        flipped[draw.randrange(len(whole) if draw.random() < 0.5 else saved._FRONT)] ^= 1 << draw.randrange(8)
        for content in flipped, whole[: draw.randrange(len(whole))]:
            path.write_bytes(content)
            seen.add(refused(path))
    assert seen == {
        f"aot.load: the file must be a program of this shardkit; got {path}. Save it again.",
        f"aot.load: the program must be whole; {path} is damaged or cut off. Save it again.",
    }


def test_a_file_that_others_can_write_to_is_refused(program, tmp_path):
    path = tmp_path / "mine.program"
    path.write_bytes(program.read_bytes())
    path.chmod(0o664)
    assert refused(path) == (
        "aot.load: a compiled program must be a file that its user alone can write to, because it is executed; got "
        f"{path}, and others can write to it. Save the program again."
    )
    path.chmod(0o600)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path, tmp_path / "none"):
        assert refused(other) == f"aot.load: path must be a file; got {other}. Pass the file that save wrote."


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(program, tmp_path):
    path = tmp_path / "theirs.program"
    path.write_bytes(program.read_bytes())
    os.chown(path, 12345, 12345)
    assert refused(path).endswith(f"got {path}, and another user owns it. Save the program again.")


# Alone catches a program that is run on what it was not compiled for: wrong results, or the end of the process.
def test_a_program_for_something_else_is_refused(program, monkeypatch):
    version = jax.__version__
    where = f"aot.load: a program must run where it was compiled for; {program} is for"
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.9.0")
        assert refused(program) == (
            f"{where} jax {version}, and this process has jax 0.9.0. Compile it here, and save that."
        )
    with monkeypatch.context() as patch:
        patch.setattr(saved, "_describe_processor", lambda: "another")
        assert refused(program).endswith("and this process has processor another. Compile it here, and save that.")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda platform: jax.local_devices()[1:])
        assert refused(program).startswith(f"{where} devices 1 x 'cpu', processor ")
    with monkeypatch.context() as patch:
        patch.setattr(serialize_executable, "deserialize_and_load", lambda *_, **__: 1 / 0)
        assert refused(program) == (
            f"aot.load: the runtime must accept the program; it refuses {program}: ZeroDivisionError: division by "
            "zero. Save the program again, in the environment in which it runs."
        )


def absent(topology, tmp_path):
    """The error with which this process refuses a step that was compiled and saved for absent chips."""
    mesh = sk.make_mesh(devices=sk.aot.topology_devices(topology), data=2, model=4)
    init, step = train_step(mesh, optax.sgd(1e-2))
    state, batch = jax.eval_shape(lambda: (params(), BATCH))
    found = sk.analysis.compiled(step, init.abstract(state), batch)
    assert found.rows
    found.save(tmp_path / "step.program")
    assert (tmp_path / "step.program").stat().st_size > 10_000
    return refused(tmp_path / "step.program")


@tpu
@pytest.mark.deep
def test_a_step_for_absent_tpus_is_saved(tmp_path):  # proves F86
    assert "is for devices 8 x 'TPU v5 lite', and this process has devices 0 x none" in absent("v5e:2x4", tmp_path)


@gpu
@pytest.mark.deep
def test_a_step_for_absent_gpus_is_saved(tmp_path):  # proves F86
    assert "and this process has devices 0 x none" in absent("h100:1x1x8", tmp_path)


def test_topologies_without_a_compiler_or_a_name_are_refused():
    with pytest.raises(ValueError, match="unknown chip 'v9' in topology 'v9:2x2'"):
        sk.aot.topology_devices("v9:2x2")
