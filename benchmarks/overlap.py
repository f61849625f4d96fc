"""How much communication hides behind compute: each kernel beside its compute alone and its communication alone.

    share hidden = (compute + communication - together) / min(compute, communication)

On accelerators all three are timed. Without, or with `--predict`, the compiler of v5e:2x4 schedules the program, and
the time model of `shardkit/analysis/hlo/compute.py` says how long it computes, how long it sends, and what of that
no compute covers. Simulated devices are not timed: their compute and communication share the same cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.functions import measure_functions
from benchmarks.start import start
from shardkit._jax.backends import leave_out_idle_tpu
from shardkit.bench.environment import environment
from shardkit.bench.records import FORMAT, Record, write
from shardkit.meshes.layout import table

TOPOLOGY, DEVICES = "v5e:2x4", 8
IMPLS = ("gather", "ring", "bidirectional")
QUICK = ("all_gather_matmul, gather", "all_gather_matmul, ring", "layers, prefetch")


class Size(NamedTuple):
    """Of all cases, over all devices: tokens and width of the activations, columns of the weights, layers of a stack.

    Tokens, columns and layers are multiples of the devices; a layer of the stack has a quarter of the columns.
    """

    tokens: int = 8192
    width: int = 4096
    hidden: int = 32768
    layers: int = 8

    def stack(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the stack's matrices."""
        return {
            "up": (self.layers, self.width, self.hidden // 4),
            "down": (self.layers, self.hidden // 4, self.width),
        }


class Parts(NamedTuple):
    """A jitted function that overlaps, the shapes of its arguments, and its compute and its communication alone.

    `alone` is None where only the compiled schedule tells the two apart.
    """

    together: Any
    args: tuple[Any, ...]
    alone: tuple[tuple[Any, tuple[Any, ...]], tuple[Any, tuple[Any, ...]]] | None


def cases_of(mesh: Any, size: Size) -> dict[str, Callable[[], Parts]]:
    """The cases by name; each is built when it is called."""
    cases: dict[str, Callable[[], Parts]] = {}
    for impl in IMPLS:
        cases[f"all_gather_matmul, {impl}"] = partial(gather_matmul, mesh, size, impl)
    for impl in IMPLS:
        cases[f"matmul_reduce_scatter, {impl}"] = partial(matmul_scatter, mesh, size, impl)
    cases["layers"] = partial(layers, mesh, size, False)
    cases["layers, prefetch"] = partial(layers, mesh, size, True)
    for name in ("gpipe", "one_f_one_b", "lockstep"):
        cases[f"pipeline, {name}"] = partial(pipeline, mesh, size, name)
    return cases


def shape(mesh: Any, spec: P, *dims: int) -> jax.ShapeDtypeStruct:
    """An array in bfloat16."""
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))


def mapped(mesh: Any, function: Any, specs: tuple[P, ...], out: P) -> Any:
    """The function over the mesh, jitted."""
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out))


def gather_matmul(mesh: Any, size: Size, impl: Any) -> Parts:
    """Tokens gathered and multiplied by columns."""
    x = shape(mesh, P("x"), size.tokens, size.width)
    w = shape(mesh, P(None, "x"), size.width, size.hidden)
    whole = shape(mesh, P(), size.tokens, size.width)
    by: Any = sk.all_gather if impl == "gather" else partial(sk.ring.all_gather, bidirectional=impl != "ring")
    specs, out = (P("x"), P(None, "x")), P(None, "x")
    both = mapped(mesh, lambda x, w: sk.all_gather_matmul(x, w, "x", impl=impl), specs, out)
    alone = mapped(mesh, lambda x, w: sk.vary(x, "x") @ w, (P(), P(None, "x")), out)
    gather = mapped(mesh, lambda x: by(x, "x"), (P("x"),), P("x"))
    return Parts(both, (x, w), ((alone, (whole, w)), (gather, (x,))))


def matmul_scatter(mesh: Any, size: Size, impl: Any) -> Parts:
    """Products of rows, whose partial sums are scattered over tokens."""
    h = shape(mesh, P(None, "x"), size.tokens, size.hidden)
    w = shape(mesh, P("x"), size.hidden, size.width)
    sums = shape(mesh, P(), size.tokens, size.width)
    by: Any = sk.reduce_scatter if impl == "gather" else partial(sk.ring.reduce_scatter, bidirectional=impl != "ring")
    specs = P(None, "x"), P("x")
    both = mapped(mesh, lambda h, w: sk.matmul_reduce_scatter(h, w, "x", impl=impl), specs, P("x"))
    alone = mapped(mesh, lambda h, w: h @ w, specs, P("x"))
    scatter = mapped(mesh, lambda y: by(sk.vary(y, "x"), "x"), (P(),), P("x"))
    return Parts(both, (h, w), ((alone, (h, w)), (scatter, (sums,))))


def layer(w: Any, x_tD: jax.Array) -> jax.Array:
    """A residual feed-forward layer."""
    return x_tD + jax.nn.gelu(x_tD @ w["up"]) @ w["down"]


def layers(mesh: Any, size: Size, prefetch: bool) -> Parts:
    """The forward pass of a stack whose weights are split, gathered layer by layer."""

    def loss(params: Any, batch: Any, keys: Any) -> sk.Mean:
        x_tD = sk.scan_layers(layer, params["layers"], batch, prefetch=prefetch)
        return sk.Mean.of(x_tD.astype(jnp.float32) ** 2)

    def gathers(stack: Any) -> Any:
        def one(total: jax.Array, w: Any) -> Any:
            return total + sum(jnp.sum(each) for each in jax.tree.leaves(sk.all_gather(w, "x"))), None

        return lax.scan(one, sk.vary(jnp.bfloat16(0), "x"), stack)[0][None]

    plan = sk.fsdp("x", layerwise=("layers",), min_size=1)
    given = {"layers": {name: jax.ShapeDtypeStruct(dims, jnp.bfloat16) for name, dims in size.stack().items()}}
    rest = plan.layouts(given, mesh)["layers"]
    params = {"layers": {name: shape(mesh, rest[name].rest, *dims) for name, dims in size.stack().items()}}
    whole = {"layers": {name: shape(mesh, P(), *dims) for name, dims in size.stack().items()}}
    split = {name: shape(mesh, P(None, "x"), *dims) for name, dims in size.stack().items()}
    batch = shape(mesh, P("x"), size.tokens, size.width)
    both, alone = (sk.make_eval_step(loss, mesh=mesh, plan=each) for each in (plan, sk.dp("x")))
    return Parts(
        both, (params, batch), ((alone, (whole, batch)), (mapped(mesh, gathers, P(None, "x"), P("x")), (split,)))
    )


def pipeline(mesh: Any, size: Size, name: str) -> Parts:
    """Forward and backward of the stack in stages, with two microbatches for a stage."""
    stages = mesh.shape["x"]

    def embed(shared: Any, batch: Any, keys: Any) -> jax.Array:
        return batch * shared["scale"]

    def stage(stack: Any, x_tD: jax.Array, keys: Any) -> jax.Array:
        return lax.scan(lambda x, w: (layer(w, x), None), x_tD, stack)[0]

    def head(shared: Any, x_tD: jax.Array, batch: Any) -> sk.Mean:
        return sk.Mean.of((x_tD * shared["scale"]).astype(jnp.float32) ** 2)

    pipe = sk.pipeline(getattr(sk.schedules, name)(stages, 2 * stages), "x")
    grad_fn = pipe.value_and_grad(embed, stage, head)

    def step(params: Any, batch: Any) -> Any:
        mean, _, grads = grad_fn(params, batch, None)
        return sk.all_reduce(mean.total, "x"), grads["layers"]

    both = mapped(mesh, step, ({"layers": P("x"), "scale": P()}, P()), (P(), P("x")))
    stack = {name: shape(mesh, P("x"), *dims) for name, dims in size.stack().items()}
    params = {"layers": stack, "scale": shape(mesh, P())}
    return Parts(both, (params, shape(mesh, P(), size.tokens, size.width)), None)


def share_hidden(compute: float, communication: float, together: float) -> float | None:
    """1 where together they take as long as the longer of the two, 0 where as long as their sum; None of nothing."""
    if not communication:
        return None
    return round((compute + communication - together) / min(compute, communication), 4)


def predicted(parts: Parts) -> tuple[float, float, float]:
    """Microseconds of compute, of communication and of both, by the compiled schedule and the time model."""
    report = sk.aot.compile(parts.together, parts.args, topology=TOPOLOGY)
    compute, wire = report.compute.seconds * 1e6, report.wire_seconds * 1e6
    return compute, wire, compute + report.exposed_seconds * 1e6


def measured(parts: Parts, rounds: int) -> tuple[float, float, float]:
    """The same, by the clock."""
    assert parts.alone is not None
    (compute, of_compute), (communication, of_communication) = parts.alone
    pairs = {"compute": (compute, of_compute), "communication": (communication, of_communication)}
    functions = {name: ready(*pair) for name, pair in (pairs | {"together": (parts.together, parts.args)}).items()}
    found = measure_functions("overlap", "", functions, rounds=rounds)
    one, other, both = (record["wall_us_median"] for record in found)
    return one, other, both


def ready(function: Any, shapes: tuple[Any, ...]) -> Callable[[], Any]:
    """The function on arrays of these shapes, compiled and called once."""
    args = jax.tree.map(lambda s: jax.device_put(jnp.ones(s.shape, s.dtype), s.sharding), shapes)
    jax.block_until_ready(function(*args))
    return partial(function, *args)


def records(times: Mapping[str, tuple[float, float, float]], row: str, method: str, size: Size) -> list[Record]:
    """A record for each case."""
    shared = {"format": FORMAT, "version": 1, "benchmark": "overlap", "row": row, "method": method}
    shared |= size._asdict() | {"environment": environment()}
    keys = ("compute_us", "communication_us", "together_us")
    return [
        {**shared, "case": name, **dict(zip(keys, (round(each, 3) for each in taken), strict=True))}
        | {"hidden_share": share_hidden(*taken)}
        for name, taken in times.items()
    ]


def lines(found: Sequence[Record]) -> str:
    """The records as a table; times in milliseconds."""
    rows = [("case", "compute ms", "communication ms", "their sum", "their maximum", "together", "hidden")]
    for r in found:
        one, other, both = (r[f"{name}_us"] / 1e3 for name in ("compute", "communication", "together"))
        hidden = "" if r["hidden_share"] is None else f"{r['hidden_share']:.0%}"
        rows.append((r["case"], *(f"{t:.3f}" for t in (one, other, one + other, max(one, other), both)), hidden))
    how = "measured" if found[0]["method"] == "measured" else "predicted from the compiled schedule"
    return f"{table(rows)}\n{found[0]['row']}, {how}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures on this machine's accelerators, or predicts."""
    leave_out_idle_tpu()
    options = start(__doc__, argv, devices=0, predict="for v5e:2x4, also where there are accelerators")
    predict = options.predict or jax.default_backend() == "cpu"
    mesh = sk.abstract_mesh(x=DEVICES) if predict else sk.make_mesh(x=-1)
    row = TOPOLOGY if predict else f"{mesh.size} x {jax.devices()[0].device_kind}"
    size = Size(1024, 512, 2048, 8) if options.smoke else Size()
    times = {}
    for name, make in cases_of(mesh, size).items():
        parts = make()
        if (options.smoke and name not in QUICK) or (parts.alone is None and not predict):
            continue
        times[name] = predicted(parts) if predict else measured(parts, options.rounds or 20)
        print(f"{name}: done", flush=True)
    found = records(times, row, "predicted" if predict else "measured", size)
    print(f"\n{lines(found)}")
    if options.json:
        write(found, options.json)


if __name__ == "__main__":
    main()
