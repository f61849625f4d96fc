"""Linear algebra in a proof: each rule against jax, laws, kernels on meshes, and wrong ones."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax import lax
from jax.lax import linalg
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import assert_equal_for_all_inputs
from shardkit.testing.exact import search
from shardkit.testing.exact.equality import UnprovableError
from shardkit.testing.exact.interpreter import Interpreter
from shardkit.testing.exact.numbers.field import Field, Settings
from shardkit.testing.exact.numbers.inputs import draw_input
from shardkit.testing.exact.numbers.orders import find_equal
from shardkit.testing.exact.numbers.values import OUTSIDE, TRULY, Exact

RNG = np.random.default_rng(3)
# Two matrices of each shape.
SQUARE, RIGHT, TALL, WIDE = (RNG.normal(size=(2, *shape)) for shape in ((4, 4), (4, 3), (6, 3), (3, 5)))
FLAGS = [(left, lower, turned, unit) for left in (0, 1) for lower in (0, 1) for turned in (0, 1) for unit in (0, 1)]


@pytest.fixture(autouse=True)
def _any_ranks():
    """These programs are written as others write them."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def zeros(*shape):
    return np.zeros(shape, np.float32)


def positive(a):
    return a @ a.mT + jnp.eye(a.shape[-1])


def triangular(a, b, left, lower, turned, unit):
    b = b if left else b.mT
    return linalg.triangular_solve(a, b, left_side=left, lower=lower, transpose_a=turned, unit_diagonal=unit)


ROWS = {
    "triangular_solve": lambda a, b, t, w: [triangular(a, b, *map(bool, flags)) for flags in FLAGS],
    "solve": lambda a, b, t, w: [
        jnp.linalg.solve(a, b), jnp.linalg.inv(a), jnp.linalg.det(a), jnp.linalg.slogdet(a),
        jsl.lu_solve(jsl.lu_factor(a[0]), b[0], trans=1), jnp.linalg.lstsq(t[0], t[0, :, 0])[0],
    ],
    "lu": lambda a, b, t, w: [linalg.lu(a), linalg.lu(t), linalg.lu(w), jsl.lu(a[0])],
    "cholesky": lambda a, b, t, w: [
        jnp.linalg.cholesky(positive(a)), jnp.linalg.cholesky(positive(a), upper=True),
        linalg.cholesky(positive(a) + jnp.triu(a, 1), symmetrize_input=False),
        jsl.solve(positive(a[0]), b[0], assume_a="pos"),
    ],
    "qr": lambda a, b, t, w: [jnp.linalg.qr(a), jnp.linalg.qr(t), jnp.linalg.qr(w), jnp.linalg.qr(t[0], mode="r")],
    "eigh": lambda a, b, t, w: [
        jnp.linalg.eigh(a), jnp.linalg.eigvalsh(a), linalg.eigh(a, lower=False, symmetrize_input=False),
    ],
    "svd": lambda a, b, t, w: [
        jnp.linalg.svd(t), jnp.linalg.svd(w, full_matrices=False), jnp.linalg.svd(a, compute_uv=False),
        jnp.linalg.pinv(t), jnp.linalg.norm(a[0], 2), jnp.linalg.matrix_rank(a),
    ],
    "tridiagonal_solve": lambda a, b, t, w: linalg.tridiagonal_solve(
        a[:, 0] * (np.arange(4) > 0), a[:, 1] + 3, a[:, 2] * (np.arange(4) < 3), b
    ),
    "order": lambda a, b, t, w: [
        jnp.argsort(a), lax.sort((a, b[..., :1] + a), num_keys=1), lax.top_k(t, 2), lax.approx_max_k(a, 2),
        lax.approx_min_k(a, 3, reduction_dimension=1), jnp.lexsort((a[0, 0], a[0, 1])),
        jnp.searchsorted(jnp.sort(a[0, 0]), a[0, 1]), jsl.expm(a[0]),
    ],
    "gradients": lambda a, b, t, w: [
        jax.grad(lambda a: jnp.sin(jnp.linalg.solve(a, b)).sum())(a), jax.grad(lambda a: jnp.linalg.det(a).sum())(a),
        jax.grad(lambda a: jnp.sin(jnp.linalg.cholesky(positive(a))).sum())(a),
        jax.grad(lambda t: sum(jnp.sin(x).sum() for x in jnp.linalg.qr(t)))(t),
        jax.grad(lambda a: jnp.sin(jnp.linalg.eigh(a)[1]).sum())(a), jax.grad(lambda a: linalg.lu(a)[0].sum())(a),
        jax.grad(lambda t: jnp.sin(jnp.linalg.svd(t, full_matrices=False)[0]).sum())(t),
    ],
}  # fmt: skip


def rows(*matrices):
    return {name: row(*matrices) for name, row in ROWS.items()}


def given(field, name, value):
    """An input of these real values."""
    x = draw_input(field, name, value.shape)
    return Exact(x.number, x.facts, value[None], degree=x.degree)


def run(function, *values):
    """Real results, and what is in the field."""
    field, matrices = Field(Settings(2, 3)), [np.asarray(value, np.float32) for value in values]
    traced = jax.make_jaxpr(function)(*matrices)
    return field, Interpreter(field).run(traced, [given(field, f"{i}", np.float64(x)) for i, x in enumerate(matrices)])


def test_real_values_are_those_of_jax():
    matrices = [np.asarray(x, np.float32) for x in (SQUARE, RIGHT, TALL, WIDE)]
    with jax.enable_x64(True):
        wanted = jax.tree.leaves(jax.jit(rows)(*(x.astype(np.float64) for x in matrices)))
    _, got = run(rows, *matrices)
    assert len(got) == len(wanted)
    for found, value in zip(got, map(np.asarray, wanted), strict=True):
        real = found.real[0] if isinstance(found, Exact) else found
        np.testing.assert_allclose(real, value, rtol=1e-9, atol=1e-9)
        if isinstance(found, Exact):  # a comparison relies on signs that are known
            assert not ((found.sign > 0) & (value < -1e-9) | (found.sign < 0) & (value > 1e-9)).any()
            assert not found.special


class Case(NamedTuple):
    """A kernel over axis "a", and the same without a mesh."""

    kernel: Any
    reference: Any
    args: tuple[Any, ...]
    ins: Any = P()
    outs: Any = P()
    n: int = 1
    grad: bool = True


def proved(case):
    return assert_equal_for_all_inputs(
        case.kernel,
        case.reference,
        mesh=sk.abstract_mesh(a=case.n),
        in_specs=case.ins,
        out_specs=case.outs,
        args=case.args,
        grad=case.grad,
        points=4,
    )


def solved_back(a, b):
    """What each triangular solve solves."""
    results = []
    for left, lower, turned, unit in FLAGS:
        x = triangular(a, b, bool(left), bool(lower), bool(turned), bool(unit))
        part = jnp.tril(a) if lower else jnp.triu(a)
        part = part - jnp.diag(jnp.diag(a)) + jnp.eye(4) if unit else part
        part = part.T if turned else part
        results.append(part @ x if left else (x @ part).T)
    return results


def whole(factors):
    return factors[0] @ factors[1]


def by_blocks(a, b):
    """The last half of a solution, by that of the first."""
    left = jnp.linalg.solve(a[:2, :2], jnp.concatenate([a[:2, 2:], b[:2]], 1))
    right = jnp.concatenate([a[2:, 2:], b[2:]], 1) - a[2:, :2] @ left
    return jnp.linalg.solve(right[:, :2], right[:, 2:])


def woodbury(a, u):
    inverse = jnp.linalg.inv(a)
    return inverse - inverse @ u @ jnp.linalg.solve(jnp.eye(1) + u.T @ inverse @ u, u.T @ inverse)


def unlike(factors):
    """L U, for the order of rows that lu says."""
    lu, _, order = factors
    return jnp.zeros_like(lu).at[order].set((jnp.tril(lu, -1) + jnp.eye(4)) @ jnp.triu(lu))


def rest_of_cholesky(a):
    """The last block of the factor, as a blocked algorithm computes it."""
    below = jsl.solve_triangular(jnp.linalg.cholesky(a[:2, :2]), a[:2, 2:], lower=True).T
    return jnp.linalg.cholesky(a[2:, 2:] - below @ below.T)


A, B = zeros(4, 4), zeros(4, 2)
LAWS = {
    "triangular_solve": Case(solved_back, lambda a, b: [b] * 16, (A, B), grad=False),
    "solve": Case(lambda a, x: jnp.linalg.solve(a, a @ x), lambda a, x: x, (A, B)),
    "inverse": Case(lambda a, b: jnp.linalg.inv(a @ b), lambda a, b: jnp.linalg.inv(b) @ jnp.linalg.inv(a), (A, A)),
    "determinant": Case(
        lambda a, b: jnp.linalg.det(a @ b), lambda a, b: jnp.linalg.det(a) * jnp.linalg.det(b), (A, A), grad=False
    ),
    "blocks": Case(lambda a, b: jnp.linalg.solve(a, b)[2:], by_blocks, (A, B), grad=False),
    "one rank more": Case(lambda a, u: jnp.linalg.inv(a + u @ u.T), woodbury, (zeros(3, 3), zeros(3, 1)), grad=False),
    "lu": Case(lambda a: unlike(linalg.lu(a)), lambda a: a, (A,)),
    "tridiagonal": Case(
        lambda d, x: linalg.tridiagonal_solve(
            jnp.pad(d[1:], (1, 0)), d * d, jnp.pad(d[:-1], (0, 1)),
            (jnp.diag(d * d) + jnp.diag(d[1:], -1) + jnp.diag(d[:-1], 1)) @ x,
        ),
        lambda d, x: x, (zeros(4), B), grad=False,
    ),
    "qr": Case(lambda a: whole(jnp.linalg.qr(a)), lambda a: a, (zeros(5, 3),)),
    "qr of a wide matrix": Case(lambda a: whole(jnp.linalg.qr(a)), lambda a: a, (zeros(3, 5),), grad=False),
    "Q is orthonormal": Case(
        lambda a: (lambda q: q.T @ q)(jnp.linalg.qr(a)[0]), lambda a: jnp.eye(3) + 0 * a[:3], (zeros(5, 3),),
        grad=False,
    ),
    "Q is orthogonal": Case(
        lambda a: (lambda q: q @ q.T)(jnp.linalg.qr(a)[0]), lambda a: jnp.eye(4) + 0 * a, (A,), grad=False
    ),
    "cholesky": Case(
        lambda a: (lambda lower: lower @ lower.T)(jnp.linalg.cholesky(positive(a))), positive, (A,), grad=False
    ),
    "cholesky of a part": Case(
        lambda a: jnp.linalg.cholesky(positive(a))[:2, :2], lambda a: jnp.linalg.cholesky(positive(a)[:2, :2]), (A,)
    ),
    "cholesky of the rest": Case(
        lambda a: rest_of_cholesky(positive(a)), lambda a: jnp.linalg.cholesky(positive(a))[2:, 2:], (A,), grad=False
    ),
    "cholesky solves": Case(
        lambda a, b: jsl.cho_solve(jsl.cho_factor(positive(a)), b), lambda a, b: jnp.linalg.solve(positive(a), b),
        (A, B), grad=False,
    ),
    "cholesky's determinant": Case(
        lambda a: jnp.prod(jnp.diagonal(jnp.linalg.cholesky(positive(a))) ** 2), lambda a: jnp.linalg.det(positive(a)),
        (A,), grad=False,
    ),
    "one triangle": Case(
        lambda a: linalg.eigh(a @ a.T + jnp.triu(a, 1), symmetrize_input=False)[0], lambda a: linalg.eigh(a @ a.T)[0],
        (A,), grad=False,
    ),
    "singular values alone": Case(
        lambda a: jnp.linalg.svd(a, compute_uv=False), lambda a: jnp.linalg.svd(a, full_matrices=False)[1], (A,)
    ),
}  # fmt: skip


# proves N49
@pytest.mark.parametrize("name", LAWS)
def test_a_law(name):
    assert proved(LAWS[name]).chance < 1e-10


def test_an_index_is_not_negative():
    """So jax's question whether it counts from the end is none about floats, and no branch that is never taken."""
    for kernel in (lambda a: jnp.linalg.solve(a, a), lambda a: jnp.take_along_axis(a, jnp.argsort(a), 1)):
        assert not any("never" in line for line in proved(Case(kernel, kernel, (A,), grad=False)).compared)


TURNED = np.array([3, 2, 1, 0])
# True, but by no law that is known: neither proved nor refuted.
UNKNOWN = {
    "trace": (lambda a: jnp.linalg.eigvalsh(positive(a)).sum(), lambda a: jnp.trace(positive(a)), "eigh"),
    "orthonormal eigenvectors": (
        lambda a: (lambda v: v @ v.T)(jnp.linalg.eigh(positive(a))[1]), lambda a: jnp.eye(4) + 0 * a, "eigh",
    ),
    "in another order": (
        lambda a: jnp.linalg.eigvalsh(positive(a)[TURNED][:, TURNED]), lambda a: jnp.linalg.eigvalsh(positive(a)),
        "eigh",
    ),
    "transposed": (
        lambda a: jnp.linalg.svd(a.T, compute_uv=False), lambda a: jnp.linalg.svd(a, compute_uv=False), "svd",
    ),
    "cholesky of no positive matrix": (
        lambda a: jnp.linalg.cholesky(-positive(a)), lambda a: jnp.linalg.cholesky(-positive(a)), "outside",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_without_a_law_it_is_not_decided(name):
    kernel, reference, word = UNKNOWN[name]
    with pytest.raises(ValueError, match=f"not decided.*{word}"):
        proved(Case(kernel, reference, (A,), grad=False))


def test_other_matrices_have_other_factors():
    """Also those of the same elements in another order."""

    def factors(a):
        even = positive(a)
        turned = even[TURNED][:, TURNED]
        return [
            [jnp.linalg.cholesky(x), jnp.linalg.eigh(x)[0], jnp.linalg.eigh(x)[1], *jnp.linalg.svd(x)]
            for x in (even, turned)
        ]

    field, results = run(factors, SQUARE[0])
    for x, y in zip(results[:6], results[6:], strict=True):
        differs = ~find_equal(field, x, y)
        assert differs[np.tril_indices(4)].all() if len(x.shape) == 2 else differs.all()


@pytest.mark.usefixtures("silent_floats")
def test_what_is_singular_is_no_number():
    def singular(x, y):
        outer = jnp.outer(x, y)
        zero = jnp.diag(x.at[1].set(x[0] - x[0]))
        solves = [jsl.solve_triangular(zero, y), jnp.linalg.solve(outer, y)]
        return [
            *solves,
            jnp.linalg.svd(outer)[1],
            jnp.linalg.eigvalsh(positive(outer) - jnp.eye(4)),
            *jnp.linalg.qr(outer),
        ]

    _, (triangular, solved, singulars, eigenvalues, q, r) = run(singular, SQUARE[0, 0], SQUARE[0, 1])
    assert abs(triangular.infinite[1]) == TRULY
    assert ((solved.poison > 0) | (abs(solved.infinite) == TRULY)).any()
    for zeros_and_one, place in ((singulars, 0), (eigenvalues, 3)):
        assert (zeros_and_one.number == 0).all(0).tolist() == [i != place for i in range(4)]
    assert (q.poison == OUTSIDE).all() and (r.poison == OUTSIDE).all()


REFUSED = {
    "fft, whose numbers are complex": lambda a: jnp.abs(jnp.fft.rfft(a)),
    "complex of complex numbers": lambda a: lax.complex(a, a).real,
    "eig, whose values may be complex": lambda a: jnp.linalg.eigvals(a).real,
    "schur, which is one of many": lambda a: jsl.schur(a)[0],
    "qr with full_matrices": lambda a: jnp.linalg.qr(a[:, :2], mode="complete")[0],
    "qr with pivoting": lambda a: linalg.qr(a, full_matrices=False, pivoting=True)[1],
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_has_no_meaning_is_refused_by_name(words):
    with pytest.raises(ValueError, match=f"{words}.* has none"):
        proved(Case(REFUSED[words], REFUSED[words], (A,), grad=False))


# Kernels


def in_one_way(q, r):
    """QR with a positive diagonal of R."""
    signs = jnp.sign(jnp.diagonal(r))
    return q * signs, signs[:, None] * r


def tsqr(x, way=in_one_way):
    """QR of the rows of all devices: that of the R of each."""
    q, r = jnp.linalg.qr(x)
    together, whole_r = jnp.linalg.qr(sk.all_gather(r, "a", replicated=True))
    mine = lax.dynamic_slice_in_dim(together, lax.axis_index("a") * len(r), len(r), 0)
    return way(q @ mine, whole_r)


def tree_tsqr(x):
    """R alone, by pairs of devices."""
    r = jnp.linalg.qr(x, mode="r")
    for by in (1, 2):
        other = lax.ppermute(r, "a", [(i, i ^ by) for i in range(4)])
        first = (lax.axis_index("a") & by) == 0
        r = jnp.linalg.qr(jnp.concatenate([jnp.where(first, r, other), jnp.where(first, other, r)]), mode="r")
    return sk.broadcast(in_one_way(r, r)[1], "a", source=0)


def cholesky_qr(x, summed=True):
    squares = sk.all_reduce(x.T @ x, "a") if summed else x.T @ x
    lower = jnp.linalg.cholesky(squares)
    return jsl.solve_triangular(lower, x.T, lower=True).T, lower.T


def ridge(x, y, summed=True):
    squares, right = sk.all_reduce(x.T @ x, "a"), x.T @ y
    right = sk.all_reduce(right, "a") if summed else right
    return jnp.linalg.solve(squares + 0.1 * jnp.eye(3), right)


def fourth_root(x):
    """The inverse of it."""
    w, v = jnp.linalg.eigh(x + 1e-6 * jnp.eye(len(x)))
    return v * jnp.maximum(w, 1e-6) ** -0.25 @ v.T


def shampoo(w, g, left, right, early=False):
    """A step; `early` averages gradients in place of their products."""
    mean = sk.all_reduce(g, "a", op="mean")
    left = left + (mean @ mean.T if early else sk.all_reduce(g @ g.T, "a", op="mean"))
    right = right + sk.all_reduce(g.T @ g, "a", op="mean")
    return w - 0.1 * fourth_root(left) @ mean @ fourth_root(right), left, right


def shampoo_alone(w, g, left, right):
    g = g.reshape(-1, 3, 2)
    left = left + jnp.einsum("kij,klj->il", g, g) / len(g)
    right = right + jnp.einsum("kij,kil->jl", g, g) / len(g)
    return w - 0.1 * fourth_root(left) @ g.mean(0) @ fourth_root(right), left, right


def carried(state, step, by):
    """A state that all devices before have changed: device i has it after i rounds."""
    state = sk.vary(state, "a")
    for _ in range(lax.axis_size("a") - 1):
        state = sk.shift(step(state), "a", by=by, wrap=False)
    return state


def delta_rule(q, k, v, beta, by=1):
    """Chunks of DeltaNet, one on each device: the changes in it by a triangular solve (the UT transform)."""

    def head(q, k, v, beta):
        lower = jnp.tril(beta[:, None] * (k @ k.T), -1) + jnp.eye(len(k))
        solved = partial(jsl.solve_triangular, lower, lower=True, unit_diagonal=True)
        w, u = solved(beta[:, None] * k), solved(beta[:, None] * v)
        state = carried(jnp.zeros((v.shape[1], k.shape[1])), lambda s: s + (u - w @ s.T).T @ k, by)
        return q @ state.T + jnp.tril(q @ k.T) @ (u - w @ state.T)

    return jax.vmap(head)(q, k, v, beta)


def delta_rule_alone(q, k, v, beta):
    def step(state, row):
        q, k, v, beta = row
        state = state - beta * jnp.outer(state @ k - v, k)
        return state, state @ q

    def head(q, k, v, beta):
        return lax.scan(step, jnp.zeros((v.shape[1], k.shape[1])), (q, k, v, beta))[1]

    return jax.vmap(head)(q, k, v, beta)


def mamba(x, dt, rate, b, c, by=1, twice=0):
    """Chunks of Mamba-2, one on each device; `twice` decays once too often."""
    dt = jax.nn.softplus(dt)

    def head(x, decay):
        until = jnp.cumsum(decay)
        causal = np.tri(len(x), dtype=bool)
        between = jnp.exp(jnp.where(causal, until[:, None] - until, -jnp.inf))
        own = (b * jnp.exp(until[-1] - until + twice * decay[-1])[:, None]).T @ x
        state = carried(jnp.zeros((b.shape[1], x.shape[1])), lambda s: jnp.exp(until[-1]) * s + own, by)
        return (c @ b.T * between) @ x + (c * jnp.exp(until)[:, None]) @ state

    return jax.vmap(head)(x * dt[..., None], -jnp.exp(rate)[:, None] * dt)


def mamba_alone(x, dt, rate, b, c):
    dt = jax.nn.softplus(dt)

    def step(state, row):
        x, decay, b, c = row
        state = jnp.exp(decay) * state + jnp.outer(b, x)
        return state, c @ state

    def head(x, decay):
        return lax.scan(step, jnp.zeros((b.shape[1], x.shape[1])), (x, decay, b, c))[1]

    return jax.vmap(head)(x * dt[..., None], -jnp.exp(rate)[:, None] * dt)


def cyclic_solve(lower, b, summed=True):
    """A triangular solve of four blocks of columns, dealt to two devices in turn."""
    done = x = sk.vary(0 * b, "a")
    size = len(b) // 4
    for block in range(4):
        rows, columns = (slice(i * size, (i + 1) * size) for i in (block, block // 2))
        mine = lax.axis_index("a") == block % 2
        before = sk.all_reduce(done[rows], "a") if summed else done[rows]
        diagonal = jnp.where(mine, lower[rows, columns], jnp.eye(size))
        part = jnp.where(mine, jsl.solve_triangular(diagonal, b[rows] - before, lower=True), 0)
        done, x = done + lower[:, columns] @ part, x.at[rows].set(part)
    return sk.all_reduce(x, "a")


def cyclic_solve_alone(dealt, b):
    lower = dealt.reshape(len(b), 4, -1)[:, np.array([0, 2, 1, 3])].reshape(len(b), -1)
    return jsl.solve_triangular(lower, b, lower=True)


SPLIT, ALONG = P("a"), P(None, "a")
TALL_ROWS = (zeros(12, 3),)
SHAMPOO = Case(
    shampoo, shampoo_alone, (zeros(3, 2), zeros(12, 2), zeros(3, 3), zeros(2, 2)), (P(), SPLIT, P(), P()), n=4
)
DELTA = Case(
    delta_rule, delta_rule_alone, (zeros(2, 8, 2), zeros(2, 8, 2), zeros(2, 8, 3), zeros(2, 8)), ALONG, ALONG, n=4
)
MAMBA = Case(
    mamba, mamba_alone, (zeros(2, 8, 2), zeros(2, 8), zeros(2), zeros(8, 3), zeros(8, 3)),
    (ALONG, ALONG, P(), SPLIT, SPLIT), ALONG, n=4,
)  # fmt: skip
RIDGE = Case(
    ridge, lambda x, y: jnp.linalg.solve(x.T @ x + 0.1 * jnp.eye(3), x.T @ y), (zeros(8, 3), zeros(8, 2)),
    (SPLIT, SPLIT), n=4,
)  # fmt: skip
CYCLIC = Case(cyclic_solve, cyclic_solve_alone, (zeros(8, 8), zeros(8, 2)), (ALONG, P()), n=2)
TSQR = Case(tsqr, lambda x: in_one_way(*jnp.linalg.qr(x)), TALL_ROWS, SPLIT, (SPLIT, P()), n=4)
KERNELS = {
    "tsqr": TSQR,
    "tsqr by pairs": TSQR._replace(
        kernel=tree_tsqr, reference=lambda x: TSQR.reference(x)[1], outs=P(), grad=False
    ),
    "cholesky qr": TSQR._replace(kernel=cholesky_qr),
    "ridge": RIDGE,
    "shampoo": SHAMPOO,
    "delta rule": DELTA,
    "mamba": MAMBA,
    "cyclic solve": CYCLIC,
    "pseudoinverse": Case(
        lambda x: jnp.linalg.pinv(sk.all_reduce(x, "a")), lambda x: jnp.linalg.pinv(x[:4] + x[4:]), (zeros(8, 3),),
        SPLIT, n=2,
    ),
}  # fmt: skip


# proves N49
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_matrices(name):
    assert proved(KERNELS[name]).chance < 1e-10


def second_half(x, b):
    """The second step of a solution by Cholesky's factor, without the first."""
    lower = jnp.linalg.cholesky(x.T @ x + np.eye(2, dtype="f"))
    return jsl.solve_triangular(lower.T, b, lower=False)


# A factor that devices have each of its own, and a right side that all of them have.
def test_a_factor_of_each_device_and_one_right_side():
    def reference(x, b):
        return jnp.concatenate([second_half(x[:3], b), second_half(x[3:], b)])

    args = (zeros(6, 2), zeros(2, 1))
    assert proved(Case(second_half, reference, args, (SPLIT, P()), SPLIT, n=2, grad=False))


def solve_by_halves(x, b, in_factor=0, in_half=0):
    """A solution by Cholesky's factor; to the factor, or to the half, something may be added before the second step."""
    lower = jnp.linalg.cholesky(x.T @ x + np.eye(2, dtype="f"))
    half = jsl.solve_triangular(lower, b, lower=True)
    return jsl.solve_triangular((lower + in_factor).T, half + in_half, lower=False)


# Factors and halves are found by their residues, and a logarithm is kept beside these.
@pytest.mark.parametrize("place", ["in_factor", "in_half"])
def test_a_factor_and_a_logarithm_are_not_the_factor(place):
    def kernel(x, b):
        return solve_by_halves(x, b, **{place: jnp.log(b * b + 1)})

    with pytest.raises((AssertionError, UnprovableError)):
        proved(Case(kernel, solve_by_halves, (zeros(3, 2), zeros(2, 1)), grad=False))


def solve_by_both_steps(a, b):
    return jsl.solve_triangular(a.T, jsl.solve_triangular(a, b, lower=True), lower=False)


# Of Q the product with itself is kept, and a solution reads one triangle of it.
def test_a_triangle_of_q_is_not_orthogonal():
    def kernel(a, b):
        return solve_by_both_steps(jnp.linalg.qr(a)[0], b)

    with pytest.raises((AssertionError, UnprovableError)):
        proved(Case(kernel, lambda a, b: b + 0 * a[:, :1], (zeros(2, 2), zeros(2, 1)), grad=False))


def test_the_triangle_that_is_not_read_may_be_nan():
    def kernel(a, b):
        beyond = jnp.triu(jnp.full((2, 2), jnp.nan), 1)
        return solve_by_both_steps(jnp.linalg.cholesky(a.T @ a + np.eye(2, dtype="f")) + beyond, b)

    def reference(a, b):
        return jnp.linalg.solve(a.T @ a + np.eye(2, dtype="f"), b)

    assert proved(Case(kernel, reference, (zeros(3, 2), zeros(2, 1)), grad=False))


# Few elements: a wrong program runs some hundred times.
FEW_DELTA = (zeros(1, 4, 2), zeros(1, 4, 2), zeros(1, 4, 2), zeros(1, 4))
FEW_MAMBA = (zeros(1, 4, 2), zeros(1, 4), zeros(1), zeros(4, 2), zeros(4, 2))
WRONG = {
    "tsqr without signs": TSQR._replace(
        kernel=partial(tsqr, way=lambda q, r: (q, r)), reference=lambda x: tuple(jnp.linalg.qr(x))
    ),
    "cholesky qr without a sum": TSQR._replace(
        kernel=lambda x: cholesky_qr(x, summed=False)[0], reference=lambda x: TSQR.reference(x)[0], outs=SPLIT
    ),
    "ridge without a sum": RIDGE._replace(kernel=partial(ridge, summed=False), outs=SPLIT, reference=lambda x, y: (
        jnp.concatenate([RIDGE.reference(x, y)] * 4)
    )),
    "shampoo of mean gradients": SHAMPOO._replace(
        kernel=partial(shampoo, early=True), args=(zeros(3, 2), zeros(6, 2), zeros(3, 3), zeros(2, 2)), n=2
    ),
    "delta rule of the wrong neighbour": DELTA._replace(kernel=partial(delta_rule, by=-1), args=FEW_DELTA, n=2),
    "mamba of the wrong neighbour": MAMBA._replace(kernel=partial(mamba, by=-1), args=FEW_MAMBA, n=2),
    "mamba that decays twice": MAMBA._replace(kernel=partial(mamba, twice=1), args=FEW_MAMBA, n=2),
    "cyclic solve without a sum": CYCLIC._replace(
        kernel=partial(cyclic_solve, summed=False), args=(zeros(4, 4), zeros(4, 1))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_of_matrices_is_refuted(name, monkeypatch):
    monkeypatch.setattr(search, "MOST_RUNS", 30)  # the line of the mistake is not what is tested
    with pytest.raises(AssertionError, match="is not the reference's for all inputs"):
        proved(WRONG[name]._replace(grad=False))
