"""A tenth set, written with the ninth and like it, with more loops and more axes: TODO figure."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted
from faults.ninth import both, positive

SEQ, ROWS, MODEL, COLS, GRID = P("sp"), P("dp"), P("tp"), P(None, "tp"), P("r", "c")


def reacting(u, v):
    """A step of two substances that spread and react on a periodic grid, rows and columns of which are split."""

    def spread(x):
        up = jnp.concatenate([sk.shift(x[-1:], "r"), x[:-1]])
        down = jnp.concatenate([x[1:], sk.shift(x[:1], "r", by=-1)])
        left = jnp.concatenate([sk.shift(x[:, -1:], "c"), x[:, :-1]], 1)
        # fault: right = jnp.concatenate([x[:, 1:], sk.shift(x[:, :1], "r", by=-1)], 1)
        right = jnp.concatenate([x[:, 1:], sk.shift(x[:, :1], "c", by=-1)], 1)
        return up + down + left + right - 4 * x

    for _ in range(2):
        made = u * v
        new = u + 0.25 * spread(u) - made + 0.5 * (1 - u)
        v = v + 0.125 * spread(v) + made - 0.75 * v
        u = new
    return u, v


def reacting_reference(u, v):
    for _ in range(2):
        around = [sum(jnp.roll(x, by, axis) for by in (-1, 1) for axis in (0, 1)) - 4 * x for x in (u, v)]
        u, v = u + 0.25 * around[0] - u * v + 0.5 - 0.5 * u, 0.25 * v + 0.125 * around[1] + u * v
    return u, v


def chained(matrices):
    """Products of all matrices until each one, in their order: of a device's own first, then by strides that double."""
    me, n = lax.axis_index("sp"), lax.axis_size("sp")
    total, products, distance = jnp.eye(2), [], 1
    for matrix in matrices:
        total = total @ matrix
        products.append(total)
    while distance < n:
        before = sk.shift(total, "sp", by=distance)
        # fault: total = jnp.where(me >= distance, total @ before, total)
        total = jnp.where(me >= distance, before @ total, total)
        distance = distance * 2
    earlier = jnp.where(me == 0, jnp.eye(2), sk.shift(total, "sp"))
    return jnp.stack([earlier @ product for product in products])


def chained_reference(matrices):
    total, products = jnp.eye(2), []
    for matrix in matrices:
        total = total @ matrix
        products.append(total)
    return jnp.stack(products)


def halved(x):
    """Scattered sums by halving: a device keeps its half and gives the other to a partner, each round a nearer one."""
    me, n = lax.axis_index("dp"), lax.axis_size("dp")
    rest, distance = x, n // 2
    while distance:
        half = rest.shape[0] // 2
        low, high = rest[:half], rest[half:]
        is_high = me // distance % 2 == 1
        kept = jnp.where(is_high, high, low)
        # fault: sent = jnp.where(is_high, high, low)
        sent = jnp.where(is_high, low, high)
        partners = [(i, i ^ distance) for i in range(n)]
        rest = kept + lax.ppermute(sent, "dp", partners)
        distance = distance // 2
    return rest


def halved_reference(x):
    return x.reshape(4, -1).sum(0)


def axial(x, query, key, value):
    """Attention along rows of an image, then along columns, for which they are made whole; rows are split."""

    def attended(lines):
        q, k, v = lines @ query, lines @ key, lines @ value
        powers = jnp.exp(jnp.einsum("lpd,lqd->lpq", q, k))
        # fault: total = powers.sum(1)
        total = powers.sum(2)
        return jnp.einsum("lpq,lqd->lpd", powers, v) / total[:, :, None]

    rows = x + attended(x)
    columns = jnp.swapaxes(lax.all_to_all(rows, "sp", 1, 0, tiled=True), 0, 1)
    seen = jnp.swapaxes(attended(columns), 0, 1)
    home = lax.all_to_all(seen, "sp", 0, 1, tiled=True)
    # slip: return x + home
    return rows + home


def axial_reference(x, query, key, value):
    for _ in range(2):
        scores = jnp.einsum("lpd,lqd->lpq", x @ query, x @ key)
        x = jnp.swapaxes(x + jax.nn.softmax(scores, 2) @ (x @ value), 0, 1)
    return x


def normed_groups(logps, old, rewards, groups, weights):
    """Rewards are normed within their groups, for clipped ratios; rows are split one way, tokens the other."""
    member = jax.nn.one_hot(groups, 2)
    counts = jnp.maximum(lax.psum(member.sum(0), "dp"), 1.0)
    means = lax.psum(rewards @ member, "dp") / counts
    apart = rewards - member @ means
    # slip: squares = lax.psum((rewards * rewards) @ member, "dp") / counts
    squares = lax.psum((apart * apart) @ member, "dp") / counts
    advantage = apart / jnp.sqrt(member @ squares + 0.25)
    ratio = jnp.exp(logps - old)
    gain = ratio * advantage[:, None]
    bounded = jnp.clip(ratio, 0.75, 1.25) * advantage[:, None]
    total = lax.psum((weights * jnp.minimum(gain, bounded)).sum(1), "sp")
    # fault: tokens = lax.psum(weights.sum(1), "dp")
    tokens = lax.psum(weights.sum(1), "sp")
    return -lax.pmean((total / tokens).mean(), "dp")


def normed_groups_reference(logps, old, rewards, groups, weights):
    member = jax.nn.one_hot(groups, 2)
    counts = jnp.maximum(member.sum(0), 1.0)
    apart = rewards - member @ (rewards @ member / counts)
    advantage = (apart / jnp.sqrt(member @ ((apart * apart) @ member / counts) + 0.25))[:, None]
    ratio = jnp.exp(logps - old)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.75, 1.25) * advantage)
    return -((weights * gain).sum(1) / weights.sum(1)).mean()


def stages(up, down, batch):
    """Two stages of residual layers with split widths; three microbatches go through, each a tick behind another."""
    me, n, count = lax.axis_index("pp"), lax.axis_size("pp"), batch.shape[0]
    arriving, done = jnp.zeros_like(batch[0]), []
    for tick in range(count + n - 1):
        fed = batch[min(tick, count - 1)]
        x = jnp.where(me == 0, fed, arriving)
        wide = jnp.tanh(x @ up[0])
        # fault: y = lax.psum(x + wide @ down[0], "tp")
        y = x + lax.psum(wide @ down[0], "tp")
        done.append(y)
        arriving = sk.shift(y, "pp")
    # slip: kept = jnp.stack(done[:count])
    kept = jnp.stack(done[n - 1 :])
    return lax.psum(jnp.where(me == n - 1, kept, 0.0), "pp")


def stages_reference(up, down, batch):
    for i in range(2):
        batch = batch + jnp.tanh(batch @ up[i]) @ down[i]
    return batch


def newton_direction(w, v, x, y):
    """Two steps towards the solution of a logistic regression's curvature; rows and features are split."""
    rows = x.shape[0] * lax.axis_size("dp")
    chance = 1 / (1 + jnp.exp(-lax.psum(x @ w, "tp")))
    slope = lax.psum(x.T @ (chance - y), "dp") / rows
    for _ in range(2):
        # fault: along = x @ v
        along = lax.psum(x @ v, "tp")
        curved = lax.psum(x.T @ (chance * (1 - chance) * along), "dp") / rows
        left = slope - curved - 0.25 * v
        v = v + 0.5 * left
    return v


def newton_direction_reference(w, v, x, y):
    chance = 1 / (1 + jnp.exp(-x @ w))
    curvature = x.T @ ((chance * (1 - chance))[:, None] * x) / 4
    slope = x.T @ (chance - y) / 4
    for _ in range(2):
        v = v + 0.5 * (slope - curvature @ v - 0.25 * v)
    return v


def bidiagonal(matrix, start):
    """Two rounds of Golub and Kahan, with rows of the matrix and left vectors split: the squares of both diagonals."""
    right = start / jnp.sqrt(start @ start)
    left, beta, squares = jnp.zeros(matrix.shape[0]), 0.0, []
    for _ in range(2):
        # slip: left = matrix @ right
        left = matrix @ right - beta * left
        alpha = jnp.sqrt(lax.psum(left @ left, "dp"))
        left = left / alpha
        # fault: right = lax.psum(matrix.T @ left, "dp") - beta * right
        right = lax.psum(matrix.T @ left, "dp") - alpha * right
        beta = jnp.sqrt(right @ right)
        right = right / beta
        squares += [alpha * alpha, beta * beta]
    return jnp.stack(squares[:3])


def bidiagonal_reference(matrix, start):
    right = start / jnp.sqrt(start @ start)
    left = matrix @ right
    first = jnp.sqrt(left @ left)
    rest = matrix.T @ left / first - first * right
    second = jnp.sqrt(rest @ rest)
    left = matrix @ (rest / second) - second * left / first
    return jnp.stack([first * first, second * second, left @ left])


def disagreement(x, w):
    """How unsure an ensemble is beyond how unsure its members are; members and classes are split."""
    powers = jnp.exp(jnp.einsum("bd,mdc->mbc", x, w))
    # fault: chances = powers / lax.psum(powers.sum(2, keepdims=True), "mp")
    chances = powers / lax.psum(powers.sum(2, keepdims=True), "tp")
    mean = lax.pmean(chances.mean(0), "mp")
    together = -lax.psum((mean * jnp.log(mean)).sum(1), "tp")
    alone = -lax.psum((chances * jnp.log(chances)).sum(2), "tp")
    return together - lax.pmean(alone.mean(0), "mp")


def disagreement_reference(x, w):
    chances = jax.nn.softmax(jnp.einsum("bd,mdc->mbc", x, w), 2)
    mean = chances.mean(0)
    return (chances * jnp.log(chances)).sum(2).mean(0) - (mean * jnp.log(mean)).sum(1)


def uneven_rounds(start, x, y, counts):
    """Devices take unequal numbers of local steps; their moves a step are averaged, times the mean number of steps."""
    w = start
    for step in range(3):
        slope = x.T @ (x @ w - y) / x.shape[0]
        # slip: w = jnp.where(step <= counts[0], w - 0.25 * slope, w)
        w = jnp.where(step < counts[0], w - 0.25 * slope, w)
    taken = counts[0].astype(w.dtype)
    direction = (start - w) / taken
    # fault: return start - lax.pmean(taken * direction, "dp")
    return start - lax.pmean(taken, "dp") * lax.pmean(direction, "dp")


def uneven_rounds_reference(start, x, y, counts):
    directions = []
    for i in range(2):
        w, rows, targets = start, x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2]
        for step in range(3):
            slope = rows.T @ (rows @ w - targets) / 2
            w = jnp.where(step < counts[i], w - 0.25 * slope, w)
        directions.append((start - w) / counts[i].astype(w.dtype))
    return start - counts.astype(start.dtype).mean() * (directions[0] + directions[1]) / 2


def springs(places, speeds, bend):
    """Two steps of a chain of springs between walls: half a kick, a move, half a kick; masses are split."""

    def force(at):
        before = sk.shift(at[-1:], "sp", wrap=False)
        # fault: after = sk.shift(at[:1], "sp", by=-1)
        after = sk.shift(at[:1], "sp", by=-1, wrap=False)
        line = jnp.concatenate([before, at, after])
        stretch = line[1:] - line[:-1]
        pulls = stretch + bend * stretch**2
        return pulls[1:] - pulls[:-1]

    pull = force(places)
    for _ in range(2):
        speeds = speeds + 0.25 * pull
        places = places + 0.5 * speeds
        # slip: speeds = speeds + 0.25 * pull
        speeds = speeds + 0.25 * force(places)
        pull = force(places)
    return places, speeds


def springs_reference(places, speeds, bend):
    def force(at):
        stretch = jnp.diff(jnp.concatenate([jnp.zeros(1), at, jnp.zeros(1)]))
        return jnp.diff(stretch + bend * stretch**2)

    for _ in range(2):
        middle = speeds + 0.25 * force(places)
        places = places + 0.5 * middle
        speeds = middle + 0.25 * force(places)
    return places, speeds


def differential(q, k, v, share):
    """Causal attention less a share of another one; keys are split, queries are whole."""
    block, places = k.shape[1], jnp.arange(q.shape[1])
    # slip: columns = jnp.arange(block)
    columns = lax.axis_index("sp") * block + jnp.arange(block)
    is_seen = columns[None] <= places[:, None]
    powers = jnp.where(is_seen[None], jnp.exp(jnp.einsum("ntd,nsd->nts", q, k)), 0.0)
    totals = lax.psum(powers.sum(2), "sp")
    shares = powers / totals[:, :, None]
    # fault: weights = shares[0] - share * powers[1]
    weights = shares[0] - share * shares[1]
    out = lax.psum(weights @ v, "sp")
    length = jnp.sqrt((out * out).mean(1) + 0.25)
    return (1 - share) * out / length[:, None]


def differential_reference(q, k, v, share):
    powers = jnp.exp(jnp.einsum("ntd,nsd->nts", q, k)) * jnp.tri(q.shape[1])[None]
    shares = powers / powers.sum(2, keepdims=True)
    out = (shares[0] - share * shares[1]) @ v
    return (1 - share) * out / jnp.sqrt((out * out).mean(1, keepdims=True) + 0.25)


def level_and_trend(x, start, fresh, bent):
    """Double smoothing: a level and a trend go from device to device; each keeps what it made in its turn."""
    me, n = lax.axis_index("sp"), lax.axis_size("sp")
    level, trend, kept = start, jnp.zeros(()), jnp.zeros_like(x)
    for turn in range(n):
        levels = []
        for value in x:
            new = fresh * value + (1 - fresh) * (level + trend)
            trend = bent * (new - level) + (1 - bent) * trend
            level = new
            levels.append(level)
        # fault: kept = jnp.where(me <= turn, jnp.stack(levels), kept)
        kept = jnp.where(me == turn, jnp.stack(levels), kept)
        level, trend = sk.shift((level, trend), "sp")
    return kept


def level_and_trend_reference(x, start, fresh, bent):
    level, trend, levels = start, jnp.zeros(()), []
    for value in x:
        new = fresh * value + (1 - fresh) * (level + trend)
        level, trend = new, bent * (new - level) + (1 - bent) * trend
        levels.append(level)
    return jnp.stack(levels)


def paged_step(x, ask, tell, out, keys, values, table, length):
    """A token against a cache: heads are split one way, pages of keys the other; a table says their order."""
    me, held, size = lax.axis_index("sp"), keys.shape[0], keys.shape[1]
    queries = jnp.einsum("d,dhe->he", x, ask)
    key, value = x @ tell[0], x @ tell[1]
    # slip: mine = me + jnp.arange(held)
    mine = me * held + jnp.arange(held)
    is_page = mine[:, None] == table[None]
    starts = jnp.where(is_page, jnp.arange(table.shape[0])[None] * size, 0).sum(1)
    places = starts[:, None] + jnp.arange(size)[None]
    is_new = (places == length)[:, :, None]
    keys = jnp.where(is_new, key[None, None], keys)
    values = jnp.where(is_new, value[None, None], values)
    # fault: is_seen = places < length
    is_seen = places <= length
    powers = jnp.where(is_seen[None], jnp.exp(jnp.einsum("he,pse->hps", queries, keys)), 0.0)
    total = lax.psum(powers.sum((1, 2)), "sp")
    seen = lax.psum(jnp.einsum("hps,pse->he", powers, values), "sp") / total[:, None]
    return lax.psum(jnp.einsum("he,hed->d", seen, out), "tp")


def paged_step_reference(x, ask, tell, out, keys, values, table, length):
    is_page, order = jnp.arange(4)[:, None] == table[None], jnp.arange(4)
    places = jnp.where(is_page, 2 * order[None], 0).sum(1)[:, None] + jnp.arange(2)[None]
    keys = jnp.where((places == length)[:, :, None], (x @ tell[0])[None, None], keys)
    values = jnp.where((places == length)[:, :, None], (x @ tell[1])[None, None], values)
    scores = jnp.einsum("d,dhe,pse->hps", x, ask, keys)
    powers = jnp.where((places <= length)[None], jnp.exp(scores), 0.0)
    seen = jnp.einsum("hps,pse->he", powers, values) / powers.sum((1, 2))[:, None]
    return jnp.einsum("he,hed->d", seen, out)


def two_grids(x, load):
    """A cycle of two grids between fixed ends: smooth, then correct by every second point; points are split."""

    def around(u):
        before = sk.shift(u[-1:], "sp", wrap=False)
        after = sk.shift(u[:1], "sp", by=-1, wrap=False)
        return jnp.concatenate([before, u[:-1]]), jnp.concatenate([u[1:], after])

    left, right = around(x)
    smooth = 0.5 * x + 0.25 * (left + right + load)
    # slip: left, right = around(x)
    left, right = around(smooth)
    missing = load - 2 * smooth + left + right
    left, right = around(missing)
    coarse = (left + 2 * missing + right)[1::2]
    fix = 0.5 * coarse
    for _ in range(2):
        left, right = around(fix)
        fix = 0.5 * (left + right + coarse)
    left, right = around(fix)
    # fault: between = 0.5 * (fix + right)
    between = 0.5 * (left + fix)
    return smooth + jnp.stack([between, fix], 1).reshape(-1)


def two_grids_reference(x, load):
    def beside(u):
        return jnp.concatenate([jnp.zeros(1), u[:-1]]) + jnp.concatenate([u[1:], jnp.zeros(1)])

    smooth = 0.5 * x + 0.25 * (beside(x) + load)
    missing = load - 2 * smooth + beside(smooth)
    coarse = (beside(missing) + 2 * missing)[1::2]
    fix = 0.5 * coarse
    for _ in range(2):
        fix = 0.5 * (beside(fix) + coarse)
    between = 0.5 * (jnp.concatenate([jnp.zeros(1), fix[:-1]]) + fix)
    return smooth + jnp.stack([between, fix], 1).reshape(-1)


def posteriors(first, moves, emitted):
    """How likely a hidden chain is in each state at each time, by what was before and is to come; times are split."""
    me, n, product = lax.axis_index("sp"), lax.axis_size("sp"), jnp.eye(2)
    steps = [moves * row[None] for row in emitted]
    for step in steps:
        product = product @ step
    products = lax.all_gather(product, "sp")
    ahead, behind = first, jnp.ones(2)
    for device in range(n):
        # slip: ahead = jnp.where(device <= me, ahead @ products[device], ahead)
        ahead = jnp.where(device < me, ahead @ products[device], ahead)
    # fault: for device in range(n):
    for device in reversed(range(n)):
        behind = jnp.where(device > me, products[device] @ behind, behind)
    forwards, backwards = [], [behind]
    for step in steps:
        ahead = ahead @ step
        forwards.append(ahead)
    for step in steps[:0:-1]:
        backwards.insert(0, step @ backwards[0])
    joint = jnp.stack(forwards) * jnp.stack(backwards)
    return joint / joint.sum(1, keepdims=True)


def posteriors_reference(first, moves, emitted):
    forwards, backwards = [first], [jnp.ones(2)]
    for row in emitted:
        forwards.append((forwards[-1] @ moves) * row)
    for t in range(emitted.shape[0] - 1, 0, -1):
        backwards.insert(0, moves @ (emitted[t] * backwards[0]))
    joint = jnp.stack(forwards[1:]) * jnp.stack(backwards)
    return joint / joint.sum(1, keepdims=True)


def taught(student, teacher, labels, heat):
    """Labels, of which -1 counts for nothing, and a teacher at a temperature; rows and the vocabulary are split."""
    columns = lax.axis_index("tp") * student.shape[1] + jnp.arange(student.shape[1])

    def logs(logits):
        return logits - jnp.log(lax.psum(jnp.exp(logits).sum(1), "tp"))[:, None]

    # slip: soft = logs(student) / heat
    soft = logs(student / heat)
    wanted = logs(teacher / heat)
    far = lax.psum((jnp.exp(wanted) * (wanted - soft)).sum(1), "tp")
    is_right = labels[:, None] == columns[None]
    wrong = -lax.psum(jnp.where(is_right, logs(student), 0.0).sum(1), "tp")
    is_kept = labels >= 0
    count = lax.psum(jnp.where(is_kept, 1.0, 0.0).sum(), "dp")
    # fault: both_losses = 0.25 * wrong + 0.75 * heat * far
    both_losses = 0.25 * wrong + 0.75 * heat**2 * far
    total = lax.psum(jnp.where(is_kept, both_losses, 0.0).sum(), "dp")
    return total / jnp.maximum(count, 1.0)


def taught_reference(student, teacher, labels, heat):
    wanted, soft = jax.nn.log_softmax(teacher / heat), jax.nn.log_softmax(student / heat)
    far = (jnp.exp(wanted) * (wanted - soft)).sum(1)
    hits = (labels[:, None] == jnp.arange(student.shape[1])[None]).astype(student.dtype)
    losses = 0.75 * heat**2 * far - 0.25 * (hits * jax.nn.log_softmax(student)).sum(1)
    is_kept = labels >= 0
    return jnp.where(is_kept, losses, 0.0).sum() / jnp.maximum(jnp.where(is_kept, 1.0, 0.0).sum(), 1.0)


def pairs_in_order(scores, grades):
    """The mean loss of pairs of which one has the better grade: scores and grades go round a ring."""
    others, other_grades = scores, grades
    loss, count = 0.0, 0.0
    for _ in range(lax.axis_size("dp")):
        is_better = grades[:, None] > other_grades[None]
        # fault: apart = others[None] - scores[:, None]
        apart = scores[:, None] - others[None]
        loss = loss + jnp.where(is_better, jnp.log(1 + jnp.exp(-apart)), 0.0).sum()
        count = count + jnp.where(is_better, 1.0, 0.0).sum()
        # slip: others, other_grades = sk.shift((others, grades), "dp")
        others, other_grades = sk.shift((others, other_grades), "dp")
    return lax.psum(loss, "dp") / lax.psum(count, "dp")


def pairs_in_order_reference(scores, grades):
    is_better = grades[:, None] > grades[None]
    losses = jnp.log(1 + jnp.exp(scores[None] - scores[:, None]))
    return jnp.where(is_better, losses, 0.0).sum() / jnp.where(is_better, 1.0, 0.0).sum()


KEPT = np.array([1, -1, 3, 0], np.int32)
TABLE = np.array([2, 0, 3, 1], np.int32)
MOVES = np.array([[0.9, 0.2], [0.05, 0.7]], np.float32)
GROUPS = np.array([0, 1, 0, 1], np.int32)
COUNTS = np.array([1, 2], np.int32)
GRADES = np.array([0, 2, 1, 1, 2, 0], np.int32)

CASES = [
    planted(reacting, reacting_reference, [floats(4, 4), floats(4, 4) + 1], [GRID, GRID], (GRID, GRID)),
    planted(chained, chained_reference, [floats(8, 2, 2)], [SEQ], SEQ, sp=4),
    planted(halved, halved_reference, [floats(32)], [ROWS], ROWS, dp=4),
    *both(
        axial,
        axial_reference,
        [floats(2, 2, 2), *[(floats(2, 2) + i) * 0.5 for i in range(3)]],
        [SEQ, P(), P(), P()],
        SEQ,
    ),
    *both(
        normed_groups,
        normed_groups_reference,
        [floats(4, 4), floats(4, 4) * 0.5, floats(4), GROUPS, positive(4, 4)],
        [P("dp", "sp"), P("dp", "sp"), ROWS, ROWS, P("dp", "sp")],
        P(),
    ),
    *both(
        stages,
        stages_reference,
        [floats(2, 2, 4), floats(2, 4, 2), floats(3, 2, 2)],
        [P("pp", None, "tp"), P("pp", "tp"), P()],
        P(),
    ),
    planted(
        newton_direction,
        newton_direction_reference,
        [floats(4), floats(4) + 1, floats(4, 4), positive(4)],
        [MODEL, MODEL, P("dp", "tp"), ROWS],
        MODEL,
    ),
    *both(bidiagonal, bidiagonal_reference, [floats(4, 2), positive(2)], [ROWS, P()], P()),
    planted(disagreement, disagreement_reference, [floats(2, 2), floats(4, 2, 4)], [P(), P("mp", None, "tp")], P()),
    *both(
        uneven_rounds,
        uneven_rounds_reference,
        [floats(2), floats(4, 2), floats(4), COUNTS],
        [P(), ROWS, ROWS, ROWS],
        P(),
    ),
    *both(springs, springs_reference, [floats(6), floats(6) + 1, positive(1)[0]], [SEQ, SEQ, P()], (SEQ, SEQ), sp=3),
    *both(
        differential,
        differential_reference,
        [floats(2, 4, 2), floats(2, 4, 2)[::-1] + 1, floats(4, 2), positive(1)[0]],
        [P(), P(None, "sp"), SEQ, P()],
        P(),
    ),
    planted(
        level_and_trend,
        level_and_trend_reference,
        [floats(6), floats(1)[0], positive(1)[0], positive(2)[1]],
        [SEQ, P(), P(), P()],
        SEQ,
        sp=3,
    ),
    *both(pairs_in_order, pairs_in_order_reference, [floats(6), GRADES], [ROWS, ROWS], P(), dp=3),
    *both(
        paged_step,
        paged_step_reference,
        [
            floats(2),
            floats(2, 2, 2),
            floats(2, 2, 2) + 0.5,
            floats(2, 2, 2) * 2,
            floats(4, 2, 2),
            floats(4, 2, 2)[::-1] + 1,
            TABLE,
            np.array(4, np.int32),
        ],
        [P(), COLS, P(), MODEL, SEQ, SEQ, P(), P()],
        P(),
    ),
    *both(two_grids, two_grids_reference, [floats(12), floats(12)[::-1] + 1], [SEQ, SEQ], SEQ, sp=3),
    *both(posteriors, posteriors_reference, [positive(2), MOVES, positive(6, 2) ** 3], [P(), P(), SEQ], SEQ, sp=3),
    *both(
        taught,
        taught_reference,
        [floats(4, 4), floats(4, 4)[::-1] + 1, KEPT, positive(1)[0] + 1],
        [P("dp", "tp"), P("dp", "tp"), ROWS, P()],
        P(),
    ),
]
