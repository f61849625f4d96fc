"""How one device sums over its examples: all at once, or in microbatches one after the other.

`Groups`, in `groups.py`, is the other way, in an order that does not depend on the mesh. A step has one of them, and
calls the same functions of both.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import quoted
from shardkit._jax.compat import on_this_mesh
from shardkit._jax.jaxprs import PER_MICROBATCH, PLAN, kind_of, mesh_axes, walk
from shardkit.collectives._sums import add_terms, typed_zeros
from shardkit.on_device.batch import split_microbatches, split_over, take_microbatch
from shardkit.on_device.seam import leave
from shardkit.plans.plan import Placement

# The Means by name, and the gradients, of a batch and the keys of its examples.
OfExamples = Callable[[Any, Any], tuple[dict[str, Any], Any]]
Arrays = list[jax.Array]


@dataclass(frozen=True)
class Microbatches:
    """So many microbatches one after the other, whose sums are added in float32."""

    parts: int = 1

    @property
    def words(self) -> str:
        """The option that asks for it, for errors."""
        return f"accumulate={self.parts}" if self.parts > 1 else ""

    def placed(self, batch: Any, placement: Placement) -> Microbatches:
        """With the number of `parts` that a device has of this batch."""
        return self

    def unfolded(self, scale: jax.Array, step: jax.Array) -> jax.Array:
        """The factor on the gradients inside the GradFn."""
        return scale

    def of(self, of_examples: OfExamples, batch: Any, keys: jax.Array, scale: jax.Array, placement: Placement) -> Any:
        """The Means and gradients of this device's examples."""
        call, arrays = of_arrays(of_examples, batch, keys, self.parts)
        first = take_microbatch(split_microbatches((batch, keys), self.parts), 0)
        shapes = _of_microbatch(of_examples, first, self.parts, split_over(placement.batch))

        def add(total: Any, arrays: Arrays) -> tuple[Any, None]:
            return add_terms(total, call(arrays)), None

        return lax.scan(add, jax.tree.map(lambda x: typed_zeros(x, dtype=jnp.float32), shapes), arrays)[0]

    leave = staticmethod(leave)

    def apart(
        self, update: Callable[[Any, Any], Any], given: Any, held: Any, *, step: jax.Array, specs: Any, what: Any
    ) -> Any:
        """`update(given, held)`, compiled with the rest of the step."""
        return update(given, held)


def of_arrays(of_examples: OfExamples, batch: Any, keys: Any, parts: int) -> tuple[Callable[[Arrays], Any], Arrays]:
    """The same function of the arrays of one microbatch, and all arrays with the microbatch as dim 0.

    Scalars, which a scan does not take, are those of the whole batch.
    """
    leaves, structure = jax.tree.flatten(split_microbatches((batch, keys), parts))

    def call(arrays: Arrays) -> Any:
        here = iter(arrays)
        return of_examples(*jax.tree.unflatten(structure, [next(here) if x.ndim else x for x in leaves]))

    return call, [x for x in leaves if x.ndim]


def _of_microbatch(of_examples: OfExamples, example: Any, parts: int, axes: tuple[str, ...]) -> Any:
    """The shapes of what one microbatch gives, after a warning where its loss mixes examples of several devices.

    It would mix those of one microbatch: a contrastive loss has fewer negatives, a norm over the batch other moments.
    What the plan sends for its leaves is right in each microbatch, and marked.
    """
    jaxpr, shapes = jax.make_jaxpr(of_examples, return_shape=True)(*example)
    for site in walk(jaxpr.jaxpr):
        mixed = kind_of(site.equation) and set(mesh_axes(site.equation)) & set(axes)
        if mixed and not site.backward and not (site.within(PLAN) or site.within(PER_MICROBATCH)):
            warnings.warn(
                f"make_train_step: with accumulate={parts} the loss gets one microbatch at a time, and the "
                "results of what it sends over an axis of the batch are those of a microbatch; it calls "
                f"{kind_of(site.equation)} over {quoted(sorted(mixed))} at {site.source}. Leave accumulate at 1, and "
                "save memory with scan_layers(..., microbatches=) or remat=, if all examples count together.",
                stacklevel=2,
            )
            break
    return on_this_mesh(shapes)
