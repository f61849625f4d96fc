"""The plans that communicate by an algorithm, the algorithms, and what a rounded message may change in a step."""

import runpy
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import shardkit as sk
from shardkit.cost import quantization_error
from shardkit.testing.one_device import Reference, Wanted
from support.conformance import BATCH, MODELS, ModelRow, PlanRow, padding, toy_tp
from support.training import KEY, expected

LINKS = ("node", "gpu")  # the axes of every algorithm here: slow links, then fast ones
ACCUMULATE = 2
RATE = 0.5  # of "sgd" in support/training.py
SCAN = ("layers",)


def _halving() -> Callable[..., Any]:
    kernel = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "recursive_halving.py"))["all_reduce"]

    def sums(leaves: Any, axes: Any) -> Any:
        """All leaves as one array, padded to a multiple of the devices."""
        flat = jnp.concatenate([x.ravel() for x in leaves])
        total = kernel(jnp.pad(flat, (0, -flat.size % sk.axis_size(axes))), axes)
        ends = np.cumsum([x.size for x in leaves])
        return [part.reshape(x.shape) for part, x in zip(jnp.split(total[: flat.size], ends[:-1]), leaves, strict=True)]

    return sums


def _halving_cost(kernel: str, elements: Any, itemsize: int, ways: Any) -> Any:
    n = int(np.prod(list(ways.values())))
    return {tuple(ways): 2 * (-(-sum(elements) // n)) * (n - 1) * itemsize}


class Way(NamedTuple):
    """An algorithm; `sums` and `weights` bound what it may change, in the sum of n elements up to a magnitude."""

    algorithm: sk.algorithms.Algorithm
    sums: Callable[[float, int], float] | None = None
    weights: Callable[[float], float] = lambda largest: 0.0


def _one_level(dtype: str) -> Callable[[float, int], float]:
    return lambda largest, n=1: quantization_error(largest, dtype, n=n)


def _two_levels(inside: str | None, outside: str) -> Callable[[float, int], float]:
    def bound(largest: float, n: int) -> float:
        """As `quantization_error` says, of two devices of "node"; an all_reduce has one level."""
        first = quantization_error(largest, inside, n=n // 2) if inside else 0.0
        two = 2 * first + quantization_error(n // 2 * largest + first, outside, n=2)
        return max(two, quantization_error(largest, outside, n=n))

    return bound


_small = sk.algorithms.compressed
WAYS = {
    "ring": Way(sk.algorithms.ring()),
    "ring in both directions": Way(sk.algorithms.ring(bidirectional=True)),
    "tables": Way(sk.algorithms.table(sk.tables.bine, name="bine")),
    "hierarchical": Way(sk.algorithms.hierarchical("gpu")),
    "bucket": Way(sk.algorithms.bucket(bucket_bytes=256, scatter_from=64)),
    "one's own": Way(sk.algorithms.Algorithm("recursive halving", all_reduce=_halving(), cost=_halving_cost)),
    "int8": Way(_small(jnp.int8, block=16), _one_level("int8"), _one_level("int8")),
    # Of int4, rounding may be as large as the gradient: the numbers in two levels are held in a finer dtype.
    "int4 in two levels": Way(
        _small(jnp.int4, block=16, inner="gpu", inner_dtype=jnp.int8), _two_levels("int8", "int4"), _one_level("int4")
    ),
    "mxfp8": Way(_small("mxfp8"), _one_level("mxfp8"), _one_level("mxfp8")),
    "bfloat16 in two levels": Way(
        _small(jnp.bfloat16, inner="gpu"), _two_levels(None, "bfloat16"), _one_level("bfloat16")
    ),
}
EIGHT, FOUR = {"node": 2, "gpu": 4}, {"node": 2, "gpu": 2}


def _both(way: sk.algorithms.Algorithm) -> Any:
    return {"gather": way, "reduce": way, "min_size": 1}


# A name, the mesh, and the plan of an algorithm; those of `dp` alone need only its all_reduce.
PLANS: dict[str, tuple[dict[str, int], Callable[[sk.algorithms.Algorithm], sk.Plan]]] = {
    "dp": (EIGHT, lambda way: sk.dp(LINKS, reduce=way)),
    "dp x tp": (FOUR | {"model": 2}, lambda way: sk.chain(sk.dp(LINKS, reduce=way), toy_tp("model"))),
    "hsdp": ({"replica": 2} | FOUR, lambda way: sk.chain(sk.dp("replica"), sk.fsdp(LINKS, **_both(way)))),
    "hsdp of dp": (FOUR | {"shard": 2}, lambda way: sk.chain(sk.dp(LINKS, reduce=way), sk.fsdp("shard", min_size=1))),
    "zero1": (EIGHT, lambda way: sk.zero1(LINKS, **_both(way))),
    "zero2": (EIGHT, lambda way: sk.zero2(LINKS, **_both(way))),
    "zero2 layerwise": (EIGHT, lambda way: sk.zero2(LINKS, layerwise=SCAN, **_both(way))),
    "fsdp": (EIGHT, lambda way: sk.fsdp(LINKS, **_both(way))),
    "fsdp layerwise": (EIGHT, lambda way: sk.fsdp(LINKS, layerwise=SCAN, **_both(way))),
    "fsdp pad": (EIGHT, lambda way: sk.fsdp(LINKS, **_both(way) | padding(8))),
}
OF_DP = ("dp", "dp x tp", "hsdp of dp")


def pairs() -> Iterator[tuple[str, str]]:
    """Every plan with every algorithm that it can use."""
    for plan in PLANS:
        for way, (algorithm, *_) in WAYS.items():
            if plan in OF_DP or algorithm.all_gather:
                yield plan, way


def plan_row(plan: str, way: str) -> PlanRow:
    """A plan that communicates by an algorithm."""
    sizes, make = PLANS[plan]
    return PlanRow(f"{plan} by {way}", sizes, lambda: make(WAYS[way].algorithm), "model" if "model" in sizes else None)


def _on_a_grid() -> Any:
    """Weights that int4 sends without an error, wherever a block of them begins: quarters up to 7/4."""
    return jax.tree.map(lambda x: np.float32(np.clip(np.round(4 * x), -7, 7) / 4), MODELS[0].params())


GRID = ModelRow("softmax on a grid", _on_a_grid, MODELS[0].batch, MODELS[0].loss)


@cache
def largest_gradients() -> Any:
    """The largest magnitude of one example's gradient of the total, for each leaf, and the weight of the batch."""
    grad_fn, batch = sk.value_and_grad(GRID.loss(None)), GRID.batch(0)
    keys = sk.example_keys(sk.step_key(KEY, 0), BATCH)

    def one(example: Any, key: Any) -> Any:
        return grad_fn(GRID.params(), *jax.tree.map(lambda x: x[None], (example, key)))[2]

    grads = jax.jit(jax.vmap(one))(batch, keys)
    return jax.tree.map(lambda g: float(np.max(np.abs(g))), grads), float(batch["weight"].sum())


def first_step(plan: str, way: str) -> Reference:
    """What rounded messages may give: the first step within the bounds of `quantization_error`, any later one.

    A device's gradient of the total is a sum over its examples, at most their number times the largest of one example;
    n of these are sent and summed, in one message or, half as large, in one for each of two microbatches. The weights
    of the first step are sent without an error. SGD moves a parameter by the gradient's error times its rate; zero1 and
    zero2 send the new parameter too.
    """
    of, (sizes, _) = WAYS[way], PLANS[plan]
    assert of.sums
    n = int(np.prod([sizes[axis] for axis in LINKS]))
    largest, weight = largest_gradients()
    # Over the other axes of the batch what was rounded is summed, or sums are rounded: the same bound.
    error = jax.tree.map(lambda most: 2 * of.sums(BATCH / 2 / n * most, n) / weight, largest)
    first, *later = expected(GRID, "sgd", 1e-5).steps
    grads = jax.tree.map(lambda allowed, more: allowed + more, first.grads_allowed, error)
    sent = of.weights if plan.startswith("zero") else lambda largest: 0.0

    def moved(x: Any, allowed: Any, more: float) -> Any:
        return allowed + RATE * more + sent(float(np.max(np.abs(x))) + RATE * more)

    params = jax.tree.map(moved, first.params, first.params_allowed, error)
    return Reference((first._replace(grads_allowed=grads, params_allowed=params), *map(_any, later)))


def _any(step: Wanted) -> Wanted:
    options = {"loss_allowed": np.inf, "grads_allowed": jax.tree.map(lambda x: np.inf, step.grads_allowed)}
    return step._replace(params_allowed=jax.tree.map(lambda x: np.full_like(x, np.inf), step.params_allowed), **options)
