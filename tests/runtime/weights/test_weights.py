"""Parameters alone: loaded by name onto every plan, and saved in original form for other libraries, bit by bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import shardkit as sk
from shardkit.meshes.layout import path_name
from shardkit.runtime import Checkpoints, StoredAs, load_params, save_params
from shardkit.runtime.checkpoint import reading
from shardkit.runtime.weights import files
from support.checkpoint_rows import KEY, ROWS, make, params

NEXT = dict(zip(ROWS, [*ROWS][3:] + [*ROWS][:3], strict=True))


@cache
def natural(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The parameters by name, each element another number."""
    leaves = jax.tree_util.tree_leaves_with_path(params())
    rng = np.random.default_rng(0)
    return {path_name(path): rng.normal(size=x.shape).astype(dtype) for path, x in leaves}


def like(row: str, dtype: Any = jnp.float32) -> Any:
    """Shapes, dtypes and layouts under a plan."""
    policy = sk.Precision(param=dtype, compute=dtype)
    return make(row, **({} if dtype == jnp.float32 else {"precision": policy})).init.abstract(params()).params


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert found[name].tobytes() == x.tobytes(), name


# proves F62: bit for bit through files, from every plan onto another
@pytest.mark.quick("fsdp", "one device", "fsdp padded", "pipeline of chunks", "unequal stages, fsdp padded", "tp")
@pytest.mark.parametrize("row", ROWS)
def test_every_plan_is_saved_and_loaded_under_another(row, tmp_path):
    save_file(natural(), tmp_path / "first.safetensors")
    loaded = load_params(tmp_path / "first.safetensors", like(row))
    save_params(tmp_path / "second.safetensors", loaded)
    again = load_params(tmp_path / "second.safetensors", like(NEXT[row]))
    save_params(tmp_path / "third.safetensors", again)
    back = load_params(tmp_path / "third.safetensors", like(row))
    same(load_file(tmp_path / "second.safetensors"), natural())
    same(load_file(tmp_path / "third.safetensors"), natural())
    for x, y, described in zip(*map(jax.tree.leaves, (loaded, back, like(row))), strict=True):
        np.testing.assert_array_equal(x, y)
        assert (x.shape, x.dtype, x.sharding) == (described.shape, described.dtype, described.sharding)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("row", ROWS)
def test_every_plan_is_saved_and_loaded_under_every_other(row, dtype, tmp_path):
    save_file(natural(dtype), tmp_path / "first.safetensors")
    loaded = load_params(tmp_path / "first.safetensors", like(row, dtype))
    save_params(tmp_path / "all", loaded)
    for other in ROWS:
        save_params(tmp_path / f"{other}.safetensors", load_params(tmp_path / "all", like(other, dtype)))
        same(load_file(tmp_path / f"{other}.safetensors"), natural(dtype))


# That loading and saving undo each other does not show that the stored form is that of a step.
def test_what_is_loaded_lies_as_init_lays_it(tmp_path):
    save_file(natural(), tmp_path / "a.safetensors")
    init = make("unequal stages, fsdp padded").init
    tree = jax.tree_util.tree_map_with_path(lambda path, _: natural()[path_name(path)], params())
    state = init(tree, KEY)
    loaded = load_params(tmp_path / "a.safetensors", init.abstract(params()).params)
    assert jax.tree.structure(loaded) == jax.tree.structure(state.params)
    for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_bfloat16_keeps_its_bits(tmp_path):
    wanted = natural(jnp.bfloat16)
    save_file(wanted, tmp_path / "a.safetensors")
    loaded = load_params(tmp_path / "a.safetensors", like("fsdp padded", jnp.bfloat16))
    for name in ("b.safetensors", "b"):
        save_params(tmp_path / name, loaded)
        again = load_params(tmp_path / name, like("pipeline of chunks", jnp.bfloat16))
        save_params(tmp_path / f"{name}.again.safetensors", again)
        same(load_file(tmp_path / f"{name}.again.safetensors"), wanted)
    wide = load_params(tmp_path / "b", like("dp"), cast=True)
    np.testing.assert_array_equal(wide["layers"]["up"], wanted["layers.up"].astype(np.float32))


def test_a_master_copy_is_saved_as_the_parameters_are(tmp_path):
    plan = sk.zero1("data", min_size=1, uneven="pad")
    init, _ = sk.make_train_step(
        sk.value_and_grad(lambda params, batch, keys: 0.0),
        optax.sgd(0.1),
        mesh=sk.make_mesh(data=8),
        plan=plan,
        precision=sk.Precision(param=jnp.bfloat16, master=jnp.float32),
    )
    w = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    state = init({"w": w}, KEY)
    save_params(tmp_path / "low.safetensors", state.params)
    save_params(tmp_path / "master.safetensors", state.opt_state.copy)
    same(load_file(tmp_path / "low.safetensors"), {"w": w.astype(jnp.bfloat16)})
    same(load_file(tmp_path / "master.safetensors"), {"w": w})


# Of a run the parameters alone, under a plan of other stages, padding and mesh, without an optimizer.
def test_a_runs_parameters_without_its_optimizer(tmp_path, monkeypatch):
    save_file(natural(), tmp_path / "a.safetensors")
    init = make("fsdp padded").init
    state = init(load_params(tmp_path / "a.safetensors", init.abstract(params()).params), KEY)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state)
    asked = []
    load = reading.load
    monkeypatch.setattr(reading, "load", lambda path, wanted: asked.append({*wanted}) or load(path, wanted))
    for row, step in (("unequal stages", None), ("tp", 0)):
        found = load_params(tmp_path / "run", like(row), step=step)
        save_params(tmp_path / f"{row}.safetensors", found)
        same(load_file(tmp_path / f"{row}.safetensors"), natural())
    assert asked == [{f"params.{name}" for name in natural()}] * 2

    head = {name: x for name, x in like("dp").items() if name != "layers"}
    found = load_params(tmp_path / "run", head, step=0, partial=True)
    assert found.keys() == head.keys() and asked[2] == {f"params.{name}" for name in head}


def test_each_device_reads_its_own_slices(tmp_path, monkeypatch):
    mesh = sk.make_mesh(data=2, model=4)
    w = np.arange(6 * 8 * 4, dtype=np.float32).reshape(6, 8, 4)
    save_file({f"w.{i}": w[i].reshape(8, 4).T.copy() for i in range(6)}, tmp_path / "a.safetensors")
    read = []
    slices = files.Safetensors.read
    monkeypatch.setattr(files.Safetensors, "read", lambda self, *which: (read.append(which), slices(self, *which))[1])
    target = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=NamedSharding(mesh, PartitionSpec("data", "model")))}
    found = load_params(tmp_path / "a.safetensors", target, names={"w": StoredAs("w.{}", (2, 1))})
    np.testing.assert_array_equal(found["w"], w)
    wanted = {(f"w.{i}", ((0, 4), (2 * part, 2 * part + 2))) for i in range(6) for part in range(4)}
    assert sorted(read) == sorted(wanted)  # each element once


def test_dims_that_a_tensor_merges_may_be_split_anywhere(tmp_path):
    mesh = sk.make_mesh(data=2, model=4)
    w = np.arange(2 * 6 * 4 * 8, dtype=np.float32).reshape(2, 6, 4, 8)  # L D H K
    names = lambda path: StoredAs("layers.{}." + path, ((2, 3), 1))  # noqa: E731
    for spec in (PartitionSpec(None, "data", "model"), PartitionSpec("data", None, None, "model"), PartitionSpec()):
        placed = jax.device_put({"q": w}, NamedSharding(mesh, spec))
        file = tmp_path / f"{len(spec)}.safetensors"
        save_params(file, placed, names=names)
        for i in range(2):
            np.testing.assert_array_equal(load_file(file)[f"layers.{i}.q"], w[i].transpose(1, 2, 0).reshape(32, 6))
        np.testing.assert_array_equal(load_params(file, placed, names=names)["q"], w)


def test_scalars_empty_leaves_and_strange_names(tmp_path):
    arrays = {"scalar": np.float32(3), "empty": np.zeros((0, 3), np.float32), "int": np.arange(3, dtype=np.int8)}
    arrays |= {"../../out": np.ones(2, np.float32), "file": np.ones(2, np.float32), "a {} %2F.npy": np.ones(2, bool)}
    whole = NamedSharding(sk.make_mesh(data=8), PartitionSpec())
    placed = jax.device_put(arrays | {"list": [np.ones(2, np.float32), np.zeros(2, np.float32)]}, whole)
    for name in ("a.safetensors", "a"):
        save_params(tmp_path / "in" / name, placed)
        found = load_params(tmp_path / "in" / name, placed)
        assert jax.tree.structure(found) == jax.tree.structure(placed)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(placed), strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape) and x.tobytes() == y.tobytes()
    assert load_file(tmp_path / "in" / "a.safetensors").keys() == {*arrays, "list.0", "list.1"}
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    del placed["empty"], placed["a {} %2F.npy"], placed["../../out"]
    with Checkpoints(tmp_path / "in" / "run") as checkpoints:
        checkpoints.save(sk.TrainState(jax.device_put(jnp.int32(1), whole), placed, (), None))
    assert load_params(tmp_path / "in" / "run", {}, partial=True) == {}


def test_a_directory_of_several_files(tmp_path):
    def names(path):
        return f"{path}.{{}}" if path.startswith("layers.") else path

    save_file(natural(), tmp_path / "a.safetensors")
    loaded = load_params(tmp_path / "a.safetensors", like("tp"))
    save_params(tmp_path / "out", loaded, names=names, file_bytes=300)  # layers of one leaf are in several files
    parts = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(parts) > 2 and parts[0] == f"model-00001-of-{len(parts):05d}.safetensors"
    found = load_params(tmp_path / "out", like("dp"), names=names)
    save_params(tmp_path / "b.safetensors", found)
    same(load_file(tmp_path / "b.safetensors"), natural())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*parts, "model.safetensors.index.json"}


def test_evaluation_says_how_its_parameters_lie(tmp_path):
    plan = sk.fsdp("data", min_size=1, uneven="pad")
    evaluate = sk.make_eval_step(
        lambda params, batch, keys: jnp.mean(batch @ params["w"]), mesh=sk.make_mesh(data=8), plan=plan
    )
    save_file({"w": np.arange(3, dtype=np.float32)}, tmp_path / "w.safetensors")
    loaded = load_params(tmp_path / "w.safetensors", evaluate.abstract({"w": jnp.ones(3)}))
    assert loaded["w"].array.shape == (8,)
    assert float(evaluate(loaded, np.ones((8, 3), np.float32))["loss"]) == 3
    made = evaluate.abstract(lambda key: {"w": jax.random.normal(key, (3,))})
    assert jax.tree.leaves(made) == jax.tree.leaves(evaluate.abstract({"w": jnp.ones(3)}))
