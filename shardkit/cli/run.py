"""A training run of the command: the step, its batches, the validation loss, and the state to start from."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardkit as sk
from shardkit.cli.output import plain
from shardkit.cli.pipelines import functions, pipeline_of
from shardkit.cli.plans import mesh_words, plan_of
from shardkit.models import transformer
from shardkit.partitioning.batch import batch_specs
from shardkit.runtime.data import text as text_data
from shardkit.simulated import offer_cpu_devices

_VALIDATION_EXAMPLES = 512
# Options that may change when a run is resumed: those of the mesh and the plan, which change numbers by rounding alone,
# and those that do not affect training.
_FREE = {"mesh", "accumulate", "sequence", "impl", "schedule", "microbatches", "chunks", "mode", "recompute"}
_FREE |= {"checkpoint", "checkpoint_every", "evaluate_every", "compare_replicas", "replay_every", "verify", "nonfinite"}
_FREE |= {"json", "output", "tensorboard", "log_every", "keep", "damaged", "deadline", "flight", "change"}
_OF_MODEL = ("layers", "dim", "heads", "kv_heads", "hidden", "dropout", "tied", "top_k", "capacity")


def mesh_of(where: str, words: tuple[str, ...], *, many: bool) -> jax.sharding.Mesh:
    """The mesh of `("data=8",)`, of simulated devices if there are no others; `many` processes have theirs already."""
    sizes = mesh_words(words, where)
    if not many and all(size > 0 for size in sizes.values()):
        offer_cpu_devices(math.prod(sizes.values()))
    return sk.make_mesh(**sizes)  # type: ignore[arg-type]


def config_of(options: Any, sizes: Any) -> transformer.Config:
    """The transformer of some options; without a number of experts, twice the size of axis expert."""
    given: Any = {name: getattr(options, name) for name in _OF_MODEL}
    experts = 2 * sizes.get("expert", 0) if options.experts is None else options.experts
    return transformer.Config(**given, experts=experts)


def settings_of(options: Any, config: transformer.Config) -> dict[str, Any]:
    """The options that determine the numbers, as JSON values."""
    settings = {name: plain(value) for name, value in asdict(options).items() if name not in _FREE}
    return settings | {"experts": config.experts or None}


class CommandRun:
    """A training run on one mesh, whose optimizer counts from step `began`."""

    def __init__(self, options: Any, mesh: jax.sharding.Mesh, config: transformer.Config, began: int = 0):
        self.options, self.config, self.mesh, self.began = options, config, mesh, began
        self.text = text = text_data.read_text(options.data) if options.data else text_data.standard_library()
        self.plan, axes = plan_of(mesh.shape, config, sequence=options.sequence, impl=options.impl)
        self.pipeline = pipeline_of(options, mesh.shape)
        plan, (grad_fn, loss_fn) = self.plan, functions(config, axes, self.pipeline)
        self.optimizer = _optimizer(options, began)
        how: Any = {"mesh": mesh, "plan": plan, "accumulate": options.accumulate, "precision": options.precision}
        make = partial(sk.make_train_step, grad_fn, self.optimizer, nonfinite=options.nonfinite)
        self.init, self.step = make(**how)
        self.step_on = lambda mesh: make(**how | {"mesh": mesh}).step  # the same step on other devices
        self._triage = sk.runtime.triage(grad_fn, **how)
        self._evaluate = sk.make_eval_step(loss_fn, mesh=mesh, plan=plan, precision=options.precision)
        self._spec = plan.batch_spec(mesh)
        count = max(1, _VALIDATION_EXAMPLES // options.batch)
        batches = text_data.validation_batches(text.validation, count=count, batch=options.batch, length=options.length)
        batch_specs(batches[0], self._spec, mesh, options.accumulate)  # raises if the batch cannot be split
        self._held_out = [sk.runtime.from_full(batch, mesh, self._spec) for batch in batches]

    def params(self, key: jax.Array) -> Any:
        """The initial parameters."""
        return transformer.init(key, self.config)

    def plain_batch(self, step: int) -> dict[str, np.ndarray]:
        """The global batch of a step, which depends on the seed and the step alone."""
        o = self.options
        return text_data.batch_at(self.text.train, seed=o.seed, step=step, batch=o.batch, length=o.length)

    def batch(self, step: int) -> dict[str, jax.Array]:
        """The batch of a step on the devices; each process reads the rows of its own devices."""
        o = self.options
        return text_data.global_batch_at(
            self.text.train, seed=o.seed, step=step, batch=o.batch, length=o.length, mesh=self.mesh, spec=self._spec
        )

    def tokens_per_second(self, steps: int, seconds: float) -> float:
        """The speed of some steps; 0 before they took any time."""
        return steps * self.options.batch * self.options.length / seconds if seconds else 0.0

    def validation(self, params: Any) -> dict[str, float]:
        """The loss in nats per byte, and the accuracy, over the held-out batches."""
        found = jax.device_get([self._evaluate(params, batch) for batch in self._held_out])
        return {name: float(np.mean([each[name] for each in found])) for name in found[0] if name != "weight"}

    def gradient_norm(self, state: sk.TrainState) -> float:
        """The global norm of the gradients of the step that gave a state, before they were clipped."""
        return float(next(each.norm for each in jax.tree.leaves(state.opt_state, is_leaf=_is_norm) if _is_norm(each)))

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, whose number is counted from 1."""
        return float(rate_of(self.options, 0)(step - 1))

    def triage(self, error: sk.NonFiniteError, batch: Any) -> sk.runtime.TriageReport:
        """Repeats the step that failed: which values are not finite, and where."""
        return self._triage(error.state._replace(step=error.state.step - 1), batch)

    def settings(self) -> dict[str, Any]:
        """The options that determine the numbers, as JSON values."""
        return settings_of(self.options, self.config)


class Norm(NamedTuple):
    """The state of `_norm_noted`.

    Attributes:
        norm: float32[], the global norm of the gradients.
    """

    norm: jax.Array


def _is_norm(x: Any) -> bool:
    return isinstance(x, Norm)


def _norm_of(tree: Any) -> jax.Array:
    return jnp.sqrt(sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), jnp.float32(0)))


def _norm_noted() -> optax.GradientTransformation:
    """Passes gradients on, and keeps their global norm in the optimizer's state."""
    return optax.GradientTransformation(
        lambda params: Norm(jnp.zeros((), jnp.float32)),
        lambda grads, state, params=None: (grads, Norm(_norm_of(grads))),
    )


def rate_of(o: Any, began: int) -> Any:
    """The learning rate of an optimizer that counts from step `began`, which is that of the run's steps."""
    warm, end = max(1, o.steps // 10), max(2, o.steps)
    of_step = optax.warmup_cosine_decay_schedule(0.0, o.learning_rate, warm, end, o.learning_rate / 10)
    return lambda count: of_step(count + began)


def _optimizer(o: Any, began: int) -> Any:
    rate = rate_of(o, began)
    optimizers = {
        "adamw": lambda: optax.adamw(rate, b2=0.95, weight_decay=o.weight_decay),
        "adafactor": lambda: optax.adafactor(rate),
        "sgd": lambda: optax.sgd(rate, momentum=0.9),
    }
    chosen = optimizers[o.optimizer]()
    clipped = (optax.clip_by_global_norm(o.clip),) if o.clip > 0 else ()
    return optax.chain(_norm_noted(), *clipped, chosen)
