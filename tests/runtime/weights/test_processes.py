"""Several processes, each of which reads what its devices hold and writes its share."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardkit.meshes.layout import path_name
from support import jobs
from support.checkpoint_rows import params

ROWS = ("fsdp padded", "unequal stages, fsdp padded")


@pytest.mark.deep
@pytest.mark.parametrize("rows", [ROWS, ROWS[::-1]])
def test_two_processes_load_and_save_their_shares(rows, tmp_path):
    rng = np.random.default_rng(0)
    leaves = jax.tree_util.tree_leaves_with_path(params())
    wanted = {path_name(path): rng.normal(size=x.shape).astype(np.float32) for path, x in leaves}
    save_file(wanted, tmp_path / "a.safetensors")
    ended = jobs.run("weights.py", tmp_path, *rows, processes=2, devices=4, timeout=120)
    assert [each.code for each in ended] == [0, 0], [each.output[-3000:] for each in ended]

    def same(found):
        assert found.keys() == wanted.keys()
        assert all(found[name].tobytes() == x.tobytes() for name, x in wanted.items())

    saw = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for each in saw:
        assert each["read"] <= each["all"], saw  # once for all replicas; padded leaves whole
    parts = [load_file(tmp_path / "files" / f"model-{part}-of-00002.safetensors") for part in ("00001", "00002")]
    assert all(parts)
    same(parts[0] | parts[1])
    same(load_file(tmp_path / "one.safetensors"))
    index = json.loads((tmp_path / "layers" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({*index.values()}) > 4
    apart = {name: load_file(tmp_path / "layers" / file)[name] for name, file in index.items()}
    stacks = {name: 8 for name in wanted if name.startswith("layers.")}
    same(
        {name: np.stack([apart[f"{name}.{i}"] for i in range(count)]) for name, count in stacks.items()}
        | {name: apart[name] for name in wanted if name not in stacks}
    )
    assert all("exists. Delete it" in each["refused"] for each in saw)
    assert [each["half"] for each in saw] == [
        "save_params: every process must have a device of the mesh; leaf 'embed' is on process 0 of 2. Load or restore "
        "them onto a mesh of all."
    ] * 2
