"""The sentences about arguments, in full wording; tests/test_arguments_walk.py has every function and argument."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import planner, runtime
from shardkit._arguments.typed import typed
from shardkit.on_device.precision import precision_of
from shardkit.runtime.cluster.config import DistributedConfig
from support.refusals import type_error

pytestmark = pytest.mark.check
HERE = Path(__file__).parent
MESH = sk.abstract_mesh(data=8)


def test_what_is_left_to_the_function():
    @typed
    def some(a: int, b: "float | None" = None, *c: int, d: bool = False, **e: int) -> None:
        """Nothing."""

    some(np.int32(1), np.float64(2), 3, d=np.bool_(True), f=4)
    some(1, math.inf)
    with pytest.raises(TypeError, match="missing 1 required"):
        some()
    for call, words in (
        (lambda: some(1.0), "some: a must be a whole number; got 1.0. Pass for example a=1."),
        (lambda: some(1, "x"), "some: b must be a number or None; got 'x'. Pass for example b=1.0."),
        (lambda: some(1, None, "3"), "some: c must be a whole number; got '3'. Pass for example c=1."),
        (lambda: some(1, d=1), "some: d must be True or False; got 1. Pass for example d=True."),
        (lambda: some(1, f="4"), "some: f must be a whole number; got '4'. Pass for example f=1."),
    ):
        with type_error(words):
            call()


def on_devices(kernel):
    x = jax.ShapeDtypeStruct((16, 4), np.float32)
    return jax.eval_shape(jax.shard_map(kernel, mesh=MESH, in_specs=P("data"), out_specs=P("data")), x)


RANGES = {
    r"make_mesh: devices must be distinct; got .* more than once\. Pass each device "
    r"once\.": lambda: sk.make_mesh([jax.devices()[0]] * 8, data=8),
    r"Precision: loss_scale must be at most 32768 with compute=float16, or every step overflows and is skipped; "
    r"got 1048576\.0\. Lower it\.": lambda: precision_of(sk.Precision(compute=jnp.float16, loss_scale=2.0**20)),
    r"Precision: growth_interval must be at least 1; got 0\. Pass growth_interval=1 or "
    r"more\.": lambda: precision_of(sk.Precision(growth_interval=0)),
    r"make_train_step: precision must be a string, a Precision or None; got <class 'jax\.numpy\.bfloat16'>\. Pass for "
    r"example sk\.Precision\(compute=jnp\.bfloat16\)\.": lambda: sk.make_train_step(
        sk.value_and_grad(lambda *_: 0.0), optax.sgd(1.0), mesh=MESH, plan=sk.dp("data"), precision=jnp.bfloat16
    ),
    r"DistributedConfig: enabled must be True or False; got 'false'\. Pass for example "
    r"enabled=True\.": lambda: DistributedConfig(enabled="false"),
    r"initialize: coordinator_address must be known in a job of many processes; got neither an argument nor "
    r"an environment variable\. Pass it, or start the job with shardkit launch\.": lambda: runtime.initialize(
        process_id=5
    ),
    r"Deadlines: step must be a number; got nan\. Pass for example "
    r"step=1.0\.": lambda: runtime.guard(mesh=MESH, deadlines=runtime.Deadlines(step=math.nan)),
    r"Deadlines: data must be more than 0 seconds; got 0\. Raise "
    r"data\.": lambda: runtime.guard(mesh=MESH, deadlines=runtime.Deadlines(data=0)),
    r"halo_exchange: before must be at most the rows of 1024 devices of 2 rows each; got 1000000000\. Lower "
    r"before\.": lambda: on_devices(lambda x: sk.collectives.halo_exchange(x, "data", before=10**9)),
    r"zigzag: dim must be a dim of at least one array; got 7\. Pass the dim of the "
    r"tokens\.": lambda: on_devices(lambda x: sk.layers.zigzag(x, "data", dim=7)),
    r"vocab_embed: tokens must be integers; got float32\. Convert them to "
    r"int32\.": lambda: on_devices(lambda x: sk.layers.vocab_embed(x, np.ones((5, 4), "f"), "data")),
    r"vocab_cross_entropy: label_smoothing must be at least 0 and below 1; got 2\.0\. "
    r"Pass for example label_smoothing=0\.1\.": lambda: sk.layers.vocab_cross_entropy(
        np.ones((2, 3, 4), "f"), np.ones((4, 5), "f"), np.ones((2, 3), int), None, label_smoothing=2.0
    ),
    r"planner: batch must be at most 1,000,000,000; got 1e\+30\. Lower it\.": lambda: planner.search(
        planner.Model(8, 64, 4, vocabulary=256), chip="v5e", chips=8, batch=10**30, sequence=8
    ),
    r"loader: threads must be at most 1024; got 1000000\. Pass "
    r"threads=1024\.": lambda: runtime.loader([1], batch=1, seed=0, mesh=MESH, spec=P("data"), threads=10**6),
}


@pytest.mark.parametrize("message, call", RANGES.items(), ids=lambda each: each if isinstance(each, str) else "")
def test_what_means_nothing_is_refused(call, message, monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert re.fullmatch(message, str(error.value)), error.value
