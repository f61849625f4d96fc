"""Files that are not what they must be: one sentence each, and no header that lies is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import shardkit as sk
from shardkit.runtime import StoredAs, load_params, save_params
from shardkit.runtime.checkpoint.checkpoints import Checkpoints
from shardkit.steps.state import TrainState


def refused(call: Any, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def laid(**shapes: Any) -> Any:
    """Descriptions of float32 leaves, of which dim 0 is split if it divides."""
    mesh = sk.make_mesh(data=8)

    def one(shape: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = shape if isinstance(shape[-1], str) else (shape, "float32")
        spec = PartitionSpec("data") if shape and shape[0] % 8 == 0 else PartitionSpec()
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    return {name: one(shape) for name, shape in shapes.items()}


def placed(**arrays: Any) -> Any:
    return jax.device_put(arrays, NamedSharding(sk.make_mesh(data=8), PartitionSpec()))


def f32(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def write(path: Path, **arrays: Any) -> Path:
    save_file(arrays, path)
    return path


def test_names_shapes_and_dtypes_that_differ(tmp_path):
    path = write(tmp_path / "a.safetensors", w=f32(8, 2), b=f32(3), n=np.ones(2, np.int32))
    where = f"load_params: '{path}'"

    def message(like: Any, **options: Any) -> str:
        return refused(lambda: load_params(path, like, **options))

    good = laid(w=(8, 2), b=(3,))
    assert message(good) == (f"{where} has 1 leaf ('n') that like lacks. Pass partial=True to leave them out.")
    assert load_params(path, good, partial=True)["b"].shape == (3,)
    assert message(laid(w=(8, 2), b=(3,), n=((2,), "int32"), c=(3,), d=(3,))) == (
        f"{where} lacks 2 leaves ('c', 'd'). Pass names= if they have other names there."
    )
    assert message(laid(w=(8, 2), v=(3,))) == (
        f"{where} lacks 1 leaf ('v') and has 2 leaves ('b', 'n') that like lacks. Pass names= if they have other names "
        "there."
    )
    assert message(laid(w=(2, 8), b=(3,)), partial=True) == (
        f"{where} has tensor 'w' of shape [8, 2]; leaf 'w' needs [2, 8]. Build the parameters with the sizes of the "
        "file."
    )
    assert message(laid(w=((8, 2), "bfloat16"), b=(3,)), partial=True) == (
        f"{where} has tensor 'w' of dtype float32; leaf 'w' is bfloat16. Pass cast=True to convert it."
    )
    assert load_params(path, laid(w=((8, 2), "bfloat16"), b=(3,)), partial=True, cast=True)["w"].dtype == jnp.bfloat16
    assert message(laid(w=(8, 2), b=(3,), n=(2,)), cast=True) == (
        f"{where} has tensor 'n' of dtype int32; leaf 'n' is float32. Convert the file."
    )


def test_names_that_are_no_names(tmp_path):
    path = write(tmp_path / "a.safetensors", w=f32(8, 2))
    like = laid(w=(8, 2))

    def message(names: Any, error: type[Exception] = ValueError) -> str:
        return refused(lambda: load_params(path, like, names=names), error)

    assert message({"v": "w"}) == (
        "load_params: names must be for leaves of the parameters, 1 leaf ('w'); got 1 leaf ('v') besides. "
        "Leave them out."
    )
    assert message(lambda name: 3, TypeError) == (
        "load_params: names must give a string or a StoredAs for each leaf; got 3 for 'w'. Return the path itself to "
        "keep it."
    )
    for dims in ((0,), (0, 0), (0, (1, 2)), "x", (0, 1, ())):
        assert message({"w": StoredAs("x", dims)}) == (
            "load_params: a StoredAs must count some of the first dims of its leaf in its name, and have the others "
            f"once in dims; got 'x' and dims={dims} for leaf 'w' of shape [8, 2]. Write at most 2 {{}} in the name, "
            "and leave dims out."
        )
    assert "got 'x.{}.{}.{}' and dims=None" in message({"w": "x.{}.{}.{}"})
    both = laid(w=(8, 2), v=(8, 2))
    assert refused(lambda: load_params(path, both, names=lambda name: "x")) == (
        "load_params: each tensor must have one name; leaves 'v' and 'w' are both called 'x'. Give one of them another."
    )
    assert load_params(write(tmp_path / "b.safetensors", a=f32(8, 2)), like, names={"w": "a"})["w"].shape == (8, 2)


def test_paths_that_hold_no_parameters(tmp_path):
    like = laid(w=(8, 2))
    rule = (
        "load_params: path must be a run's directory of checkpoints, a .safetensors file or index, or a directory with "
        "one of these; "
    )
    (tmp_path / "some.txt").write_text("")
    for path, what in (("none", "is not there"), ("some.txt", "is none of them"), ("", "is none of them")):
        assert (
            refused(lambda: load_params(tmp_path / path, like))
            == f"{rule}'{tmp_path / path}' {what}. Pass one of them."
        )
    path = write(tmp_path / "a.safetensors", w=f32(8, 2))
    assert refused(lambda: load_params(path, like, step=3)) == (
        f"load_params: step must be for a run's directory of checkpoints; got 3 for '{path}'. Leave it out."
    )
    state = TrainState(placed(step=jnp.int32(2))["step"], placed(w=f32(8, 2)), (), None)
    assert refused(lambda: load_params(path, state)) == (
        "load_params: like must be the parameters; got a TrainState. Pass like.params, or restore all of it with "
        "Checkpoints."
    )
    assert refused(lambda: load_params(path, {"w": f32(8, 2)})) == (
        "load_params: every leaf must be sharded over a mesh of devices; leaf 'w' has None. Pass the result of init or "
        "init.abstract of make_train_step, over a mesh from make_mesh."
    )
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state)
    assert refused(lambda: load_params(tmp_path / "run", like, step=1)) == (
        f"load_params: '{tmp_path / 'run'}' has no finished step 1; it has 2. Pass one of these as step=."
    )
    assert refused(lambda: load_params(tmp_path / "run", like, names={"w": "v"})) == (
        f"load_params: names must be for files of other libraries; '{tmp_path / 'run' / '2'}' is a step of a run. "
        "Leave them out, and call the leaves of like as the run does."
    )


def test_what_is_not_saved(tmp_path):
    params = placed(w=f32(8, 2))

    def message(path: Any, given: Any = params, error: type[Exception] = ValueError, **options: Any) -> str:
        return refused(lambda: save_params(tmp_path / path, given, **options), error)

    save_params(tmp_path / "a.safetensors", params)
    save_params(tmp_path / "dir", params)
    for path, there in (("a.safetensors", "a.safetensors"), ("dir", "dir/model-00001-of-00001.safetensors")):
        assert message(path) == (
            f"save_params: path must have no parameters yet; '{tmp_path / there}' exists. Delete it, or pass another "
            "path."
        )
    assert message("x", placed(w=np.ones(8, ml_dtypes.float8_e4m3fn))) == (
        "save_params: a dtype must be one that safetensors files have; leaf 'w' is float8_e4m3fn. Convert it."
    )
    assert message("x", placed(__metadata__=np.ones(8, "f"))) == (  # was written, and could not be read
        "save_params: no tensor of safetensors may be called '__metadata__', which is theirs; leaf '__metadata__' is. "
        "Pass for example names={'__metadata__': 'metadata'}."
    )
    assert message("x", laid(w=(8, 2))) == (
        "save_params: every leaf must be an array; leaf 'w' is only its shape. Pass state.params, and not what "
        "init.abstract returns."
    )
    (tmp_path / "file").write_text("")
    assert message("file/x.safetensors", error=RuntimeError) == (
        f"save_params: '{tmp_path / 'file' / 'x.safetensors'}' could not be written: File exists. Free or repair the "
        "disk, then save again."
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "dir", "file"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_link_in_place_of_a_file_of_ours(name, tmp_path):
    """What it led to was overwritten."""
    path, victim = tmp_path / "weights", tmp_path / "victim"
    path.mkdir()
    victim.write_text("kept")
    alone = not name.endswith(".json")
    (path / f"{name}.unfinished").symlink_to(victim)
    with pytest.raises(RuntimeError) as caught:
        save_params(path / name if alone else path, placed(w=np.ones(8, np.float32)))
    assert str(caught.value) == (
        f"save_params: '{path / name}' could not be written: '{path / name}.unfinished' is a symbolic link, which is "
        "not followed. Free or repair the disk, then save again."
    )
    assert victim.read_text() == "kept"


def test_an_index_that_leads_elsewhere(tmp_path):
    write(tmp_path / "out.safetensors", w=f32(8, 2))
    inner = tmp_path / "in"
    inner.mkdir()
    write(inner / "a.safetensors", w=f32(8, 2))
    index = inner / "model.safetensors.index.json"
    where, remedy = f"load_params: '{index}' cannot be read:", "Copy or export it again."

    def message(text: str) -> str:
        index.write_text(text)
        return refused(lambda: load_params(inner, laid(w=(8, 2))))

    for file in ("../out.safetensors", str(tmp_path / "out.safetensors"), 3, "a.txt", ""):
        assert message(json.dumps({"weight_map": {"w": file}})) == (
            f"{where} tensor 'w' must be in a .safetensors file beside it, and is in {file!r}. {remedy}"
        )
    assert message(json.dumps({"weight_map": {"v": "a.safetensors"}})) == (
        f"{where} it says that 'a.safetensors' has the tensor 'v', which it lacks. {remedy}"
    )
    for text in ("", "{", "[]", "{}", '{"weight_map": 3}', "[" * 100_000, "\udcff"):
        index.write_bytes(text.encode(errors="surrogateescape"))
        assert refused(lambda: load_params(inner, laid(w=(8, 2)))) == (
            f"{where} it is not the JSON of an index, with a weight_map. {remedy}"
        )
    gone = inner / "b.safetensors"
    assert message(json.dumps({"weight_map": {"w": gone.name}})) == (
        f"load_params: '{gone}' cannot be read: there is no such file. {remedy}"
    )


def header(tensors: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(shape: Any = (8, 2), dtype: Any = "F32", offsets: Any = (0, 64)) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": [*shape], "data_offsets": [*offsets]}}


LIES = {
    "a length of 2^63": header(entry(), bytes(64), 2**63),
    "a length of all": header(entry(), bytes(64), 10**7),
    "nothing": b"",
    "four bytes": b"\x01\0\0\0",
    "no JSON": header(b"\xff{", bytes(64)),
    "deep JSON": header(b'{"w":' + b"[" * 90_000, bytes(64)),
    "data beyond the end": header(entry(offsets=(0, 2**40)), bytes(64)),
    "a large shape": header(entry(shape=(2**40, 2**40)), bytes(64)),
    "a shape that overflows": header(entry(shape=(2**62, 8)), bytes(64)),
    "a negative size": header(entry(shape=(-8, -2)), bytes(64)),
    "offsets backwards": header(entry(offsets=(64, 0)), bytes(64)),
    "another dtype": header(entry(dtype="F31"), bytes(64)),
    "a dtype that is none": header(entry(dtype=7), bytes(64)),
    "more data": header(entry(), bytes(99)),
    "shared data": header(entry() | {"v": entry()["w"]}, bytes(64)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(lie, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(LIES[lie])
    message = refused(lambda: load_params(path, laid(w=(8, 2))))
    assert message.startswith(f"load_params: '{path}' ") and "\n" not in message


def test_damaged_bytes_crash_nothing(tmp_path):
    """Any error but a sentence of shardkit's fails here; so does a header that is believed about sizes."""
    rng, like = np.random.default_rng(0), laid(w=(8, 2), b=(3,))
    whole = write(tmp_path / "a.safetensors", w=f32(8, 2), b=f32(3)).read_bytes()
    path, unharmed = tmp_path / "b.safetensors", 0
    for _ in range(150):
        data = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 4)):
            data[at] = rng.integers(256)
        path.write_bytes(data[: rng.integers(len(data))] if rng.random() < 0.2 else data)
        try:
            found = load_params(path, like)
        except ValueError as error:
            assert str(error).startswith("load_params: ") and "\n" not in str(error), error
        else:
            assert (found["w"].shape, found["b"].shape) == ((8, 2), (3,))
            unharmed += 1
    assert unharmed < 120


def test_without_the_package(tmp_path, monkeypatch):
    path = write(tmp_path / "a.safetensors", w=f32(8, 2))
    monkeypatch.setitem(__import__("sys").modules, "safetensors.numpy", None)
    text = ": safetensors must be installed for its files; it is not. Run pip install 'shardkit[safetensors]'."
    assert refused(lambda: load_params(path, laid(w=(8, 2))), ImportError) == f"load_params{text}"
    assert refused(lambda: save_params(tmp_path / "b", placed(w=f32(8, 2))), ImportError) == f"save_params{text}"
    assert load_file(path)["w"].shape == (8, 2)
