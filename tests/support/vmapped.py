"""A kernel under plain nested vmap, where no axis has a type: the other way in which the library's kernels are used."""

import jax
import jax.numpy as jnp

from shardkit.meshes.layout import all_axes
from shardkit.testing._interpreter import join_shards, split_shards
from support.tiers import DEEP


def under_vmap(kernel, sizes, in_specs, out_spec):
    """A function of the global arrays, one spec for each, with one array as result."""

    def run(*args):
        def one(_, *leaves):
            return kernel(*leaves)

        for name in reversed(sizes):
            in_axes = (0, *(0 if name in all_axes(spec) else None for spec in in_specs))
            one = jax.vmap(one, in_axes=in_axes, axis_name=name)
        pieces = [split_shards(jnp.asarray(x), spec, sizes) for x, spec in zip(args, in_specs, strict=True)]
        return join_shards(one(jnp.zeros(tuple(sizes.values())), *pieces), out_spec, sizes)

    return run if DEEP else jax.jit(run)  # operation by operation it compiles a hundred programs
