"""Programs of a few hundred numbers, compiled for absent chips: read and proved without a compiler.

    PYTHONPATH=tests python -m support.recorded.small v5e:2x4 h100:1x1x8

Their line numbers are in the recordings: after a change here, record again.
"""

import base64
import gzip
import json
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from shardkit import abstract_mesh
from shardkit.analysis.hlo import aot
from shardkit.analysis.hlo.report import Built
from support.recorded.programs import shape
from support.recorded.record import HERE, load

VERSION = "0.10"


def layers(total=lax.psum):
    """Two layers in a scan: weights gathered over fsdp, products summed over tp, gradients reduce-scattered."""
    mesh = abstract_mesh(fsdp=4, tp=2)
    specs = (P(None, "fsdp", "tp"), P(None, "tp", "fsdp")), P("fsdp")

    def loss(weights, x_bD):
        def layer(x_bD, shards):
            w_Df = lax.all_gather(shards[0], "fsdp", axis=0, tiled=True)
            w_fD = lax.all_gather(shards[1], "fsdp", axis=1, tiled=True)
            return x_bD + total(jnp.tanh(x_bD @ w_Df) @ w_fD, "tp"), None

        x_bD, _ = lax.scan(layer, x_bD, weights)
        return jnp.sum(x_bD.astype(jnp.float32) ** 2)

    grad = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=specs, out_specs=specs[0])
    step = jax.jit(lambda weights, x_bD: grad(weights, x_bD))
    weights = shape((2, 16, 32), mesh, specs[0][0]), shape((2, 32, 16), mesh, specs[0][1])
    return step, (weights, shape((32, 16), mesh, specs[1]))


def name_of(topology):
    return f"layers/{topology.replace(':', '_')}-jax{VERSION}.json.gz"


def built(topology):
    """What the compiler made of `layers`, as it is recorded, with the program as this jax traces it."""
    step, args = layers()
    answer, module = load(name_of(topology))
    return Built(step.trace(*args), {"fsdp": 4, "tp": 2}, module, answer, 0.0)


if __name__ == "__main__":
    # No path of the machine that records is written down.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    for topology in sys.argv[1:]:
        step, args = layers()
        made = aot.build(step, args, topology=topology)
        data = {"answer": made.answer, "module": base64.b64encode(made.module).decode()}
        (HERE / name_of(topology)).write_bytes(gzip.compress(json.dumps(data).encode(), mtime=0))
