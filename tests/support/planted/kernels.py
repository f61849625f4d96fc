"""Wrong kernels, each beside what it should have computed.

A row gives the kernel, the reference on global arrays, the layouts and what the right tool says. All run on a mesh
data=2, model=4 unless `sizes` says otherwise.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import shardkit as sk

BOTH = ("data", "model")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 8)).astype(np.float32)
W = RNG.normal(size=(8, 8)).astype(np.float32)
ONES = np.ones((16, 8), np.float32)


class Planted(NamedTuple):
    """A mistake, and the words in which the tool must report it."""

    name: str
    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    call: tuple[tuple[Any, ...], Any, Any]  # arguments, in_specs, out_specs
    says: str = r"the result must equal the reference"
    tool: str = "assert_matches_reference"  # or "check_vma" (jax itself) or "emulate"
    sizes: dict[str, int] = {"data": 2, "model": 4}  # noqa: RUF012


def ring_reduce_scatter(x, *, start):
    """Every hop adds this device's part of the piece that is passing; right for start=1."""
    n, here = sk.axis_size("model"), sk.axis_index("model")
    parts = x.reshape(n, -1, *x.shape[1:])
    total = parts[(here - start) % n]
    for hop in range(n - 1):
        total = sk.shift(total, "model") + parts[(here - start - 1 - hop) % n]
    return total


def ring_gather(x, *, sign):
    """Puts what arrives after k hops where it came from; right for sign=-1."""
    n, here = sk.axis_size("model"), sk.axis_index("model")
    out = sk.vary(jnp.zeros((n, *x.shape), x.dtype), "model")
    for hop in range(n):
        out = out.at[(here + sign * hop) % n].set(x)
        x = sk.shift(x, "model")
    return out.reshape(-1, *x.shape[1:])


def local_softmax(x):
    shifted = jnp.exp(x - sk.all_reduce(x.max(1, keepdims=True), "model", op="max"))
    return shifted / shifted.sum(1, keepdims=True)


def elementwise_normalisation(x):
    mean = sk.all_reduce(x, "data", op="mean")
    return (x - mean) / jnp.sqrt(sk.all_reduce((x - mean) ** 2, "data", op="mean"))


def clipped(x):
    return x * jnp.minimum(1, 1 / jnp.sqrt(jnp.sum(x**2)))


ROWS, COLUMNS, BLOCKS = P("data"), P(None, "model"), P("data", "model")
UNEQUAL = {"check_vma": r"out_specs", "emulate": r"must be equal along axis 'data'"}
FACTOR_2, FACTOR_4 = r"everywhere 2x the reference", r"everywhere 4x the reference"


def of_sum(
    name: str, kernel: Callable[..., Any], spec: P, says: str, tool: str = "assert_matches_reference"
) -> Planted:
    """A mistake in the sum of all elements."""
    return Planted(name, kernel, jnp.sum, ((X,), spec, P()), says, tool)


def mean_of_means(x, w):
    return sk.all_reduce(jnp.sum(x[:, 0] * w) / jnp.sum(w), BOTH, op="mean")


def drop(x):
    return x * jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), 1.0, 0.0)


def noisy(x):
    return x + jax.random.normal(sk.fold_axis(jax.random.key(0), "data"), x.shape)


def biased(x, w, b):
    return sk.all_reduce(x @ w + b[None, :], "model")


RAGGED = np.float32([1] * 8 + [5] + [0] * 6 + [1]) + 0.1
KERNELS = [
    *(of_sum(f"missing psum, by {tool}", lambda x: jnp.sum(x), ROWS, says, tool) for tool, says in UNEQUAL.items()),
    of_sum(
        "psum over one axis of two",
        lambda x: sk.all_reduce(jnp.sum(x), "data"),
        BLOCKS,
        r"must be equal along axis 'model'",
        "emulate",
    ),
    of_sum("double psum", lambda x: sk.all_reduce(sk.all_reduce(jnp.sum(x), "data"), "data"), ROWS, FACTOR_2),
    of_sum("psum over an axis with equal copies", lambda x: sk.all_reduce(jnp.sum(x), BOTH), ROWS, FACTOR_4),
    of_sum(
        "mean where a sum was meant",
        lambda x: sk.all_reduce(jnp.sum(x), "data", op="mean"),
        ROWS,
        r"everywhere 1/2 of the reference",
    ),
    Planted(
        "mean of means",
        mean_of_means,
        lambda x, w: jnp.sum(x[:, 0] * w) / jnp.sum(w),
        ((X, RAGGED), (P(BOTH), P(BOTH)), P()),
        r"the result must equal the reference; the largest difference is",
    ),
    Planted(
        "wrong permutation",
        lambda x: sk.shift(x, "model", by=-1),
        lambda x: jnp.roll(x, 2, 1),
        ((X,), COLUMNS, COLUMNS),
        r"the result must equal the reference; the largest difference is",
    ),
    Planted(
        "a ring without its last hop",
        lambda x: sk.shift(x, "model", wrap=False),
        lambda x: jnp.roll(x, 2, 1),
        ((X,), COLUMNS, COLUMNS),
        r"at \[\d+, [01]\], where it is 0 and",
    ),
    Planted(
        "off-by-one ring reduce-scatter",
        lambda x: ring_reduce_scatter(x, start=2),
        lambda x: 4 * x,
        ((W,), P(), P("model")),
        r"under jit, the result must equal the reference",
    ),
    Planted(
        "ring gather filled backwards",
        lambda x: sk.all_reduce(ring_gather(x, sign=1), "model", op="mean"),
        lambda x: x,
        ((X,), P("model"), P()),
        r"under jit, the result must equal the reference",
    ),
    Planted(
        "scatter order reversed",
        lambda x: sk.reduce_scatter(sk.reduce_scatter(x, "model"), "data"),
        lambda x: 8 * x,
        ((X,), P(), P(BOTH)),
    ),
    Planted(
        "split and concat exchanged",
        lambda x: sk.all_to_all(x, "model", split_dim=1, concat_dim=1),
        lambda x: x,
        ((W,), P("model"), P(None, "model")),
        r"\(the whole tree\) has shape \(2, 32\) and the reference \(8, 8\)",
    ),
    Planted(
        "pmean of element-wise values as normalisation",
        elementwise_normalisation,
        lambda x: (x - x.mean(0, keepdims=True)) / x.std(0, keepdims=True),
        ((X,), ROWS, ROWS),
        r"where it is -?1 and the reference",
    ),
    Planted("softmax normalized per shard", local_softmax, lambda x: jax.nn.softmax(x, 1), ((X,), COLUMNS, COLUMNS)),
    Planted("clip per shard", clipped, clipped, ((X,), ROWS, ROWS)),
    Planted(
        "partial product left unreduced",
        lambda x, w: sk.all_reduce(x @ w, "model", op="mean"),
        lambda x, w: x @ w,
        ((X, W), (COLUMNS, P("model")), P()),
        r"everywhere 1/4 of the reference",
    ),
    Planted(
        "bias added before the sum",
        biased,
        lambda x, w, b: x @ w + b[None, :],
        ((X, W, np.ones(8, np.float32)), (COLUMNS, P("model"), P()), P()),
        r"the largest difference is 3 at",
    ),
    Planted(
        "gradient stopped at a gather",
        lambda x: jax.lax.stop_gradient(sk.all_gather(x, "data", replicated=True)) * 2,
        lambda x: x * 2,
        ((X,), ROWS, P()),
        r"the gradient of argument 0 must equal the reference; .*everywhere 0x the reference",
    ),
    Planted("RNG not folded", drop, drop, ((ONES,), ROWS, ROWS), r"where it is [01] and the reference [01]"),
    *(
        Planted(f"RNG folded where copies must agree, by {tool}", noisy, lambda x: x, ((ONES,), P(), P()), says, tool)
        for tool, says in UNEQUAL.items()
    ),
]


def moments(x):
    mean = sk.all_reduce(x.mean(0, keepdims=True), "data", op="mean")
    return mean, sk.all_reduce(((x - mean) ** 2).mean(0, keepdims=True), "data", op="mean")


def softmax(x):
    shifted = jnp.exp(x - sk.all_reduce(x.max(1, keepdims=True), "model", op="max"))
    return shifted / sk.all_reduce(shifted.sum(1, keepdims=True), "model")


# What the rows above should have been, where that is not plain: it shows that only the mistake is reported.
RIGHT = {
    "mean of means": lambda x, w: sk.all_reduce(jnp.sum(x[:, 0] * w), BOTH) / sk.all_reduce(jnp.sum(w), BOTH),
    "wrong permutation": lambda x: sk.shift(x, "model"),
    "off-by-one ring reduce-scatter": lambda x: ring_reduce_scatter(x, start=1),
    "ring gather filled backwards": lambda x: sk.all_reduce(ring_gather(x, sign=-1), "model", op="mean"),
    "scatter order reversed": lambda x: sk.reduce_scatter(sk.reduce_scatter(x, "data"), "model"),
    "split and concat exchanged": lambda x: sk.all_to_all(x, "model", split_dim=1, concat_dim=0),
    "pmean of element-wise values as normalisation": lambda x: (x - moments(x)[0]) / jnp.sqrt(moments(x)[1]),
    "softmax normalized per shard": softmax,
    "clip per shard": lambda x: x * jnp.minimum(1, 1 / jnp.sqrt(sk.all_reduce(jnp.sum(x**2), "data"))),
}
