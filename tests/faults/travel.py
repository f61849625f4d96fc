"""What travels between neighbours, and what is normalized over all: rings, pipelines, halos, norms, optimizers."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.attention import causal
from faults.case import planted

SEQ, STAGES, COLS, ROWS, GRID = P("sp"), P("pp"), P(None, "tp"), P("tp"), P("r", "c")


def striped(q, k, v):
    """Token j of device i is token j * n + i, so that all devices have as much to do; the sequence comes that way."""
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    block = q.shape[0]
    # fault: rows = i * block + jnp.arange(block)
    rows = jnp.arange(block) * n + i
    total, out = jnp.zeros((block, 1)), jnp.zeros_like(v)
    for step in range(n):
        cols = jnp.arange(block) * n + (i - step) % n
        powers = jnp.where(rows[:, None] >= cols[None], jnp.exp(q @ k.T), 0.0)
        total, out = total + powers.sum(1, keepdims=True), out + powers @ v
        k, v = sk.shift((k, v), "sp")
    return out / total


def striped_reference(q, k, v):
    order = jnp.array([0, 2, 4, 1, 3, 5])
    back = jnp.argsort(order)
    return causal(q[back], k[back], v[back])[order]


def zigzag(q, k, v):
    """Device i has blocks i and 2 n - 1 - i, so that all devices have as much to do; keys are gathered."""
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    half = q.shape[0] // 2
    # fault: second = (n + i) * half + jnp.arange(half)
    second = (2 * n - 1 - i) * half + jnp.arange(half)
    rows = jnp.concatenate([i * half + jnp.arange(half), second])
    cols, keys, values = lax.all_gather((rows, k, v), "sp", tiled=True)
    powers = jnp.where(rows[:, None] >= cols[None], jnp.exp(q @ keys.T), 0.0)
    return powers @ values / powers.sum(1, keepdims=True)


def zigzag_reference(q, k, v):
    order = jnp.array([0, 1, 6, 7, 2, 3, 4, 5])
    back = jnp.argsort(order)
    return causal(q[back], k[back], v[back])[order]


def values_gradient(q, k, cotangent):
    """The gradient of values travels with its keys, and comes home with the last step."""
    gradient = jnp.zeros((k.shape[0], cotangent.shape[1]))
    for _ in range(lax.axis_size("sp")):
        gradient = gradient + (q @ k.T).T @ cotangent
        # fault: k = sk.shift(k, "sp")
        k, gradient = sk.shift((k, gradient), "sp")
    return gradient


def staged(weights, batch):
    """A device works at microbatch t - i in tick t, and scales by what belongs to it."""
    x, scales = batch
    n, i = lax.axis_size("pp"), lax.axis_index("pp")
    many = x.shape[0]

    def tick(arriving, t):
        # fault: number = jnp.clip(t, 0, many - 1)
        number = jnp.clip(t - i, 0, many - 1)
        entering = jnp.where(i == 0, x[number], arriving)
        y = jnp.sin(entering @ weights[0]) * scales[number]
        return sk.shift(y, "pp", wrap=False), y

    _, done = lax.scan(tick, sk.vary(jnp.zeros_like(x[0]), "pp"), jnp.arange(many + n - 1))
    return lax.psum(jnp.where(i == n - 1, done[n - 1 :], 0.0), "pp")


def staged_reference(weights, batch):
    x, scales = batch
    for w in weights:
        x = jnp.sin(x @ w) * scales[:, None]
    return x


def auxiliary(weights, x):
    """A loss of each stage is summed over its own ticks alone."""
    n, i = lax.axis_size("pp"), lax.axis_index("pp")
    many = x.shape[0]
    arriving, extra = jnp.zeros_like(x[0]), jnp.float32(0)
    for t in range(many + n - 1):
        entering = jnp.where(i == 0, x[min(t, many - 1)], arriving)
        y = jnp.sin(entering * weights)
        # fault: works = (t >= i) & (t < many)
        works = (t >= i) & (t < i + many)
        extra = extra + jnp.where(works, jnp.square(y).sum(), 0.0)
        arriving = sk.shift(y, "pp", wrap=False)
    return lax.psum(extra, "pp")


def auxiliary_reference(weights, x):
    first = jnp.sin(x * weights[0])
    return jnp.square(first).sum() + jnp.square(jnp.sin(first * weights[1])).sum()


def corners(x):
    """Nine points: rows travel after columns are there, so that corners come with them."""
    wide = jnp.concatenate([sk.shift(x[:, -1:], "c"), x, sk.shift(x[:, :1], "c", by=-1)], 1)
    above = sk.shift(wide[-1:], "r")
    # fault: below = sk.shift(wide[-1:], "r", by=-1)
    below = sk.shift(wide[:1], "r", by=-1)
    high = jnp.concatenate([above, wide, below])
    h, w = x.shape
    return sum((1 + a + 2 * b) * high[a : a + h, b : b + w] for a in range(3) for b in range(3))


def corners_reference(x):
    rolled = [(1 + a + 2 * b) * jnp.roll(x, (1 - a, 1 - b), (0, 1)) for a in range(3) for b in range(3)]
    return sum(rolled)


def inflow(x, speed, boundary):
    """What flows in from the left; at the first device that is a boundary value."""
    # fault: before = sk.shift(x[-1:], "sp", wrap=False)
    before = jnp.where(lax.axis_index("sp") == 0, boundary, sk.shift(x[-1:], "sp"))
    left = jnp.concatenate([before, x[:-1]])
    return x - speed * (x - left)


def group_norm(x):
    """Groups of channels, whose pixels are split."""
    groups = x.reshape(x.shape[0], 2, -1)
    mean = lax.pmean(groups.mean((0, 2)), "sp")
    # fault: square = (groups * groups).mean((0, 2))
    square = lax.pmean((groups * groups).mean((0, 2)), "sp")
    variance = square - mean * mean
    return ((groups - mean[None, :, None]) / jnp.sqrt(variance + 0.1)[None, :, None]).reshape(x.shape)


def group_norm_reference(x):
    groups = x.reshape(x.shape[0], 2, -1)
    variance = groups.var((0, 2), keepdims=True)
    return ((groups - groups.mean((0, 2), keepdims=True)) / jnp.sqrt(variance + 0.1)).reshape(x.shape)


def normalized_keys(q, k):
    """Queries and keys of length one; their dims are split."""
    q = q / jnp.sqrt(lax.psum((q * q).sum(1, keepdims=True), "tp"))
    # fault: k = k / jnp.sqrt((k * k).sum(1, keepdims=True))
    k = k / jnp.sqrt(lax.psum((k * k).sum(1, keepdims=True), "tp"))
    return jnp.tanh(lax.psum(q @ k.T, "tp"))


def normalized_keys_reference(q, k):
    q = q / jnp.sqrt((q * q).sum(1, keepdims=True))
    k = k / jnp.sqrt((k * k).sum(1, keepdims=True))
    return jnp.tanh(q @ k.T)


def factored_rows(gradient):
    """Adafactor: a second moment as rows times columns; rows are split."""
    square = gradient * gradient
    rows = square.mean(1)
    cols = lax.pmean(square.mean(0), "tp")
    # fault: mean = rows.mean()
    mean = lax.pmean(rows.mean(), "tp")
    return gradient / jnp.sqrt(rows[:, None] * cols[None] / mean)


def factored_rows_reference(gradient):
    square = gradient * gradient
    return gradient / jnp.sqrt(square.mean(1)[:, None] * square.mean(0)[None] / square.mean())


def summed_levels(x):
    """Whole levels of one scale are summed, and scaled back."""
    largest = jnp.abs(x).max()
    scale = lax.pmax(largest, "tp") / 7.0
    levels = jnp.round(x / scale)
    # fault: return lax.psum(levels * (largest / 7.0), "tp")
    return lax.psum(levels * scale, "tp")


def summed_levels_reference(x):
    scale = jnp.abs(x).max() / 7.0
    return (jnp.round(x / scale) * scale).reshape(2, 3).sum(0)


def bounded_step(update):
    """An update whose mean square is at most one."""
    total = lax.psum((update * update).sum(), "tp")
    # fault: size = jnp.sqrt(total / update.size)
    size = jnp.sqrt(total / (update.size * lax.axis_size("tp")))
    return update / jnp.maximum(1.0, size)


Q, K, V = floats(6, 2), floats(6, 2) + 1, floats(6, 3)
CASES = [
    planted(striped, striped_reference, (Q, K, V), [SEQ] * 3, SEQ, sp=2, grad=0),
    planted(zigzag, zigzag_reference, (floats(8, 2), floats(8, 2) + 1, floats(8, 3)), [SEQ] * 3, SEQ, sp=2, grad=0),
    planted(values_gradient, lambda q, k, c: (q @ k.T).T @ c, (Q, K, V), [SEQ] * 3, SEQ, sp=3),
    planted(
        staged, staged_reference, (floats(2, 2, 2), (floats(3, 2), floats(3))), (STAGES, P()), P(), pp=2, grad=0
    ),
    planted(auxiliary, auxiliary_reference, (floats(2), floats(3, 2)), (STAGES, P()), P(), pp=2),
    planted(corners, corners_reference, (floats(6, 6),), (GRID,), GRID, r=3, c=3),
    planted(
        inflow, lambda x, s, b: x - s * (x - jnp.concatenate([b, x[:-1]])), (floats(6), floats(), floats(1)),
        (SEQ, P(), P()), SEQ, sp=3,
    ),
    planted(group_norm, group_norm_reference, (floats(4, 4),), (SEQ,), SEQ, sp=2),
    planted(normalized_keys, normalized_keys_reference, (floats(2, 4), floats(3, 4)), (COLS, COLS), P(), tp=2),
    planted(factored_rows, factored_rows_reference, (floats(4, 3),), (ROWS,), ROWS, tp=2),
    planted(summed_levels, summed_levels_reference, (floats(6),), (ROWS,), P(), tp=2, grad=0),
    planted(
        bounded_step, lambda u: u / jnp.maximum(1.0, jnp.sqrt((u * u).mean())), (floats(6),), (ROWS,), ROWS, tp=2
    ),
]  # fmt: skip
