"""A seventh set, written before its writer had read the search, and measured once: TODO figure.

A kernel may have two mistakes, one at a time: `# fault:` marks the first, `# slip:` the second.
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


def retention(q, k, v, decay):
    """Scores fade with distance; what earlier devices leave behind fades by whole blocks."""
    me, n, block = lax.axis_index("sp"), lax.axis_size("sp"), q.shape[0]
    powers = jnp.stack([decay**t for t in range(block + 1)])
    back = np.arange(block)[:, None] - np.arange(block)[None]
    # fault: fading = jnp.where(back > 0, powers[np.maximum(back, 0)], 0.0)
    fading = jnp.where(back >= 0, powers[np.maximum(back, 0)], 0.0)
    inner = (q @ k.T * fading) @ v
    # slip: state = (k * powers[1:][::-1][:, None]).T @ v
    state = (k * powers[:block][::-1][:, None]).T @ v
    states = lax.all_gather(state, "sp")
    carry = jnp.zeros_like(state)
    for device in range(n):
        carry = jnp.where(device < me, carry * powers[block] + states[device], carry)
    return inner + (q * powers[1:][:, None]) @ carry


def retention_reference(q, k, v, decay):
    powers = jnp.stack([decay**t for t in range(q.shape[0])])
    back = np.arange(q.shape[0])[:, None] - np.arange(q.shape[0])[None]
    return (q @ k.T * jnp.where(back >= 0, powers[np.maximum(back, 0)], 0.0)) @ v


def skewness(x):
    """Central moments of devices, merged one after another; the third over the cube of the root of the second."""
    mean = x.mean()
    parts = lax.all_gather((mean, ((x - mean) ** 2).sum(), ((x - mean) ** 3).sum()), "dp")
    more = x.shape[0]
    count, mean, second, third = more, parts[0][0], parts[1][0], parts[2][0]
    for i in range(1, lax.axis_size("dp")):
        total = count + more
        # fault: apart = mean - parts[0][i]
        apart = parts[0][i] - mean
        third = third + parts[2][i] + apart**3 * (count * more * (count - more) / total**2)
        third = third + 3 * apart * (count * parts[1][i] - more * second) / total
        second = second + parts[1][i] + apart**2 * (count * more / total)
        # slip: mean = mean + apart * count / total
        mean = mean + apart * more / total
        count = total
    spread = second / count
    return third / count / (spread * jnp.sqrt(spread))


def skewness_reference(x):
    apart = x - x.mean()
    spread = (apart**2).mean()
    return (apart**3).mean() / (spread * jnp.sqrt(spread))


def random_field(emissions, transitions, tags):
    """A chain whose loss is the weight of the right path among all paths; its places are split."""
    me, n, block = lax.axis_index("sp"), lax.axis_size("sp"), emissions.shape[0]
    # slip: is_start = jnp.arange(block) == 0
    is_start = (me == 0) & (jnp.arange(block) == 0)
    before = jnp.concatenate([sk.shift(tags[-1:], "sp", wrap=False), tags[:-1]])
    steps = jnp.where(is_start, 0.0, transitions[before, tags])
    right = lax.psum((emissions[jnp.arange(block), tags] + steps).sum(), "sp")
    product = jnp.eye(3)
    for t in range(block):
        factor = jnp.where(is_start[t], jnp.eye(3), jnp.exp(transitions))
        product = product @ (factor * jnp.exp(emissions[t])[None])
    products = lax.all_gather(product, "sp")
    chance = jnp.ones(3)
    for device in range(n):
        # fault: chance = products[device] @ chance
        chance = chance @ products[device]
    return jnp.log(chance.sum()) - right


def random_field_reference(emissions, transitions, tags):
    chance, right = jnp.exp(emissions[0]), emissions[0, tags[0]]
    for t in range(1, emissions.shape[0]):
        chance = (chance @ jnp.exp(transitions)) * jnp.exp(emissions[t])
        right = right + transitions[tags[t - 1], tags[t]] + emissions[t, tags[t]]
    return jnp.log(chance.sum()) - right


def lifted(x):
    """A wavelet on a ring: odd places are predicted by their neighbours, even ones take part of what is left."""
    even, odd = x[::2], x[1::2]
    after = sk.shift(even[:1], "sp", by=-1)
    # slip: detail = odd - (even + jnp.concatenate([after, even[1:]])) / 2
    detail = odd - (even + jnp.concatenate([even[1:], after])) / 2
    # fault: before = sk.shift(odd[-1:], "sp")
    before = sk.shift(detail[-1:], "sp")
    smooth = even + (jnp.concatenate([before, detail[:-1]]) + detail) / 4
    return smooth, detail


def lifted_reference(x):
    even, odd = x[::2], x[1::2]
    detail = odd - (even + jnp.roll(even, -1)) / 2
    return even + (jnp.roll(detail, 1) + detail) / 4, detail


def triangle(pair, left, right, gate):
    """The pair i, j is renewed by the pairs i, k and j, k of all k; rows of pairs are split."""
    a = jnp.einsum("ikc,cd->ikd", pair, left)
    b = jnp.einsum("ikc,cd->ikd", pair, right)
    everywhere = lax.all_gather(b, "dp", tiled=True)
    # fault: renewed = jnp.einsum("ikd,kjd->ijd", a, everywhere)
    renewed = jnp.einsum("ikd,jkd->ijd", a, everywhere)
    gates = jax.nn.sigmoid(jnp.einsum("ijc,cd->ijd", pair, gate))
    return gates * renewed


def triangle_reference(pair, left, right, gate):
    renewed = jnp.einsum("ikd,jkd->ijd", pair @ left, pair @ right)
    return jax.nn.sigmoid(pair @ gate) * renewed


def cyclic_reduction(lower, diagonal, upper, right):
    """A tridiagonal system, a row a device: each round removes the neighbours at a distance, which doubles."""
    me, n = lax.axis_index("dp"), lax.axis_size("dp")
    for distance in (1, 2):
        lower_a, diagonal_a, upper_a, right_a = sk.shift((lower, diagonal, upper, right), "dp", by=distance)
        lower_b, diagonal_b, upper_b, right_b = sk.shift((lower, diagonal, upper, right), "dp", by=-distance)
        above = jnp.where(me >= distance, lower / diagonal_a, 0.0)
        # slip: below = jnp.where(me + distance <= n, upper / diagonal_b, 0.0)
        below = jnp.where(me + distance < n, upper / diagonal_b, 0.0)
        # fault: diagonal = diagonal - above * lower_a - below * upper_b
        diagonal = diagonal - above * upper_a - below * lower_b
        right = right - above * right_a - below * right_b
        lower = -above * lower_a
        upper = -below * upper_b
    return right / diagonal


def cyclic_reduction_reference(lower, diagonal, upper, right):
    diagonals, rights = [diagonal[0]], [right[0]]
    for i in range(1, 4):
        factor = lower[i] / diagonals[-1]
        diagonals.append(diagonal[i] - factor * upper[i - 1])
        rights.append(right[i] - factor * rights[-1])
    x = [rights[3] / diagonals[3]]
    for i in (2, 1, 0):
        x.insert(0, (rights[i] - upper[i] * x[0]) / diagonals[i])
    return jnp.stack(x)


def toeplitz(kernel, x):
    """A filter as long as the sequence: blocks of inputs go round, and each meets the filter at its distance."""
    me, n, block = lax.axis_index("sp"), lax.axis_size("sp"), x.shape[0]
    places = jnp.arange(block)
    total = jnp.zeros_like(x)
    for step in range(n):
        source = (me - step) % n
        # fault: lag = (source - me) * block + places[:, None] - places[None]
        lag = (me - source) * block + places[:, None] - places[None]
        # slip: weights = jnp.where(lag >= 0, kernel[jnp.clip(lag, 0, block - 1)], 0.0)
        weights = jnp.where(lag >= 0, kernel[jnp.clip(lag, 0, n * block - 1)], 0.0)
        total = total + weights @ x
        x = sk.shift(x, "sp")
    return total


def toeplitz_reference(kernel, x):
    lag = np.arange(x.shape[0])[:, None] - np.arange(x.shape[0])[None]
    return jnp.where(lag >= 0, kernel[np.maximum(lag, 0)], 0.0) @ x


def supervised(x, labels, temperature):
    """Each row against all others, of which those with its label are wanted; rows are split."""
    rows = x.shape[0]
    everything, all_labels = lax.all_gather((x, labels), "dp", tiled=True)
    index = lax.axis_index("dp") * rows + jnp.arange(rows)
    is_other = index[:, None] != jnp.arange(everything.shape[0])[None]
    logits = x @ everything.T / temperature
    # fault: total = jnp.exp(logits).sum(1)
    total = jnp.where(is_other, jnp.exp(logits), 0.0).sum(1)
    # slip: wanted = labels[:, None] == all_labels[None]
    wanted = is_other & (labels[:, None] == all_labels[None])
    means = jnp.where(wanted, logits, 0.0).sum(1) / wanted.sum(1).astype(x.dtype)
    return lax.pmean((jnp.log(total) - means).mean(), "dp")


def supervised_reference(x, labels, temperature):
    is_other = ~jnp.eye(x.shape[0], dtype=bool)
    logits = x @ x.T / temperature
    total = jnp.where(is_other, jnp.exp(logits), 0.0).sum(1)
    wanted = is_other & (labels[:, None] == labels[None])
    means = jnp.where(wanted, logits, 0.0).sum(1) / wanted.sum(1).astype(x.dtype)
    return (jnp.log(total) - means).mean()


def gated_cell(x, w, u, state):
    """A recurrent cell whose units are split: each step gathers the state, then what the second gate keeps of it."""

    def step(h, row):
        everywhere = lax.all_gather(h, "tp", tiled=True)
        update = jax.nn.sigmoid(row @ w[0] + everywhere @ u[0])
        reset = jax.nn.sigmoid(row @ w[1] + everywhere @ u[1])
        # fault: kept = lax.all_gather(h, "tp", tiled=True)
        kept = lax.all_gather(reset * h, "tp", tiled=True)
        candidate = jnp.tanh(row @ w[2] + kept @ u[2])
        # slip: h = update * h + (1 - update) * candidate
        h = (1 - update) * h + update * candidate
        return h, h

    return lax.scan(step, state, x)[1]


def gated_cell_reference(x, w, u, state):
    out = []
    for row in x:
        update = jax.nn.sigmoid(row @ w[0] + state @ u[0])
        reset = jax.nn.sigmoid(row @ w[1] + state @ u[1])
        candidate = jnp.tanh(row @ w[2] + (reset * state) @ u[2])
        state = (1 - update) * state + update * candidate
        out.append(state)
    return jnp.stack(out)


def soft_slots(x, slots, w):
    """Slots of experts are mixtures of all tokens, and tokens of what all slots give; both are split."""
    powers = jnp.exp(x @ slots)
    # fault: sent = powers / lax.psum(powers.sum(0, keepdims=True), "ep")
    sent = powers / lax.psum(powers.sum(0, keepdims=True), "dp")
    inputs = lax.psum(sent.T @ x, "dp")
    outputs = jnp.tanh(inputs @ w[0])
    taken = powers / lax.psum(powers.sum(1, keepdims=True), "ep")
    # slip: return lax.psum(sent @ outputs, "ep")
    return lax.psum(taken @ outputs, "ep")


def soft_slots_reference(x, slots, w):
    powers = jnp.exp(x @ slots)
    inputs = (powers / powers.sum(0, keepdims=True)).T @ x
    outputs = jnp.tanh(jnp.einsum("esd,edf->esf", inputs.reshape(2, 2, -1), w)).reshape(4, -1)
    return powers / powers.sum(1, keepdims=True) @ outputs


def forgetting(q, k, v, logs):
    """Causal attention in which a pair fades by all gates between its places, given as logs; the sequence is split."""
    me, n, rows = lax.axis_index("sp"), lax.axis_size("sp"), q.shape[0]
    totals = lax.all_gather(logs.sum(), "sp")
    earlier = jnp.where(jnp.arange(n) < me, totals, 0.0).sum()
    # fault: faded = jnp.cumsum(logs)
    faded = jnp.cumsum(logs) + earlier
    k, v, all_faded = lax.all_gather((k, v, faded), "sp", tiled=True)
    # slip: logits = q @ k.T * q.shape[1] ** -0.5 + all_faded[None] - faded[:, None]
    logits = q @ k.T * q.shape[1] ** -0.5 + faded[:, None] - all_faded[None]
    seen = (me * rows + jnp.arange(rows))[:, None] >= jnp.arange(k.shape[0])[None]
    powers = jnp.where(seen, jnp.exp(logits), 0.0)
    return powers @ v / powers.sum(1, keepdims=True)


def forgetting_reference(q, k, v, logs):
    faded = jnp.cumsum(logs)
    logits = q @ k.T * q.shape[1] ** -0.5 + faded[:, None] - faded[None]
    powers = jnp.where(jnp.tri(q.shape[0], dtype=bool), jnp.exp(logits), 0.0)
    return powers @ v / powers.sum(1, keepdims=True)


def quasi_newton(gradient, moves, changes):
    """The direction of L-BFGS: back through the history, then forward through it; weights are split."""
    direction, shares = gradient, []
    for k in (1, 0):
        share = lax.psum(moves[k] @ direction, "dp") / lax.psum(moves[k] @ changes[k], "dp")
        direction = direction - share * changes[k]
        shares.append(share)
    # slip: scale = lax.psum(moves[1] @ changes[1], "dp") / lax.psum(moves[1] @ moves[1], "dp")
    scale = lax.psum(moves[1] @ changes[1], "dp") / lax.psum(changes[1] @ changes[1], "dp")
    direction = scale * direction
    for k in (0, 1):
        back = lax.psum(changes[k] @ direction, "dp") / lax.psum(moves[k] @ changes[k], "dp")
        # fault: direction = direction + (shares[k] - back) * moves[k]
        direction = direction + (shares[1 - k] - back) * moves[k]
    return -direction


def quasi_newton_reference(gradient, moves, changes):
    rates = 1 / (moves * changes).sum(1)
    second = rates[1] * (moves[1] @ gradient)
    direction = gradient - second * changes[1]
    first = rates[0] * (moves[0] @ direction)
    direction = direction - first * changes[0]
    direction = direction / (rates[1] * (changes[1] @ changes[1]))
    direction = direction + moves[0] * (first - rates[0] * (changes[0] @ direction))
    return -direction - moves[1] * (second - rates[1] * (changes[1] @ direction))


def bucketed(w, b, w_gradient, b_gradient):
    """Gradients lie in one padded bucket, of which each device averages and applies a piece."""
    n, used = lax.axis_size("dp"), w.size + b.size
    rest = jnp.zeros(-used % n)
    bucket = jnp.concatenate([w_gradient.reshape(-1), b_gradient, rest])
    piece = lax.psum_scatter(bucket, "dp", tiled=True) / n
    weights = jnp.concatenate([w.reshape(-1), b, rest])
    mine = lax.dynamic_slice_in_dim(weights, lax.axis_index("dp") * piece.size, piece.size)
    weights = lax.all_gather(mine - 0.5 * piece, "dp", tiled=True)
    # fault: return weights[: w.size].reshape(w.shape), weights[-b.size :]
    return weights[: w.size].reshape(w.shape), weights[w.size : used]


def bucketed_reference(w, b, w_gradient, b_gradient):
    return w - 0.5 * w_gradient.reshape(2, 3, 2).mean(0), b - 0.5 * b_gradient.reshape(2, 3).mean(0)


def drift(start, control, controls, x, y):
    """A round of local steps, corrected by how a device's gradient differs from all, as the round before has shown."""
    rate, w, mine = 0.25, start, controls[0]
    for _ in range(3):
        slope = x.T @ (x @ w - y) / x.shape[0]
        # slip: w = w - rate * (slope + mine - control)
        w = w - rate * (slope - mine + control)
    # fault: renewed = mine - control + (start - w) / rate
    renewed = mine - control + (start - w) / (3 * rate)
    moved = lax.pmean(w - start, "dp")
    changed = lax.pmean(renewed - mine, "dp")
    return start + moved, control + changed, renewed[None]


def drift_reference(start, control, controls, x, y):
    moved, renewed = [], []
    for mine, x_part, y_part in zip(controls, x.reshape(2, 2, -1), y.reshape(2, 2), strict=True):
        w = start
        for _ in range(3):
            w = w - 0.25 * (x_part.T @ (x_part @ w - y_part) / 2 - mine + control)
        moved.append(w - start)
        renewed.append(mine - control + (start - w) / 0.75)
    renewed = jnp.stack(renewed)
    return start + jnp.stack(moved).mean(0), control + (renewed - controls).mean(0), renewed


def assimilated(members, noise, observed):
    """Members of an ensemble move towards an observation of their first number; members are split."""
    count = members.shape[0] * lax.axis_size("dp")
    mean = lax.psum(members.sum(0), "dp") / count
    # fault: apart = members - members.mean(0, keepdims=True)
    apart = members - mean[None]
    seen = apart[:, 0]
    spread = lax.psum(seen @ seen, "dp") / (count - 1)
    gain = lax.psum(apart.T @ seen, "dp") / (count - 1) / (spread + 0.5)
    # slip: missing = observed + noise - mean[0]
    missing = observed + noise - members[:, 0]
    return members + missing[:, None] * gain[None]


def assimilated_reference(members, noise, observed):
    apart = members - members.mean(0, keepdims=True)
    covariance = apart.T @ apart / (members.shape[0] - 1)
    gain = covariance[:, 0] / (covariance[0, 0] + 0.5)
    return members + (observed + noise - members[:, 0])[:, None] * gain[None]


def pressed(places, masses):
    """Smoothed particles: densities in a first trip round the ring, forces of pressure in a second one."""
    n = lax.axis_size("sp")
    density, force = jnp.zeros_like(places), jnp.zeros_like(places)
    others, weights = places, masses
    for _ in range(n):
        near = 1 / (1 + (places[:, None] - others[None]) ** 2)
        density = density + near @ weights
        others, weights = sk.shift((others, weights), "sp")
    share = (density - 1) / density**2
    others, weights, shares = places, masses, share
    for _ in range(n):
        apart = places[:, None] - others[None]
        # fault: slope = apart / (1 + apart * apart)
        slope = apart / (1 + apart * apart) ** 2
        # slip: force = force + (slope * (share[:, None] + share[None])) @ weights
        force = force + (slope * (share[:, None] + shares[None])) @ weights
        others, weights, shares = sk.shift((others, weights, shares), "sp")
    return 2 * force


def pressed_reference(places, masses):
    apart = places[:, None] - places[None]
    density = 1 / (1 + apart**2) @ masses
    share = (density - 1) / density**2
    return (2 * apart / (1 + apart**2) ** 2 * (share[:, None] + share[None])) @ masses


def positive(*shape):
    """Numbers between 0.2 and 0.8."""
    return (0.2 + 0.6 * np.random.default_rng(shape).random(shape)).astype(np.float32)


def both(*arguments, **sizes):
    """Two cases: a kernel with its fault, and with its slip."""
    case = planted(*arguments, **sizes)
    return case, case._replace(name=f"{case.name}_again", mark="slip")


TAGS = np.array([2, 0, 1, 1, 0, 2], np.int32)
LABELS = np.array([0, 1, 0, 1, 2, 2, 0, 1], np.int32)
UNITS = P(None, None, "tp")

CASES = [
    *both(
        retention,
        retention_reference,
        [floats(6, 2), floats(6, 2) + 1, floats(6, 3), positive(1)[0]],
        [SEQ, SEQ, SEQ, P()],
        SEQ,
        sp=3,
    ),
    *both(skewness, skewness_reference, [floats(8)], [ROWS], P(), dp=4),
    *both(random_field, random_field_reference, [floats(6, 3), floats(3, 3), TAGS], [SEQ, P(), SEQ], P(), sp=3),
    *both(lifted, lifted_reference, [floats(12)], [SEQ], (SEQ, SEQ), sp=3),
    planted(
        triangle,
        triangle_reference,
        [floats(4, 4, 2), floats(2, 3), floats(2, 3) + 1, floats(2, 3) * 2],
        [ROWS, P(), P(), P()],
        ROWS,
    ),
    *both(
        cyclic_reduction,
        cyclic_reduction_reference,
        [positive(4), positive(4) + 2, positive(4) * 0.5, floats(4)],
        [ROWS] * 4,
        ROWS,
        dp=4,
    ),
    *both(toeplitz, toeplitz_reference, [floats(8), floats(8) + 1], [P(), SEQ], SEQ, sp=4),
    *both(supervised, supervised_reference, [floats(8, 2), LABELS, positive(1)[0]], [ROWS, ROWS, P()], P(), dp=4),
    *both(
        gated_cell,
        gated_cell_reference,
        [floats(3, 2), floats(3, 2, 4), floats(3, 4, 4), floats(4)],
        [P(), UNITS, UNITS, MODEL],
        COLS,
    ),
    *both(
        soft_slots,
        soft_slots_reference,
        [floats(4, 2), floats(2, 4), floats(2, 2, 3)],
        [ROWS, P(None, "ep"), P("ep")],
        ROWS,
        dp=2,
        ep=2,
    ),
    *both(
        forgetting,
        forgetting_reference,
        [floats(4, 2), floats(4, 2) + 1, floats(4, 3), -positive(4)],
        [SEQ] * 4,
        SEQ,
    ),
    *both(
        quasi_newton,
        quasi_newton_reference,
        [floats(4), floats(2, 4), floats(2, 4) * 2 + 1],
        [ROWS, P(None, "dp"), P(None, "dp")],
        ROWS,
    ),
    planted(
        bucketed,
        bucketed_reference,
        [floats(3, 2), floats(3), floats(6, 2), floats(6)],
        [P(), P(), ROWS, ROWS],
        (P(), P()),
    ),
    *both(
        drift,
        drift_reference,
        [floats(3), floats(3) + 1, floats(2, 3), floats(4, 3), floats(4)],
        [P(), P(), ROWS, ROWS, ROWS],
        (P(), P(), ROWS),
    ),
    *both(assimilated, assimilated_reference, [floats(4, 3), floats(4), floats(1)[0]], [ROWS, ROWS, P()], ROWS),
    *both(pressed, pressed_reference, [floats(6), positive(6)], [SEQ, SEQ], SEQ, sp=3),
]
