"""Arrays, loader, drift and triage in every process of a job: `pieces.py DIRECTORY` leaves there what each one saw."""

import contextlib
import io
import json
import sys
from itertools import islice
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from grain.samplers import IndexSampler
from grain.sharding import ShardByJaxProcess
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.runtime.data import arrays, reading
from shardkit.runtime.data.loader import loader
from shardkit.runtime.drift import replica_drift
from shardkit.runtime.triage import nonfinite, triage

cluster = sk.runtime.initialize(timeout=300)
rank, devices = cluster.rank, jax.devices()
half = len(devices) // 2
saw = {"rank": rank}


def refusal(fn, *args, **options):
    try:
        fn(*args, **options)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def of_devices(x):
    return {device.id: value.tolist() for device, value in reading.local_shards(x).items()}


mesh = sk.make_mesh(devices, data=len(devices))
whole = np.arange(16, dtype=np.float32).reshape(8, 2)
tree = {"key": jax.random.split(jax.random.key(0), len(devices)), "x": whole}
full = arrays.from_full(tree, mesh, P("data"))
saw["full"] = of_devices(full["x"])
saw["fetched"] = reading.fetch(full["x"]).tolist()
saw["fetched key"] = reading.fetch(full["key"]).tolist() == np.asarray(jax.random.key_data(tree["key"])).tolist()
saw["differs"] = refusal(arrays.from_full, {"w": np.full(8, float(rank == cluster.processes - 1))}, mesh, P("data"))
saw["asarray"] = refusal(np.asarray, full["x"])
saw["replicated"] = np.asarray(reading.replicate(full["x"], mesh)).tolist()  # whole here: nothing is fetched
with contextlib.redirect_stdout(io.StringIO()) as printed:
    reading.print_global(full["x"][:, 0])
saw["printed"] = printed.getvalue()
with contextlib.redirect_stdout(io.StringIO()) as printed:
    show = jax.shard_map(lambda x: sk.collectives.debug_print(x[0, 0]), mesh=mesh, in_specs=P("data"), out_specs=None)
    jax.jit(show)(full["x"])
    jax.effects_barrier()
saw["printed by kernels"] = printed.getvalue()

# rows: every process gives its own, also where its devices stand apart in the mesh or hold the same rows
apart = sk.make_mesh([devices[i] for i in (*range(0, len(devices), 2), *range(1, len(devices), 2))], data=len(devices))
grid = sk.make_mesh(devices, context=2, data=half)
saw["rows"] = {}
for name, over, spec in [("data", mesh, P("data")), ("apart", apart, P("data")), ("grid", grid, P("data", "context"))]:
    rows = arrays.local_rows(8, over, spec)
    x = arrays.from_process_local({"x": whole[rows], "s": np.float32(2)}, over, spec, batch=8)["x"]
    assert x.shape == (8, 2) and x.sharding == NamedSharding(over, spec)
    saw["rows"][name] = [rows.tolist(), reading.fetch(x).tolist(), of_devices(x)]
saw["not divisible"] = refusal(arrays.from_process_local, whole[:3], mesh, P("data"))
saw["not divisible batch"] = refusal(arrays.local_rows, 6, mesh, P("data"))

# a mesh of half the devices: the processes outside get arrays without local data
some = sk.make_mesh(devices[:half], data=half)
mine = arrays.local_rows(8, some, P("data"))
outside = not mine.size
pieces = [jax.device_put(whole[:2], device) for device in some.local_devices]
inside = {
    "full": arrays.from_full(whole, some, P("data")),
    "local": arrays.from_process_local(whole[mine] if mine.size else whole[:1], some, P("data"), batch=8),
    "single": arrays.from_single_device(pieces, some, P("data"), (2 * half, 2), jnp.float32),
}
saw["half"] = {name: [list(x.shape), of_devices(x)] for name, x in inside.items()}
saw["half needs"] = (
    [
        refusal(arrays.from_process_local, whole[:1], some, P("data")),
        refusal(arrays.from_single_device, [], some, P("data"), (4, 2)),
        refusal(reading.fetch, {"w": inside["full"]}) if half > 1 else "",
    ]
    if outside
    else []
)
saw["half drift"] = [len(replica_drift(inside)), len(nonfinite(inside))]
saw["half loader"] = [list(x.shape) for x in islice(loader(range(32), batch=8, seed=0, mesh=some, spec=P("data")), 2)]


# the loader: only this process's samples are read, and the run goes on from the job's position
class Noted:
    def __init__(self):
        self.read = set()

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.read.add(index)
        return np.float32(index)


noted = Noted()
batches = loader(noted, batch=8, seed=3, mesh=mesh, spec=P("data"), epochs=1, prefetch=0, threads=0)
saw["line"] = [reading.fetch(x).tolist() for x in batches]
saw["read"] = sorted(noted.read)
saw["grain"] = []
for seed in (3, 3, 4):
    sampler = IndexSampler(40, ShardByJaxProcess(), shuffle=True, num_epochs=1, seed=seed)
    samples = grain.DataLoader(data_source=range(40), sampler=sampler, worker_count=0)
    saw["grain"].append([int(x) for x in samples])


def loss_fn(params, batch, keys):
    return sk.Mean.of(sk.dropout(jnp.tanh(batch[:, None] * params["w"][None]), keys, 0.1))


grad_fn, plan = sk.value_and_grad(loss_fn), sk.dp("data")
init, step = sk.make_train_step(grad_fn, optax.sgd(0.1), mesh=mesh, plan=plan)
state = init(lambda key: {"w": jnp.ones(3)}, jax.random.key(0))
batches = loader(range(40), batch=8, seed=3, mesh=mesh, spec=plan.batch_spec(mesh))
saw["losses"] = []
for batch in islice(batches, 4):
    state, metrics = step(state, batch / 40)
    saw["losses"].append(float(metrics["loss"]))
saw["position"] = batches.position
batches.close()

# drift on one device of the last process, and a NaN in one of its rows
copies = [jax.device_put(np.float32([1, 2 + (d == devices[-1])]), d) for d in mesh.local_devices]
saw["no drift"] = len(replica_drift(state))
saw["drift"] = [str(each) for each in replica_drift({"w": arrays.from_single_device(copies, mesh, P(), (2,))})]
rows = arrays.local_rows(8, mesh, P("data"))
bad = arrays.from_process_local(np.where(rows == 7, np.nan, rows / 8).astype(np.float32), mesh, P("data"))
report = triage(grad_fn, mesh=mesh, plan=plan)(state, bad)
saw["triage"] = str(report)
saw["nonfinite"] = [str(row) for row in nonfinite({"bad": bad})]

Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(saw))
