"""A dim as parts, one for each device: in its place `[.., n, rows, ..]`, or in front `[n, .., rows, ..]`.

Worked example: dim 1 of [3, 8, 5] in 4 parts is [3, 4, 2, 5] in its place, and [4, 3, 2, 5] in front.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def separate_parts(x: jax.Array, dim: int, count: int) -> jax.Array:
    """`[.., count rows, ..] -> [.., count, rows, ..]`"""
    rows = x.shape[dim] // count
    return x.reshape(*x.shape[:dim], count, rows, *x.shape[dim + 1 :])


def merge_parts(parts: jax.Array, dim: int) -> jax.Array:
    """`[.., count, rows, ..] -> [.., count rows, ..]`"""
    count, rows = parts.shape[dim : dim + 2]
    return parts.reshape(*parts.shape[:dim], count * rows, *parts.shape[dim + 2 :])


def stack_parts(x: jax.Array, dim: int, count: int) -> jax.Array:
    """`[.., count rows, ..] -> [count, .., rows, ..]`"""
    return jnp.moveaxis(separate_parts(x, dim, count), dim, 0)


def join_parts(parts: jax.Array, dim: int) -> jax.Array:
    """`[count, .., rows, ..] -> [.., count rows, ..]`"""
    return merge_parts(jnp.moveaxis(parts, 0, dim), dim)
