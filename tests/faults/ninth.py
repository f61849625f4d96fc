"""A ninth set, written like the seventh by one who had not read the search, and measured once: TODO figure."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

SEQ, ROWS, MODEL, COLS = P("sp"), P("dp"), P("tp"), P(None, "tp")


def alignments(scores, gap):
    """The weights of all alignments, summed: a device has a row, and works at column t - i in tick t."""
    me, n, columns = lax.axis_index("sp"), lax.axis_size("sp"), scores.shape[1]
    value, above = jnp.zeros(()), jnp.zeros(())
    for tick in range(n + columns - 1):
        # slip: column = tick - me + 1
        column = tick - me
        corner = jnp.where((me == 0) & (column == 0), 1.0, above)
        above = sk.shift(value, "sp", wrap=False)
        score = scores[0, jnp.clip(column, 0, columns - 1)]
        # fault: new = score * above + gap * (corner + value)
        new = score * corner + gap * (above + value)
        value = jnp.where((column >= 0) & (column < columns), new, 0.0)
    return lax.psum(jnp.where(me == n - 1, value, 0.0), "sp")


def alignments_reference(scores, gap):
    rows, columns = scores.shape
    table = [[0.0] * (columns + 1) for _ in range(rows + 1)]
    table[0][0] = 1.0
    for i in range(rows):
        for j in range(columns):
            table[i + 1][j + 1] = scores[i, j] * table[i][j] + gap * (table[i][j + 1] + table[i + 1][j])
    return table[rows][columns]


def monotone(chances):
    """The log of the chance of all paths that stay or go on by one state a step; states are split."""
    me, n, states = lax.axis_index("tp"), lax.axis_size("tp"), chances.shape[1]
    # slip: is_first = jnp.arange(states) == 0
    is_first = me * states + jnp.arange(states) == 0
    alpha = jnp.where(is_first, chances[0], 0.0)
    for t in range(1, chances.shape[0]):
        before = sk.shift(alpha[-1:], "tp", wrap=False)
        moved = jnp.concatenate([before, alpha[:-1]])
        # fault: alpha = chances[t] * alpha + moved
        alpha = chances[t] * (alpha + moved)
    return jnp.log(lax.psum(jnp.where(me == n - 1, alpha[-1], 0.0), "tp"))


def monotone_reference(chances):
    alpha = jnp.concatenate([chances[0, :1], jnp.zeros(chances.shape[1] - 1)])
    for t in range(1, chances.shape[0]):
        alpha = chances[t] * (alpha + jnp.concatenate([jnp.zeros(1), alpha[:-1]]))
    return jnp.log(alpha[-1])


def standardized(x, w, gain):
    """A layer whose weights have mean zero and one variance over their inputs, which are split."""
    inputs = w.shape[0] * lax.axis_size("tp")
    mean = lax.psum(w.sum(0), "tp") / inputs
    apart = w - mean[None]
    # fault: variance = (apart * apart).mean(0)
    variance = lax.pmean((apart * apart).mean(0), "tp")
    # slip: scale = gain / (jnp.sqrt(variance * inputs) + 0.25)
    scale = gain / jnp.sqrt(variance * inputs + 0.25)
    return lax.psum(x @ (apart * scale[None]), "tp")


def standardized_reference(x, w, gain):
    apart = w - w.mean(0, keepdims=True)
    return x @ apart * (gain / jnp.sqrt((apart * apart).sum(0) + 0.25))[None]


def unlikely(logits, right, banned):
    """The right token should be likely, a banned one should not; the vocabulary is split."""
    words = logits.shape[1]
    columns = lax.axis_index("tp") * words + jnp.arange(words)
    powers = jnp.exp(logits)
    # slip: total = lax.psum(powers.sum(), "tp")
    total = lax.psum(powers.sum(1), "tp")
    wanted = lax.psum(jnp.where(columns[None] == right[:, None], powers, 0.0).sum(1), "tp") / total
    avoided = lax.psum(jnp.where(columns[None] == banned[:, None], powers, 0.0).sum(1), "tp") / total
    # fault: return -(jnp.log(wanted) - jnp.log(avoided)).mean()
    return -(jnp.log(wanted) + jnp.log(1 - avoided)).mean()


def unlikely_reference(logits, right, banned):
    powers, rows = jnp.exp(logits), jnp.arange(logits.shape[0])
    chances = powers / powers.sum(1, keepdims=True)
    return -(jnp.log(chances[rows, right]) + jnp.log(1 - chances[rows, banned])).mean()


def calibration(confidence, hits, bins):
    """How far confidence is from what was right, squared, of bins weighted by their rows; rows are split."""
    rows = confidence.shape[0] * lax.axis_size("dp")
    inside = jax.nn.one_hot(bins, 3)
    counts = lax.psum(inside.sum(0), "dp") + 1
    sure = lax.psum(confidence @ inside, "dp") / counts
    # fault: right = hits @ inside / counts
    right = lax.psum(hits @ inside, "dp") / counts
    # slip: return (inside.sum(0) * (sure - right) ** 2).sum() / rows
    return (counts * (sure - right) ** 2).sum() / rows


def calibration_reference(confidence, hits, bins):
    inside = jax.nn.one_hot(bins, 3)
    counts = inside.sum(0) + 1
    return (counts * ((confidence - hits) @ inside / counts) ** 2).sum() / confidence.shape[0]


def brier(logits, labels):
    """The squared distance of probabilities from what was; rows and classes are split."""
    rows, classes = logits.shape
    columns = lax.axis_index("tp") * classes + jnp.arange(classes)
    powers = jnp.exp(logits)
    chances = powers / lax.psum(powers.sum(1, keepdims=True), "tp")
    hits = jnp.where(labels[:, None] == columns[None], 1.0, 0.0)
    apart = lax.psum(((chances - hits) ** 2).sum(), ("dp", "tp"))
    # fault: return apart / rows
    return apart / (rows * lax.axis_size("dp"))


def brier_reference(logits, labels):
    powers = jnp.exp(logits)
    chances = powers / powers.sum(1, keepdims=True)
    return ((chances - jax.nn.one_hot(labels, logits.shape[1])) ** 2).sum(1).mean()


def fused_sensors(state, precision, h, y, noise):
    """A Kalman update in its information form: what each sensor sees of two numbers is added; sensors are split."""
    # fault: seen = h * noise[:, None]
    seen = h / noise[:, None]
    total = precision + lax.psum(h.T @ seen, "dp")
    # slip: information = total @ state + lax.psum(seen.T @ y, "dp")
    information = precision @ state + lax.psum(seen.T @ y, "dp")
    volume = total[0, 0] * total[1, 1] - total[0, 1] * total[1, 0]
    first = total[1, 1] * information[0] - total[0, 1] * information[1]
    second = total[0, 0] * information[1] - total[1, 0] * information[0]
    return jnp.stack([first, second]) / volume, total


def fused_sensors_reference(state, precision, h, y, noise):
    total = precision + jnp.einsum("si,sj,s->ij", h, h, 1 / noise)
    information = precision @ state + h.T @ (y / noise)
    volume = total[0, 0] * total[1, 1] - total[0, 1] * total[1, 0]
    adjoint = jnp.stack([total[1, 1], -total[0, 1], -total[1, 0], total[0, 0]]).reshape(2, 2)
    return adjoint @ information / volume, total


def soft_f(chances, labels):
    """The mean of the soft F scores of all classes; rows and classes are split."""
    classes = chances.shape[1]
    columns = lax.axis_index("tp") * classes + jnp.arange(classes)
    is_right = labels[:, None] == columns[None]
    both_ways = lax.psum(jnp.where(is_right, chances, 0.0).sum(0), "dp")
    said = lax.psum(chances.sum(0), "dp")
    # fault: there = jnp.where(is_right, 1.0, 0.0).sum(0)
    there = lax.psum(jnp.where(is_right, 1.0, 0.0).sum(0), "dp")
    return lax.pmean((2 * both_ways / (said + there)).mean(), "tp")


def soft_f_reference(chances, labels):
    hits = jax.nn.one_hot(labels, chances.shape[1])
    return (2 * (hits * chances).sum(0) / (hits.sum(0) + chances.sum(0))).mean()


def own_adapters(x, w, down, up, owners):
    """Each row asks for one low-rank update of a layer that all share; the updates are split."""
    held = down.shape[0]
    local = owners - lax.axis_index("ep") * held
    # fault: is_here = (local >= 0) & (local <= held)
    is_here = (local >= 0) & (local < held)
    index = jnp.clip(local, 0, held - 1)
    narrow = jnp.einsum("bd,bdr->br", x, down[index])
    wide = jnp.einsum("br,bro->bo", narrow, up[index])
    update = lax.psum(jnp.where(is_here[:, None], wide, 0.0), "ep")
    # slip: return x @ w + update * down.shape[2]
    return x @ w + update / down.shape[2]


def own_adapters_reference(x, w, down, up, owners):
    return x @ w + jnp.einsum("bd,bdr,bro->bo", x, down[owners], up[owners]) / 2


def hamilton(place, speed, x, y):
    """Two leapfrog steps over weights that have a prior and a regression, rows of which are split."""

    def slope(w):
        # fault: return lax.psum(w + x.T @ (x @ w - y), "dp")
        return w + lax.psum(x.T @ (x @ w - y), "dp")

    speed = speed - 0.125 * slope(place)
    for step in range(2):
        place = place + 0.25 * speed
        # slip: share = 0.25
        share = 0.25 if step == 0 else 0.125
        speed = speed - share * slope(place)
    return place, speed


def hamilton_reference(place, speed, x, y):
    for _ in range(2):
        speed = speed - 0.125 * (place + x.T @ (x @ place - y))
        place = place + 0.25 * speed
        speed = speed - 0.125 * (place + x.T @ (x @ place - y))
    return place, speed


def variance_reduced(w, anchor, x, y):
    """A step by few rows, corrected by what they and all rows say at an anchor; rows are split."""

    def slopes(at, rows, targets):
        return rows.T @ (jnp.tanh(rows @ at) - targets) / rows.shape[0]

    whole = lax.pmean(slopes(anchor, x, y), "dp")
    new = slopes(w, x[:1], y[:1])
    # fault: old = slopes(anchor, x, y)
    old = slopes(anchor, x[:1], y[:1])
    # slip: slope = lax.pmean(new + old, "dp") - whole
    slope = lax.pmean(new - old, "dp") + whole
    return w - 0.5 * slope


def variance_reduced_reference(w, anchor, x, y):
    new = x[::2].T @ (jnp.tanh(x[::2] @ w) - y[::2]) / 2
    old = x[::2].T @ (jnp.tanh(x[::2] @ anchor) - y[::2]) / 2
    return w - 0.5 * (new - old + x.T @ (jnp.tanh(x @ anchor) - y) / 4)


def saddle(x, y, matrix):
    """Extragradient: both players try a step, and take it anew by what they would meet; the first one is split."""
    trial_x = x - 0.5 * (matrix @ y)
    trial_y = y + 0.5 * lax.psum(matrix.T @ x, "dp")
    new_x = x - 0.5 * (matrix @ trial_y)
    # fault: new_y = trial_y + 0.5 * lax.psum(matrix.T @ trial_x, "dp")
    new_y = y + 0.5 * lax.psum(matrix.T @ trial_x, "dp")
    return new_x, new_y


def saddle_reference(x, y, matrix):
    new_x = x - 0.5 * matrix @ (y + 0.5 * matrix.T @ x)
    return new_x, y + 0.5 * matrix.T @ (x - 0.5 * matrix @ y)


def chebyshev(laplacian, x, coefficients):
    """A filter of a graph as a sum of Chebyshev's polynomials of its matrix, rows of which are split."""
    before = x
    now = laplacian @ lax.all_gather(x, "dp", tiled=True)
    total = coefficients[0] * before + coefficients[1] * now
    for k in range(2, 4):
        spread = laplacian @ lax.all_gather(now, "dp", tiled=True)
        # fault: before, now = now, 2 * spread - x
        before, now = now, 2 * spread - before
        # slip: total = total + coefficients[k] * before
        total = total + coefficients[k] * now
    return total


def chebyshev_reference(laplacian, x, coefficients):
    first = laplacian @ x
    second = 2 * laplacian @ first - x
    third = 2 * laplacian @ second - first
    c = coefficients
    return c[0] * x + c[1] * first + c[2] * second + c[3] * third


def trace_estimate(probes, matrix):
    """A trace by random probes, and the variance of it; probes are split one way, rows of the matrix the other."""
    count, rows = probes.shape[0] * lax.axis_size("dp"), matrix.shape[0]
    # fault: mine = lax.dynamic_slice_in_dim(probes, lax.axis_index("dp") * rows, rows, 1)
    mine = lax.dynamic_slice_in_dim(probes, lax.axis_index("tp") * rows, rows, 1)
    images = probes @ matrix.T
    products = lax.psum((mine * images).sum(1), "tp")
    mean = lax.psum(products.sum(), "dp") / count
    apart = lax.psum(((products - mean) ** 2).sum(), "dp")
    # slip: return mean, apart / (count - 1)
    return mean, apart / (count - 1) / count


def trace_estimate_reference(probes, matrix):
    products = (probes * (probes @ matrix.T)).sum(1)
    return products.mean(), ((products - products.mean()) ** 2).sum() / 12


def turning_state(x, turn):
    """A state goes through a matrix each step; a block begins with what all blocks before it leave behind."""
    me, n = lax.axis_index("sp"), lax.axis_size("sp")
    state, states, power = jnp.zeros(2), [], jnp.eye(2)
    for row in x:
        state = turn @ state + row
        power = turn @ power
        states.append(state)
    ends = lax.all_gather(state, "sp")
    carry = jnp.zeros(2)
    for device in range(n):
        # fault: carry = jnp.where(device < me, turn @ carry + ends[device], carry)
        carry = jnp.where(device < me, power @ carry + ends[device], carry)
    out = []
    for state in states:
        carry = turn @ carry
        out.append(state + carry)
    return jnp.stack(out)


def turning_state_reference(x, turn):
    state, out = jnp.zeros(2), []
    for row in x:
        state = turn @ state + row
        out.append(state)
    return jnp.stack(out)


def flow_matching(noise, data, times, up, down):
    """The velocity from noise to data, by a layer whose width is split; rows are split the other way."""
    mixed = (1 - times)[:, None] * noise + times[:, None] * data
    inputs = jnp.concatenate([mixed, times[:, None]], 1)
    velocity = lax.psum(jnp.tanh(inputs @ up) @ down, "tp")
    # fault: apart = velocity - (data - mixed)
    apart = velocity - (data - noise)
    return lax.pmean((apart * apart).mean(), "dp")


def flow_matching_reference(noise, data, times, up, down):
    mixed = noise + times[:, None] * (data - noise)
    velocity = jnp.tanh(mixed @ up[:-1] + times[:, None] * up[-1:]) @ down
    return ((velocity - data + noise) ** 2).mean()


def prototypes(support, labels, queries, targets):
    """A query is likely to be of the class whose mean example is near; examples and queries are split."""
    member = jax.nn.one_hot(labels, 2)
    counts = lax.psum(member.sum(0), "dp") + 1
    # fault: centres = member.T @ support / counts[:, None]
    centres = lax.psum(member.T @ support, "dp") / counts[:, None]
    logits = -((queries[:, None] - centres[None]) ** 2).sum(2)
    right = logits[jnp.arange(queries.shape[0]), targets]
    return lax.pmean((jnp.log(jnp.exp(logits).sum(1)) - right).mean(), "dp")


def prototypes_reference(support, labels, queries, targets):
    member = jax.nn.one_hot(labels, 2)
    centres = member.T @ support / (member.sum(0) + 1)[:, None]
    logits = -((queries[:, None] - centres[None]) ** 2).sum(2)
    return (jnp.log(jnp.exp(logits).sum(1)) - logits[jnp.arange(queries.shape[0]), targets]).mean()


def margin(x, w, labels):
    """Cosines to directions of classes, the right one less a margin; classes are split."""
    x = x / jnp.sqrt((x * x).sum(1, keepdims=True))
    # slip: w = w / jnp.sqrt((w * w).sum(1, keepdims=True))
    w = w / jnp.sqrt((w * w).sum(0, keepdims=True))
    cosines = x @ w
    columns = lax.axis_index("tp") * w.shape[1] + jnp.arange(w.shape[1])
    is_right = labels[:, None] == columns[None]
    logits = 4 * jnp.where(is_right, cosines - 0.25, cosines)
    # fault: right = lax.psum(jnp.where(is_right, 4 * cosines, 0.0).sum(1), "tp")
    right = lax.psum(jnp.where(is_right, logits, 0.0).sum(1), "tp")
    return (jnp.log(lax.psum(jnp.exp(logits).sum(1), "tp")) - right).mean()


def margin_reference(x, w, labels):
    cosines = x / jnp.sqrt((x * x).sum(1, keepdims=True)) @ (w / jnp.sqrt((w * w).sum(0, keepdims=True)))
    hits = jax.nn.one_hot(labels, w.shape[1])
    logits = 4 * (cosines - 0.25 * hits)
    return (jnp.log(jnp.exp(logits).sum(1)) - (logits * hits).sum(1)).mean()


def positive(*shape):
    """Numbers between 0.2 and 0.8."""
    return (0.2 + 0.6 * np.random.default_rng(shape).random(shape)).astype(np.float32)


def both(*arguments, **sizes):
    """Two cases: a kernel with its fault, and with its slip."""
    case = planted(*arguments, **sizes)
    return case, case._replace(name=f"{case.name}_again", mark="slip")


RIGHT = np.array([3, 0, 2], np.int32)
BANNED = np.array([1, 2, 0], np.int32)
BINS = np.array([0, 2, 1, 0, 2, 1], np.int32)
CLASSES = np.array([1, 3, 0, 2], np.int32)
HALVES = np.array([0, 1, 1, 0], np.int32)

CASES = [
    *both(alignments, alignments_reference, [positive(3, 3), positive(1)[0]], [SEQ, P()], P(), sp=3),
    *both(monotone, monotone_reference, [positive(6, 4)], [COLS], P()),
    *both(standardized, standardized_reference, [floats(3, 4), floats(4, 2), floats(2)], [COLS, MODEL, P()], P()),
    *both(unlikely, unlikely_reference, [floats(3, 4), RIGHT, BANNED], [COLS, P(), P()], P()),
    *both(calibration, calibration_reference, [positive(6), floats(6), BINS], [ROWS] * 3, P()),
    planted(brier, brier_reference, [floats(4, 4), CLASSES], [P("dp", "tp"), ROWS], P()),
    *both(
        fused_sensors,
        fused_sensors_reference,
        [floats(2), floats(2, 2), floats(4, 2), floats(4), positive(4)],
        [P(), P(), ROWS, ROWS, ROWS],
        (P(), P()),
    ),
    planted(soft_f, soft_f_reference, [positive(4, 4), CLASSES], [P("dp", "tp"), ROWS], P()),
    *both(
        own_adapters,
        own_adapters_reference,
        [floats(4, 3), floats(3, 2), floats(4, 3, 2), floats(4, 2, 2), CLASSES],
        [P(), P(), P("ep"), P("ep"), P()],
        P(),
    ),
    *both(
        hamilton,
        hamilton_reference,
        [floats(2), floats(2) + 1, floats(4, 2), floats(4)],
        [P(), P(), ROWS, ROWS],
        (P(), P()),
    ),
    *both(
        variance_reduced,
        variance_reduced_reference,
        [floats(2), floats(2) + 1, floats(4, 2), floats(4)],
        [P(), P(), ROWS, ROWS],
        P(),
    ),
    planted(saddle, saddle_reference, [floats(4), floats(3), floats(4, 3)], [ROWS, P(), ROWS], (ROWS, P())),
    *both(chebyshev, chebyshev_reference, [floats(4, 4), floats(4), positive(4)], [ROWS, ROWS, P()], ROWS),
    *both(
        trace_estimate,
        trace_estimate_reference,
        [floats(4, 4), floats(4, 4) + 1],
        [ROWS, MODEL],
        (P(), P()),
    ),
    planted(turning_state, turning_state_reference, [floats(6, 2), floats(2, 2)], [SEQ, P()], SEQ, sp=3),
    planted(
        flow_matching,
        flow_matching_reference,
        [floats(4, 2), floats(4, 2)[::-1] * 2, positive(4), floats(3, 4), floats(4, 2)],
        [ROWS, ROWS, ROWS, COLS, MODEL],
        P(),
    ),
    planted(
        prototypes,
        prototypes_reference,
        [floats(4, 2), HALVES, floats(4, 2) + 1, HALVES[::-1].copy()],
        [ROWS] * 4,
        P(),
    ),
    *both(margin, margin_reference, [floats(3, 2), floats(2, 4), RIGHT], [P(), COLS, P()], P()),
]
