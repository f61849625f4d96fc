"""Every process loads parameters and saves its share of them: `weights.py DIRECTORY ROW OTHER`."""

import json
import sys
from pathlib import Path

import jax
import numpy as np

import shardkit as sk
from shardkit.runtime import load_params, save_params
from shardkit.runtime.weights import files, save

cluster = sk.runtime.initialize(timeout=30)
from support.checkpoint_rows import make, params  # which starts the devices

directory, row, other = Path(sys.argv[1]), *sys.argv[2:]
read = []
slices = files.Safetensors.read


def noted(self, name, ranges):
    read.append(int(np.prod([last - first for first, last in ranges])))
    return slices(self, name, ranges)


files.Safetensors.read = noted
save._PIECE_BYTES = 100  # several pieces for each leaf
loaded = load_params(directory / "a.safetensors", make(row).init.abstract(params()).params)
saw = {"read": sum(read), "all": sum(x.size for x in jax.tree.leaves(params()))}
save_params(directory / "files", loaded)
again = load_params(directory / "files", make(other).init.abstract(params()).params)
save_params(directory / "one.safetensors", again)
names = lambda name: f"{name}.{{}}" if name.startswith("layers.") else name  # noqa: E731
save_params(directory / "layers", again, names=names, file_bytes=300)
half = load_params(directory / "a.safetensors", make("tp").init.abstract(params()).params)
try:
    save_params(directory / "half", half)
except ValueError as error:
    saw["half"] = str(error)
try:
    save_params(directory / ("files" if cluster.rank else "others"), again)
except (ValueError, RuntimeError) as error:
    saw["refused"] = str(error)
(directory / f"{cluster.rank}.json").write_text(json.dumps(saw))
