"""Checkpoints: every plan's state comes back bit by bit under every other, and what is damaged is refused in words."""

import errno
import gc
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import shardkit as sk
from shardkit.on_device.checksum import checksum
from shardkit.runtime.checkpoint import reading
from shardkit.runtime.checkpoint.checkpoints import Checkpoints, latest_step
from shardkit.runtime.checkpoint.portable import flatten_state, to_portable
from shardkit.runtime.checkpoint.reading import DamagedError
from shardkit.runtime.checkpoint.record import crc_of
from support.checkpoint_child import digests
from support.checkpoint_rows import KEY, ROWS, batch, make, params
from support.checkpoint_runs import restored, save, start, wait_until
from support.counting import Compiles
from support.refusals import refused, value_error
from support.training import lenient
from support.trees import assert_laid_out


def bits(state: Any) -> dict[str, np.ndarray]:
    """Every leaf of a state in portable form, on the host."""
    return {path: np.asarray(x) for path, x in to_portable(flatten_state("test", state)).items()}


def assert_same(actual: Any, wanted: Any) -> None:
    """Two states of the same bits, whatever their layouts."""
    actual, wanted = (x if isinstance(x, dict) else bits(x) for x in (actual, wanted))
    assert actual.keys() == wanted.keys()
    for path, x in actual.items():
        assert (x.dtype, x.shape) == (wanted[path].dtype, wanted[path].shape), path
        ours, theirs = (np.frombuffer(each.tobytes(), np.uint8) for each in (x, wanted[path]))  # nan has bits, too
        np.testing.assert_array_equal(ours, theirs, err_msg=path)


def names(directory: Any) -> list[str]:
    """What is in a directory of checkpoints, besides the file that says whose it is."""
    return sorted({*os.listdir(directory)} - {".lock"})


@cache
def one_device(precision: str | None) -> tuple[str, dict[str, np.ndarray], list[float]]:
    """Where two steps on one device are saved, the state's bits, and the losses of the two steps after."""
    init, step = make("one device", **policy(precision))
    state = init(params(), KEY)
    for index in range(2):
        state, _ = step(state, batch(index))
    directory = mkdtemp()
    save(directory, state, position=2)
    saved, losses = bits(state), []
    for index in (2, 3):
        state, metrics = step(state, batch(index))
        losses.append(float(metrics["loss"]))
    return directory, saved, losses


def policy(precision: str | None) -> dict[str, Any]:
    low = sk.Precision(param=jnp.bfloat16, compute=jnp.bfloat16, master=jnp.float32)
    return {} if precision is None else {"precision": {"master": low, "fp16": "fp16"}[precision]}


@pytest.fixture(autouse=True)
def what_orbax_leaves_behind(request: Any) -> Any:
    """Coroutines of a reading that failed are collected here, where the test expects it, and not in another one."""
    fails = request.node.get_closest_marker("filterwarnings")
    if fails:  # looking through all that tests before it left takes a second
        gc.freeze()
    yield
    if fails:
        gc.collect()


# ---- every plan onto every other


# Every plan is restored further down as well.
CASES = [("fsdp padded", "fp16")]
SWEEP = [(name, None) for name in ROWS if (name, None) not in CASES]
SWEEP += [("zero1", "master"), ("pipeline of chunks", "fp16"), ("unequal stages, fsdp padded", "master")]
NEXT = dict(zip(ROWS, [*ROWS][3:] + [*ROWS][:3], strict=True))
PAIRS = [(name, [NEXT[name]], None) for name in ROWS] + [("unequal stages", ["fsdp padded"], "master")]
FLOATS = ["float16", "bfloat16", "float4_e2m1fn"]
FLOATS += [f"float8_{form}" for form in ("e3m4", "e4m3fn", "e4m3b11fnuz", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]
DTYPES = [*FLOATS, "int2", "int4", "int8", "uint8", "int16", "uint32", "bool", "complex64"]


# proves F61, F62, F63: dropout and unequal weights on
@pytest.mark.parametrize("name, precision", [*CASES, *(pytest.param(*case, marks=pytest.mark.deep) for case in SWEEP)])
def test_training_goes_on_under_every_plan(name, precision, tmp_path):
    directory, saved, losses = one_device(precision)
    init, step = make(name, **policy(precision))
    step(init(params(), KEY), batch(0))
    target = init.abstract(params())
    state, run = restored(directory, target)
    assert (run.step, run.position) == (2, 2)
    assert_laid_out(state, target)
    assert_same(state, saved)
    with Compiles() as compiles:
        state, metrics = step(state, batch(2))
    assert compiles.count == 0
    np.testing.assert_allclose(metrics["loss"], losses[0], rtol=1e-5 if precision is None else 2e-2)

    save(tmp_path, state, position=3)
    again, run = restored(tmp_path, target)
    with Compiles() as compiles:
        ends = [step(each, batch(3)) for each in (state, again)]
    assert compiles.count == 0
    assert_same(ends[0][0], ends[1][0])
    assert float(ends[0][1]["loss"]) == float(ends[1][1]["loss"])
    np.testing.assert_allclose(ends[0][1]["loss"], losses[1], rtol=1e-4 if precision is None else 2e-2)


# proves F62
@pytest.mark.quick("pipeline of chunks-others8-None", "unequal stages, fsdp padded-others10-None", "zero2-others6-None")
@pytest.mark.parametrize(
    "name, others, precision", [*PAIRS, *(pytest.param(name, [*ROWS], None, marks=pytest.mark.deep) for name in ROWS)]
)
def test_every_plan_is_restored_under_every_other(name, others, precision, tmp_path):
    directory, wanted, _ = one_device(precision)
    state, _ = restored(directory, make(name, **policy(precision)).init.abstract(params()))
    save(tmp_path, state)
    with Checkpoints(tmp_path) as checkpoints:
        for other in others:
            target = make(other, **policy(precision)).init.abstract(params())
            moved, _ = checkpoints.restore(target)
            assert_laid_out(moved, target)
            assert_same(moved, wanted)


def test_what_is_stored_knows_no_mesh(tmp_path):  # proves F61, F62
    stored = []
    for name in ("one device", "unequal stages, fsdp padded"):
        init = make(name).init
        save(tmp_path / name, init(params(), KEY))
        record = json.loads((tmp_path / name / "0" / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
        stored.append(record["shardkit"]["leaves"])
    assert stored[0] == stored[1]
    assert stored[0]["key"] == {
        "shape": [],
        "dtype": "key",
        "implementation": "threefry2x32",
        "checksum": int(checksum(jax.random.key_data(KEY))),
    }
    assert stored[0]["params.layers.up"]["shape"] == [8, 8, 12]


# ---- single states


def tiny(tree: Any = None, *, optimizer: Any = None, key: Any = KEY, data: int = 2, **options: Any) -> Any:
    """The init and a state of a model that is never trained."""
    tree = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)} if tree is None else tree
    mesh = sk.make_mesh(jax.devices()[:data], data=data)
    grad_fn = sk.value_and_grad(lambda params, batch, keys: jnp.sum(params["w"]) * jnp.mean(batch))
    plan = sk.fsdp("data", min_size=1)
    init, step = sk.make_train_step(grad_fn, optimizer or optax.sgd(0.5), mesh=mesh, plan=plan, **options)
    return init, step, init(tree, key)


def at(state: Any, step: int) -> Any:
    return state._replace(step=jax.device_put(jnp.int32(step), state.step.sharding))


def test_a_save_holds_what_the_state_was_when_it_was_called(tmp_path):  # proves F61: the next step donates the state
    init, step, state = tiny({"w": jnp.ones((2048, 512)), "b": jnp.ones(3)})
    x = np.ones(8, np.float32)
    with Checkpoints(tmp_path, keep=4) as checkpoints:
        for _ in range(3):
            state, _ = step(state, x)
            wanted = bits(jax.tree.map(jnp.copy, state))  # to look at an array keeps it from being donated
            checkpoints.save(state)
            for _ in range(3):
                state, _ = step(state, x)
            checkpoints.wait()
            old, (state, _) = state, step(state, x)
            assert old.params["w"].is_deleted()
            found, _ = checkpoints.restore(init.abstract({"w": jnp.ones((2048, 512)), "b": jnp.ones(3)}))
            assert_same(found, wanted)


def test_what_a_run_says_comes_back(tmp_path):
    init, _, state = tiny()
    config = {"lr": 1e-3, "names": ["a", None], "nested": {"deep": [1, 2.5, True]}}
    save(tmp_path, at(state, 7), position={"sample": 2**40}, config=config, metrics={"loss": jnp.float32(0.5)})
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == latest_step(tmp_path) == 7
        _, run = checkpoints.restore(init.abstract({"w": jnp.zeros((2, 3)), "b": jnp.ones(3)}))
    assert (run.step, run.position, run.config, run.metrics) == (7, {"sample": 2**40}, config, {"loss": 0.5})
    assert run.versions["shardkit"] == sk.__version__ and run.versions["jax"] == jax.__version__
    assert set(run.versions) == {"shardkit", "jax", "orbax-checkpoint"}


def test_keys_keep_their_implementation(tmp_path):  # proves F63
    noise = optax.add_noise(0.1, 0.5, jax.random.key(3))
    init, _, state = tiny(optimizer=lenient(noise))
    # No step takes such a key, but one's own loop may.
    state = state._replace(key=jax.device_put(jax.random.key(9, impl="rbg"), state.key.sharding))
    save(tmp_path, state)
    found, _ = restored(tmp_path, init.abstract({"w": jnp.zeros((2, 3)), "b": jnp.ones(3)}))
    assert str(jax.random.key_impl(found.key)) == "rbg"
    assert_same(found, state)


def every(dtype: str) -> np.ndarray:
    """All 256, or fewer, bit patterns of a dtype of a byte or less; of larger ones a few numbers."""
    if dtype in FLOATS[2:]:
        return np.arange(2 ** jnp.finfo(dtype).bits, dtype=np.uint8).view(jnp.dtype(dtype))
    if dtype.startswith(("int", "uint")):
        return np.arange(max(jnp.iinfo(dtype).min, -128), min(jnp.iinfo(dtype).max, 255) + 1).astype(jnp.dtype(dtype))
    return np.asarray(jnp.asarray(np.arange(6) % 3, dtype))


def test_every_dtype_empty_arrays_and_strange_names(tmp_path):
    tree: dict[str, Any] = {name: every(name) for name in DTYPES}
    strange = {"../../out": jnp.ones(2), "/etc/x": jnp.ones(2), "a b\n%2F": jnp.ones(2), "": jnp.ones(2)}
    mesh = sk.make_mesh(jax.devices()[:2], data=2)
    whole = NamedSharding(mesh, PartitionSpec())
    laid = jax.device_put({**tree, **strange, "empty": jnp.zeros((0, 3)), "odd": -jnp.zeros(5)}, whole)
    state = sk.TrainState(jnp.int32(1), laid, (), KEY)
    state = jax.tree.map(lambda x: jax.device_put(x, whole), state._replace(key=None))
    directory = tmp_path / "inner" / "checkpoints"
    save(directory, state)
    found, _ = restored(directory, state)  # a state describes itself
    assert_same(found, state)
    for name in DTYPES:
        assert np.asarray(found.params[name]).tobytes() == tree[name].tobytes(), name
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]
    assert names(directory) == ["1"]


@pytest.mark.check  # XLA ends the process, or fails in its own words, where it computes with these, or orbax has none
@pytest.mark.parametrize("dtype", ["int1", "uint1", "uint4", "float8_e4m3"])
def test_dtypes_that_are_not_stored_are_refused(dtype, tmp_path):
    lay = NamedSharding(sk.make_mesh(data=8), PartitionSpec())
    bit = jax.ShapeDtypeStruct((2,), getattr(ml_dtypes, dtype), sharding=lay)
    with value_error(
        f"save: every leaf must have a dtype that XLA and orbax support; leaf 'params.w' is {dtype}. Convert it, for "
        "example to uint8."
    ):
        flatten_state("save", sk.TrainState(jax.ShapeDtypeStruct((), jnp.int32, sharding=lay), {"w": bit}, (), None))


def test_the_newest_and_the_best_are_kept(tmp_path):
    _, _, state = tiny()
    losses = [3.0, 1.0, 2.0, 1.0, float("nan"), 5.0, 4.0, 6.0]
    with Checkpoints(tmp_path / "low", keep=2, best="loss", keep_best=2) as checkpoints:
        for step, loss in enumerate(losses):
            checkpoints.save(at(state, step), metrics={"loss": loss})
            checkpoints.wait()
            assert len(names(tmp_path / "low")) <= 4
    assert names(tmp_path / "low") == ["1", "3", "6", "7"]
    with Checkpoints(tmp_path / "low", keep=1, best="loss", keep_best=1) as checkpoints:  # as another run leaves it
        checkpoints.save(at(state, 8))
    assert names(tmp_path / "low") == ["3", "8"]  # of two alike the newer
    with Checkpoints(tmp_path / "high", keep=1, best="loss", higher_is_better=True) as checkpoints:
        for step, loss in enumerate(losses):
            checkpoints.save(at(state, step), metrics={"loss": loss, "other": 0})
    assert names(tmp_path / "high") == ["7"]
    with Checkpoints(tmp_path / "none", keep=2) as checkpoints:
        for step in range(4):
            checkpoints.save(at(state, step))
    assert names(tmp_path / "none") == ["2", "3"]


def test_only_finished_steps_count(tmp_path):
    init, _, state = tiny()
    target = init.abstract({"w": jnp.zeros((2, 3)), "b": jnp.ones(3)})
    assert latest_step(tmp_path / "nowhere") is None and latest_step(tmp_path) is None
    save(tmp_path, at(state, 3))
    shutil.copytree(tmp_path / "3", tmp_path / "4.orbax-checkpoint-tmp")
    (tmp_path / "notes").mkdir()
    (tmp_path / "05").mkdir()
    (tmp_path / "20251231235959").mkdir()
    (tmp_path / "x.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "9").write_text("no directory")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 3
        assert checkpoints.restore(target)[1].step == 3
        checkpoints.save(at(state, 4))
    theirs = ["05", "20251231235959", "9", "notes", "x.orbax-checkpoint-tmp"]  # what is not ours stays
    assert names(tmp_path) == sorted(["3", "4", *theirs])


def test_what_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    _, _, state = tiny()

    def busy(path: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    def warned(path: Path) -> str:
        return f"save: '{path}' is no longer needed, but could not be deleted: Device or resource busy. Delete it."

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(at(state, 1))
        checkpoints.save(at(state, 2))
        monkeypatch.setattr(shutil, "rmtree", busy)
        with pytest.warns(RuntimeWarning) as told:
            checkpoints.wait()
        assert [str(each.message) for each in told] == [warned(tmp_path / "1")]
    left = tmp_path / "1.orbax-checkpoint-tmp"
    assert latest_step(tmp_path) == 2 and left.is_dir()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(RuntimeWarning) as told:
            checkpoints.save(at(state, 3))
        assert [str(each.message) for each in told] == [warned(left)]
    assert latest_step(tmp_path) == 3


def test_links_go_and_what_they_lead_to_stays(tmp_path):
    _, _, state = tiny()
    directory, archive = tmp_path / "run", tmp_path / "archive"
    save(directory, at(state, 1))
    archive.mkdir()
    (directory / "1").rename(archive / "1")
    (directory / "1").symlink_to(archive / "1")
    (directory / "2.orbax-checkpoint-tmp").symlink_to(archive)
    (directory / "3.orbax-checkpoint-tmp").write_text("no directory")
    with Checkpoints(directory, keep=1) as checkpoints:
        checkpoints.save(at(state, 2))
    assert names(directory) == ["2"]
    assert os.listdir(archive) == ["1"] and latest_step(archive) == 1


def test_copies_that_have_drifted_apart_are_saved_as_one_of_them_was(tmp_path):  # else no later checkpoint is restored
    mesh = sk.make_mesh(data=4, model=2)
    whole = np.arange(64, dtype=np.float32).reshape(8, 8)

    def drifted(spec: PartitionSpec, at: tuple[int, int]) -> jax.Array:
        indices = NamedSharding(mesh, spec).addressable_devices_indices_map(whole.shape)
        off = {device: 100.0 * (device == mesh.devices[at]) for device in indices}
        pieces = [jax.device_put(whole[index] + np.float32(off[device]), device) for device, index in indices.items()]
        return sk.runtime.from_single_device(pieces, mesh, spec, whole.shape)

    good = {str(at): drifted(PartitionSpec(), at) for at in [(2, 1), (3, 0)]}
    good |= {f"model {at}": drifted(PartitionSpec("model"), at) for at in [(1, 0), (2, 1)]}
    first = {"0": drifted(PartitionSpec(), (0, 0)), "model 0": drifted(PartitionSpec("model"), (0, 1))}
    step = jax.device_put(jnp.int32(1), NamedSharding(mesh, PartitionSpec()))
    state = sk.TrainState(step, good | first, (), None)
    save(tmp_path, state)
    found = restored(tmp_path, state)[0].params
    for name in good:
        np.testing.assert_array_equal(found[name], whole)
    np.testing.assert_array_equal(found["0"], whole + 100)
    np.testing.assert_array_equal(found["model 0"], whole + 100 * (np.arange(8) > 3)[:, None])


def test_a_second_save_compiles_nothing(tmp_path):
    init, _ = make("unequal stages, fsdp padded")
    state = init(params(), KEY)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        state = at(state, 1)
        with Compiles() as compiles:
            checkpoints.save(state)
    assert compiles.count == 0


# ---- what is refused


def saved(directory: Path, *steps: int) -> Any:
    """A directory with some steps, and the target of its states."""
    init, _, state = tiny()
    with Checkpoints(directory, keep=9) as checkpoints:
        for step in steps:
            checkpoints.save(at(state, step))
    return init.abstract({"w": jnp.zeros((2, 3)), "b": jnp.ones(3)})


def test_a_step_that_is_not_there(tmp_path):
    target = saved(tmp_path / "some", 2, 10)
    empty = tmp_path / "none"
    assert refused(lambda: restored(empty, target)) == (
        f"restore: '{empty}' has no finished step. Start with init(params, key), or correct the directory."
    )
    assert not empty.exists()  # who only reads makes nothing
    for step in (3, "../some/2"):
        assert refused(lambda: restored(tmp_path / "some", target, step=step)) == (
            f"restore: '{tmp_path / 'some'}' has no finished step {step!r}; it has 2, 10. Pass one of these as step=."
        )
    assert refused(lambda: restored(empty, target, step=1)) == (
        f"restore: '{empty}' has no finished step 1; it has none. Pass one of these as step=."
    )


def test_a_save_that_is_refused(tmp_path):
    saved(tmp_path, 2, 10)
    _, _, state = tiny()
    for step in (1, 10):
        assert refused(lambda: save(tmp_path, at(state, step))) == (
            f"save: a step must be newer than all saved steps; got step {step}, and '{tmp_path}' has step 10. Restore "
            "that step first, delete it, or save to another directory."
        )
    for name, value, reason in (
        ("position", {"at": np.arange(2)}, "Object of type ndarray is not JSON serializable"),
        ("config", tmp_path, "Object of type PosixPath is not JSON serializable"),
        ("config", {1: "a", "1": "b"}, "two keys of a dict become '1' in JSON"),
    ):
        assert refused(lambda: save(tmp_path, at(state, 11), **{name: value})) == (
            f"save: {name} must be a JSON value, of dicts, lists, strings, numbers, booleans and None; {reason}. "
            "Convert it, an array for example with .tolist()."
        )
    for metrics, reason in (
        ({"loss": "high"}, "could not convert string to float: 'high'"),
        ([0.5], "'list' object has no attribute 'items'"),
    ):
        assert refused(lambda: save(tmp_path, at(state, 11), metrics=metrics)) == (
            f"save: metrics must be numbers by name; {reason}. Pass for example {{'loss': 0.5}}."
        )
    _, _, twice = tiny({"w": jnp.ones((2, 3)), "a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}})
    assert refused(lambda: save(tmp_path, at(twice, 11))) == (
        "save: the path of each leaf must be unique; got two leaves at 'params.a.b'. Rename one of them."
    )
    assert names(tmp_path) == ["10", "2"]


def test_arguments_that_are_refused(tmp_path, monkeypatch):
    for call in (Checkpoints, latest_step):
        for address in ("gs://bucket/run", Path("gs://bucket/run")):
            assert refused(lambda: call(address)) == (
                f"{call.__name__}: directory must be a path in a file system; got the URL {str(address)!r}. Mount it, "
                "and pass the path of the mount."
            )
        for name in ("lr[0.1]", "lr*", "why?"):
            assert refused(lambda: call(tmp_path / name / "run")) == (
                f"{call.__name__}: directory must have no *, ? or [ in its path, which orbax takes for a pattern; got "
                f"'{tmp_path / name / 'run'}'. Pass a path without them."
            )
    target = saved(tmp_path, 1)
    bare = target._replace(step=jax.ShapeDtypeStruct((), jnp.int32))
    assert refused(lambda: restored(tmp_path, bare)) == (
        "restore: every leaf must be sharded over a mesh of devices; leaf 'step' has None. Pass the result of init or "
        "init.abstract of make_train_step, over a mesh from make_mesh."
    )
    monkeypatch.setitem(sys.modules, "orbax.checkpoint.experimental.v1", None)
    assert refused(lambda: Checkpoints(tmp_path), ImportError) == (
        "Checkpoints: orbax-checkpoint must be installed; it is not. Run pip install 'shardkit[checkpoint]'."
    )


def test_leaves_that_are_not_those_of_the_checkpoint(tmp_path):  # proves F62
    def described(tree: Any, **options: Any) -> Any:
        return tiny(tree, **options)[0].abstract(tree)

    w, b = jnp.ones((2, 3)), jnp.ones(3)
    where = f"restore: step 4 of '{tmp_path}'"
    target = saved(tmp_path, 4)
    good = bits(restored(tmp_path, target)[0])

    def message(tree: Any, **options: Any) -> str:
        return refused(lambda: restored(tmp_path, described(tree, **options)))

    same = "Restore into a state of the same model, optimizer and precision."
    assert message({"w": w, "b": b, "c": b}) == f"{where} lacks 1 leaf ('params.c'). {same}"
    assert message({"w": w}) == f"{where} has 1 leaf ('params.b') that this state lacks. {same}"
    assert message({"w": w, "c": b}) == (
        f"{where} lacks 1 leaf ('params.c') and has 1 leaf ('params.b') that this state lacks. {same}"
    )
    assert message({"w": w, "b": b}, optimizer=optax.adam(0.1)) == (
        f"{where} lacks 5 leaves ('opt_state.0.count', 'opt_state.0.mu.b', 'opt_state.0.mu.w' and 2 more). "
        f"{same[:-1]}, or load the parameters alone with load_params."
    )
    assert message({"w": w, "b": b}, precision="fp16") == (
        f"{where} lacks 2 leaves ('loss_scale.scale', 'loss_scale.good_steps'). {same}"
    )
    assert message({"w": jnp.ones((2, 4)), "b": b}) == (
        f"{where} has leaf 'params.w' with shape [2, 3]; this state has [2, 4]. Build the state with the saved "
        "configuration."
    )
    assert message({"w": jnp.ones((2, 4)), "b": jnp.ones(4)}) == (
        f"{where} has leaf 'params.b' with shape [3]; this state has [4], and 1 leaf more differs. Build the state "
        "with the saved configuration."
    )
    low = sk.Precision(param=jnp.bfloat16)
    assert message({"w": w, "b": b}, precision=low) == (
        f"{where} has leaf 'params.b' with dtype float32; this state has bfloat16, and 1 leaf more differs. Restore "
        "with the saved precision, and cast afterwards."
    )
    plain = described({"w": w, "b": b})
    keys = jax.ShapeDtypeStruct((3,), KEY.dtype, sharding=plain.params["b"].sharding)
    assert refused(lambda: restored(tmp_path, plain._replace(params=plain.params | {"b": keys}))) == (
        f"{where} has leaf 'params.b' with dtype float32; this state has key. Restore with the saved precision, and "
        "cast afterwards."
    )
    assert_same(restored(tmp_path, target)[0], good)


def files(step: Path) -> list[Path]:
    return sorted(path for path in step.rglob("*") if path.is_file() and path.stat().st_size)


# orbax leaves coroutines behind where its own reading fails
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
def test_damage_is_found_and_named(tmp_path):
    target = saved(tmp_path, 1, 2, 3)
    good = bits(restored(tmp_path, target, step=2)[0])
    step = tmp_path / "3"
    where = f"restore: step 3 of '{tmp_path}'"
    older = "To restore the newest before it, pass step=2."
    untouched = shutil.copytree(step, tmp_path / "copy")

    def damaged(change: Any) -> str:
        shutil.rmtree(step)
        shutil.copytree(untouched, step)
        change()
        return refused(lambda: restored(tmp_path, target))

    def edit(change: Any) -> None:
        path = step / "_CHECKPOINT_METADATA"
        record = json.loads(path.read_text())
        change(record["custom_metadata"])
        path.write_text(json.dumps(record))

    def sealed(record: Any, **changes: Any) -> None:
        record["shardkit"].update(changes)
        record["crc32"] = crc_of(record["shardkit"])

    where += " cannot be restored:"
    foreign = f"{where} its record is damaged, or not from shardkit. {older}"
    unreadable = f"{where} its arrays are damaged. {older}"
    assert damaged(lambda: edit(lambda record: record.clear())) == foreign
    assert damaged(lambda: edit(lambda record: record["shardkit"].update(position=5))) == foreign
    assert damaged(lambda: (step / "_CHECKPOINT_METADATA").write_bytes(b"\xff{")) == foreign
    assert damaged(lambda: os.truncate(step / "_CHECKPOINT_METADATA", 40)) == foreign
    assert damaged(lambda: edit(lambda record: sealed(record, format=0))) == foreign
    for path in files(untouched / "state" / "d"):
        assert damaged(lambda: os.truncate(step / path.relative_to(untouched), 10)) == unreadable
    assert damaged(lambda: (step / "state" / "manifest.ocdbt").unlink()) == unreadable
    manifest = step / "state" / "manifest.ocdbt"
    assert damaged(lambda: manifest.unlink() or manifest.symlink_to(manifest.name)) == (
        f"{where} its arrays cannot be read (Too many levels of symbolic links). {older}"
    )
    leaf = json.loads((step / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]["shardkit"]["leaves"]
    leaf["params.w"]["checksum"] += 1
    assert damaged(lambda: edit(lambda record: sealed(record, leaves=leaf))) == (
        f"{where} the checksum of its leaf 'params.w' differs. {older}"
    )
    assert_same(restored(tmp_path, target, step=2)[0], good)
    for number in ("1", "2"):
        (tmp_path / number / "_CHECKPOINT_METADATA").write_text("")
    assert refused(lambda: restored(tmp_path, target)).endswith(". No older step can be either.")


def test_a_run_goes_on_from_before_the_damage(tmp_path):
    """Its next save was refused: the damaged step was the newest."""
    target = saved(tmp_path, 1, 2, 9)
    (tmp_path / "9" / "_CHECKPOINT_METADATA").write_text("")
    with Checkpoints(tmp_path) as checkpoints:
        assert "pass step=2" in refused(lambda: checkpoints.restore(target))
        state, _ = checkpoints.restore(target, step=2)
        with pytest.warns(RuntimeWarning) as caught:
            checkpoints.save(at(state, 3))
        assert str(caught[0].message) == (
            f"save: this run resumed from step 2 of '{tmp_path}'; the newer step 9 no longer counts, and was renamed "
            "to '9.aside'."
        )
        checkpoints.save(at(state, 9))
        checkpoints.wait()
        assert checkpoints.latest_step() == 9
    assert names(tmp_path) == ["2", "3", "9", "9.aside"]
    assert restored(tmp_path, target)[1].step == 9


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
def test_damaged_steps_are_left_out_where_that_is_meant(tmp_path):
    """A job that restarts by itself would else end at every damaged step; and the damage must stay visible."""
    target = saved(tmp_path, 1, 2, 9)
    good = bits(restored(tmp_path, target, step=1)[0])
    (tmp_path / "9" / "_CHECKPOINT_METADATA").write_text("")
    for path in files(tmp_path / "2" / "state" / "d"):
        os.truncate(path, 10)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(RuntimeWarning) as caught:
            assert checkpoints.run(damaged="older").step == 2  # whose arrays it does not read
            state, run = checkpoints.restore(target, damaged="older")
        start = f"restore: step {{}} of '{tmp_path}' cannot be restored: "
        record = start.format(9) + "its record is damaged, or not from shardkit. Step 2 is taken instead."
        arrays = start.format(2) + "its arrays are damaged. Step 1 is taken instead."
        assert [str(each.message) for each in caught if each.category is RuntimeWarning] == [record, record, arrays]
        assert run.step == 1
        assert_same(state, good)
        with pytest.warns(RuntimeWarning) as caught:
            checkpoints.save(at(state, 3))
        assert ["'2.aside'" in str(caught[0].message), "'9.aside'" in str(caught[1].message)] == [True, True]
    assert names(tmp_path) == ["1", "2.aside", "3", "9.aside"]
    with pytest.raises(DamagedError) as last, Checkpoints(tmp_path) as checkpoints:
        for number in ("1", "3"):
            (tmp_path / number / "_CHECKPOINT_METADATA").write_text("")
        checkpoints.restore(target, damaged="older")
    assert last.value.older is None


@pytest.mark.parametrize("empty", [False, True])
def test_a_directory_that_only_looks_like_a_step(empty, tmp_path):
    """It was taken for the newest step, and nothing could start; and the save of that number was refused."""
    target, looks = saved(tmp_path, 3, 1400), tmp_path / "1400"
    (looks / "_CHECKPOINT_METADATA").unlink()
    if empty:
        shutil.rmtree(looks)
        looks.mkdir()
    lost = [path.relative_to(looks) for path in files(looks)]
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(RuntimeWarning) as caught:
            state, run = checkpoints.restore(target)
        assert run.step == latest_step(tmp_path) == 3
        assert str(caught[0].message) == (
            f"restore: ignored '{looks}', which is not a finished step: it has no _CHECKPOINT_METADATA."
        )
        assert refused(lambda: checkpoints.restore(target, step=1400)) == (
            f"restore: '{tmp_path}' has no finished step 1400; it has 3. Pass one of these as step=."
        )
        with pytest.warns(RuntimeWarning) as caught:
            checkpoints.save(at(state, 1400))
        assert str(caught[0].message) == f"save: '{looks}' is not a finished step, and was renamed to '1400.aside'."
    assert names(tmp_path) == ["1400", "1400.aside", "3"] and restored(tmp_path, target)[1].step == 1400
    assert [path.relative_to(tmp_path / "1400.aside") for path in files(tmp_path / "1400.aside")] == lost


def newer(step: Path) -> None:
    """Makes a step of a format that is not known here, whose checksum is another, too."""
    path = step / "_CHECKPOINT_METADATA"
    record = json.loads(path.read_text())
    record["custom_metadata"]["shardkit"]["format"] = 3
    path.write_text(json.dumps(record))


def test_what_a_newer_version_wrote_is_no_damage(tmp_path):
    """It was taken for damaged, and set aside by the next save of the older version."""
    target = saved(tmp_path, 1, 2, 3)
    newer(tmp_path / "2")
    (tmp_path / "3" / "_CHECKPOINT_METADATA").write_text("")
    message = (
        f"restore: step 2 of '{tmp_path}' cannot be restored: its format is 3; this version of shardkit reads up to "
        "2. Go on with the version that wrote it, or pass an older step."
    )
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(RuntimeWarning, match="Step 2 is taken instead"):
            assert refused(lambda: checkpoints.restore(target, damaged="older")) == message
        assert refused(lambda: checkpoints.run(2, damaged="older")) == message
        state, _ = checkpoints.restore(target, step=1)
        assert refused(lambda: checkpoints.save(at(state, 2))) == (
            f"save: a step must not be set aside if a newer version of shardkit wrote it; '{tmp_path / '2'}' has a "
            "newer format. Go on with that version, or save to another directory."
        )
    assert names(tmp_path) == ["1", "2", "3"]


LOCKING = """
import sys, time
from pathlib import Path
from shardkit.runtime.checkpoint.directory import lock
lock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(600)
"""


def test_two_jobs_in_one_directory(tmp_path):
    _, _, state = tiny()
    save(tmp_path, at(state, 1))
    with Checkpoints(tmp_path) as one, Checkpoints(tmp_path) as other:  # one process may have several
        one.save(at(state, 2))
        one.wait()
        other.save(at(state, 3))
    with subprocess.Popen([sys.executable, "-c", LOCKING, tmp_path], stdout=subprocess.PIPE) as job:
        try:
            assert job.stdout.readline() == b"locked\n"
            message = refused(lambda: save(tmp_path, at(state, 4)), RuntimeError)
        finally:
            job.kill()
    found = re.fullmatch(
        rf"save: a directory must be written by one job; another job writes to '{tmp_path}' \(process {job.pid} on "
        r"'(.*)' since '[-\d: ]+'\)\. End that job, or save to another directory\.",
        message,
    )
    assert found and found[1] == socket.gethostname()
    save(tmp_path, at(state, 4))  # it is dead
    assert names(tmp_path) == ["2", "3", "4"]


def test_a_link_in_place_of_a_file_of_ours(tmp_path):
    """What the lock led to was overwritten by the name of the job."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    target = saved(run, 1, 2)
    state, _ = restored(run, target)
    victim.write_text("kept")
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(victim)
    assert refused(lambda: save(run, at(state, 3)), RuntimeError) == (
        f"save: '{run}' cannot be locked: '{run}/.lock' is a symbolic link, which is not followed. Save to "
        "another directory."
    )
    assert victim.read_text() == "kept" and names(run) == ["1", "2"]
    record = run / "2" / "_CHECKPOINT_METADATA"
    record.rename(victim)
    record.symlink_to(victim)
    assert refused(lambda: restored(run, target)) == (
        f"restore: step 2 of '{run}' cannot be restored: '{record}' is a symbolic link, which is not followed. To "
        "restore the newest before it, pass step=1."
    )


def test_what_says_nothing_of_the_files_and_too_little_memory_are_no_damage(tmp_path, monkeypatch):
    target = saved(tmp_path, 1, 2)
    text = "UNAVAILABLE: Error opening [os_error_code='24']"
    for error in (OSError(errno.EMFILE, "Too many open files"), ValueError(text)):
        monkeypatch.setattr(reading, "load_arrays", Mock(side_effect=error))
        assert refused(lambda: restored(tmp_path, target), RuntimeError) == (
            f"restore: step 2 of '{tmp_path}' could not be read: Too many open files. The step may be intact: fix the "
            "cause, then restore again."
        )
    for error in (MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")):
        monkeypatch.setattr(reading, "load_arrays", Mock(side_effect=error))
        with pytest.raises(type(error)) as caught:
            restored(tmp_path, target)
        assert caught.value is error


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("flips", [8, pytest.param(300, marks=pytest.mark.deep)])
def test_no_flipped_bit_goes_unseen(flips, tmp_path):  # most of them orbax loads without a word
    target = saved(tmp_path, 1)
    good = bits(restored(tmp_path, target)[0])
    draw = np.random.default_rng(0)
    found = 0
    for _ in range(flips):
        path = draw.choice(files(tmp_path / "1"))
        content = path.read_bytes()
        changed = bytearray(content)
        changed[draw.integers(len(changed))] ^= 1 << draw.integers(8)
        path.write_bytes(changed)
        try:
            state, run = restored(tmp_path, target)
        except ValueError as error:
            assert str(error).startswith(f"restore: step 1 of '{tmp_path}' cannot be restored: ")
            found += 1
        else:  # a file that is not needed
            assert_same(state, good)
            assert (run.step, run.position) == (1, None)
        path.write_bytes(content)
    assert found > flips / 8  # a restore reads about a quarter of the files


# ---- what comes in between


def test_an_exit_code_does_not_hide_a_save_that_failed(tmp_path):
    _, _, state = tiny()

    def preempted() -> None:
        with Checkpoints(tmp_path / "run") as checkpoints:
            checkpoints.save(at(state, 1))
            checkpoints.wait()
            checkpoints._saving = 2, Mock(result=Mock(side_effect=TimeoutError()))
            sys.exit(75)

    assert refused(preempted, RuntimeError) == (
        f"save: step 2 could not be written to '{tmp_path / 'run'}': TimeoutError. Step 1, the newest finished, is "
        "intact; free or repair the disk, then save again."
    )
    with pytest.raises(SystemExit) as caught, Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(at(state, 2))
        sys.exit(75)
    assert caught.value.code == 75 and latest_step(tmp_path / "run") == 2


def test_a_wait_that_is_interrupted_is_taken_up_again(tmp_path):
    _, _, state = tiny()
    with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(at(state, 1))
        response = checkpoints._saving[1]
        result = Mock(side_effect=[KeyboardInterrupt, response.result()])
        checkpoints._saving = 1, Mock(result=result)
        checkpoints.wait()
    assert result.call_count == 2


def test_versions_that_are_not_known_stop_no_save(tmp_path, monkeypatch):  # of a source tree, for example
    monkeypatch.setattr(metadata, "version", Mock(side_effect=metadata.PackageNotFoundError))
    saved(tmp_path, 1)
    assert set(Checkpoints(tmp_path).run().versions.values()) == {"not installed"}


# ---- disks


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MB, which only root can make."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small disk can be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:coroutine:RuntimeWarning")
def test_a_full_disk(small_disk):
    noise = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(16, 3))), "b": jnp.ones(3)}
    init, _, state = tiny(noise)
    save(small_disk, at(state, 1))
    good = bits(restored(small_disk, init.abstract(noise))[0])
    rows = np.random.default_rng(0).normal(size=(1024, 512))
    _, _, large = tiny({"w": jnp.asarray(rows, jnp.float32), "b": jnp.ones(3)})
    wanted = (
        f"save: step 2 could not be written to '{small_disk}': No space left on device. "
        "Step 1, the newest finished, is intact; free or repair the disk, then save again."
    )
    assert refused(lambda: save(small_disk, at(large, 2)), RuntimeError) == wanted
    with Checkpoints(small_disk) as checkpoints:
        checkpoints.save(at(large, 2))
        assert refused(lambda: checkpoints.save(at(state, 3)), RuntimeError) == wanted  # the next save tells
        assert checkpoints.latest_step() == 1
        checkpoints.save(at(state, 3))  # clears away what was left, and goes on
    assert names(small_disk) == ["1", "3"]
    assert_same(restored(small_disk, init.abstract(noise), step=1)[0], good)
    with pytest.raises(ZeroDivisionError) as caught, Checkpoints(small_disk) as checkpoints:
        checkpoints.save(at(large, 4))
        1 / 0  # noqa: B018
    assert caught.value.__notes__[0].startswith(f"save: step 4 could not be written to '{small_disk}': No space")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with Checkpoints(small_disk, read_only=True) as checkpoints:  # who reads needs no room
        assert checkpoints.restore(init.abstract(noise))[1].step == 3
    before = set(threading.enumerate())
    assert refused(lambda: save(small_disk, at(state, 5))) == (
        f"Checkpoints: directory must be writable; '{small_disk}' is not writable. Pass another directory, or "
        "read_only=True to restore only."
    )
    left = {thread.name.partition("_")[0] for thread in set(threading.enumerate()) - before}
    assert left <= {"asyncio"}  # idle; one of a save would keep the process from ending for 20 minutes


def test_who_reads_alone_does_not_save_and_a_directory_that_cannot_be(tmp_path):
    target = saved(tmp_path, 1)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.restore(target)[1].step == 1
        assert refused(lambda: checkpoints.save(at(tiny()[2], 2))) == (
            f"save: '{tmp_path}' was opened with read_only=True. Open it without, to save."
        )
    assert names(tmp_path) == ["1"]
    _, _, state = tiny()
    (tmp_path / "file").write_text("mine")
    for directory in (tmp_path / "file", tmp_path / "file" / "x"):
        assert refused(lambda: save(directory, state)) == (
            f"Checkpoints: directory must be writable; '{tmp_path / 'file'}' is not a directory. Pass another "
            "directory, or read_only=True to restore only."
        )
    assert (tmp_path / "file").read_text() == "mine"


# ---- kills


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.deep)])
def test_a_killed_run_goes_on_as_if_it_had_not_been(kills, tmp_path):  # proves F61, F63
    def run(name: str, **what: Any) -> subprocess.Popen:
        options = {"row": "one device", "directory": str(tmp_path / name), "report": str(tmp_path / "report")}
        return start(tmp_path, **(options | what))

    def report() -> Any:
        return json.loads((tmp_path / "report").read_text())

    directory = tmp_path / "killed"
    draw = np.random.default_rng(0)
    for kill in range(kills):
        before = latest_step(directory)
        child = run("killed", steps=10**6)
        try:
            wait_until(lambda: (latest_step(directory) or 0) > (before or 0), child, tmp_path)
            if kill % 2:  # in the middle of a save, else anywhere
                wait_until(lambda: any(directory.glob("*tmp*")), child, tmp_path)
            time.sleep(draw.uniform(0, 0.05))
        finally:
            child.kill()
            child.wait()
        assert report()["resumed"] == before
    last = latest_step(directory)
    assert run("killed", steps=last + 2).wait(300) == 0, (tmp_path / "output").read_text()
    init, step = make("one device")
    state, losses = init(params(), KEY), []
    for position in range(last + 2):
        state, metrics = step(state, batch(position))
        losses.append(float(metrics["loss"]))
    assert report()["resumed"] == last
    assert report()["losses"] == losses[last:]
    assert report()["ended"] == digests(state)
    assert sorted(map(int, names(directory))) == [last, last + 1, last + 2]  # what was cut off is cleared away


def test_a_path_through_the_folder_above_is_read_again(tmp_path, monkeypatch):
    """It was written, and could not be read: "its arrays are damaged"."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    init, _ = make("one device")
    state = init(params(), KEY)
    save("../saved", state, position=1)
    found, _ = restored("../saved", state)
    assert_same(found, state)
    assert latest_step(tmp_path / "saved") == 0
