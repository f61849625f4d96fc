"""Each primitive of a proof on whole numbers, on two axes, against jax: values, places, ties and signs."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.numbers.field import Field, Settings
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.values import Exact
from shardkit.testing.exact.rules.known import to_known

BOTH = ("a", "b")
RNG = np.random.default_rng(5)
# Each device has 4 rows of 3: of x two devices along "a" have their own, of y two along "b". Many are equal, some zero.
X, Y = RNG.integers(-4, 5, (8, 3)).astype("f"), RNG.integers(-4, 5, (8, 3)).astype("f")
AT = np.array([[3, 0], [1, 5], [0, 2]])  # row 5 is out of bounds


def here():
    """0 to 3: another number on each device."""
    return 2 * lax.axis_index("a") + lax.axis_index("b")


def shifted_cond(x, y):
    return lax.switch(here(), [lambda: x, lambda: y, lambda: x - y, lambda: 2 * x])


def looped(x, y):
    """As many rounds as the device has a number."""
    start = 0 * here(), x + 0 * y
    return lax.while_loop(lambda c: c[0] < here(), lambda c: (c[0] + 1, c[1] + y), start)[1]


def looped_by_rows(x, y):
    """A loop of each row that ends by its own floats, as `jax.vmap` batches it: the rows end one after the other."""
    halve = jax.vmap(lambda row: lax.while_loop(lambda c: jnp.abs(c).sum() > 1, lambda c: c / 2, row))
    return halve(x) + y


def largest_of_none(x, y):
    return jnp.where(x[:0].max(0, initial=-5) > -jnp.inf, x, y) + lax.reduce_min(y[:0], axes=(0, 1)).clip(max=3)


def scanned(reverse):
    def scan(x, y):
        step = lambda c, row: (c + row * y[0], (c - row, 2 * row))  # noqa: E731
        return lax.scan(step, x[0] + 0 * y[0], x, reverse=reverse)

    return scan


def ragged(x, y):
    sizes = jnp.array([1, 0, 2]) + lax.axis_index("a") * jnp.array([0, 1, 0])
    return lax.ragged_dot(x, jnp.stack([y[:3], y[1:], 2 * y[:3]]), sizes)


def ragged_transposed(x, y):
    sizes = jnp.array([1, 0, 2]) + lax.axis_index("a") * jnp.array([0, 1, 0])
    return jax.vjp(lambda w: lax.ragged_dot(x, w, sizes), jnp.stack([y[:3], y[1:], 2 * y[:3]]))[1](x * y)[0]


def sorted_together(x, y):
    return lax.sort((jnp.abs(x), y + 0 * x, x), dimension=0, num_keys=2)


def convolved(x, y):
    """[1, 2, 4] of x as an image of 3 channels and y as a kernel of 2 features."""
    return lax.conv(x.T[None], y.reshape(2, 3, 2), (1,), "SAME")


def with_gradients(function, *args):
    result, pull = jax.vjp(function, *args)
    return result, pull(3 * result)


def pooled(init, by):
    return lambda x: lax.reduce_window(x, init, by, (3, 2), (2, 1), ((1, 0), (0, 1)))


POOLS = [pooled(0.0, lax.add), pooled(-jnp.inf, lax.max), pooled(jnp.inf, lax.min)]
WINDOWED = (lax.add, lax.mul, lax.max, lax.min)
CUMULATED = (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin)
ROW = np.arange(12).reshape(4, 3)
ROWS = {
    "add, sub, mul": lambda x, y: [x + y, x - y, x * y, -x, x * x, x**3, x**0, x + 2, 3 - y, 0.5 * x],
    "div": lambda x, y: [x / (y * y + 1), 1 / (x * x + 1), x / 4, (y * y + 1) ** -2],
    "pow": lambda x, y: [x ** jnp.full_like(x, p) for p in (0, 1, 2, 3)] + [x ** jnp.float32(3)],
    "pow, negative": lambda x, y: (x * x + 1) ** jnp.full_like(x, -2),
    "order": lambda x, y: [jnp.abs(x), jnp.sign(x), jnp.maximum(x, y), jnp.minimum(x, y), jnp.clip(x, -1, y * y)],
    "comparisons": lambda x, y: [x < y, x <= y, x > y, x >= y, x == y, x != y, x.astype(bool), jnp.isfinite(x)],
    "selected": lambda x, y: [
        jnp.where(x < y, x, 2 * y), jnp.where(here() > 1, x, y), lax.select_n(here() % 3, x, y + 0 * x, -x),
    ],
    "selected by rows": lambda x, y: lax.select_n((ROW + here()) % 3, x + 0 * y, y + 0 * x, x * y),
    "sums": lambda x, y: [x.sum(0), x.sum(1), x.sum(), (x * y).sum(0), x.mean(0), x[:0].sum(0)],
    "products": lambda x, y: [x.prod(0), y.prod(1), x.prod(), x[:, :0].prod(1)],
    "largest": lambda x, y: [x.max(0), y.max(1), x.max(), y.min(0), x.min(1), x.min()],
    "largest of none": lambda x, y: largest_of_none(x, y),
    "places of the largest": lambda x, y: [jnp.argmax(x, 0), jnp.argmax(y, 1), jnp.argmin(x, 0), jnp.argmin(y, 1)],
    "cumulated": lambda x, y: [[f(x, 0), f(y, 1, reverse=True)] for f in CUMULATED],
    "sorted": lambda x, y: [jnp.sort(x, 0), jnp.sort(y, 1), sorted_together(x, y), lax.top_k(x, 2), lax.top_k(-y.T, 3)],
    "matmul": lambda x, y: [x @ y.T, x.T @ y, x @ jnp.ones(3), jnp.outer(x[:, 0], y[0]), jnp.vdot(x, y)],
    "einsum": lambda x, y: [
        jnp.einsum("bi,bj->bij", x, y), jnp.einsum("bi,ci->cb", x, y), jnp.einsum("ab,ab->", x, y),
        jnp.einsum("abc,cab->b", x[..., None] * y[:, None], y.reshape(3, 4, 1) * jnp.ones((3, 4, 3))),
    ],
    "convolved": lambda x, y: [convolved(x, y), with_gradients(convolved, x + 0 * y, y + 0 * x)],
    "pooled": lambda x, y: [
        [with_gradients(pool, x), with_gradients(pool, x - y), jax.jvp(pool, (x + 10 * ROW,), (y,))] for pool in POOLS
    ],
    "pooled, from": lambda x, y: [lax.reduce_window(x * y, y[0, 0], by, (2, 2), (1, 1), "SAME") for by in WINDOWED],
    "ragged": lambda x, y: [ragged(x, y), ragged_transposed(x, y)],
    "shapes": lambda x, y: [
        x.reshape(3, 4), lax.reshape(x, (12,), (1, 0)), y.T, jnp.flip(x, 1), x[1:4:2, ::-1], x[None, :, None],
        jnp.broadcast_to(x[:, None], (4, 2, 3)), lax.squeeze(x[:1], (0,)),
    ],
    "joined": lambda x, y: [
        jnp.concatenate([x, y], 0), jnp.concatenate([x, y, 2 * x], 1), jnp.stack([x, y]), jnp.stack([x, y], 2),
        jnp.concatenate([x, jnp.ones((4, 1))], 1), jnp.tile(x, (2, 1)),
    ],
    "parts": lambda x, y: [jnp.split(x, [1, 3]), jnp.split(y, 3, 1), list(jnp.unstack(y, axis=1)), jnp.roll(x, 1, 0)],
    "padded": lambda x, y: [lax.pad(x, 2.0, ((1, 0, 2), (-1, 2, 0))), lax.pad(y, x[0, 0], ((0, 1, 0), (0, 0, 1)))],
    "gathered": lambda x, y: [
        x[AT[:, 0]], x[:, np.array([2, 0])], x.at[AT].get(mode="fill", fill_value=7.0), y.at[AT].get(mode="clip"),
        jnp.take_along_axis(x, AT.T % 4, 0),
    ],
    "gathered here": lambda x, y: [
        x[here()], y.at[here() + 2].get(mode="fill", fill_value=0.0), y[:, jnp.array([here() % 3, 0])],
    ],
    "sliced here": lambda x, y: [
        lax.dynamic_slice(x, (here(), 1), (2, 2)), lax.dynamic_slice(y, (here() - 2, 0), (3, 1)),
    ],
    "updated here": lambda x, y: [
        lax.dynamic_update_slice(x, y[:2, :2], (here(), 1)), lax.dynamic_update_slice(y, x[:1], (here() - 1, 0)),
    ],
    "scattered": lambda x, y: [
        x.at[AT[:, 0]].set(y[:3]), x.at[AT].add(2.0), x.at[np.array([1, 1, 3])].add(y[:3]),
        y.at[:, np.array([0, 2])].set(x[:, :2]),
    ],
    "scattered here": lambda x, y: [
        x.at[here()].set(y[0]), y.at[here()].add(x[1]), x.at[here() + 2].set(5.0, mode="drop"),
        y.at[here() + 2].add(x[0], mode="clip"),
    ],
    "branches and loops": lambda x, y: [
        shifted_cond(x + 0 * y, y + 0 * x), scanned(False)(x, y), scanned(True)(x, y),
        looped(x, y), looped_by_rows(x, y),
    ],
    "sums over devices": lambda x, y: [
        lax.psum(x, "a"), lax.psum(y, "b"), lax.psum(x * y, BOTH), lax.psum(sk.vary(x, BOTH), BOTH),
        lax.pmean(x, "a"), lax.psum(here(), "a"), lax.psum(sk.vary(jnp.int32(3), "a"), "a"),
    ],
    "largest of devices": lambda x, y: [
        lax.pmax(x, "a"), lax.pmin(x * y, BOTH), lax.pmax(y, "b"), lax.pmin(here(), "a"), lax.pmax(here(), BOTH),
    ],
    "all devices'": lambda x, y: [
        lax.all_gather(x, "a"), lax.all_gather(x * y, ("b", "a"), axis=1),
        lax.all_gather(x * y, BOTH, axis=1, tiled=True), lax.all_gather(y, "b", axis=2),
    ],
    "parts of sums": lambda x, y: [
        lax.psum_scatter(x * y, BOTH, tiled=True), lax.psum_scatter(x * y, ("b", "a")),
        lax.psum_scatter(x[:, :2], "a", scatter_dimension=1, tiled=True), lax.psum_scatter(y[:2], "b"),
    ],
    "exchanged": lambda x, y: [
        lax.all_to_all(x * y, ("b", "a"), 0, 1, tiled=True), lax.all_to_all(x * y, BOTH, 0, 1),
        lax.all_to_all(x, "a", 0, 0, tiled=True), lax.all_to_all(y[:, :2], "b", 1, 0),
    ],
    "sent": lambda x, y: [
        lax.ppermute(x, "a", [(0, 1)]), lax.ppermute(x * y, BOTH, [(0, 3), (3, 1), (1, 0)]),
        lax.ppermute(y, "b", [(0, 1), (1, 0)]),
    ],
    "bits": lambda x, y: [
        lax.bitcast_convert_type(lax.ppermute(lax.bitcast_convert_type(x, jnp.int32), "a", [(1, 0)]), jnp.float32),
    ],
    "shifts of integers": lambda x, y: [
        lax.shift_right_logical(here() - 8, 1), lax.shift_left(here() - 8, 33 * here()), lax.clamp(1, here() * 3, 2),
    ],
    "exps and logs": lambda x, y: [
        jnp.exp(jnp.log(x * x + 1)), jnp.exp(x - x), jnp.log(jnp.exp(y)), jnp.log1p(0 * x), jnp.expm1(0 * y),
        jax.nn.sigmoid(0 * x),
    ],
}  # fmt: skip


def kernel(x, y):
    results = {name: row(x, y) for name, row in ROWS.items()}
    return jax.tree.map(lambda z: sk.vary(jnp.asarray(z), BOTH)[None, None], results)


def means_the_same(field, found, value):
    """Whether a result in the field is this array, and what is known of it is so."""
    value = np.asarray(value)
    if found.shape != value.shape or not isinstance(found, Exact):
        return found.shape == value.shape and np.array_equal(found, value)
    sign = np.broadcast_to(found.sign, value.shape)  # a comparison relies on it
    known = not ((sign > 0) & (value < 0) | (sign < 0) & (value > 0)).any() and not found.infinite.any()
    return known and find_equal(field, found, field.lift(value)).all()


# proves N49: a rule that is wrong on the mesh and alone proves that two wrong programs are equal
def test_a_primitive_means_what_jax_computes():
    """All rows are one program, which compiles in two seconds."""
    mesh = sk.make_mesh(jax.devices()[:4], a=2, b=2)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        mapped = jax.shard_map(kernel, mesh=mesh, in_specs=(P("a"), P("b")), out_specs=P("a", "b"))
        wanted = jax.jit(mapped)(X, Y)
        traced, shapes = jax.make_jaxpr(mapped, return_shape=True)(X, Y)
    field = Field(Settings(2, 3))
    results = Interpreter(field).run(traced, [field.lift(X), field.lift(Y)])
    got = jax.tree.unflatten(jax.tree.structure(shapes), results)
    for name in ROWS:
        for at, (found, value) in enumerate(
            zip(jax.tree.leaves(got[name]), jax.tree.leaves(wanted[name]), strict=True)
        ):
            assert means_the_same(field, found, value), f"result {at} of {name}"


# A compiled program holds the random numbers of jax, so the traced one beside it is given the same, without a compiler.
def test_random_numbers_beside_a_compiled_program_are_those_of_jax():
    def draw(key):
        keys = jax.random.split(jax.random.fold_in(key, 4_000_000_000), (2, 3))
        batched = jax.vmap(lambda key: jax.random.bits(key, (3,), jnp.uint16))(keys[0])
        return [jax.random.bits(keys[1, 2], (2, 5)), batched, jax.random.key_data(keys), jax.random.uniform(key)]

    key = jax.random.key(123)
    field = Field(Settings(2, 3))
    field.compiled = True
    results = Interpreter(field).run(jax.make_jaxpr(draw)(key), [to_known(key)])
    for found, value in zip(results, draw(key), strict=True):
        np.testing.assert_array_equal(found, value)
