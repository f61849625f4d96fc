"""Compiles the programs for absent chips and writes down what the compilers said.

    PYTHONPATH=tests python -m support.recorded.record v5e:2x4 h100:1x1x8 v6e:2x4/fsdp_tp/offload

One file for each program, topology and jax version: a gzipped JSON of the compiler's answer and its module (base64).
"""

import base64
import gzip
import json
import sys
from pathlib import Path

import jax

from shardkit.analysis.hlo import aot
from support.recorded.programs import PROGRAMS

HERE = Path(__file__).parent


def load(name):
    """The compiler's answer and module, as `record` wrote them."""
    data = json.loads(gzip.decompress((HERE / name).read_bytes()))
    return data["answer"], base64.b64decode(data["module"])


OPTIONS = {
    "": {},
    "offload": {
        f"xla_tpu_enable_sparse_core_collective_offload_{kind}": True
        for kind in ("all_gather", "all_reduce", "reduce_scatter")
    },
}


def record(topology, only="", options=""):
    version = ".".join(jax.__version__.split(".")[:2])
    for name, make in PROGRAMS.items():
        if only not in ("", name):
            continue
        step, args = make()
        built = aot.build(step, args, topology=topology, options=OPTIONS[options])
        data = {"answer": built.answer, "module": base64.b64encode(built.module).decode()}
        file = HERE / f"{name}-{topology.replace(':', '_')}{options and '-' + options}-jax{version}.json.gz"
        file.write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))
        print(f"{file.name}: {file.stat().st_size:,} bytes\n{built.report(aot.parse_topology(topology))}")


if __name__ == "__main__":
    # No path of the machine that records is written down.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    for each in sys.argv[1:]:
        record(*each.split("/"))
