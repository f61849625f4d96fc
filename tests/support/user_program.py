"""What a type checker sees of shardkit: read by `tests/test_publishing.py` beside an installed wheel, never run."""

from collections.abc import Callable
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax

import shardkit as sk
from shardkit.analysis.jaxpr.census import Census
from shardkit.bench.environment import environment
from shardkit.testing.one_device import Reference
from shardkit.testing.program import Program

Arrays = dict[str, jax.Array]


def loss_fn(params: Arrays, batch: Arrays, keys: jax.Array) -> sk.Mean:
    return sk.Mean.of((batch["x"] @ params["w"]) ** 2)


mesh = sk.make_mesh(data=2, fsdp=4)
plan = sk.chain(sk.dp("data"), sk.fsdp("fsdp"))
assert_type(plan, sk.Plan)
init, step = sk.make_train_step(sk.value_and_grad(loss_fn), optax.sgd(0.1), mesh=mesh, plan=plan)
batch = {"x": jnp.ones((8, 4))}
state, metrics = step(init({"w": jnp.ones((4, 1))}, jax.random.key(0)), batch)
assert_type(state, sk.TrainState)
assert_type(metrics, dict[str, jax.Array])
assert_type(sk.describe(mesh), str)

# What is imported on first use has its types too.
assert_type(sk.census(step, state, batch), Census)
assert_type(sk.lint(step, state, batch), list[sk.Finding])
assert_type(sk.cost.bubble(4, 8), float)
assert_type(sk.schedules.lockstep(4, 8), sk.schedules.Schedule)
assert_type(sk.testing.meshes().example(), dict[str, int])
assert_type(sk.runtime.is_main(), bool)
assert_type(environment(), dict[str, Any])
assert_type(sk.models.transformer.Config().layers, int)
assert_type(sk.testing.LAWS[0], Callable[[Program, Reference], str | None])

# Mistakes that a checker finds.
sk.fsdp("fsdp", layer_wise=())  # type: ignore[call-arg]
print(sk.al_reduce)  # type: ignore[attr-defined]
print(sk.cost.zero_bytes)  # type: ignore[attr-defined]
print(sk.testing.proof)  # type: ignore[attr-defined]
sk.ring.all_gather("x")  # type: ignore[call-arg]
