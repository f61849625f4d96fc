"""A fifth set, written before its writer had read the search, each kernel of a family that is in no earlier set.

At first try 22 of 30 lines were named first. Not named: `layered_product` (an all_gather over another axis),
`sharpness` (a stale variable, with which the result is another value of the reference), `latent` (the root of another
dim), `upsampled` (the first device for the last), `discrepancy` (rows of this device for all rows) and `sampled` (a
factor that nothing reads). Named second: `dropped` and `ranks` (rows counted without the index of the device).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

SEQ, ROWS, MODEL, COLS = P("sp"), P("dp"), P("tp"), P(None, "tp")


def gram_schmidt(x):
    """Orthonormal columns of a matrix whose rows are split over devices."""
    columns = []
    for k in range(x.shape[1]):
        column = x[:, k]
        for earlier in columns:
            # fault: column = column - earlier * (earlier @ column)
            column = column - earlier * lax.psum(earlier @ column, "dp")
        columns.append(column / jnp.sqrt(lax.psum(column @ column, "dp")))
    return jnp.stack(columns, 1)


def gram_schmidt_reference(x):
    columns = []
    for k in range(x.shape[1]):
        column = x[:, k]
        for earlier in columns:
            column = column - earlier * (earlier @ column)
        columns.append(column / jnp.sqrt(column @ column))
    return jnp.stack(columns, 1)


def nearest(queries, points, values):
    """The value of the nearest point; points are split over devices, queries are whole."""
    squares = ((queries[:, None] - points[None]) ** 2).sum(2)
    # fault: least = squares.min(1)
    least = lax.pmin(squares.min(1), "dp")
    is_nearest = squares <= least[:, None]
    return lax.psum(jnp.where(is_nearest, values[None], 0.0).sum(1), "dp")


def nearest_reference(queries, points, values):
    squares = ((queries[:, None] - points[None]) ** 2).sum(2)
    is_nearest = squares <= squares.min(1, keepdims=True)
    return jnp.where(is_nearest, values[None], 0.0).sum(1)


def forward_fill(x, seen):
    """A missing value is the last one that was seen, also on earlier devices."""
    me = lax.axis_index("sp")
    last = jnp.zeros(())
    for t in range(x.shape[0]):
        last = jnp.where(seen[t], x[t], last)
    lasts, some = lax.all_gather((last, seen.any()), "sp")
    carry = jnp.zeros(())
    for device in range(lax.axis_size("sp")):
        # fault: carry = jnp.where(some[device] & (device <= me), lasts[device], carry)
        carry = jnp.where(some[device] & (device < me), lasts[device], carry)
    out = []
    for t in range(x.shape[0]):
        carry = jnp.where(seen[t], x[t], carry)
        out.append(carry)
    return jnp.stack(out)


def forward_fill_reference(x, seen):
    carry, out = jnp.zeros(()), []
    for t in range(x.shape[0]):
        carry = jnp.where(seen[t], x[t], carry)
        out.append(carry)
    return jnp.stack(out)


def upwind(u, speed):
    """A step of advection on a periodic line: what is left of each cell flows in."""
    # fault: before = sk.shift(u[-1:], "sp", by=-1)
    before = sk.shift(u[-1:], "sp")
    left = jnp.concatenate([before, u[:-1]])
    return u - speed * (u - left)


def upwind_reference(u, speed):
    return u - speed * (u - jnp.roll(u, 1))


def layered_product(a, b):
    """2.5D: each layer of the grid multiplies its part of the inner dim, and layers are summed."""
    a = lax.all_gather(a, "col", axis=1, tiled=True)
    # fault: b = lax.all_gather(b, "col", axis=0, tiled=True)
    b = lax.all_gather(b, "row", axis=0, tiled=True)
    return lax.psum(a @ b, "layer")


def layered_product_reference(a, b):
    return a @ b


def hadamard(x):
    """The Walsh-Hadamard transform over devices, by exchanges with the device that differs in one bit."""
    n, me = lax.axis_size("dp"), lax.axis_index("dp")
    for k in range(2):
        other = lax.ppermute(x, "dp", [(i, i ^ (1 << k)) for i in range(n)])
        is_upper = (me >> k) & 1 == 1
        # fault: x = jnp.where(is_upper, x - other, x + other)
        x = jnp.where(is_upper, other - x, x + other)
    return x


def hadamard_reference(x):
    signs = np.array([[1, 1], [1, -1]], np.float32)
    blocks = x.reshape(4, -1)
    return (jnp.kron(signs, signs) @ blocks).reshape(x.shape)


def sharpness(w, x, y):
    """The gradient at the point that a step of fixed length uphill reaches."""
    error = x @ w - y
    uphill = lax.psum(x.T @ error, "dp")
    there = w + 0.5 * uphill / jnp.sqrt((uphill * uphill).sum())
    # fault: error = x @ w - y
    error = x @ there - y
    return lax.psum(x.T @ error, "dp")


def sharpness_reference(w, x, y):
    uphill = x.T @ (x @ w - y)
    there = w + 0.5 * uphill / jnp.sqrt((uphill * uphill).sum())
    return x.T @ (x @ there - y)


def responsibilities(x, means):
    """A step of expectation and maximization; the components of the mixture are split over devices."""
    powers = jnp.exp(-((x[:, None] - means[None]) ** 2).sum(2))
    # fault: shares = powers / powers.sum(1, keepdims=True)
    shares = powers / lax.psum(powers.sum(1, keepdims=True), "tp")
    return shares.T @ x / shares.sum(0)[:, None]


def responsibilities_reference(x, means):
    powers = jnp.exp(-((x[:, None] - means[None]) ** 2).sum(2))
    shares = powers / powers.sum(1, keepdims=True)
    return shares.T @ x / shares.sum(0)[:, None]


def decorrelated(a, b):
    """Barlow Twins: the correlation of two views over the whole batch should be the identity."""
    count = a.shape[0] * lax.axis_size("dp")
    a = a - lax.pmean(a.mean(0, keepdims=True), "dp")
    b = b - lax.pmean(b.mean(0, keepdims=True), "dp")
    # fault: correlation = lax.psum(a.T @ b, "dp") / a.shape[0]
    correlation = lax.psum(a.T @ b, "dp") / count
    away = (correlation - jnp.eye(a.shape[1])) ** 2
    return 0.1 * away.sum() + 0.9 * jnp.trace(away)


def decorrelated_reference(a, b):
    correlation = (a - a.mean(0, keepdims=True)).T @ (b - b.mean(0, keepdims=True)) / a.shape[0]
    away = (correlation - jnp.eye(a.shape[1])) ** 2
    return 0.1 * away.sum() + 0.9 * jnp.trace(away)


def bags(table, tokens, kept):
    """The mean embedding of a bag of tokens without its padding; the vocabulary is split."""
    rows = table.shape[0]
    local = tokens - lax.axis_index("tp") * rows
    inside = (local >= 0) & (local < rows)
    picked = jnp.where(inside[:, :, None], table[jnp.clip(local, 0, rows - 1)], 0.0)
    # fault: sums = lax.psum(picked.sum(1), "tp")
    sums = lax.psum((picked * kept[:, :, None]).sum(1), "tp")
    return sums / kept.sum(1, keepdims=True)


def bags_reference(table, tokens, kept):
    return (table[tokens] * kept[:, :, None]).sum(1) / kept.sum(1, keepdims=True)


def tree(x):
    """A broadcast from device 0 in two rounds: to the other half, then within the halves."""
    me = lax.axis_index("dp")
    for k in (2, 1):
        received = lax.ppermute(x, "dp", [(i, i + k) for i in range(0, 4, 2 * k)])
        # fault: x = jnp.where(me % k == 0, received, x)
        x = jnp.where(me % (2 * k) == k, received, x)
    return x


def tree_reference(x):
    return jnp.tile(x[: x.shape[0] // 4], 4)


def restricted(fine):
    """Full weighting of a multigrid: a coarse point is a quarter, a half and a quarter of three fine ones."""
    # fault: before = sk.shift(fine[:1], "sp", wrap=False)
    before = sk.shift(fine[-1:], "sp", wrap=False)
    left = jnp.concatenate([before, fine[1:-1:2]])
    return left / 4 + fine[::2] / 2 + fine[1::2] / 4


def restricted_reference(fine):
    left = jnp.concatenate([jnp.zeros(1), fine[1:-1:2]])
    return left / 4 + fine[::2] / 2 + fine[1::2] / 4


def smoothed(queries, points, values):
    """Kernel regression: points and their values go around the ring."""
    total, weights = jnp.zeros(queries.shape[0]), jnp.zeros(queries.shape[0])
    for _ in range(lax.axis_size("sp")):
        near = 1 / (1 + (queries[:, None] - points[None]) ** 2)
        total, weights = total + near @ values, weights + near.sum(1)
        # fault: points = sk.shift(points, "sp")
        points, values = sk.shift((points, values), "sp")
    return total / weights


def smoothed_reference(queries, points, values):
    near = 1 / (1 + (queries[:, None] - points[None]) ** 2)
    return near @ values / near.sum(1)


def newton(w, direction, x, y):
    """The slope and the curvature of a logistic regression along a direction."""
    chance = jax.nn.sigmoid(x @ w)
    slope = lax.psum(x.T @ (chance - y), "dp") @ direction
    spread = chance * (1 - chance)
    # fault: hessian = lax.pmean((x * spread[:, None]).T @ x, "dp")
    hessian = lax.psum((x * spread[:, None]).T @ x, "dp")
    return slope / (direction @ hessian @ direction)


def newton_reference(w, direction, x, y):
    chance = jax.nn.sigmoid(x @ w)
    hessian = (x * (chance * (1 - chance))[:, None]).T @ x
    return (x.T @ (chance - y)) @ direction / (direction @ hessian @ direction)


def latent(x, down, queries, keys, values, out):
    """Latent attention: one narrow latent a token, heads of which are split over devices."""
    narrow = x @ down
    total = jnp.zeros_like(x)
    for head in range(queries.shape[0]):
        q, k, v = x @ queries[head], narrow @ keys[head], narrow @ values[head]
        # fault: powers = jnp.exp(q @ k.T * x.shape[1] ** -0.5)
        powers = jnp.exp(q @ k.T * q.shape[1] ** -0.5)
        total = total + (powers / powers.sum(1, keepdims=True)) @ v @ out[head]
    return lax.psum(total, "tp")


def latent_reference(x, down, queries, keys, values, out):
    narrow = x @ down
    total = jnp.zeros_like(x)
    for head in range(queries.shape[0]):
        q, k, v = x @ queries[head], narrow @ keys[head], narrow @ values[head]
        powers = jnp.exp(q @ k.T * q.shape[1] ** -0.5)
        total = total + (powers / powers.sum(1, keepdims=True)) @ v @ out[head]
    return total


def upsampled(x):
    """Twice as many points, the new ones halfway between neighbours; the last point stays at the end."""
    me, n = lax.axis_index("sp"), lax.axis_size("sp")
    after = sk.shift(x[:1], "sp", by=-1, wrap=True)
    # fault: after = jnp.where(me == 0, x[-1:], after)
    after = jnp.where(me == n - 1, x[-1:], after)
    right = jnp.concatenate([x[1:], after])
    return jnp.stack([x, (x + right) / 2], 1).reshape(-1)


def upsampled_reference(x):
    right = jnp.concatenate([x[1:], x[-1:]])
    return jnp.stack([x, (x + right) / 2], 1).reshape(-1)


def excited(x, narrow, wide):
    """Squeeze and excitation: channels are scaled by gates that see the mean of all places."""
    # fault: squeezed = lax.pmean(x.sum(0), "sp")
    squeezed = lax.pmean(x.mean(0), "sp")
    gates = jax.nn.sigmoid(jax.nn.relu(squeezed @ narrow) @ wide)
    return x * gates[None]


def excited_reference(x, narrow, wide):
    gates = jax.nn.sigmoid(jax.nn.relu(x.mean(0) @ narrow) @ wide)
    return x * gates[None]


def diffused(x, noise, kept):
    """Noise by a schedule whose products go over all times; times are split over devices."""
    n, me = lax.axis_size("sp"), lax.axis_index("sp")
    totals = lax.all_gather(kept.prod(), "sp")
    earlier = jnp.where(jnp.arange(n) < me, totals, 1.0).prod()
    share = jnp.cumprod(kept) * earlier
    # fault: return jnp.sqrt(share) * x + (1 - share) * noise
    return jnp.sqrt(share) * x + jnp.sqrt(1 - share) * noise


def diffused_reference(x, noise, kept):
    share = jnp.cumprod(kept)
    return jnp.sqrt(share) * x + jnp.sqrt(1 - share) * noise


def discrepancy(x, y):
    """The squared distance of the means of two samples under a polynomial kernel."""
    count = x.shape[0] * lax.axis_size("dp")
    all_x, all_y = lax.all_gather((x, y), "dp", tiled=True)
    within = ((x @ all_x.T + 1) ** 2).sum() + ((y @ all_y.T + 1) ** 2).sum()
    # fault: between = ((x @ y.T + 1) ** 2).sum()
    between = ((x @ all_y.T + 1) ** 2).sum()
    return lax.psum(within - 2 * between, "dp") / count**2


def discrepancy_reference(x, y):
    within = ((x @ x.T + 1) ** 2).mean() + ((y @ y.T + 1) ** 2).mean()
    return within - 2 * ((x @ y.T + 1) ** 2).mean()


def ranks(gains, scores):
    """Gains divided by the place of a whole-numbered score among all; equal ones stand in the order of their index."""
    rows = scores.shape[0]
    everything = lax.all_gather(scores, "dp", tiled=True)
    # fault: index = jnp.arange(rows)
    index = lax.axis_index("dp") * rows + jnp.arange(rows)
    is_smaller = everything[None] < scores[:, None]
    is_before = (everything[None] == scores[:, None]) & (jnp.arange(everything.shape[0])[None] < index[:, None])
    return gains / (1 + (is_smaller | is_before).sum(1).astype(gains.dtype))


def ranks_reference(gains, scores):
    index = jnp.arange(scores.shape[0])
    is_smaller = scores[None] < scores[:, None]
    is_before = (scores[None] == scores[:, None]) & (index[None] < index[:, None])
    return gains / (1 + (is_smaller | is_before).sum(1).astype(gains.dtype))


def reflected(x, y):
    """A Householder reflection by a vector that is split over devices."""
    norm = jnp.sqrt(lax.psum((x * x).sum(), "dp"))
    # fault: is_first = jnp.arange(x.shape[0]) == 0
    is_first = (lax.axis_index("dp") == 0) & (jnp.arange(x.shape[0]) == 0)
    mirror = x + jnp.where(is_first, norm, 0.0)
    return y - 2 * mirror * lax.psum(mirror @ y, "dp") / lax.psum(mirror @ mirror, "dp")


def reflected_reference(x, y):
    mirror = x + jnp.where(jnp.arange(x.shape[0]) == 0, jnp.sqrt((x * x).sum()), 0.0)
    return y - 2 * mirror * (mirror @ y) / (mirror @ mirror)


def column_gradients(x, w, slopes):
    """The gradients of a layer whose columns are split: of its inputs, and of its weights."""
    hidden = x @ w
    before = slopes * (1 - jnp.tanh(hidden) ** 2)
    # fault: return before @ w.T, x.T @ before
    return lax.psum(before @ w.T, "tp"), x.T @ before


def column_gradients_reference(x, w, slopes):
    return jax.vjp(lambda x, w: jnp.tanh(x @ w), x, w)[1](slopes)


def dropped(x, w):
    """A mask by a rule of the global index of each row, and what is kept is scaled."""
    # fault: index = jnp.arange(x.shape[0])
    index = lax.axis_index("dp") * x.shape[0] + jnp.arange(x.shape[0])
    kept = (index * 5 + 2) % 7 < 4
    return jnp.where(kept[:, None], x * (7 / 4), 0.0) @ w


def dropped_reference(x, w):
    kept = (jnp.arange(x.shape[0]) * 5 + 2) % 7 < 4
    return jnp.where(kept[:, None], x * (7 / 4), 0.0) @ w


def token_shift(x, mix, w):
    """Each token is mixed with the one before it, which may be on the device before."""
    before = jnp.concatenate([sk.shift(x[-1:], "sp", wrap=False), x[:-1]])
    # fault: mixed = (1 - mix) * x + mix * before
    mixed = mix * x + (1 - mix) * before
    return jax.nn.relu(mixed @ w) ** 2


def token_shift_reference(x, mix, w):
    before = jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])
    return jax.nn.relu((mix * x + (1 - mix) * before) @ w) ** 2


def uncertain(losses, logs):
    """Losses of many tasks, a few a device, weighted by their learned variances."""
    # fault: weighted = jnp.exp(logs) * losses + logs
    weighted = jnp.exp(-logs) * losses + logs
    return lax.pmean(weighted.mean(), "dp")


def uncertain_reference(losses, logs):
    return (jnp.exp(-logs) * losses + logs).mean()


def cosines(x, y):
    """Cosines of all pairs of two lists of vectors whose features are split."""
    dots = lax.psum(x @ y.T, "tp")
    # fault: lengths = lax.psum(jnp.sqrt((x * x).sum(1)), "tp")
    lengths = jnp.sqrt(lax.psum((x * x).sum(1), "tp"))
    others = jnp.sqrt(lax.psum((y * y).sum(1), "tp"))
    return dots / (lengths[:, None] * others[None])


def cosines_reference(x, y):
    lengths, others = jnp.sqrt((x * x).sum(1)), jnp.sqrt((y * y).sum(1))
    return x @ y.T / (lengths[:, None] * others[None])


def sampled(x, right, candidates, chances):
    """A softmax over sampled candidates, split over devices, each corrected by the chance to be sampled."""
    wanted = (x * right).sum(1)
    # fault: powers = jnp.exp(x @ candidates.T)
    powers = jnp.exp(x @ candidates.T) / chances[None]
    total = jnp.exp(wanted) + lax.psum(powers.sum(1), "tp")
    return (jnp.log(total) - wanted).mean()


def sampled_reference(x, right, candidates, chances):
    wanted = (x * right).sum(1)
    total = jnp.exp(wanted) + (jnp.exp(x @ candidates.T) / chances[None]).sum(1)
    return (jnp.log(total) - wanted).mean()


def drawdown(prices):
    """How far each price is below the highest until then, also on earlier devices."""
    n, me = lax.axis_size("sp"), lax.axis_index("sp")
    tops = lax.all_gather(prices.max(), "sp")
    # fault: earlier = jnp.where(jnp.arange(n) < me, tops, 0.0).max()
    earlier = jnp.where(jnp.arange(n) < me, tops, -jnp.inf).max()
    highest = jnp.maximum(lax.cummax(prices), earlier)
    return highest - prices


def drawdown_reference(prices):
    return lax.cummax(prices) - prices


def adagrad(w, squares, gradient, rate):
    """A step whose state is split: gradients are scattered, and the weights that are whole again are returned."""
    # fault: slope = lax.psum_scatter(gradient, "dp", tiled=True)
    slope = lax.psum_scatter(gradient, "dp", tiled=True) / lax.axis_size("dp")
    squares = squares + slope * slope
    w = w - rate * slope / jnp.sqrt(squares)
    return w, squares


def adagrad_reference(w, squares, gradient, rate):
    slope = gradient.reshape(2, -1).mean(0)
    squares = squares + slope * slope
    return w - rate * slope / jnp.sqrt(squares), squares


def horner(coefficients, x):
    """A polynomial whose coefficients are split: each device scales its part by the power at which it begins."""
    rows = coefficients.shape[0]
    powers = jnp.stack([x**k for k in range(4 * rows)])
    value = (coefficients[:, None] * powers[:rows]).sum(0)
    # fault: value = value * powers[lax.axis_index("dp") * (rows - 1)]
    value = value * powers[lax.axis_index("dp") * rows]
    return lax.psum(value, "dp")


def horner_reference(coefficients, x):
    return (coefficients[:, None] * jnp.stack([x**k for k in range(coefficients.shape[0])])).sum(0)


def positive(*shape):
    """Numbers between 0.2 and 0.8."""
    return (0.2 + 0.6 * np.random.default_rng(shape).random(shape)).astype(np.float32)


SEEN = np.array([0, 1, 0, 0, 0, 0, 1, 0], bool)
TOKENS = np.array([[0, 5, 2], [7, 3, 3], [6, 1, 4]], np.int32)
KEPT = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 0]], np.float32)
SCORES = np.array([2, 1, 2, 0, 2, 1], np.int32)
GRID = (P("row", ("layer", "col")), P(("layer", "row"), "col"))
HEADS = (P(), P(), MODEL, MODEL, MODEL, MODEL)

CASES = [
    planted(gram_schmidt, gram_schmidt_reference, [floats(4, 2)], [ROWS], ROWS),
    planted(nearest, nearest_reference, [floats(3, 2), floats(6, 2), floats(6)], [P(), ROWS, ROWS], P(), grad=0),
    planted(forward_fill, forward_fill_reference, [floats(8), SEEN], [SEQ, SEQ], SEQ, sp=4),
    planted(upwind, upwind_reference, [floats(8), floats(8) + 1], [SEQ, SEQ], SEQ, sp=4),
    planted(
        layered_product,
        layered_product_reference,
        [floats(4, 8), floats(8, 6)],
        GRID,
        P("row", "col"),
        row=2,
        col=2,
        layer=2,
    ),
    planted(hadamard, hadamard_reference, [floats(8)], [ROWS], ROWS, dp=4),
    planted(sharpness, sharpness_reference, [floats(3), floats(4, 3), floats(4)], [P(), ROWS, ROWS], P(), grad=0),
    planted(responsibilities, responsibilities_reference, [floats(3, 2), floats(4, 2)], [P(), MODEL], MODEL),
    planted(decorrelated, decorrelated_reference, [floats(4, 3), floats(4, 3) + 1], [ROWS, ROWS], P()),
    planted(bags, bags_reference, [floats(8, 2), TOKENS, KEPT], [MODEL, P(), P()], P()),
    planted(tree, tree_reference, [floats(8)], [ROWS], ROWS, dp=4),
    planted(restricted, restricted_reference, [floats(16)], [SEQ], SEQ, sp=4),
    planted(smoothed, smoothed_reference, [floats(6), floats(6) + 1, floats(6) * 2], [SEQ] * 3, SEQ, sp=3),
    planted(newton, newton_reference, [floats(2), floats(2) + 1, floats(4, 2), floats(4)], [P(), P(), ROWS, ROWS], P()),
    planted(
        latent,
        latent_reference,
        [floats(3, 4), floats(4, 2), floats(2, 4, 3), floats(2, 2, 3), floats(2, 2, 3) + 1, floats(2, 3, 4)],
        HEADS,
        P(),
    ),
    planted(upsampled, upsampled_reference, [floats(8)], [SEQ], SEQ, sp=4),
    planted(excited, excited_reference, [floats(4, 3), floats(3, 2), floats(2, 3)], [SEQ, P(), P()], SEQ),
    planted(diffused, diffused_reference, [floats(6), floats(6) + 1, positive(6)], [SEQ] * 3, SEQ, sp=3),
    planted(discrepancy, discrepancy_reference, [floats(4, 2), floats(4, 2) + 1], [ROWS, ROWS], P()),
    planted(ranks, ranks_reference, [floats(6), SCORES], [ROWS, ROWS], ROWS),
    planted(reflected, reflected_reference, [floats(4), floats(4) + 1], [ROWS, ROWS], ROWS),
    planted(
        column_gradients,
        column_gradients_reference,
        [floats(3, 2), floats(2, 4), floats(3, 4)],
        [P(), COLS, COLS],
        (P(), COLS),
        grad=0,
    ),
    planted(dropped, dropped_reference, [floats(8, 2), floats(2, 2)], [ROWS, P()], ROWS),
    planted(token_shift, token_shift_reference, [floats(6, 2), floats(6, 2) + 1, floats(2, 2)], [SEQ, SEQ, P()], SEQ),
    planted(uncertain, uncertain_reference, [floats(4), floats(4) + 1], [ROWS, ROWS], P()),
    planted(cosines, cosines_reference, [floats(2, 4), floats(3, 4)], [COLS, COLS], P()),
    planted(
        sampled,
        sampled_reference,
        [floats(3, 2), floats(3, 2) + 1, floats(4, 2), positive(4)],
        [P(), P(), MODEL, MODEL],
        P(),
    ),
    planted(drawdown, drawdown_reference, [floats(8)], [SEQ], SEQ, grad=0, sp=4),
    planted(
        adagrad,
        adagrad_reference,
        [floats(4), positive(4), floats(8), positive(4)],
        [ROWS, ROWS, ROWS, ROWS],
        (ROWS, ROWS),
        grad=0,
    ),
    planted(horner, horner_reference, [floats(8), floats(3)], [ROWS, P()], P(), dp=4),
]
