"""A third set, written before the search was improved with its help: solvers, backward passes, decoding, clusters."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

SEQ, ROWS, COLS, EXPERTS = P("sp"), P("dp"), P(None, "tp"), P("ep")
COSINES, SINES = np.float32([1, 0, -1, 0]), np.float32([0, 1, 0, -1])


def four_step(x):
    """A Fourier transform of four numbers: pairs far apart, a turn, a transposition, then neighbours."""
    places = lax.axis_index("sp") * x.shape[1] + jnp.arange(x.shape[1])
    pairs = jnp.stack([x[0] + x[1], x[0] - x[1]])
    turns = jnp.arange(2)[:, None] * places[None] % 4
    real = jnp.asarray(COSINES)[turns] * pairs
    # fault: imaginary = jnp.asarray(SINES)[turns] * pairs
    imaginary = -jnp.asarray(SINES)[turns] * pairs
    real, imaginary = lax.all_to_all((real, imaginary), "sp", 0, 1, tiled=True)
    parts = jnp.stack([real, imaginary])
    return jnp.stack([parts[..., 0] + parts[..., 1], parts[..., 0] - parts[..., 1]], 2)


def four_step_reference(x):
    numbers = jnp.array([x[0, 0], x[0, 1], x[1, 0], x[1, 1]])
    turns = jnp.arange(4)[:, None] * jnp.arange(4)[None] % 4
    parts = jnp.stack([jnp.asarray(COSINES)[turns] @ numbers, -jnp.asarray(SINES)[turns] @ numbers])
    return jnp.swapaxes(parts.reshape(2, 2, 2), 1, 2)


def eliminated(row):
    """A matrix becomes upper triangular; each device has one row, and the pivot is sent to all."""
    i = lax.axis_index("dp")
    for k in range(2):
        # fault: pivot = lax.psum(jnp.where(i == 0, row, 0.0), "dp")
        pivot = lax.psum(jnp.where(i == k, row, 0.0), "dp")
        factor = row[:, k : k + 1] / pivot[:, k : k + 1]
        row = jnp.where(i > k, row - factor * pivot, row)
    return row


def eliminated_reference(matrix):
    for k in range(2):
        factors = matrix[k + 1 :, k : k + 1] / matrix[k : k + 1, k : k + 1]
        matrix = matrix.at[k + 1 :].add(-factors * matrix[k : k + 1])
    return matrix


def segmented_sums(x, starts):
    """Running sums that begin anew at each start."""
    i, n = lax.axis_index("sp"), lax.axis_size("sp")
    total, sums = jnp.zeros_like(x[0]), []
    for j in range(x.shape[0]):
        total = jnp.where(starts[j] == 1, 0.0, total) + x[j]
        sums.append(total)
    ends, resets = lax.all_gather((total, starts.max()), "sp")
    carry = jnp.float32(0)
    for j in range(n - 1):
        # fault: after = carry + ends[j]
        after = jnp.where(resets[j] == 1, 0.0, carry) + ends[j]
        carry = jnp.where(j < i, after, carry)
    return jnp.stack(sums) + jnp.where(jnp.cumsum(starts) == 0, carry, 0.0)


def segmented_sums_reference(x, starts):
    total, sums = jnp.float32(0), []
    for j in range(6):
        total = jnp.where(starts[j] == 1, 0.0, total) + x[j]
        sums.append(total)
    return jnp.stack(sums)


def nucleus(logits):
    """The likeliest tokens, up to three quarters of the mass; the vocabulary is split."""
    powers = jnp.exp(logits)
    every = lax.all_gather(powers, "tp", axis=1, tiled=True)
    likelier = every[:, None] > powers[:, :, None]
    before = jnp.where(likelier, every[:, None], 0.0).sum(2)
    # fault: kept = before < 0.75 * powers.sum(1, keepdims=True)
    kept = before < 0.75 * every.sum(1, keepdims=True)
    left = jnp.where(kept, powers, 0.0)
    return left / lax.psum(left.sum(1, keepdims=True), "tp")


def nucleus_reference(logits):
    powers = jnp.exp(logits)
    before = jnp.where(powers[:, None] > powers[:, :, None], powers[:, None], 0.0).sum(2)
    left = jnp.where(before < 0.75 * powers.sum(1, keepdims=True), powers, 0.0)
    return left / left.sum(1, keepdims=True)


def beams(scores, states):
    """The states of the best two continuations of beams that devices share."""
    values, places = lax.top_k(scores.reshape(-1), 2)
    places = places + lax.axis_index("dp") * scores.size
    values, places = lax.all_gather((values, places), "dp", tiled=True)
    best = places[lax.top_k(values, 2)[1]]
    # fault: parents = best // scores.shape[0]
    parents = best // scores.shape[1]
    return states[parents]


def beams_reference(scores, states):
    return states[lax.top_k(scores.reshape(-1), 2)[1] // 3]


def written(cache, new, position):
    """A key is written where its position is."""
    size = cache.shape[0]
    # fault: hit = position % size == jnp.arange(size)
    hit = position - lax.axis_index("sp") * size == jnp.arange(size)
    return jnp.where(hit[:, None], new[None], cache)


def limited_groups(x, router, w):
    """A token goes to the experts of one device alone, to the one with the highest score."""
    scores = x @ router
    best = scores.max(1)
    chosen = best == lax.pmax(best, "ep")
    powers = jnp.exp(scores)
    # fault: gates = powers / lax.psum(powers.sum(1, keepdims=True), "ep")
    gates = powers / powers.sum(1, keepdims=True)
    out = jnp.einsum("te,td,edf->tf", gates, x, w)
    return lax.psum(jnp.where(chosen[:, None], out, 0.0), "ep")


def limited_groups_reference(x, router, w):
    scores = (x @ router).reshape(2, 2, 2)
    gates = jax.nn.softmax(scores, 2)
    best = scores.max(2)
    chosen = best == best.max(1, keepdims=True)
    out = jnp.einsum("tge,td,gedf->tgf", gates, x, w.reshape(2, 2, 3, 2))
    return jnp.where(chosen[:, :, None], out, 0.0).sum(1)


def norm_backward(x, gain, cotangent):
    """The backward pass of a root mean square norm of split features."""
    width = x.shape[1] * lax.axis_size("tp")
    square = lax.psum((x * x).sum(1), "tp") / width + 0.1
    scaled = cotangent * gain[None]
    # fault: inner = lax.psum((cotangent * x).sum(1), "tp") / width
    inner = lax.psum((scaled * x).sum(1), "tp") / width
    return (scaled - x * (inner / square)[:, None]) / jnp.sqrt(square)[:, None]


def norm_backward_reference(x, gain, cotangent):
    def norm(x):
        return x * gain[None] / jnp.sqrt((x * x).mean(1, keepdims=True) + 0.1)

    return jax.vjp(norm, x)[1](cotangent)[0]


def queries_gradient(q, k, v, cotangent):
    """The gradient of queries through a softmax of keys that are split."""
    powers = jnp.exp(q @ k.T)
    weights = powers / lax.psum(powers.sum(1, keepdims=True), "sp")
    arriving = cotangent @ v.T
    mean = lax.psum((weights * arriving).sum(1, keepdims=True), "sp")
    # fault: slopes = weights * arriving - mean
    slopes = weights * (arriving - mean)
    return lax.psum(slopes @ k, "sp")


def queries_gradient_reference(q, k, v, cotangent):
    def attention(q):
        powers = jnp.exp(q @ k.T)
        return powers / powers.sum(1, keepdims=True) @ v

    return jax.vjp(attention, q)[1](cotangent)[0]


def halo_adjoint(cotangent, kernel):
    """The backward pass of a convolution: what falls beyond a block goes home and is added there."""
    size = cotangent.shape[0]
    wide = jnp.zeros(size + 2)
    for j in range(3):
        wide = wide.at[j : j + size].add(kernel[j] * cotangent)
    first = sk.shift(wide[-1:], "sp")
    # fault: last = sk.shift(wide[:1], "sp")
    last = sk.shift(wide[:1], "sp", by=-1)
    return wide[1:-1].at[:1].add(first).at[-1:].add(last)


def halo_adjoint_reference(cotangent, kernel):
    return kernel[0] * jnp.roll(cotangent, -1) + kernel[1] * cotangent + kernel[2] * jnp.roll(cotangent, 1)


def centred_teacher(teacher, student, center):
    """Self-distillation: the teacher's logits less a moving mean, which this batch moves for the next."""
    new = 0.75 * center + 0.25 * lax.pmean(teacher.mean(0), "dp")
    # fault: targets = jax.nn.softmax(teacher - new[None])
    targets = jax.nn.softmax(teacher - center[None])
    losses = -(targets * jax.nn.log_softmax(student)).sum(1)
    return lax.pmean(losses.mean(), "dp"), new


def centred_teacher_reference(teacher, student, center):
    targets = jax.nn.softmax(teacher - center[None])
    loss = -(targets * jax.nn.log_softmax(student)).sum(1).mean()
    return loss, 0.75 * center + 0.25 * teacher.mean(0)


def pairwise_sigmoid(a, b):
    """Each pair is a binary question; texts go round, and only those of this device have their images here."""
    size, loss = a.shape[0], jnp.float32(0)
    for step in range(lax.axis_size("dp")):
        # fault: signs = 2 * jnp.eye(size) - 1
        signs = 2 * jnp.eye(size) * int(step == 0) - 1
        loss = loss + jnp.log(1 + jnp.exp(-signs * (a @ b.T))).sum()
        b = sk.shift(b, "dp")
    return lax.psum(loss, "dp")


def pairwise_sigmoid_reference(a, b):
    return jnp.log(1 + jnp.exp(-(2 * jnp.eye(4) - 1) * (a @ b.T))).sum()


def row_scales(table, gradient, sums):
    """One accumulator a row of an embedding, of which devices have columns."""
    # fault: square = lax.pmean((gradient * gradient).sum(1), "tp")
    square = lax.pmean((gradient * gradient).mean(1), "tp")
    new = sums + square
    return table - 0.5 * gradient / jnp.sqrt(new)[:, None], new


def row_scales_reference(table, gradient, sums):
    new = sums + (gradient * gradient).mean(1)
    return table - 0.5 * gradient / jnp.sqrt(new)[:, None], new


def table_gradient(tokens, cotangent):
    """The gradient of a table of six rows, of which a device has some; tokens are split the other way."""
    rows = 6 // lax.axis_size("tp")
    # fault: first = lax.axis_index("dp") * rows
    first = lax.axis_index("tp") * rows
    hits = jnp.float32((tokens - first)[None] == jnp.arange(rows)[:, None])
    return lax.psum(hits @ cotangent, "dp")


def modularity(links, groups):
    """How many more links than by chance are inside of groups; nodes are split."""
    degrees = links.sum(1)
    every, others = lax.all_gather((degrees, groups), "dp", tiled=True)
    total = lax.psum(degrees.sum(), "dp")
    # fault: chance = degrees[:, None] * every[None] / (2 * total)
    chance = degrees[:, None] * every[None] / total
    inside = jnp.where(groups[:, None] == others[None], links - chance, 0.0)
    return lax.psum(inside.sum(), "dp") / total


def modularity_reference(links, groups):
    degrees = links.sum(1)
    chance = degrees[:, None] * degrees[None] / links.sum()
    return jnp.where(groups[:, None] == groups[None], links - chance, 0.0).sum() / links.sum()


def leapfrog(electric, magnetic):
    """Two fields on grids half a cell apart, each a half step after the other."""
    after = sk.shift(electric[:1], "sp", by=-1)
    magnetic_now = magnetic + 0.5 * (jnp.concatenate([electric[1:], after]) - electric)
    # fault: before = sk.shift(magnetic[-1:], "sp")
    before = sk.shift(magnetic_now[-1:], "sp")
    electric_now = electric + 0.5 * (magnetic_now - jnp.concatenate([before, magnetic_now[:-1]]))
    return electric_now, magnetic_now


def leapfrog_reference(electric, magnetic):
    magnetic = magnetic + 0.5 * (jnp.roll(electric, -1) - electric)
    return electric + 0.5 * (magnetic - jnp.roll(magnetic, 1)), magnetic


def red_black(x, force):
    """Gauss and Seidel: even places are renewed first, then odd ones; blocks are odd."""
    size = x.shape[0]
    # fault: colours = jnp.arange(size) % 2
    colours = (lax.axis_index("sp") * size + jnp.arange(size)) % 2
    for colour in range(2):
        left = jnp.concatenate([sk.shift(x[-1:], "sp"), x[:-1]])
        right = jnp.concatenate([x[1:], sk.shift(x[:1], "sp", by=-1)])
        x = jnp.where(colours == colour, 0.5 * (left + right + force), x)
    return x


def red_black_reference(x, force):
    for colour in range(2):
        new = 0.5 * (jnp.roll(x, 1) + jnp.roll(x, -1) + force)
        x = jnp.where(jnp.arange(6) % 2 == colour, new, x)
    return x


def deposited(cells, fractions, masses):
    """Particles give their masses to the two cells around them, on a ring of four cells."""
    here = jax.nn.one_hot(cells, 4)
    # fault: beyond = jax.nn.one_hot(cells + 1, 4)
    beyond = jax.nn.one_hot((cells + 1) % 4, 4)
    grid = ((1 - fractions) * masses) @ here + (fractions * masses) @ beyond
    return lax.psum_scatter(grid, "dp", tiled=True)


def deposited_reference(cells, fractions, masses):
    here = ((1 - fractions) * masses) @ jax.nn.one_hot(cells, 4)
    return here + jnp.roll((fractions * masses) @ jax.nn.one_hot(cells, 4), 1)


def turned(x):
    """Rotary positions of a split sequence, the second half of the features being the partner of the first."""
    places = jnp.float32(lax.axis_index("sp") * x.shape[0] + jnp.arange(x.shape[0]))
    angles = places[:, None] * jnp.array([1.0, 0.5, 1.0, 0.5])[None]
    # fault: partner = jnp.concatenate([x[:, 2:], -x[:, :2]], 1)
    partner = jnp.concatenate([-x[:, 2:], x[:, :2]], 1)
    return x * jnp.cos(angles) + partner * jnp.sin(angles)


def turned_reference(x):
    angles = jnp.arange(4.0)[:, None] * jnp.array([1.0, 0.5])[None]
    a, b = x[:, :2], x[:, 2:]
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], 1)


def two_ways(q, k, v):
    """Keys and values go round both ways at once, so that a ring takes half as long."""
    powers = jnp.exp(q @ k.T)
    total, out = powers.sum(1, keepdims=True), powers @ v
    onward, backward = (k, v), (k, v)
    for _ in range(lax.axis_size("sp") // 2):
        onward = sk.shift(onward, "sp")
        # fault: backward = sk.shift(backward, "sp")
        backward = sk.shift(backward, "sp", by=-1)
        for keys, values in (onward, backward):
            powers = jnp.exp(q @ keys.T)
            total, out = total + powers.sum(1, keepdims=True), out + powers @ values
    return out / total


def two_ways_reference(q, k, v):
    powers = jnp.exp(q @ k.T)
    return powers @ v / powers.sum(1, keepdims=True)


def shortest_paths(start, links):
    """Distances after two rounds; a device has some nodes and the links that leave them."""
    size, i = start.shape[0], lax.axis_index("dp")
    distances = start
    for _ in range(2):
        # fault: arriving = lax.pmin((start[:, None] + links).min(0), "dp")
        arriving = lax.pmin((distances[:, None] + links).min(0), "dp")
        distances = jnp.minimum(distances, lax.dynamic_slice_in_dim(arriving, i * size, size))
    return distances


def shortest_paths_reference(distances, links):
    for _ in range(2):
        distances = jnp.minimum(distances, (distances[:, None] + links).min(0))
    return distances


def expected_means(x, means):
    """A step of expectation maximization: points are split one way, clusters the other."""
    powers = jnp.exp(x @ means.T)
    shares = powers / lax.psum(powers.sum(1, keepdims=True), "tp")
    sums = lax.psum(shares.T @ x, "dp")
    # fault: masses = lax.psum(shares.sum(0), "tp")
    masses = lax.psum(shares.sum(0), "dp")
    return sums / masses[:, None]


def expected_means_reference(x, means):
    shares = jax.nn.softmax(x @ means.T, 1)
    return shares.T @ x / shares.sum(0)[:, None]


def clipped_units(w, gradient):
    """The gradient of a unit is at most a quarter of the unit's weights; inputs are split."""
    weights = jnp.sqrt(lax.psum((w * w).sum(1), "tp"))
    slopes = jnp.sqrt(lax.psum((gradient * gradient).sum(1), "tp"))
    # fault: factors = jnp.minimum(1.0, 0.25 * slopes / weights)
    factors = jnp.minimum(1.0, 0.25 * weights / slopes)
    return gradient * factors[:, None]


def clipped_units_reference(w, gradient):
    weights, slopes = jnp.sqrt((w * w).sum(1)), jnp.sqrt((gradient * gradient).sum(1))
    return gradient * jnp.minimum(1.0, 0.25 * weights / slopes)[:, None]


def accumulated_slopes(w, x, y):
    """Gradients of microbatches are reduced as they come, and added up."""
    total = jnp.zeros_like(w)
    for inputs, targets in zip(x, y, strict=True):
        slopes = inputs.T @ (inputs @ w - targets)
        # fault: total = lax.psum(total + slopes, "dp")
        total = total + lax.psum(slopes, "dp")
    return total / len(x)


def accumulated_slopes_reference(w, x, y):
    residuals = jnp.einsum("mbd,d->mb", x, w) - y
    return jnp.einsum("mbd,mb->d", x, residuals) / 2


Q, K, V, C = floats(2, 3), floats(4, 3), floats(4, 2), floats(2, 2)
CELLS, TOKENS, STARTS = np.array([3, 0, 2, 3]), np.array([4, 1, 0, 5]), np.array([0, 1, 1, 0, 0, 0])
CASES = [
    planted(four_step, four_step_reference, (floats(2, 2),), (P(None, "sp"),), P(None, "sp"), sp=2),
    planted(eliminated, eliminated_reference, (floats(3, 3),), (ROWS,), ROWS, dp=3),
    planted(segmented_sums, segmented_sums_reference, (floats(6), STARTS), (SEQ, SEQ), SEQ, sp=3),
    planted(nucleus, nucleus_reference, (floats(2, 4),), (COLS,), COLS, tp=2, grad=0),
    planted(beams, beams_reference, (floats(4, 3), floats(4, 2)), (ROWS, P()), P(), dp=2, grad=0),
    planted(
        written, lambda c, k, p: jnp.where((p == jnp.arange(6))[:, None], k[None], c),
        (floats(6, 2), floats(2), np.int32(4)), (SEQ, P(), P()), SEQ, sp=3,
    ),
    planted(
        limited_groups, limited_groups_reference, (floats(2, 3), floats(3, 4), floats(4, 3, 2)),
        (P(), P(None, "ep"), EXPERTS), P(), ep=2, grad=0,
    ),
    planted(
        norm_backward, norm_backward_reference, (floats(2, 4), floats(4), floats(2, 4) + 1),
        (COLS, P("tp"), COLS), COLS, tp=2, grad=0,
    ),
    planted(queries_gradient, queries_gradient_reference, (Q, K, V, C), (P(), SEQ, SEQ, P()), P(), sp=2, grad=0),
    planted(halo_adjoint, halo_adjoint_reference, (floats(6), floats(3)), (SEQ, P()), SEQ, sp=3),
    planted(
        centred_teacher, centred_teacher_reference, (floats(4, 3), floats(4, 3) + 1, floats(3)), (ROWS, ROWS, P()),
        (P(), P()), dp=2,
    ),
    planted(pairwise_sigmoid, pairwise_sigmoid_reference, (floats(4, 2), floats(4, 2) + 1), (ROWS, ROWS), P(), dp=2),
    planted(
        row_scales, row_scales_reference, (floats(3, 4), floats(3, 4) + 1, np.float32([1, 2, 3])), (COLS, COLS, P()),
        (COLS, P()), tp=2,
    ),
    planted(
        table_gradient, lambda t, c: jax.nn.one_hot(t, 6).T @ c, (TOKENS, floats(4, 2)), (ROWS, ROWS), P("tp"),
        dp=2, tp=2,
    ),
    planted(modularity, modularity_reference, (floats(4, 4), np.array([0, 1, 1, 0])), (ROWS, ROWS), P(), dp=2),
    planted(leapfrog, leapfrog_reference, (floats(6), floats(6) + 1), (SEQ, SEQ), (SEQ, SEQ), sp=3),
    planted(red_black, red_black_reference, (floats(6), floats(6) + 1), (SEQ, SEQ), SEQ, sp=2),
    planted(deposited, deposited_reference, (CELLS, floats(4), floats(4) + 1), (ROWS, ROWS, ROWS), ROWS, dp=2),
    planted(turned, turned_reference, (floats(4, 4),), (SEQ,), SEQ, sp=2),
    planted(two_ways, two_ways_reference, (floats(3, 2), floats(3, 2) + 1, floats(3, 3)), [SEQ] * 3, SEQ, sp=3),
    planted(shortest_paths, shortest_paths_reference, (floats(4), floats(4, 4)), (ROWS, ROWS), ROWS, dp=2, grad=0),
    planted(
        expected_means, expected_means_reference, (floats(4, 2), floats(4, 2)), (ROWS, P("tp")), P("tp"), dp=2, tp=2
    ),
    planted(clipped_units, clipped_units_reference, (floats(2, 4), floats(2, 4) + 1), (COLS, COLS), COLS, tp=2),
    planted(
        accumulated_slopes, accumulated_slopes_reference, (floats(2), floats(2, 4, 2), floats(2, 4)),
        (P(), P(None, "dp"), P(None, "dp")), P(), dp=2, grad=0,
    ),
]  # fmt: skip
