"""Grids, particles and linear solvers on several devices."""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from corpus.case import floats
from faults.case import planted

LINE, ROWS, GRID, BODIES = P("sp"), P("dp"), P("r", "c"), P("dp")


def heat(x):
    """A step of diffusion on a line of which both ends are insulated."""
    n, i = lax.axis_size("sp"), lax.axis_index("sp")
    left = sk.shift(x[-1:], "sp", wrap=False)
    right = sk.shift(x[:1], "sp", by=-1, wrap=False)
    left = jnp.where(i == 0, x[:1], left)
    # fault: right = jnp.where(i == n - 1, x[:1], right)
    right = jnp.where(i == n - 1, x[-1:], right)
    padded = jnp.concatenate([left, x, right])
    return x + 0.25 * (padded[:-2] - 2 * x + padded[2:])


def heat_reference(x):
    padded = jnp.concatenate([x[:1], x, x[-1:]])
    return x + 0.25 * (padded[:-2] - 2 * x + padded[2:])


def wave(now, before):
    """A periodic string: the next positions follow from two earlier ones."""
    left, right = sk.shift(now[-1:], "sp"), sk.shift(now[:1], "sp", by=-1)
    # fault: padded = jnp.concatenate([right, now, left])
    padded = jnp.concatenate([left, now, right])
    pull = padded[:-2] - 2 * now + padded[2:]
    return 2 * now - before + 0.5 * pull


def wave_reference(now, before):
    return 2 * now - before + 0.5 * (jnp.roll(now, 1) - 2 * now + jnp.roll(now, -1))


def divergence(u, v):
    """Of a flow on a periodic grid: u runs along columns, v along rows."""
    from_left = jnp.concatenate([sk.shift(u[:, -1:], "c"), u[:, :-1]], 1)
    # fault: from_above = jnp.concatenate([sk.shift(v[-1:], "c"), v[:-1]])
    from_above = jnp.concatenate([sk.shift(v[-1:], "r"), v[:-1]])
    return (u - from_left) + (v - from_above)


def divergence_reference(u, v):
    return u - jnp.roll(u, 1, 1) + v - jnp.roll(v, 1, 0)


def jacobi(matrix, diagonal, right, x):
    """Two rounds; rows of the matrix on each device."""
    for _ in range(2):
        everything = lax.all_gather(x, "dp", tiled=True)
        residual = right - matrix @ everything
        # fault: x = residual / diagonal
        x = x + residual / diagonal
    return x


def jacobi_reference(matrix, diagonal, right, x):
    for _ in range(2):
        x = x + (right - matrix @ x) / diagonal
    return x


def conjugate_gradient(matrix, right):
    """Two steps from zero."""
    x, residual, direction = jnp.zeros_like(right), right, right
    size = lax.psum((residual * residual).sum(), "dp")
    for _ in range(2):
        product = matrix @ lax.all_gather(direction, "dp", tiled=True)
        # fault: length = size / (direction * product).sum()
        length = size / lax.psum((direction * product).sum(), "dp")
        x, residual = x + length * direction, residual - length * product
        after = lax.psum((residual * residual).sum(), "dp")
        direction, size = residual + after / size * direction, after
    return x


def conjugate_gradient_reference(matrix, right):
    x, residual, direction = jnp.zeros_like(right), right, right
    for _ in range(2):
        product = matrix @ direction
        size = (residual * residual).sum()
        length = size / (direction * product).sum()
        x, residual = x + length * direction, residual - length * product
        direction = residual + (residual * residual).sum() / size * direction
    return x


def forces(places, masses):
    """The bodies of the other devices come round a ring."""
    n = lax.axis_size("dp")
    total = jnp.zeros_like(places)
    others, heavy = places, masses
    # fault: for _ in range(n - 1):
    for _ in range(n):
        apart = others[None] - places[:, None]
        total = total + (heavy[None] * apart / (1 + apart**2)).sum(1)
        others, heavy = sk.shift(others, "dp"), sk.shift(heavy, "dp")
    return total


def forces_reference(places, masses):
    apart = places[None] - places[:, None]
    return (masses[None] * apart / (1 + apart**2)).sum(1)


def total_energy(places, speeds, masses):
    everybody, heavy = lax.all_gather((places, masses), "dp", tiled=True)
    kinetic = 0.5 * (masses * speeds**2).sum()
    pairs = masses[:, None] * heavy[None] * (places[:, None] - everybody[None]) ** 2
    # fault: potential = pairs.sum() / lax.axis_size("dp")
    potential = pairs.sum() / 2
    return lax.psum(kinetic + potential, "dp")


def total_energy_reference(places, speeds, masses):
    pairs = masses[:, None] * masses[None] * (places[:, None] - places[None]) ** 2
    return 0.5 * (masses * speeds**2).sum() + pairs.sum() / 2


def centred(places, masses):
    mass = lax.psum(masses.sum(), "dp")
    # fault: centre = lax.pmean((masses * places).sum(), "dp") / mass
    centre = lax.psum((masses * places).sum(), "dp") / mass
    return places - centre


X, V, M = floats(8), floats(8) + 1, floats(4) ** 2
A, B = floats(4, 4), floats(4, 4) + 1
CASES = [
    planted(heat, heat_reference, (X,), (LINE,), LINE, sp=4),
    planted(wave, wave_reference, (X, V), (LINE, LINE), LINE, sp=4),
    planted(divergence, divergence_reference, (A, B), (GRID, GRID), GRID, r=2, c=2),
    planted(jacobi, jacobi_reference, (A, floats(4) + 3, floats(4), M), (ROWS, ROWS, ROWS, ROWS), ROWS, dp=2),
    planted(conjugate_gradient, conjugate_gradient_reference, (A, floats(4)), (ROWS, ROWS), ROWS, dp=2, grad=0),
    planted(forces, forces_reference, (floats(6), floats(6) ** 2), (BODIES, BODIES), BODIES, dp=3),
    planted(
        total_energy, total_energy_reference, (floats(6), floats(6) + 1, floats(6) ** 2), [BODIES] * 3, P(), dp=3
    ),
    planted(centred, lambda x, m: x - (m * x).sum() / m.sum(), (floats(4), M), (BODIES, BODIES), BODIES, dp=2),
]  # fmt: skip
