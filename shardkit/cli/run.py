"""A training run of the command: the step, its batches, the validation loss, and the state to start from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import jax
import numpy as np
import optax

import shardkit as sk
from shardkit.cli.pipelines import functions, pipeline_of
from shardkit.models import transformer
from shardkit.partitioning.batch import batch_specs
from shardkit.runtime.data import text as text_data

_VALIDATION_EXAMPLES = 512
# Options that may change when a run is resumed: those of the mesh and the plan, which change numbers by rounding alone,
# and those that do not affect training.
_FREE = {"mesh", "accumulate", "sequence", "impl", "schedule", "microbatches", "chunks", "mode", "recompute"}
_FREE |= {"checkpoint", "checkpoint_every", "evaluate_every", "compare_replicas", "verify", "nonfinite"}
_FREE |= {"json", "keep", "deadline", "flight"}


class CommandRun:
    """A training run on one mesh."""

    def __init__(
        self,
        options: Any,
        mesh: jax.sharding.Mesh,
        plan: sk.Plan,
        axes: transformer.Axes,
        config: transformer.Config,
        text: text_data.Text,
    ):
        self.options, self.text, self.config, self.mesh = options, text, config, mesh
        self.pipeline = pipeline_of(options, mesh.shape)
        grad_fn, loss_fn = functions(config, axes, self.pipeline)
        self.optimizer = _optimizer(options)
        how: Any = {"mesh": mesh, "plan": plan, "accumulate": options.accumulate, "precision": options.precision}
        self.init, self.step = sk.make_train_step(grad_fn, self.optimizer, nonfinite=options.nonfinite, **how)
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

    def validation_loss(self, state: sk.TrainState) -> float:
        """Mean loss over the held-out batches, in nats per byte."""
        return float(np.mean([self._evaluate(state.params, batch)["loss"] for batch in self._held_out]))

    def triage(self, error: sk.NonFiniteError, batch: Any) -> sk.runtime.TriageReport:
        """Repeats the step that failed: which values are not finite, and where."""
        return self._triage(error.state._replace(step=error.state.step - 1), batch)

    def settings(self) -> dict[str, Any]:
        """The options that determine the numbers, as JSON values."""
        return {name: plain(value) for name, value in asdict(self.options).items() if name not in _FREE}


def first_state(run: CommandRun, checkpoints: Any) -> tuple[sk.TrainState, int]:
    """The initial state, or that of the newest checkpoint, and the index of the next step.

    Raises:
        ValueError: the checkpoint was saved with other options.
    """
    o = run.options
    if checkpoints is None or checkpoints.latest_step() is None:
        return run.init(run.params, jax.random.key(o.seed)), 0
    saved = checkpoints.run()
    for name, value in run.settings().items():
        if saved.config.get(name) != value:
            raise ValueError(
                f"--checkpoint: a run must be resumed with the same options; {name} was {saved.config.get(name)} and "
                f"is {value}. Pass the same value, or another directory."
            )
    state, _ = checkpoints.restore(run.init.abstract(run.params))  # type: ignore[attr-defined]
    return state, saved.position // o.batch


def plain(value: Any) -> Any:
    """An option as a JSON value."""
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _optimizer(o: Any) -> Any:
    rate = optax.warmup_cosine_decay_schedule(
        0.0, o.learning_rate, max(1, o.steps // 10), max(2, o.steps), o.learning_rate / 10
    )
    optimizers = {
        "adamw": lambda: optax.adamw(rate, b2=0.95, weight_decay=o.weight_decay),
        "adafactor": lambda: optax.adafactor(rate),
        "sgd": lambda: optax.sgd(rate, momentum=0.9),
    }
    chosen = optimizers[o.optimizer]()
    return optax.chain(optax.clip_by_global_norm(o.clip), chosen) if o.clip > 0 else chosen
