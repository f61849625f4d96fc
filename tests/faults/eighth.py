"""An eighth set, written with the seventh and like it, with more loops and more axes: TODO figure."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted
from faults.seventh import both, positive

SEQ, ROWS, MODEL, COLS = P("sp"), P("dp"), P("tp"), P(None, "tp")


def nonnegative(x, w, h):
    """A round of a nonnegative factorization, whose rows are split: first one factor, then the other with it."""
    # slip: top = lax.pmean(w.T @ x, "dp")
    top = lax.psum(w.T @ x, "dp")
    bottom = lax.psum(w.T @ w, "dp") @ h
    renewed = h * top / bottom
    # fault: w = w * (x @ h.T) / (w @ (h @ h.T))
    w = w * (x @ renewed.T) / (w @ (renewed @ renewed.T))
    return w, renewed


def nonnegative_reference(x, w, h):
    h = h * (w.T @ x) / (w.T @ w @ h)
    return w * (x @ h.T) / (w @ h @ h.T), h


def summed_area(image):
    """Sums of all pixels above and to the left of each; rows and columns of the image are split."""
    i, j = lax.axis_index("r"), lax.axis_index("c")
    sums = jnp.cumsum(jnp.cumsum(image, 0), 1)
    lefts = lax.all_gather(sums[:, -1], "c")
    # slip: is_left = jnp.arange(lefts.shape[0]) < i
    is_left = jnp.arange(lefts.shape[0]) < j
    wide = sums + jnp.where(is_left[:, None], lefts, 0.0).sum(0)[:, None]
    # fault: tops = lax.all_gather(sums[-1], "r")
    tops = lax.all_gather(wide[-1], "r")
    is_above = jnp.arange(tops.shape[0]) < i
    return wide + jnp.where(is_above[:, None], tops, 0.0).sum(0)[None]


def summed_area_reference(image):
    return jnp.cumsum(jnp.cumsum(image, 0), 1)


def pencils(x, first, second, third):
    """A transform of all three dims of a field: two are split, and each is made whole when its turn comes."""
    x = jnp.einsum("ab,byz->ayz", first, x)
    x = lax.all_to_all(x, "r", 0, 1, tiled=True)
    # slip: x = jnp.einsum("ba,xbz->xaz", second, x)
    x = jnp.einsum("ab,xbz->xaz", second, x)
    # fault: x = lax.all_to_all(x, "r", 1, 2, tiled=True)
    x = lax.all_to_all(x, "c", 1, 2, tiled=True)
    return jnp.einsum("ab,xyb->xya", third, x)


def pencils_reference(x, first, second, third):
    return jnp.einsum("ax,by,cz,xyz->abc", first, second, third, x)


def v_trace(ratios, rewards, values):
    """Targets of V-trace: what comes after the last time of a device is on the devices behind it."""
    me, n = lax.axis_index("sp"), lax.axis_size("sp")
    clipped = jnp.minimum(ratios, 1.0)
    following = jnp.concatenate([values[1:], sk.shift(values[:1], "sp", by=-1, wrap=False)])
    # fault: errors = rewards + 0.75 * following - values
    errors = clipped * (rewards + 0.75 * following - values)
    total, product, totals, products = jnp.zeros(()), jnp.ones(()), [], []
    for t in reversed(range(values.shape[0])):
        total = errors[t] + 0.75 * clipped[t] * total
        # slip: product = 0.75 * product
        product = 0.75 * clipped[t] * product
        totals.insert(0, total)
        products.insert(0, product)
    ends, shares = lax.all_gather((total, product), "sp")
    carry = jnp.zeros(())
    for device in reversed(range(n)):
        carry = jnp.where(device > me, ends[device] + shares[device] * carry, carry)
    return values + jnp.stack(totals) + jnp.stack(products) * carry


def v_trace_reference(ratios, rewards, values):
    clipped = jnp.minimum(ratios, 1.0)
    following = jnp.concatenate([values[1:], jnp.zeros(1)])
    total, totals = jnp.zeros(()), []
    for t in reversed(range(values.shape[0])):
        total = clipped[t] * (rewards[t] + 0.75 * following[t] - values[t] + 0.75 * total)
        totals.insert(0, total)
    return values + jnp.stack(totals)


def nested(w, x, y):
    """Weights are split over nodes and over the devices of each: gathered for a step, whose slopes are scattered."""
    rows = x.shape[0] * lax.axis_size(("node", "local"))
    everywhere = lax.all_gather(w, ("node", "local"), tiled=True)
    error = x @ everywhere - y
    # fault: slopes = lax.psum_scatter(x.T @ error, ("local", "node"), tiled=True)
    slopes = lax.psum_scatter(x.T @ error, ("node", "local"), tiled=True)
    return w - 0.5 * slopes / rows


def nested_reference(w, x, y):
    return w - 0.5 * (x.T @ (x @ w - y)) / x.shape[0]


def mixed_softmax(x, priors, heads, words, targets):
    """The loss of a mixture of softmaxes over one vocabulary, which is split."""
    asked = jnp.exp(x @ priors)
    # fault: shares = asked / lax.psum(asked.sum(1, keepdims=True), "tp")
    shares = asked / asked.sum(1, keepdims=True)
    width = words.shape[1]
    hot = jax.nn.one_hot(targets - lax.axis_index("tp") * width, width)
    chance = jnp.zeros(x.shape[0])
    for m in range(heads.shape[0]):
        # slip: hidden = jnp.tanh(x @ heads[0])
        hidden = jnp.tanh(x @ heads[m])
        powers = jnp.exp(hidden @ words)
        right = lax.psum((powers * hot).sum(1), "tp")
        chance = chance + shares[:, m] * right / lax.psum(powers.sum(1), "tp")
    return -jnp.log(chance).mean()


def mixed_softmax_reference(x, priors, heads, words, targets):
    shares = jnp.exp(x @ priors)
    powers = jnp.exp(jnp.tanh(jnp.einsum("td,mdf->tmf", x, heads)) @ words)
    chances = powers / powers.sum(2, keepdims=True) * (shares / shares.sum(1, keepdims=True))[:, :, None]
    return -jnp.log((chances.sum(1) * jax.nn.one_hot(targets, words.shape[1])).sum(1)).mean()


def interactions(x, linear, factors):
    """A factorization machine: each feature alone, and all pairs of two; features are split."""
    single = lax.psum(x @ linear, "tp")
    sums = lax.psum(x @ factors, "tp")
    # fault: squares = lax.psum((x @ factors) ** 2, "tp")
    squares = lax.psum((x * x) @ (factors * factors), "tp")
    pairs = (sums * sums - squares).sum(1) / 2
    return jax.nn.sigmoid(single + pairs)


def interactions_reference(x, linear, factors):
    products = (factors @ factors.T) * (1 - jnp.eye(x.shape[1]))
    return jax.nn.sigmoid(x @ linear + (x @ products * x).sum(1) / 2)


def importance_bound(x, w, mean, width, noise):
    """The log of the mean weight of samples of a latent; samples are split."""
    samples = noise.shape[0] * lax.axis_size("dp")
    z = mean[None] + width[None] * noise
    misfit = ((x[None] - z @ w) ** 2).sum(1)
    logs = ((noise * noise).sum(1) - (z * z).sum(1) - misfit) / 2
    # fault: top = lax.stop_gradient(logs.max())
    top = lax.pmax(lax.stop_gradient(logs.max()), "dp")
    total = lax.psum(jnp.exp(logs - top).sum(), "dp")
    return top + jnp.log(total / samples) + jnp.log(width).sum()


def importance_bound_reference(x, w, mean, width, noise):
    z = mean[None] + width[None] * noise
    logs = ((noise * noise).sum(1) - (z * z).sum(1) - ((x[None] - z @ w) ** 2).sum(1)) / 2
    return jnp.log(jnp.exp(logs).mean()) + jnp.log(width).sum()


def welch(x, window):
    """The mean power of segments that overlap by half; every second one ends on the next device, if there is one."""
    me, n, half = lax.axis_index("sp"), lax.axis_size("sp"), x.shape[0] // 2
    after = sk.shift(x[:half], "sp", by=-1, wrap=False)
    powers = []
    for segment in (x, jnp.concatenate([x[half:], after])):
        tapered = segment * window
        powers.append((COSINES @ tapered) ** 2 + (SINES @ tapered) ** 2)
    # fault: second = powers[1]
    second = jnp.where(me < n - 1, powers[1], 0.0)
    # slip: return lax.psum(powers[0] + second, "sp") / (2 * n)
    return lax.psum(powers[0] + second, "sp") / (2 * n - 1)


def welch_reference(x, window):
    segments = jnp.stack([x[start : start + 4] * window for start in range(0, x.shape[0] - 3, 2)])
    return ((segments @ COSINES.T) ** 2 + (segments @ SINES.T) ** 2).mean(0)


def controlled(state, cosine, sine):
    """A rotation of the second qubit where the first is set, then one of the third; two qubits are devices."""
    # fault: is_set = lax.axis_index("b") == 1
    is_set = lax.axis_index("a") == 1
    is_upper = lax.axis_index("b") == 1
    other = lax.ppermute(state, "b", [(0, 1), (1, 0)])
    # slip: sign = jnp.where(is_upper, -1.0, 1.0)
    sign = jnp.where(is_upper, 1.0, -1.0)
    state = jnp.where(is_set, cosine * state + sign * sine * other, state)
    low, high = state[: state.shape[0] // 2], state[state.shape[0] // 2 :]
    return jnp.concatenate([cosine * low - sine * high, sine * low + cosine * high])


def controlled_reference(state, cosine, sine):
    turn = jnp.stack([cosine, -sine, sine, cosine]).reshape(2, 2)
    state = state.reshape(2, 2, 2, -1)
    state = jnp.stack([state[0], jnp.einsum("ab,bcd->acd", turn, state[1])])
    return jnp.einsum("ab,xybd->xyad", turn, state).reshape(-1)


def far_tokens(h, heads, tokens):
    """Losses of the next token and of the one behind it, each by its own head, as far as there are any."""
    me, n, block = lax.axis_index("sp"), lax.axis_size("sp"), tokens.shape[0]
    place, total = me * block + jnp.arange(block), jnp.zeros(())
    for ahead in (1, 2):
        logits = h @ heads[ahead - 1]
        wanted = jnp.concatenate([tokens[ahead:], sk.shift(tokens[:ahead], "sp", by=-1)])
        right = (logits * jax.nn.one_hot(wanted, logits.shape[1])).sum(1)
        losses = jnp.log(jnp.exp(logits).sum(1)) - right
        # fault: counted = place < n * block - 1
        counted = place < n * block - ahead
        summed = lax.psum(jnp.where(counted, losses, 0.0).sum(), "sp")
        # slip: total = total + summed / (n * block)
        total = total + summed / (n * block - ahead)
    return total / 2


def far_tokens_reference(h, heads, tokens):
    total = jnp.zeros(())
    for ahead in (1, 2):
        logits = (h @ heads[ahead - 1])[:-ahead]
        right = (logits * jax.nn.one_hot(tokens[ahead:], logits.shape[1])).sum(1)
        total = total + (jnp.log(jnp.exp(logits).sum(1)) - right).mean()
    return total / 2


def prefilled(q, k, v, keys, values, length):
    """New tokens see what a cache holds, places of which are split, and each other; then keys go into the cache."""
    rows, scale, many = keys.shape[0], q.shape[1] ** -0.5, q.shape[0]
    place = lax.axis_index("sp") * rows + jnp.arange(rows)
    old = jnp.where((place < length)[None], jnp.exp(q @ keys.T * scale), 0.0)
    # slip: seen = jnp.arange(many)[:, None] <= jnp.arange(many)[None]
    seen = jnp.arange(many)[:, None] >= jnp.arange(many)[None]
    new = jnp.where(seen, jnp.exp(q @ k.T * scale), 0.0)
    # fault: total = lax.psum(old.sum(1) + new.sum(1), "sp")
    total = lax.psum(old.sum(1), "sp") + new.sum(1)
    out = lax.psum(old @ values, "sp") + new @ v
    is_here = place[:, None] == (length + jnp.arange(many))[None]
    keys = jnp.where(is_here.any(1)[:, None], is_here.astype(k.dtype) @ k, keys)
    return out / total[:, None], keys


def prefilled_reference(q, k, v, keys, values, length):
    everything, scale = jnp.concatenate([keys[:3], k]), q.shape[1] ** -0.5
    seen = np.arange(3)[:, None] + 3 >= np.arange(6)[None]
    powers = jnp.where(seen, jnp.exp(q @ everything.T * scale), 0.0)
    out = powers @ jnp.concatenate([values[:3], v]) / powers.sum(1, keepdims=True)
    return out, jnp.concatenate([everything, keys[6:]])


def magnitudes(x, w, down, up, lengths):
    """A low-rank update of the direction of each column, whose length is learned alone; inputs are split."""
    moved = w + down @ up
    # fault: norms = jnp.sqrt(lax.psum((w * w).sum(0), "tp"))
    norms = jnp.sqrt(lax.psum((moved * moved).sum(0), "tp"))
    return lax.psum(x @ moved, "tp") * (lengths / norms)[None]


def magnitudes_reference(x, w, down, up, lengths):
    moved = w + down @ up
    return x @ (moved * (lengths / jnp.sqrt((moved * moved).sum(0)))[None])


def blended(x, y, w, share):
    """Each row is mixed with that of the next device, and its error with the error against that one's target."""
    partner = sk.shift(x, "dp", by=-1)
    # fault: partner_y = sk.shift(y, "dp")
    partner_y = sk.shift(y, "dp", by=-1)
    out = jnp.tanh((share * x + (1 - share) * partner) @ w)
    errors = share * (out - y) ** 2 + (1 - share) * (out - partner_y) ** 2
    return lax.pmean(errors.mean(), "dp")


def blended_reference(x, y, w, share):
    partner, partner_y = jnp.roll(x, -2, 0), jnp.roll(y, -2)
    out = jnp.tanh((share * x + (1 - share) * partner) @ w)
    return (share * (out - y) ** 2 + (1 - share) * (out - partner_y) ** 2).mean()


def queued(queries, keys, queue, temperature):
    """Queries against their keys and a queue of older ones; then the keys of all devices enter it in front."""
    right = (queries * keys).sum(1) / temperature
    powers = jnp.exp(queries @ queue.T / temperature)
    losses = jnp.log(jnp.exp(right) + powers.sum(1)) - right
    everything = lax.all_gather(keys, "dp", tiled=True)
    # fault: queue = jnp.concatenate([everything, queue[everything.shape[0] :]])
    queue = jnp.concatenate([everything, queue[: -everything.shape[0]]])
    return lax.pmean(losses.mean(), "dp"), queue


def queued_reference(queries, keys, queue, temperature):
    right = (queries * keys).sum(1) / temperature
    powers = jnp.exp(queries @ queue.T / temperature)
    return (jnp.log(jnp.exp(right) + powers.sum(1)) - right).mean(), jnp.concatenate([keys, queue[:-4]])


def dependence(x, y):
    """How far two samples depend on each other: products of their centred kernels, rows of which are split."""
    count = x.shape[0] * lax.axis_size("dp")
    all_x, all_y = lax.all_gather((x, y), "dp", tiled=True)
    gram_x, gram_y = (x @ all_x.T + 1) ** 2, (y @ all_y.T + 1) ** 2
    of_rows = gram_x.mean(1, keepdims=True)
    of_columns = lax.pmean(gram_x.mean(0, keepdims=True), "dp")
    whole = lax.pmean(gram_x.mean(), "dp")
    # fault: centred = gram_x - of_rows - of_columns - whole
    centred = gram_x - of_rows - of_columns + whole
    return lax.psum((centred * gram_y).sum(), "dp") / (count - 1) ** 2


def dependence_reference(x, y):
    count = x.shape[0]
    centre = jnp.eye(count) - 1 / count
    return jnp.trace(centre @ (x @ x.T + 1) ** 2 @ centre @ (y @ y.T + 1) ** 2) / (count - 1) ** 2


def plate(u, load):
    """Two steps of a plate that bends under a load, a periodic grid of which rows and columns are split."""

    def laplacian(u):
        up = jnp.concatenate([sk.shift(u[-1:], "r"), u[:-1]])
        down = jnp.concatenate([u[1:], sk.shift(u[:1], "r", by=-1)])
        left = jnp.concatenate([sk.shift(u[:, -1:], "c"), u[:, :-1]], 1)
        # fault: right = jnp.concatenate([u[:, 1:], sk.shift(u[:, :1], "r", by=-1)], 1)
        right = jnp.concatenate([u[:, 1:], sk.shift(u[:, :1], "c", by=-1)], 1)
        return up + down + left + right - 4 * u

    for _ in range(2):
        u = u - (laplacian(laplacian(u)) - load) / 64
    return u


def plate_reference(u, load):
    def laplacian(u):
        return sum(jnp.roll(u, by, dim) for by in (1, -1) for dim in (0, 1)) - 4 * u

    for _ in range(2):
        u = u - (laplacian(laplacian(u)) - load) / 64
    return u


def sliced_experts(x, slots, up, down):
    """Tokens travel to experts along one axis; the inner width of each expert is split along another."""
    arriving = lax.all_to_all(slots.T @ x, "ep", 0, 0, tiled=True)
    hidden = jnp.tanh(arriving @ up[0])
    # fault: out = lax.psum(hidden @ down[0], "ep")
    out = lax.psum(hidden @ down[0], "tp")
    home = lax.all_to_all(out, "ep", 0, 0, tiled=True)
    return slots @ home


def sliced_experts_reference(x, slots, up, down):
    x, slots = x.reshape(2, 2, -1), slots.reshape(2, 2, 2, 2)
    hidden = jnp.tanh(jnp.einsum("btec,btd,edf->becf", slots, x, up))
    return jnp.einsum("btec,becf,efd->btd", slots, hidden, down).reshape(4, -1)


def counted_tokens(w, x, y, kept):
    """Slopes of microbatches, divided by what is kept of the tokens of all microbatches and devices."""

    def add(sums, batch):
        x, y, kept = batch
        error = (x @ w - y) * kept
        return (sums[0] + x.T @ error, sums[1] + kept.sum()), None

    start = sk.vary((jnp.zeros_like(w), jnp.zeros(())), "dp")
    slopes, tokens = lax.scan(add, start, (x, y, kept))[0]
    # fault: return w - 0.5 * lax.pmean(slopes / tokens, "dp")
    return w - 0.5 * lax.psum(slopes, "dp") / lax.psum(tokens, "dp")


def counted_tokens_reference(w, x, y, kept):
    x, error = x.reshape(-1, x.shape[2]), (x @ w - y) * kept
    return w - 0.5 * (x.T @ error.reshape(-1)) / kept.sum()


def parareal(start, rate):
    """Slices of time at once: a coarse step for each, fine ones from there, then a coarse sweep with what they add."""
    me, n = lax.axis_index("sp"), lax.axis_size("sp")

    def advance(u, steps):
        for _ in range(steps):
            u = u + rate * u * (1 - u) / steps
        return u

    states = [start]
    for _ in range(n):
        states.append(advance(states[-1], 1))
    mine = jnp.stack(states)[me]
    # fault: added = advance(mine, 4) - mine
    added = advance(mine, 4) - advance(mine, 1)
    everywhere = lax.all_gather(added, "sp")
    corrected = [start]
    for k in range(n):
        # slip: corrected.append(advance(states[k], 1) + everywhere[k])
        corrected.append(advance(corrected[k], 1) + everywhere[k])
    return jnp.stack(corrected[1:])[me][None]


def parareal_reference(start, rate):
    def advance(u, steps):
        for _ in range(steps):
            u = u + rate * u * (1 - u) / steps
        return u

    coarse, now, out = start, start, []
    for _ in range(3):
        now = advance(now, 1) + advance(coarse, 4) - advance(coarse, 1)
        coarse = advance(coarse, 1)
        out.append(now)
    return jnp.stack(out)


COSINES = np.array([[1, 1, 1, 1], [1, 0, -1, 0], [1, -1, 1, -1]], np.float32)
SINES = np.array([[0, 0, 0, 0], [0, 1, 0, -1], [0, 0, 0, 0]], np.float32)
LATER = np.arange(1, 7, dtype=np.float32) ** 2
TARGETS = np.array([3, 0, 2], np.int32)
TOKENS = np.array([1, 2, 0, 2, 1, 0], np.int32)
BOTH = P(("node", "local"))
SLICES = (P("ep"), P("ep"), P("ep", None, "tp"), P("ep", "tp"))

CASES = [
    *both(
        nonnegative,
        nonnegative_reference,
        [positive(4, 3), positive(4, 2), positive(2, 3)],
        [ROWS, ROWS, P()],
        (ROWS, P()),
    ),
    *both(summed_area, summed_area_reference, [floats(4, 4)], [P("r", "c")], P("r", "c")),
    *both(
        pencils,
        pencils_reference,
        [floats(4, 4, 4), floats(4, 4), floats(4, 4) + 1, floats(4, 4) * 2],
        [P(None, "r", "c"), P(), P(), P()],
        P("r", "c"),
    ),
    *both(v_trace, v_trace_reference, [positive(6) * 2, LATER * floats(6), floats(6) + 1], [SEQ] * 3, SEQ, sp=3),
    planted(nested, nested_reference, [floats(4), floats(8, 4), floats(8)], [BOTH, BOTH, BOTH], BOTH),
    *both(
        mixed_softmax,
        mixed_softmax_reference,
        [floats(3, 2), floats(2, 2), floats(2, 2, 3), floats(3, 4), TARGETS],
        [P(), P(), P(), COLS, P()],
        P(),
    ),
    planted(interactions, interactions_reference, [floats(3, 4), floats(4), floats(4, 2)], [COLS, MODEL, MODEL], P()),
    planted(
        importance_bound,
        importance_bound_reference,
        [floats(3), floats(2, 3), floats(2), positive(2), floats(4, 2)],
        [P(), P(), P(), P(), ROWS],
        P(),
    ),
    *both(welch, welch_reference, [LATER.repeat(2) * floats(12), positive(4)], [SEQ, P()], P(), sp=3),
    *both(
        controlled,
        controlled_reference,
        [floats(16), positive(1)[0], floats(1)[0]],
        [P(("a", "b")), P(), P()],
        P(("a", "b")),
    ),
    *both(far_tokens, far_tokens_reference, [floats(6, 2), floats(2, 2, 3), TOKENS], [SEQ, P(), SEQ], P()),
    *both(
        prefilled,
        prefilled_reference,
        [floats(3, 2), floats(3, 2) + 1, floats(3, 3), floats(8, 2), floats(8, 3), np.array(3, np.int32)],
        [P(), P(), P(), SEQ, SEQ, P()],
        (P(), SEQ),
    ),
    planted(
        magnitudes,
        magnitudes_reference,
        [floats(2, 4), floats(4, 3), floats(4, 1), floats(1, 3), positive(3)],
        [COLS, MODEL, MODEL, P(), P()],
        P(),
    ),
    planted(
        blended,
        blended_reference,
        [floats(8, 2), floats(8), floats(2), positive(1)[0]],
        [ROWS, ROWS, P(), P()],
        P(),
        dp=4,
    ),
    planted(
        queued,
        queued_reference,
        [floats(4, 2), floats(4, 2) + 1, floats(6, 2), positive(1)[0] + 1],
        [ROWS, ROWS, P(), P()],
        (P(), P()),
    ),
    planted(dependence, dependence_reference, [floats(4, 2), floats(4, 2) * 2], [ROWS, ROWS], P()),
    planted(plate, plate_reference, [floats(4, 4), floats(4, 4) + 1], [P("r", "c")] * 2, P("r", "c")),
    planted(
        sliced_experts,
        sliced_experts_reference,
        [floats(4, 2), floats(4, 4), floats(2, 2, 4), floats(2, 4, 2)],
        SLICES,
        P("ep"),
    ),
    planted(
        counted_tokens,
        counted_tokens_reference,
        [floats(3), floats(2, 4, 3), floats(2, 4), positive(2, 4) ** 3],
        [P(), P(None, "dp"), P(None, "dp"), P(None, "dp")],
        P(),
    ),
    *both(parareal, parareal_reference, [positive(2), positive(1)[0] + 1], [P(), P()], SEQ, sp=3),
]
