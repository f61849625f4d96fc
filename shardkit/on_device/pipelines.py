"""What a pipeline runs: a GradFn or a loss, and the stages in whose order it takes the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardkit._arguments.checks import quote
from shardkit._arguments.typed import check_fields
from shardkit.on_device.means import Mean
from shardkit.schedules import Schedule
from shardkit.schedules.stages import Stages


@dataclass(frozen=True)
class Staged:
    """A function whose parameters have the stack "layers" in the order of stages."""

    stages: Stages  # the stages; `make_train_step` and `make_eval_step` give them to the plan's `pp`
    function: Callable[..., Any]  # the function. `dataclasses.replace(self, function=mine)` wraps it.
    # the schedule that the function runs; None if it is not known
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        check_fields(self)


class PipelineGradFn(Staged):
    """The GradFn of a pipeline, as `sk.pipeline(...).value_and_grad` returns it.

    Attributes:
        stages: which device has which layers; `make_train_step` arranges the plan's `pp` by them.
        function: a GradFn of the layers of one device, in that order. `dataclasses.replace(grad_fn, function=mine)`
            wraps it.
        schedule: the schedule that it runs.
    """

    def __call__(self, params: Any, batch: Any, keys: Any, *, scale: Any = 1) -> tuple[Mean, Mapping[str, Any], Any]:
        """As a GradFn."""
        return self.function(params, batch, keys, scale=scale)


class PipelineLoss(Staged):
    """The loss of a pipeline, as `sk.pipeline(...).loss` returns it.

    Attributes:
        stages: which device has which layers; `make_eval_step` arranges the plan's `pp` by them.
        function: a loss of the layers of one device, in that order.
        schedule: the schedule that it runs.
    """

    def __call__(self, params: Any, batch: Any, keys: Any) -> Any:
        """As a loss function for `value_and_grad`."""
        return self.function(params, batch, keys)


def pipeline_remedy(axes: Sequence[str]) -> str:
    """What to pass in place of a loss that runs the layers of one device as if they were all."""
    return (
        f"A device has only its own layers along {quote(axes)}: pass sk.pipeline(schedule, {axes[0]!r})"
        ".value_and_grad(embed, stage, head), or .loss(embed, stage, head) to make_eval_step."
    )
