"""Programs that hang, go wrong in silence or send bytes for nothing, each beside the program that was meant.

A row gives both programs, the rule that must name the first, and their arguments. All are traced on an abstract mesh
data=2, model=4 (or the one in the row): nothing could run them, and nothing has to.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import shardkit as sk

BOTH = ("data", "model")
MESH = sk.abstract_mesh(data=2, model=4)
X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


class Planted(NamedTuple):
    """A wrong program, the rule that names it, and the right one."""

    name: str
    rule: str
    wrong: Callable[..., Any]
    right: Callable[..., Any]
    args: tuple[Any, ...] = (X,)
    options: dict[str, Any] = {}  # noqa: RUF012


def _columns(weight: P, batch: P, axis: str | None = None) -> Callable[..., Any]:
    """A weight that a step returns, and a batch that it is used on twice."""

    def kernel(w: Any, x: Any) -> Any:
        y = x @ w @ w.T
        return 2 * w, y if axis is None else sk.all_reduce(y, axis)

    return jax.shard_map(kernel, mesh=MESH, in_specs=(weight, batch), out_specs=(weight, batch))


def on(kernel: Callable[[Any], Any], mesh: Any = MESH, out_specs: Any = None) -> Callable[[Any], Any]:
    """The kernel over blocks of X on each device."""
    axes = tuple(mesh.axis_names)
    body = kernel if out_specs is not None else lambda x: sk.vary(kernel(x), axes)
    return jax.shard_map(body, mesh=mesh, in_specs=P(axes), out_specs=P(axes) if out_specs is None else out_specs)


def first(axis: str) -> jax.Array:
    """Whether this is the first device of the axis: the predicate that goes wrong."""
    return sk.axis_index(axis) == 0


def all_agree(x: jax.Array, axes: Any = BOTH) -> jax.Array:
    """A predicate from data that all devices agree on."""
    return sk.all_reduce(jnp.sum(x), axes) > 0


def reduced(axis: str, x: jax.Array) -> jax.Array:
    """An all_reduce, typed as its operand."""
    return sk.vary(sk.all_reduce(x, axis), BOTH)


def chosen(predicate: Callable[[jax.Array], Any], collective: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """The collective under a cond."""
    return lambda x: lax.cond(predicate(x), collective, lambda x: x, x)


def selected(predicate: Callable[[jax.Array], Any], collective: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """The collective on every device, and a choice of results."""
    return lambda x: jnp.where(predicate(x), collective(x), x)


_sum_model = partial(reduced, "model")
_sum_data = partial(reduced, "data")


def _gathered(x: jax.Array) -> jax.Array:
    return sk.all_gather(x, "model")[: x.shape[0]] + x


def _scattered(x: jax.Array) -> jax.Array:
    return jnp.concatenate([sk.reduce_scatter(x, "model")] * 4)


def _exchanged(x: jax.Array) -> jax.Array:
    return sk.all_to_all(x, "model", split_dim=0, concat_dim=0)


def _shifted(x: jax.Array) -> jax.Array:
    return sk.shift(x, "model")


def _broadcast(x: jax.Array) -> jax.Array:
    return sk.vary(sk.broadcast(x, BOTH), BOTH)


def _sum_in_nested(x: jax.Array) -> jax.Array:
    return sk.vary(sk.all_reduce(x, "model"), "model")


def _my_place(x: jax.Array) -> jax.Array:
    return first("model")


def _other_place(x: jax.Array) -> jax.Array:
    return first("data")


def _my_data(x: jax.Array) -> jax.Array:
    return jnp.sum(x) > 0


def _any_nan(x: jax.Array) -> jax.Array:
    return sk.all_reduce(jnp.isnan(x).any(), BOTH, op="any")


def _scanned(kernel: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.scan(lambda y, _: (kernel(y), None), x, length=3)[0]


def _while_small(limit: Callable[[jax.Array], jax.Array], step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.while_loop(lambda y: limit(jnp.sum(y)) < 100, step, x)


def _half_sum(x: jax.Array) -> jax.Array:
    return 0.5 * _sum_model(x) + x


def _fixed_point(agree: bool) -> Callable[[jax.Array], jax.Array]:
    """Iterates until the change is small: this device's own change, or the largest of all."""

    def step(carry: Any) -> Any:
        x, _ = carry
        new = sk.vary(sk.all_reduce(jnp.tanh(x), "model", op="mean"), BOTH)
        change = jnp.max(jnp.abs(new - x))
        return new, sk.vary(sk.all_reduce(change, BOTH, op="max"), BOTH) if agree else change

    return lambda x: lax.while_loop(lambda c: c[1] > 1e-3, step, (x, sk.vary(jnp.float32(1), BOTH)))[0]


def _test_sums(agree: bool) -> Callable[[jax.Array], jax.Array]:
    """A loop whose test communicates, after a trip count of its own or a common one."""

    def goes_on(carry: Any) -> jax.Array:
        n, x = carry
        return (n < (3 if agree else sk.axis_index("model"))) & (sk.all_reduce(jnp.sum(x), "model")[None][0] < 9)

    def run(x: jax.Array) -> jax.Array:
        count = sk.vary(jnp.int32(0), ()) if agree else sk.vary(jnp.int32(0), "model")
        return lax.while_loop(goes_on, lambda c: (c[0] + 1, c[1] * 2), (count, x))[1]

    return run


def _later(change: Callable[[jax.Array], Any]) -> Callable[[Any], Any]:
    """A predicate that all agree on in the first iteration, and then what `change` has made of it."""

    def body(_: Any, carry: Any) -> Any:
        x, count = carry
        return lax.cond(count > 0, _sum_model, lambda x: x, x), count + change(x)

    return on(lambda x: lax.fori_loop(0, 3, body, (x, sk.vary(jnp.float32(0), BOTH)))[0])


def _counted(end: Callable[[str], Any], begin: Any = 0) -> jax.Array:
    return lax.while_loop(lambda i: i < end("model"), lambda i: i + 1, begin)


def _counted_twice(end: Callable[[str], Any]) -> Callable[[Any], Any]:
    return on(lambda x: lax.scan(lambda c, _: (_counted(end, c), None), 0, length=2)[0], out_specs=P())


def _custom(kernel: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The kernel as the backward rule of the identity."""

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    identity.defvjp(lambda x: (x, x), lambda x, cotangent: (kernel(cotangent),))
    return jax.grad(lambda x: jnp.sum(on(lambda x: identity(x) * 2)(x)))


def _custom_forward(kernel: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @jax.custom_vjp
    def run(x: jax.Array) -> jax.Array:
        return kernel(x)

    run.defvjp(lambda x: (kernel(x), None), lambda _, cotangent: (cotangent,))
    return on(run)


def _nested(kernel: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A shard_map over model inside one over data; the predicate comes from the outer one."""

    def outer(x: jax.Array) -> jax.Array:
        def inner(x: jax.Array) -> jax.Array:
            return kernel(x)

        here = jax.sharding.get_abstract_mesh()
        return jax.shard_map(inner, mesh=here, in_specs=P("model"), out_specs=P("model"), axis_names={"model"})(x)

    return jax.shard_map(outer, mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})


def _told_to(agree: bool) -> Callable[[Any], Any]:
    """The host says on each device whether to go on, and may say it differently."""

    def kernel(x: jax.Array) -> jax.Array:
        go_on = io_callback(lambda: np.bool_(True), jax.ShapeDtypeStruct((), np.bool_))
        go_on = sk.all_reduce(go_on, BOTH, op="all") if agree else go_on
        return lax.cond(go_on, _sum_model, lambda x: x, x)

    return on(kernel)


def _switch(index: Callable[[], jax.Array], *kernels: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.switch(index(), kernels, x)


def _by_process(wrong: bool) -> Callable[[Any], Any]:
    """Process 0 logs a norm over all devices; or all compute it."""

    def kernel(x: jax.Array) -> jax.Array:
        if jax.process_index() == 0 or not wrong:
            x = x / sk.vary(sk.all_reduce(jnp.sum(x * x), BOTH), BOTH)
        return x

    return on(kernel)


def _by_process_inside_jit(wrong: bool) -> Callable[[Any], Any]:
    """The same behind a jit, whose trace jax keeps."""

    @jax.jit
    def inner(x: jax.Array) -> jax.Array:
        return sk.shift(x, "model", by=1 if jax.process_index() == 0 or not wrong else -1)

    return on(inner)


def _seeded(wrong: bool) -> Callable[[Any], Any]:
    """Noise from a generator seeded by the process, and baked into the program; or by a number."""

    def fn(x: jax.Array) -> jax.Array:
        seed = jax.process_index() if wrong else 0
        return on(lambda x: x * 2)(x + np.random.default_rng(seed).normal(size=x.shape).astype(np.float32))

    return fn


def _pmap(x: jax.Array) -> jax.Array:
    return jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)


def _shard_mapped(x: jax.Array) -> jax.Array:
    return jax.shard_map(lambda x: lax.psum(x, "i"), mesh=sk.abstract_mesh(i=8), in_specs=P("i"), out_specs=P())(x)


def _dropout(fold: Any, use: Any = lambda draws, x: jnp.where(draws > 0, x, 0)) -> Callable[..., Any]:
    def kernel(key: Any, x: Any) -> Any:
        return use(jax.random.normal(fold(key), x.shape), x)

    return jax.shard_map(kernel, mesh=MESH, in_specs=(P(), P("data", "model")), out_specs=P("data", "model"))


def _unchecked(check: bool, kernel: Any = None, out_specs: Any = None) -> Callable[[Any], Any]:
    kernel = kernel or (lambda x: lax.psum(jnp.sum(x), BOTH))
    return jax.shard_map(kernel, mesh=MESH, in_specs=P(BOTH), out_specs=out_specs or P(), check_vma=check)


def _off(name: str, wrong: Any, right: Any) -> Planted:
    """An output that is equal by its spec alone, and where check_vma is off."""
    return Planted(name, U, _unchecked(False, wrong), _unchecked(False, right), (X,), {"ignore": ("check-vma-off",)})


def _linear(spec: Any) -> Callable[[Any, Any], Any]:
    """x W with W replicated or split, gathered for use."""

    def kernel(w: jax.Array, x: jax.Array) -> jax.Array:
        w = sk.all_gather(w, BOTH) if w.shape[0] < 64 else w
        return x @ w

    return jax.shard_map(kernel, mesh=MESH, in_specs=(spec, P(BOTH)), out_specs=P(BOTH))


def _sorted(kept: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """One round of an odd-even sort: the devices in the middle exchange, those at the ends have no partner."""

    def kernel(x: jax.Array) -> jax.Array:
        other = lax.ppermute(x, "model", [(1, 2), (2, 1)])
        least = jnp.sort(jnp.concatenate([x, other]), 0)[: x.shape[0]]
        return kept(x, least)

    return kernel


def _attacked(begin: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A data-parallel gradient at inputs that an inner gradient moves from where `begin` starts."""

    def kernel(w: jax.Array, x: jax.Array) -> jax.Array:
        error = lambda w, moved: jnp.sum(jnp.tanh((x + moved) @ w) ** 2)  # noqa: E731

        def loss(w: jax.Array) -> jax.Array:
            climb = lambda moved, _: (moved + jax.grad(error, 1)(w, moved), None)  # noqa: E731
            moved, _ = lax.scan(climb, begin(x), None, length=2)
            return error(w, moved)

        return sk.all_reduce(jax.grad(loss)(sk.vary(w, BOTH)), BOTH)

    return jax.shard_map(kernel, mesh=MESH, in_specs=(P(), P(BOTH)), out_specs=P())


def _slopes(at: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    """A data-parallel gradient of each example's derivative at a number."""

    def kernel(w: jax.Array, x: jax.Array) -> jax.Array:
        slope = lambda w, each: jax.grad(lambda t: jnp.sum(jnp.tanh(t * each @ w)))(at())  # noqa: E731
        loss = lambda w: jnp.sum(jax.vmap(slope, (None, 0))(w, x) ** 2)  # noqa: E731
        return sk.all_reduce(jax.grad(loss)(sk.vary(w, BOTH)), BOTH)

    return jax.shard_map(kernel, mesh=MESH, in_specs=(P(), P(BOTH)), out_specs=P())


def _masked_mean(reduced: Callable[[jax.Array, jax.Array], jax.Array], split: Any = BOTH) -> Callable[..., Any]:
    """The mean of those that a mask keeps, on all devices."""

    def kernel(x: jax.Array) -> jax.Array:
        mask = (x > 0).astype(x.dtype)
        return reduced(jnp.sum(x * mask), jnp.sum(mask))

    return jax.shard_map(kernel, mesh=MESH, in_specs=P(split), out_specs=P())


def _penalized(penalty: Callable[[sk.Mean, jax.Array], jax.Array]) -> Any:
    def loss(w: jax.Array, x: jax.Array, keys: Any) -> Any:
        mean = sk.Mean.of((x @ w) ** 2, (x > 0).astype(x.dtype))
        return sk.Mean(mean.total + penalty(mean, jnp.sum(w**2)), mean.weight)

    return sk.make_eval_step(loss, mesh=MESH, plan=sk.dp(BOTH))


def _gradient(batch: P, axes: Any) -> Callable[..., Any]:
    def kernel(w: jax.Array, x: jax.Array) -> jax.Array:
        grads = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(sk.vary(w, axes))
        return sk.all_reduce(grads, axes)

    return jax.shard_map(kernel, mesh=MESH, in_specs=(P(), batch), out_specs=P())


_WIDE = sk.abstract_mesh(fsdp=64)


def _gain(spec: Any) -> Callable[[Any, Any], Any]:
    """x times a gain, which 64 devices hold in pieces or whole."""

    def kernel(gain: jax.Array, x: jax.Array) -> jax.Array:
        gain = sk.all_gather(gain, "fsdp") if spec else gain
        return x * gain[None, :]

    return jax.shard_map(kernel, mesh=_WIDE, in_specs=(spec, P("fsdp")), out_specs=P("fsdp"))


def _own_rows(x: jax.Array, axis: Any, n: int) -> jax.Array:
    size = x.shape[0] // n
    return lax.dynamic_slice_in_dim(x, sk.axis_index(axis) * size, size, 0)


def _updated(reduce: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """A step of gradient descent, with what `reduce` makes of the gradient."""
    return on(lambda x: x - 0.1 * reduce(jax.grad(lambda x: jnp.sum(x**2))(x)), out_specs=P(BOTH))


def _with_halo(use: Callable[[Any, Any], Any]) -> Callable[[jax.Array], jax.Array]:
    """A loop that sends what its second carry holds; `use` may read it."""

    def body(carry: Any, _: Any) -> Any:
        x, halo = carry
        return (use(jnp.tanh(x), halo), x + sk.shift(halo, "model")), None

    return lambda x: lax.scan(body, (x, x), None, length=3)[0][0]


def _while_with_halo(use: Callable[[Any, Any], Any]) -> Callable[[jax.Array], jax.Array]:
    """The same in a while loop."""

    def body(carry: Any) -> Any:
        n, x, halo = carry
        return n + 1, use(jnp.tanh(x), halo), x + sk.shift(halo, "model")

    return lambda x: lax.while_loop(lambda carry: carry[0] < 3, body, (0, x, x))[1]


@jax.custom_vjp
def _ignore_second(x: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.tanh(x)


_ignore_second.defvjp(lambda x, other: (jnp.tanh(x), x), lambda x, cotangent: (cotangent, jnp.zeros_like(x)))


def _neighbours_piece(x: jax.Array) -> jax.Array:
    return sk.all_gather(x[None], "model")[(sk.axis_index("model") + 1) % 4]


def _tangent_of_square(kernel: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.grad(lambda x: jnp.sum(on(lambda x: kernel(x) ** 2)(x)))


D, PP, U = "divergent-collective", "ppermute-in-divergent-branch", "unequal-output"
TWICE, FEW = "non-bijective-permutation", "incomplete-permutation"
RING = [(i, (i + 1) % 4) for i in range(4)]
HALVES = [(i, (i + 4) % 8) for i in range(8)]


def _chain(sources: range, by: int = 1) -> list[tuple[int, int]]:
    return [(i, i + by) for i in sources]


def _permuted(name: str, rule: str, wrong: Any, right: Any, axis: Any = "model") -> Planted:
    def program(pairs: Any) -> Callable[[Any], Any]:
        return on(lambda x: lax.ppermute(x, axis, pairs))

    return Planted(name, rule, program(wrong), program(right))


def _under(name: str, rule: str, collective: Any, wrong: Any, right: Any = None, around: Any = on) -> Planted:
    """A collective under two predicates; without a second one, every device calls it and then selects."""
    meant = selected(wrong, collective) if right is None else chosen(right, collective)
    return Planted(name, rule, around(chosen(wrong, collective)), around(meant))


DIVERGENT = [
    # a predicate that differs along the collective's own axis
    _under("all_reduce under cond", D, _sum_model, _my_place),
    _under("all_gather under a predicate from data", D, _gathered, _my_data, all_agree),
    _under("reduce_scatter under cond", D, _scattered, lambda x: jnp.max(x) > 0, partial(all_agree, axes="model")),
    _under("all_to_all under cond", D, _exchanged, _my_place, _other_place),
    _under("shift under cond", D, _shifted, _my_place),
    _under("broadcast under a predicate from max", D, _broadcast, lambda x: jnp.isnan(x).any(), _any_nan),
    Planted(
        "sum over both axes, predicate along one",
        D,
        on(chosen(_other_place, lambda x: sk.vary(sk.all_reduce(x, BOTH), BOTH))),
        on(chosen(_other_place, _sum_model)),
    ),
    _under(
        "predicate reduced over the wrong axis",
        D,
        _sum_model,
        partial(all_agree, axes="data"),
        partial(all_agree, axes="model"),
    ),
    Planted(
        "the other branch sums over another axis",
        D,
        on(lambda x: lax.cond(first("data"), _sum_model, _sum_data, x)),
        on(lambda x: lax.cond(all_agree(x), _sum_model, _sum_data, x)),
    ),
    Planted(
        "switch by device",
        D,
        on(_switch(lambda: sk.axis_index("model"), _sum_model, lambda x: x, lambda x: x, lambda x: x)),
        on(_switch(lambda: sk.axis_index("data"), _sum_model, lambda x: x)),
    ),
    _under("in a jit in a scan", D, _sum_model, _my_place, _other_place, lambda kernel: on(_scanned(jax.jit(kernel)))),
    _under("under remat", D, _sum_model, _my_data, all_agree, lambda kernel: on(jax.checkpoint(kernel))),
    _under("in a custom derivative's forward rule", D, _sum_model, _my_place, _other_place, _custom_forward),
    _under("in a custom derivative's backward rule", D, _sum_model, _my_place, _other_place, _custom),
    _under("in the gradient of a cond", D, _gathered, _my_place, around=_tangent_of_square),
    _under("inside a nested shard_map", D, _sum_in_nested, _my_place, _other_place, _nested),
    Planted(
        "a cond inside a cond",
        D,
        on(chosen(_my_place, chosen(all_agree, _sum_data))),
        on(chosen(_my_place, chosen(_my_data, lambda x: x * 2))),
    ),
    Planted(
        "a while that stops by this device's data",
        D,
        on(_while_small(lambda s: s, _half_sum)),
        on(_while_small(lambda s: sk.all_reduce(s, BOTH), _half_sum)),
    ),
    Planted("a fixed point of this device's own", D, on(_fixed_point(agree=False)), on(_fixed_point(agree=True))),
    Planted("a loop as long as the index", D, on(_test_sums(agree=False)), on(_test_sums(agree=True))),
    Planted("a predicate that becomes different in the second iteration", D, _later(jnp.sum), _later(lambda x: 1)),
    Planted(
        "a predicate that a divergent loop counted",
        D,
        on(chosen(lambda x: _counted(sk.axis_index) > 2, _sum_model)),
        on(chosen(lambda x: _counted(sk.axis_size) > 2, _sum_model)),
    ),
    Planted("a predicate that the host gives", D, _told_to(agree=False), _told_to(agree=True)),
    Planted(
        "without check_vma",
        D,
        _unchecked(False, chosen(lambda x: lax.axis_index("model") == 0, lambda x: lax.psum(x, "model")), P(BOTH)),
        on(chosen(_other_place, _sum_model)),
        (X,),
        {"ignore": ("check-vma-off",)},
    ),
    # a ppermute, whatever its axis
    _under("ppermute under another axis' predicate", PP, _shifted, _other_place),
    _under(
        "a ring under another axis' predicate", PP, lambda x: sk.ring.all_reduce(x, "model"), _other_place, all_agree
    ),
    _under(
        "a pipeline's stage under cond",
        PP,
        lambda x: jnp.tanh(sk.collectives.halo_exchange(x, "model")[1:-1]),
        lambda x: sk.axis_index("data") < 1,
        around=lambda kernel: on(_scanned(kernel)),
    ),
    Planted(
        "ppermute in a while over another axis",
        PP,
        on(_while_small(lambda s: sk.all_reduce(s, "model"), lambda x: sk.shift(x, "model") + 1)),
        on(_while_small(lambda s: sk.all_reduce(s, BOTH), lambda x: sk.shift(x, "model") + 1)),
    ),
    # equal by type only
    Planted(
        "a cond's result passes as equal",
        U,
        on(lambda x: lax.cond(first("data"), lambda: 5.0, lambda: 7.0), out_specs=P()),
        on(lambda x: sk.all_reduce(jnp.where(first("data"), 5.0, 7.0), "data", op="max"), out_specs=P()),
    ),
    Planted("a loop's count passes as equal", U, _counted_twice(sk.axis_index), _counted_twice(sk.axis_size)),
]


def _masked(x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)


WRONG = [
    _permuted("a source twice", TWICE, [(0, 1), (0, 2)], RING),
    _permuted("a target twice", TWICE, [(0, 1), (1, 2), (2, 1), (3, 0)], RING),
    _permuted("a ring one device too long", TWICE, _chain(range(4)), _chain(range(3))),
    _permuted("a device below zero", TWICE, _chain(range(4), by=-1), _chain(range(1, 4), by=-1)),
    _permuted("a chain one device too short", FEW, _chain(range(2)), _chain(range(3))),
    _permuted("swapped halves, one forgotten", FEW, HALVES[:7], HALVES, BOTH),
    _permuted("to itself", "identity-permutation", _chain(range(4), by=0), RING),
    Planted(
        "zeros taken for values",
        FEW,
        on(lambda x: lax.ppermute(x, "model", [(0, 2), (1, 3)]) + lax.ppermute(x, "model", [(0, 1)])),
        on(lambda x: jnp.where(sk.axis_index("model") == 1, lax.ppermute(x, "model", [(0, 1)]), x)),
    ),
    Planted(
        "a sum of a sum",
        "repeated-reduction",
        on(lambda x: sk.all_reduce(sk.all_reduce(x, "model") * 2, BOTH)),
        on(lambda x: sk.all_reduce(sk.all_reduce(x, "model") * 2, "data")),
    ),
    Planted(
        "a mean of a mean, in a loss's gradient",
        "repeated-reduction",
        _tangent_of_square(lambda x: sk.vary(lax.pmean(lax.pmean(x, "model"), "model"), BOTH)),
        _tangent_of_square(lambda x: sk.vary(lax.pmean(x, "model"), BOTH)),
    ),
    Planted(
        "a sum of what was gathered",
        "repeated-reduction",
        on(lambda x: sk.all_reduce(jnp.sum(sk.all_gather(x, "model") ** 2)[None], "model")),
        on(lambda x: sk.all_reduce(jnp.sum(x**2)[None], "model")),
    ),
    Planted(
        "weight decay counted by every device",
        "repeated-reduction",
        jax.shard_map(lambda w: lax.psum(jnp.sum(w**2), BOTH), mesh=MESH, in_specs=P(), out_specs=P()),
        jax.shard_map(lambda w: lax.psum(jnp.sum(w**2), BOTH), mesh=MESH, in_specs=P(BOTH), out_specs=P()),
    ),
    Planted(
        "gathered for the neighbor's piece",
        "gather-one-shard-used",
        on(_neighbours_piece),
        on(lambda x: sk.shift(x, "model", by=-1)),
    ),
    Planted(
        "gathered through a jit for one piece",
        "gather-one-shard-used",
        on(lambda x: lax.dynamic_index_in_dim(lax.all_gather(x, "model"), 2, keepdims=False)),
        on(lambda x: sk.broadcast(x, "model", source=2)),
    ),
    Planted(
        "reduced for its own piece",
        "all-reduce-then-slice",
        on(lambda x: _own_rows(sk.all_reduce(x, "model"), "model", 4)),
        on(lambda x: sk.reduce_scatter(x, "model")),
    ),
    Planted(
        "reduced in the backward pass for its own piece",
        "all-reduce-then-slice",
        _tangent_of_square(lambda x: jnp.tile(x, (4, 1)) * sk.all_gather(x, "model", replicated=True)),
        _tangent_of_square(lambda x: jnp.tile(x, (4, 1)) * sk.all_gather(x, "model")),
    ),
    Planted(
        "gradients reduced in place",
        "unread-message",
        _updated(lambda gradient: [sk.all_reduce(gradient, BOTH), gradient][1]),
        _updated(lambda gradient: sk.all_reduce(gradient, BOTH)),
    ),
    Planted(
        "a halo in a carry that nobody reads",
        "unread-message",
        on(_with_halo(lambda x, halo: x)),
        on(_with_halo(lambda x, halo: x + halo)),
    ),
    Planted(
        "a running halo in a while loop that nobody reads",
        "unread-message",
        on(_while_with_halo(lambda x, halo: x)),
        on(_while_with_halo(lambda x, halo: x + halo)),
    ),
    Planted(
        "a branch that shifts for nothing",
        "unread-message",
        on(lambda x: lax.cond(all_agree(x), lambda x: (_shifted(x), x)[1], lambda x: 2 * x, x)),
        on(lambda x: lax.cond(all_agree(x), _shifted, lambda x: 2 * x, x)),
    ),
    Planted(
        "a result of both branches that nobody reads",
        "unread-message",
        on(lambda x: lax.cond(all_agree(x), lambda x: (x, _shifted(jnp.sin(x))), lambda x: (2 * x, x), x)[0]),
        on(lambda x: lax.cond(all_agree(x), lambda x: (x, _shifted(jnp.sin(x))), lambda x: (2 * x, x), x)[1]),
    ),
    Planted(
        "a shift for a function with its own derivative, which ignores it",
        "unread-message",
        on(lambda x: _ignore_second(x, _shifted(x))),
        on(lambda x: _ignore_second(_shifted(x), x)),
    ),
    Planted(
        "a ring that a kernel runs for nothing",
        "unread-message",
        on(lambda x: (sk.ring.all_gather(jnp.tile(x, (4, 1)), "model"), x)[1]),
        on(lambda x: sk.ring.all_gather(jnp.tile(x, (4, 1)), "model")),
    ),
    Planted(
        "a large weight on every device",
        "large-replicated",
        _linear(P()),
        _linear(P(BOTH)),
        (X, X),
        {"large": 64 * 64 * 4},
    ),
    Planted(
        "a gain in crumbs",
        "tiny-shards",
        _gain(P("fsdp")),
        _gain(P()),
        (jax.ShapeDtypeStruct((256,), jnp.float32), jax.ShapeDtypeStruct((64, 256), jnp.float32)),
    ),
    Planted(
        "a small weight in columns",
        "tensor-parallel-that-fits",
        _columns(P(None, "model"), P("data"), "model"),
        _columns(P(), P(BOTH)),
        (X, X),
        {"memory": 2**20},
    ),
    Planted(
        "a sort that compares the ends with zeros",
        FEW,
        on(_sorted(lambda x, least: least)),
        on(_sorted(lambda x, least: jnp.where(sk.axis_index("model") > 0, least, x))),
    ),
    Planted(
        "zeros that a chain leaves as a predicate",
        FEW,
        on(lambda x: jnp.where(lax.ppermute(x > 0, "model", [(0, 1), (1, 2)]), x, 0)),
        on(lambda x: jnp.where(lax.ppermute(x > 0, "model", [(0, 1), (1, 2), (2, 3), (3, 0)]), x, 0)),
    ),
    Planted(
        "one dropout mask on all devices",
        "repeated-draw",
        _dropout(lambda key: key),
        _dropout(lambda key: sk.fold_axis(sk.fold_axis(key, "data"), "model")),
        (KEY, X),
    ),
    Planted(
        "one noise along the other axis",
        "repeated-draw",
        _dropout(lambda key: sk.fold_axis(key, "data"), lambda draws, x: x + draws),
        _dropout(lambda key: sk.fold_axis(sk.fold_axis(key, "data"), "model"), lambda draws, x: x + draws),
        (KEY, X),
    ),
    Planted(
        "an attack that begins with zeros",
        "inner-gradient-of-a-constant",
        _attacked(lambda x: jnp.zeros(x.shape, x.dtype)),
        _attacked(lambda x: sk.vary(jnp.zeros(x.shape, x.dtype), BOTH)),
        (X, X),
    ),
    Planted(
        "a slope at one of each example",
        "inner-gradient-of-a-constant",
        _slopes(lambda: 1.0),
        _slopes(lambda: sk.vary(jnp.float32(1.0), BOTH)),
        (X, X),
    ),
    Planted(
        "a mean of masked means",
        "mean-of-quotients",
        _masked_mean(lambda total, count: sk.all_reduce(total / jnp.maximum(count, 1), BOTH, op="mean")),
        _masked_mean(lambda total, count: sk.all_reduce(total, BOTH) / jnp.maximum(sk.all_reduce(count, BOTH), 1)),
    ),
    Planted(
        "a mean of masked means that are cast",
        "mean-of-quotients",
        _masked_mean(lambda total, count: sk.all_reduce(sk.vary(total / count, "model"), BOTH, op="mean"), "data"),
        _masked_mean(lambda total, count: sk.all_reduce(total, "data") / sk.all_reduce(count, "data"), "data"),
        options={"ignore": ("repeated-reduction",)},
    ),
    Planted(
        "a penalty in each device's total",
        "term-of-each-device",
        _penalized(lambda mean, square: 1e-4 * square),
        _penalized(lambda mean, square: 1e-4 * mean.weight * square),
        (X, X),
    ),
    Planted(
        "data parallelism over one of two axes",
        "idle-axis",
        _gradient(P("data"), "data"),
        _gradient(P(BOTH), BOTH),
        (X, X),
    ),
    Planted(
        "one key for two dropouts",
        "reused-key",
        lambda key, x: _masked(_masked(x, key) @ x, key),
        lambda key, x: _masked(_masked(x, jax.random.fold_in(key, 0)) @ x, jax.random.fold_in(key, 1)),
        (KEY, X),
    ),
    Planted(
        "one mask for every layer",
        "reused-key",
        lambda keys, x: lax.scan(lambda y, w: (_masked(y * w[None], keys[0]), None), x, x)[0],
        lambda keys, x: lax.scan(lambda y, each: (_masked(y * each[1][None], each[0]), None), x, (keys, x))[0],
        (jax.ShapeDtypeStruct((64,), KEY.dtype), X),
    ),
    _off("never reduced, unchecked", lambda x: jnp.sum(x), lambda x: lax.psum(jnp.sum(x), BOTH)),
    _off(
        "the gradient of a mean, unchecked",
        lambda x: jax.grad(lambda w: lax.pmean(jnp.sum((x @ w) ** 2), BOTH))(jnp.ones(64)),
        lambda x: lax.pmean(jax.grad(lambda w: jnp.sum((x @ w) ** 2))(jnp.ones(64)), BOTH),
    ),
    Planted("unchecked types", "check-vma-off", _unchecked(False), _unchecked(True)),
    Planted("pmap", "pmap", _pmap, _shard_mapped, (jax.ShapeDtypeStruct((8, 4), jnp.float32),)),
    Planted("process 0 alone", "process-dependent-communication", _by_process(True), _by_process(False)),
    Planted(
        "another direction behind a jit",
        "process-dependent-communication",
        _by_process_inside_jit(True),
        _by_process_inside_jit(False),
    ),
    Planted("another constant", "process-dependent-program", _seeded(True), _seeded(False)),
]


def _send_right(x_ref: Any, result_ref: Any, sent: Any, received: Any, *, waits: bool) -> None:
    """Copies a block to the next device, and leaves before the block of the other one has come, or not."""
    right = (lax.axis_index("x") + 1) % 2
    copy = pltpu.make_async_remote_copy(x_ref, result_ref, sent, received, device_id=(right,))
    copy.start()
    copy.wait_send()
    if waits:
        copy.wait_recv()


def _copied(waits: bool) -> Callable[[Any], Any]:
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        partial(_send_right, waits=waits),
        jax.ShapeDtypeStruct((32, 64), jnp.float32),
        in_specs=[anywhere],
        out_specs=anywhere,
        scratch_shapes=[pltpu.SemaphoreType.DMA] * 2,
    )
    mesh = sk.abstract_mesh(x=2)
    return jax.shard_map(lambda x: call(x), mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)


KERNELS = [
    Planted(
        "a remote copy that nobody awaits",
        "kernel-order",
        _copied(waits=False),
        _copied(waits=True),
        (X,),
        {"ignore": ("check-vma-off",)},
    )
]
PLANTED = DIVERGENT + WRONG + KERNELS
