"""`examples/profile_a_step.py`: jax's profiler and the compiled program name the same collectives."""

import gzip
import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

EXAMPLE = Path(__file__).parents[2] / "examples" / "profile_a_step.py"
BOTH = ("data", "model")


def every_kind(mesh):
    """A program with each kind of collective, two of them in a loop, and its argument."""

    def kernel(x):
        def layer(c, _):
            gathered = lax.all_gather(c, "model", axis=0, tiled=True)
            return lax.psum_scatter(jnp.tanh(gathered), "model", tiled=True), None

        x, _ = lax.scan(layer, x, None, length=3)
        x = lax.ppermute(x, "data", [(0, 1), (1, 0)])
        x = lax.all_to_all(x.reshape(4, -1), "model", 0, 0, tiled=True).reshape(-1)
        return x + lax.psum(x, BOTH)

    x = jax.device_put(jnp.arange(256.0), NamedSharding(mesh, P(BOTH)))
    return jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=P(BOTH), out_specs=P(BOTH))), x


# proves S119, S128, F89: a name of jax's trace that is not the compiled program's would have no time
def test_every_collective_has_its_bytes_and_its_time(mesh2x4, tmp_path):
    step, x = every_kind(mesh2x4)
    rows = list(runpy.run_path(str(EXAMPLE))["collectives"](step, (x,), tmp_path / "run"))
    times = {row.kind: row.times for row, _ in rows}
    assert times == {"all_gather": 3, "reduce_scatter": 3, "ppermute": 1, "all_to_all": 1, "all_reduce": 1}
    # 32 elements on a device: a gather over 4 sends three times that, by a ring as a reduce_scatter of four times that.
    sent = {row.kind: int(row.sent) for row, _ in rows}
    assert sent == {"all_gather": 384, "reduce_scatter": 384, "ppermute": 128, "all_to_all": 96, "all_reduce": 224}
    assert all(0 < seconds < 60 for _, seconds in rows)
    (run,) = (tmp_path / "run" / "plugins" / "profile").iterdir()  # where TensorBoard looks
    perfetto = json.loads(gzip.decompress((run / "perfetto_trace.json.gz").read_bytes()))
    assert {row.name for row, _ in rows} <= {event.get("name") for event in perfetto["traceEvents"]}
    assert gzip.decompress((tmp_path / "run" / "memory.prof").read_bytes())  # a protocol buffer, as pprof reads it
