"""Arrays, loader, drift and triage across real processes: every process sees its part, and all say the same."""

import fcntl
import json
import os
from itertools import chain, islice

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.runtime.data.loader import loader
from support import jobs

WHOLE = np.arange(16.0).reshape(8, 2).tolist()
SIZES = [(2, 2), pytest.param((4, 2), marks=pytest.mark.deep), pytest.param((4, 1), marks=pytest.mark.deep)]


@pytest.fixture(scope="session", params=SIZES, ids=str)
def seen(request, tmp_path_factory):
    """How many processes and devices a job has, and what each process saw; the workers of a run start it once."""
    processes, devices = request.param
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # else it is that of earlier runs
    folder = base / f"pieces_{processes}_{devices}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            ended = jobs.run("pieces.py", folder, processes=processes, devices=devices, timeout=600)
            assert [each.code for each in ended] == [0] * processes, [each.output[-2000:] for each in ended]
            (folder / "done").touch()
    return request.param, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


def joined(lists):
    return list(chain.from_iterable(lists))


def in_order(held):
    """What devices hold, in the order of their ids, joined along dim 0."""
    return joined(held[device] for device in sorted(held, key=int))


# proves S112, F64
def test_the_whole_on_every_process(seen):
    size, every = seen
    assert joined(in_order(each["full"]) for each in every) == WHOLE
    for each in every:
        assert each["fetched"] == each["replicated"] == WHOLE and each["fetched key"]
        assert each["differs"] == (
            "from_full: every process must pass the same array; leaf w of process 0 differs from that of process "
            f"{size[0] - 1}. Create it from the same seed or file, or pass each process's rows to from_process_local."
        )


# proves S113, S117, F64: global rows, rows of a process, rows of a device; whatever the order of the mesh
def test_every_process_gives_its_rows(seen):
    (processes, devices), every = seen
    for name in ("data", "apart", "grid"):
        for each in every:
            rows, fetched, held = each["rows"][name]
            assert fetched == WHOLE
            if name != "grid":
                assert len(rows) == 8 / processes and len(held) == devices
                assert all(len(piece) == 8 / processes / devices for piece in held.values())
                assert sorted(joined(held.values())) == [WHOLE[row] for row in rows]
    if devices > 1:  # a process's devices stand apart in the mesh
        assert every[0]["rows"]["apart"][0] != every[0]["rows"]["data"][0]


# proves S115: each process raises on its own, and none waits for another
def test_a_batch_that_does_not_divide(seen):
    (processes, devices), every = seen
    for each in every:
        if devices > 1:
            assert each["not divisible"] == (
                "from_process_local: a process's rows must divide over its parts of axis 'data'; leaf (the whole tree) "
                f"has 3 rows for {devices} of {processes * devices} parts. Pass another number of rows, or pad with "
                "examples of weight 0."
            )
        assert each["not divisible batch"] == (
            f"local_rows: the batch must be divisible by axis 'data'; got 6 rows over {processes * devices} devices of "
            f"{processes} processes. Pass another batch, or pad with examples of weight 0."
        )


# proves S104: jax's own error names the way out
def test_what_one_process_cannot_fetch_alone(seen):
    _, every = seen
    for each in every:
        assert "process_allgather" in each["asarray"] and "addressable_shards" in each["asarray"]


# proves S105
def test_one_process_prints(seen):
    (processes, devices), (first, *others) = seen
    assert first["printed"] == f"{np.arange(0.0, 16.0, 2.0, dtype=np.float32)}\n"
    n = processes * devices
    assert first["printed by kernels"].splitlines() == [
        "x: float32[] on each device",
        *(f"data={i}  {16 * i / n}" for i in range(n)),
    ]
    assert all(each["printed"] == each["printed by kernels"] == "" for each in others)


# proves S107, S114: processes outside a mesh hold nothing of it, say what they must be given, and do not wait
def test_a_mesh_of_half_the_processes(seen):
    (processes, devices), every = seen
    for each in every:
        outside = each["rank"] >= processes // 2
        for name, (shape, held) in each["half"].items():
            assert shape == ([processes * devices, 2] if name == "single" else [8, 2])
            assert len(held) == (0 if outside else devices)
        assert each["half drift"] == [0, 0] and each["half loader"] == [[8], [8]]
        if outside:
            none = f"process {each['rank']} has none of its {processes * devices // 2} devices"
            lies = "process 0" if processes == 2 else "processes 0, 1"
            assert each["half needs"] == [
                (
                    f"from_process_local: batch must be given on a process outside the mesh; {none}. Pass batch=, the "
                    "global number of rows."
                ),
                f"from_single_device: the dtype must be given on a process outside the mesh; {none}. Pass dtype=, as "
                "on the other processes.",
                f"fetch: a process must have a device of the array's mesh; leaf w is on {lies}, and this is "
                f"process {each['rank']}. Call fetch on those only.",
            ]


# proves S116, S117, F66: disjoint, all of them, and in the order of one process
def test_every_process_loads_its_own_samples(seen, data8):
    size, every = seen
    line = [np.asarray(x).tolist() for x in loader(range(40), batch=8, seed=3, mesh=data8, spec=P("data"), epochs=1)]
    assert all(each["line"] == line for each in every)
    assert sorted(joined(each["read"] for each in every)) == list(range(40))
    assert all(len(each["read"]) == 40 / size[0] for each in every)


# proves S116: and by grain's own sampler, where a user splits the data by process
def test_grain_splits_by_process(seen):
    _, every = seen
    for number in range(3):
        assert sorted(joined(each["grain"][number] for each in every)) == list(range(40))
    assert all(first == again != other for first, again, other in (each["grain"] for each in every))


# proves F65, F66, F70: the losses are those of one process, which goes on where the job stopped
def test_training_and_resuming_with_another_process_count(seen):
    size, every = seen
    mesh = sk.make_mesh(jax.devices()[: size[0] * size[1]], data=size[0] * size[1])

    def loss_fn(params, batch, keys):
        return sk.Mean.of(sk.dropout(jnp.tanh(batch[:, None] * params["w"][None]), keys, 0.1))

    init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh, plan=sk.dp("data"))
    state, losses = init(lambda key: {"w": jnp.ones(3)}, jax.random.key(0)), []
    options = {"batch": 8, "seed": 3, "mesh": mesh, "spec": P("data")}
    for batch in islice(loader(range(40), **options), 4):
        state, metrics = step(state, batch.astype(jnp.float32) / jnp.float32(40))
        losses.append(float(metrics["loss"]))
    for each in every:
        np.testing.assert_allclose(each["losses"], losses, rtol=1e-6)
        assert each["position"] == 32
    line = np.concatenate(list(islice(loader(range(40), **options), 8)))
    rest = np.concatenate(list(islice(loader(range(40), **options, position=every[0]["position"]), 4)))
    np.testing.assert_array_equal(rest, line[32:])


# proves F16, S123: planted in the last process, and every process says the same
def test_drift_and_triage_say_the_same_everywhere(seen):
    (size, every), last = seen, seen[0][0] * seen[0][1] - 1
    for each in every:
        assert each["no drift"] == 0 and each["drift"] == every[0]["drift"]
        assert (
            each["drift"][0].startswith(f"w at data={last} (device ") and f"process {size[0] - 1})" in each["drift"][0]
        )
        assert each["triage"].splitlines() == [
            "loss nan, weight 24",
            "not finite before the cross-device reduction:",
            "leaf              where   values  first",
            f"batch             data={last}  1       [7]",
            f"means.loss.total  data={last}  1",
            f"grads.w           data={last}  3       [0]",
            "first example of the batch with such a value: 7",
        ]
        assert each["nonfinite"] == [f"NonFinite(path='bad', coordinates={{'data': {last}}}, values=1, first=(7,))"]
