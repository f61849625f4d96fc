"""The cases of `overlap`: collective matmuls, layers whose weights are gathered, and pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._check import quoted

IMPLS = ("gather", "ring", "bidirectional")
AXIS = "x"


class Size(NamedTuple):
    """The sizes of all cases, over all devices.

    Attributes:
        tokens: of the activations, a multiple of the devices.
        width: of the activations.
        hidden: columns of the weights, a multiple of the devices.
        layers: of the stack whose weights are gathered layer by layer, and of the pipelines, a multiple of the devices.
    """

    tokens: int = 8192
    width: int = 4096
    hidden: int = 32768
    layers: int = 8


class Parts(NamedTuple):
    """A jitted function that overlaps, with the shapes of its arguments.

    Attributes:
        together: the function.
        args: its arguments, as ShapeDtypeStructs with shardings.
        alone: its compute alone and its communication alone, each with its own arguments; None where only the compiled
            schedule tells them apart.
    """

    together: Any
    args: tuple[Any, ...]
    alone: tuple[tuple[Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]] | None


def chosen(mesh: Any, size: Size, only: Sequence[str]) -> dict[str, Callable[[], Parts]]:
    """The cases of these names, or all; each is built when it is called."""
    cases: dict[str, Callable[[], Parts]] = {}
    for impl in IMPLS:
        cases[f"all_gather_matmul, {impl}"] = partial(_gather_matmul, mesh, size, impl)
    for impl in IMPLS:
        cases[f"matmul_reduce_scatter, {impl}"] = partial(_matmul_scatter, mesh, size, impl)
    cases["layers"] = partial(_layers, mesh, size, False)
    cases["layers, prefetch"] = partial(_layers, mesh, size, True)
    for name in ("gpipe", "one_f_one_b", "lockstep"):
        cases[f"pipeline, {name}"] = partial(_pipeline, mesh, size, name)
    for name in only:
        if name not in cases:
            raise ValueError(f"overlap: --only must name cases; got {name!r}. Pass some of {quoted(cases)}.")
    return {name: cases[name] for name in only or cases}


def _shape(mesh: Any, spec: P, *dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))


def _mapped(mesh: Any, function: Any, specs: tuple[P, ...], out: P) -> Any:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))


def _gather_matmul(mesh: Any, size: Size, impl: Any) -> Parts:
    x = _shape(mesh, P(AXIS), size.tokens, size.width)
    w = _shape(mesh, P(None, AXIS), size.width, size.hidden)
    whole = _shape(mesh, P(), size.tokens, size.width)
    by: Any = sk.all_gather if impl == "gather" else partial(sk.ring.all_gather, bidirectional=impl != "ring")
    both = _mapped(
        mesh,
        lambda x, w: sk.all_gather_matmul(x, w, AXIS, impl=impl),
        (x.sharding.spec, w.sharding.spec),
        P(None, AXIS),
    )
    alone = _mapped(mesh, lambda x, w: sk.vary(x, AXIS) @ w, (P(), w.sharding.spec), P(None, AXIS))
    gather = _mapped(mesh, lambda x: by(x, AXIS), (P(AXIS),), P(AXIS))
    return Parts(both, (x, w), ((alone, (whole, w)), (gather, (x,))))


def _matmul_scatter(mesh: Any, size: Size, impl: Any) -> Parts:
    h = _shape(mesh, P(None, AXIS), size.tokens, size.hidden)
    w = _shape(mesh, P(AXIS), size.hidden, size.width)
    partial_sums = _shape(mesh, P(), size.tokens, size.width)
    by: Any = sk.reduce_scatter if impl == "gather" else partial(sk.ring.reduce_scatter, bidirectional=impl != "ring")
    specs = h.sharding.spec, w.sharding.spec
    both = _mapped(mesh, lambda h, w: sk.matmul_reduce_scatter(h, w, AXIS, impl=impl), specs, P(AXIS))
    alone = _mapped(mesh, lambda h, w: h @ w, specs, P(AXIS))
    scatter = _mapped(mesh, lambda y: by(sk.vary(y, AXIS), AXIS), (P(),), P(AXIS))
    return Parts(both, (h, w), ((alone, (h, w)), (scatter, (partial_sums,))))


def _stack(size: Size) -> dict[str, tuple[int, ...]]:
    """A layer's matrices have a quarter of the columns, for a stack of ordinary width."""
    return {"up": (size.layers, size.width, size.hidden // 4), "down": (size.layers, size.hidden // 4, size.width)}


def _layer(w: Any, x_tD: jax.Array) -> jax.Array:
    return x_tD + jax.nn.gelu(x_tD @ w["up"]) @ w["down"]


def _layers(mesh: Any, size: Size, prefetch: bool) -> Parts:
    """The forward pass of a stack whose weights are split, gathered layer by layer."""

    def loss(params: Any, batch: Any, keys: Any) -> sk.Mean:
        x_tD = sk.scan_layers(_layer, params["layers"], batch, prefetch=prefetch)
        return sk.Mean.of(x_tD.astype(jnp.float32) ** 2)

    def gathers(layers: Any) -> Any:
        def one(total: jax.Array, w: Any) -> Any:
            return total + sum(jnp.sum(each) for each in jax.tree.leaves(sk.all_gather(w, AXIS))), None

        return lax.scan(one, sk.vary(jnp.bfloat16(0), AXIS), layers)[0][None]

    plan = sk.fsdp(AXIS, layerwise=("layers",), min_size=1)
    given = {"layers": {name: jax.ShapeDtypeStruct(dims, jnp.bfloat16) for name, dims in _stack(size).items()}}
    rest = plan.layouts(given, mesh)["layers"]
    params = {"layers": {name: _shape(mesh, rest[name].rest, *dims) for name, dims in _stack(size).items()}}
    whole = {"layers": {name: _shape(mesh, P(), *dims) for name, dims in _stack(size).items()}}
    batch = _shape(mesh, P(AXIS), size.tokens, size.width)
    both, alone = (sk.make_eval_step(loss, mesh=mesh, plan=each) for each in (plan, sk.dp(AXIS)))
    split = {name: _shape(mesh, P(None, AXIS), *dims) for name, dims in _stack(size).items()}
    gather = jax.jit(jax.shard_map(gathers, mesh=mesh, in_specs=P(None, AXIS), out_specs=P(AXIS)))
    return Parts(both, (params, batch), ((alone, (whole, batch)), (gather, (split,))))


def _pipeline(mesh: Any, size: Size, name: str) -> Parts:
    """Forward and backward of the stack in stages, with two microbatches for a stage."""
    stages = mesh.shape[AXIS]
    schedule = getattr(sk.schedules, name)(stages, 2 * stages)

    def embed(shared: Any, batch: Any, keys: Any) -> jax.Array:
        return batch * shared["scale"]

    def stage(layers: Any, x_tD: jax.Array, keys: Any) -> jax.Array:
        return lax.scan(lambda x, w: (_layer(w, x), None), x_tD, layers)[0]

    def head(shared: Any, x_tD: jax.Array, batch: Any) -> sk.Mean:
        return sk.Mean.of((x_tD * shared["scale"]).astype(jnp.float32) ** 2)

    grad_fn = sk.pipeline_value_and_grad(embed, stage, head, schedule, AXIS, mode="masked")
    specs = {"layers": P(AXIS), "scale": P()}

    def step(params: Any, batch: Any) -> Any:
        mean, _, grads = grad_fn(params, batch, None)
        return sk.all_reduce(mean.total, AXIS), grads["layers"]

    both = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), P(AXIS))))
    layers = {name: _shape(mesh, P(AXIS), *dims) for name, dims in _stack(size).items()}
    return Parts(
        both, ({"layers": layers, "scale": _shape(mesh, P())}, _shape(mesh, P(), size.tokens, size.width)), None
    )
