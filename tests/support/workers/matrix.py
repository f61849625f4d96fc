"""Every collective on every kind of mesh over many processes, against its meaning; prints how many checks held."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing import reference

sk.runtime.initialize(timeout=300)
D = jax.device_count()

KERNELS = {
    "all_reduce sum": (sk.all_reduce, reference.all_reduce, {}),
    "all_reduce mean": (sk.all_reduce, reference.all_reduce, {"op": "mean"}),
    "all_reduce max": (sk.all_reduce, reference.all_reduce, {"op": "max"}),
    "all_reduce min": (sk.all_reduce, reference.all_reduce, {"op": "min"}),
    "all_gather": (sk.all_gather, reference.all_gather, {"dim": 1}),
    "reduce_scatter": (sk.reduce_scatter, reference.reduce_scatter, {"dim": 0}),
    "all_to_all": (sk.all_to_all, reference.all_to_all, {"split_dim": 0, "concat_dim": 1}),
    "shift": (sk.shift, reference.shift, {"by": 1}),
    "shift without wrap": (sk.shift, reference.shift, {"by": -1, "wrap": False}),
    "broadcast": (sk.broadcast, reference.broadcast, {"source": 1}),
    "prefix_scan": (sk.collectives.prefix_scan, reference.prefix_scan, {}),
    "ring.all_gather": (sk.ring.all_gather, reference.all_gather, {}),
    "ring.reduce_scatter": (sk.ring.reduce_scatter, reference.reduce_scatter, {}),
    "ring.all_reduce": (sk.ring.all_reduce, reference.all_reduce, {}),
}
MESHES = {
    "line": (jax.devices(), {"a": D}),
    "grid": (jax.devices(), {"a": 2, "b": D // 2}),
    "permuted": ([*jax.devices()[::2], *jax.devices()[1::2][::-1]], {"a": D // 2, "b": 2}),
}
FORMS = {
    "plain": lambda f: f,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c, f(x)), 0, None, length=2)[1][1],
    "while": lambda f: (
        lambda x: lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, f(x)), (0, jax.tree.map(lambda s: s * 0, f(x)))
        )[1]
    ),
    "cond": lambda f: lambda x: lax.cond(jnp.bool_(True), f, lambda x: f(2 * x), x),
}

held = 0
for mesh_name, (devices, sizes) in MESHES.items():
    mesh, lead, spec = sk.make_mesh(devices, **sizes), len(sizes), P(*sizes)
    everything = tuple(sizes)
    rng = np.random.default_rng(len(mesh_name))
    x = rng.integers(-3, 4, (*sizes.values(), D, 3)).astype(np.float32) * 24  # every mean is exact
    global_x = sk.runtime.from_full(x, mesh, spec)
    for axis in [*sizes, everything] if lead > 1 else sizes:
        programs, expected = {}, {}
        for name, (kernel, meaning, options) in KERNELS.items():
            if isinstance(axis, tuple) and name.startswith(("ring", "prefix_scan")):
                continue

            def device(block, form, kernel=kernel, options=options):
                inner = lambda b: sk.vary(kernel(b, axis, **options), everything)  # noqa: E731
                got = form(inner)(block.reshape(block.shape[lead:]))
                return got.reshape((1,) * lead + got.shape)

            def on_mesh(x, form, device=device):
                each = partial(device, form=form)
                return jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec)(x)

            def meant(x, xp, meaning=meaning, options=options):
                return reference.over_mesh(lambda b, xp: meaning(b, xp=xp, **options), x, sizes, axis, xp=xp)

            for form_name, form in FORMS.items():
                if form_name == "plain" or mesh_name == "grid":
                    programs[name, form_name] = partial(on_mesh, form=form)
                    expected[name, form_name] = meant(x, np)
            # Ties share a derivative: see tests/collectives/test_shapes.py.
            if name not in ("all_reduce max", "all_reduce min"):
                w = rng.integers(-3, 4, expected[name, "plain"].shape).astype(np.float32)
                programs[name, "gradient"] = lambda x, f=on_mesh, w=w: jax.grad(
                    lambda x: jnp.sum(f(x, form=FORMS["plain"]) * w)
                )(x)
                expected[name, "gradient"] = np.asarray(
                    jax.grad(lambda x, f=meant, w=w: jnp.sum(f(x, jnp) * w))(jnp.asarray(x))
                )
        results = jax.jit(lambda x, programs=programs: {key: f(x) for key, f in programs.items()})(global_x)
        for key, got in results.items():
            for shard in got.addressable_shards:
                np.testing.assert_array_equal(
                    np.asarray(shard.data), expected[key][shard.index], err_msg=f"{mesh_name} {axis} {key}"
                )
            held += 1
print(f"{held} checks held")
