"""Collectives that arrive wrong: a primitive's lowering replaced by another program."""

from contextlib import contextmanager
from functools import partial

import jax
from jax import lax
from jax.interpreters import mlir

from shardkit._jax.compat import private


@contextmanager
def planted(name, wrong):
    """Lowers a primitive of `jax._src.lax.parallel` to `wrong(shares, x)`: all devices' operands over "d", and its own.

    What was lowered before stays as it is: give it a function that jax has not seen.
    """
    lowerings, primitive = private("interpreters.mlir._lowerings"), private(f"lax.parallel.{name}")
    own = lowerings[primitive]
    gathers = name == "all_gather_p"

    def instead(x, **params):
        if gathers:  # all_gather itself is what is wrong
            shares = lax.all_to_all(jax.numpy.broadcast_to(x, (4, *x.shape)), "d", 0, 0, tiled=True)
        else:
            shares = lax.all_gather(x, "d")
        return wrong(shares, x)

    mlir.register_lowering(primitive, mlir.lower_fun(partial(instead), multiple_results=False))
    try:
        yield
    finally:
        lowerings[primitive] = own
