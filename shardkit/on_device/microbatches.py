"""How one device sums over its examples: all at once, or in microbatches one after the other.

`Groups`, in `groups.py`, is the other way, in an order that does not depend on the mesh. A step has one of them, and
calls the same functions of both.

Worked example: a device has 6 examples, and 3 microbatches. Its arrays x[6, 8] become x[3, 2, 8]. A scan calls the loss
with x[2, 8] three times, and adds totals, weights and gradients in float32: Mean(5, 2), Mean(7, 2), Mean(3, 1) (one
example is padding, with weight 0) become Mean(15, 5). What is then summed over devices is one gradient of each leaf, as
without microbatches, and it is divided by the weight of all examples: the loss does not change with their number.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardkit._arguments.checks import quote
from shardkit._jax.compat import on_this_mesh
from shardkit._jax.jaxprs import PER_MICROBATCH, PLAN, kind_of, mesh_axes, walk
from shardkit.collectives._sums import add_terms, typed_zeros
from shardkit.on_device.batch import example_axes, split_microbatches, take_microbatch
from shardkit.on_device.seam import leave
from shardkit.plans.plan import Placement

Leaves = list[jax.Array]
# From a batch and the keys of its examples to the Means by name and the gradients; the same of the arrays of both.
ComputeSums = Callable[[Any, Any], tuple[dict[str, Any], Any]]
ComputeSumsOfLeaves = Callable[[Leaves], Any]


@dataclass(frozen=True)
class Microbatches:
    """`parts` microbatches one after the other, whose sums are added in float32."""

    parts: int = 1

    @property
    def words(self) -> str:
        """The option that asks for microbatches, as errors name it."""
        return f"accumulate={self.parts}" if self.parts > 1 else ""

    def for_batch(self, batch: Any, placement: Placement) -> Microbatches:
        """As it is: every device splits every batch into `parts`. `Groups` counts its parts here."""
        return self

    def hide_scale(self, scale: jax.Array, step: jax.Array) -> jax.Array:
        """The factor on the gradients inside the GradFn, as it is. `Groups` hides it from the compiler."""
        return scale

    def sum_examples(
        self, compute_sums: ComputeSums, batch: Any, keys: jax.Array, scale: jax.Array, placement: Placement
    ) -> Any:
        """The Means and gradients of this device's examples."""
        compute_sums_of_leaves, leaves = split_leaves(compute_sums, batch, keys, self.parts)
        # Traced before the scan, because the warning reads the program of one microbatch.
        traced = TracedFunction(compute_sums_of_leaves, take_microbatch(leaves, 0))
        _warn_of_mixing(traced.jaxpr, self.parts, example_axes(placement.batch))

        def add_microbatch(total: Any, leaves: Leaves) -> tuple[Any, None]:
            return add_terms(total, traced(leaves)), None

        # Zeros that vary as the terms do: a scan refuses a carry that varies only after its first turn.
        zeros = jax.tree.map(lambda x: typed_zeros(x, dtype=jnp.float32), on_this_mesh(traced.shapes))
        total, _ = lax.scan(add_microbatch, zeros, leaves)
        return total

    leave = staticmethod(leave)

    def update_apart(
        self, update: Callable[[Any, Any], Any], inputs: Any, old: Any, *, step: jax.Array, specs: Any, words: Any
    ) -> Any:
        """`update(inputs, old)`, compiled with the rest of the step."""
        return update(inputs, old)


def split_leaves(compute_sums: ComputeSums, batch: Any, keys: Any, parts: int) -> tuple[ComputeSumsOfLeaves, Leaves]:
    """`compute_sums` as a function of one microbatch's arrays, and the arrays of all microbatches, for a scan.

    The arrays have the microbatch as dim 0. A scan takes no scalars: the function has the scalars of the batch in it.
    """
    leaves, structure = jax.tree.flatten(split_microbatches((batch, keys), parts))
    places = [place for place, x in enumerate(leaves) if x.ndim]

    def compute_sums_of_leaves(arrays: Leaves) -> Any:
        microbatch = list(leaves)
        for place, x in zip(places, arrays, strict=True):
            microbatch[place] = x
        batch, keys = jax.tree.unflatten(structure, microbatch)
        return compute_sums(batch, keys)

    return compute_sums_of_leaves, [leaves[place] for place in places]


class TracedFunction:
    """A function of arrays, traced once: its program can be read before it is called, and calls run the program.

    Attributes:
        jaxpr: the program.
        shapes: the shapes and dtypes of its results.
    """

    def __init__(self, fn: ComputeSumsOfLeaves, example: Leaves):
        closed, self.shapes = jax.make_jaxpr(fn, return_shape=True)(example)
        self.jaxpr: Any = closed.jaxpr
        self._constants = closed.consts
        self._structure = jax.tree.structure(self.shapes)

    def __call__(self, leaves: Leaves) -> Any:
        """The results for arrays of the shapes of the example."""
        results = jax.core.eval_jaxpr(self.jaxpr, self._constants, *leaves)
        for number, shape in enumerate(jax.tree.leaves(self.shapes)):
            if not isinstance(results[number], jax.Array):  # a literal of the program, such as a constant weight
                results[number] = jnp.asarray(results[number], shape.dtype)
        return jax.tree.unflatten(self._structure, results)


def _warn_of_mixing(jaxpr: Any, parts: int, batch_axes: tuple[str, ...]) -> None:
    """Warns of a loss that mixes examples of several devices.

    With microbatches it mixes the examples of one microbatch only: a contrastive loss has fewer negatives, a norm over
    the batch has other moments. The plan's collectives for its leaves are right in each microbatch; they are marked,
    and no reason to warn.
    """
    for site in walk(jaxpr):
        collective = kind_of(site.equation)
        mixed_axes = set(mesh_axes(site.equation)) & set(batch_axes)
        if collective is None or not mixed_axes:
            continue
        if not site.backward and not (site.within(PLAN) or site.within(PER_MICROBATCH)):
            warnings.warn(
                f"make_train_step: with accumulate={parts} the loss gets one microbatch at a time, so a collective "
                f"over an axis of the batch mixes the examples of one microbatch; it calls {collective} over "
                f"{quote(sorted(mixed_axes))} at {site.source}. Leave accumulate at 1, and save memory with "
                "scan_layers(..., microbatches=) or remat=, if all examples count together.",
                stacklevel=2,
            )
            return
