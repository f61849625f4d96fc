"""The bubble of a pipeline, and its microbatches in flight.

Symbols of the papers: p stages (devices of the pipe axis), m microbatches, v chunks per device. F, B, W are the times
of one microbatch on one device's whole share of layers: forward, whole backward, and the weight-gradient part of the
backward. Communication between stages is left out.
"""

from __future__ import annotations

import math
from typing import NoReturn

from shardkit import _check

SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "lockstep",
    "breadth_first",
    "zero_bubble_h1",
    "zero_bubble_v",
    "dualpipe_v",
)
_CHUNKED = ("interleaved", "lockstep", "breadth_first")
_OTHER_NAMES = {
    "one_f_one_b": "1f1b",
    "interleaved_1f1b": "interleaved",
    "zb_h1": "zero_bubble_h1",
    "zb_v": "zero_bubble_v",
}


def _named(where: str, schedule: str, stages: int, microbatches: int, chunks: int) -> tuple[str, int, int, int]:
    name = _check.spelled(where, "schedule", schedule, SCHEDULES, _OTHER_NAMES)
    stages, microbatches, chunks = _check.whole(where, stages=stages, microbatches=microbatches, chunks=chunks)
    if chunks > 1 and name == "1f1b":
        name = "interleaved"
    if chunks > 1 and name not in _CHUNKED:
        raise ValueError(
            f"{where}: schedule {schedule!r} does not take chunks; got chunks={chunks}. "
            "Leave chunks out, or choose 'interleaved', 'lockstep' or 'breadth_first'."
        )
    return name, stages, microbatches, chunks


def bubble_time(
    stages: int,
    microbatches: int,
    schedule: str = "1f1b",
    *,
    chunks: int = 1,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
) -> float:
    """The idle time of each device per step, in the unit of the costs.

    | schedule | idle time |
    |---|---|
    | gpipe, 1f1b | (p-1) (F + B) |
    | interleaved, lockstep, breadth_first | (p-1) (F + B) / v |
    | zero_bubble_h1 | (p-1) (F + B - W - min(F, B-W, W)); the paper's (p-1) (F + B - 2W) where W is the least |
    | zero_bubble_v | 0, where F = B - W = W |
    | dualpipe_v | (p-1) (F + 2B - 3W) / 2, where F = B - W and W is at most F |

    The papers write B for B - W, and F&B for F + B. The formulas hold for m >= p (gpipe, 1f1b: any m; zero_bubble_v:
    2p - 1; dualpipe_v: 2p; interleaved, lockstep with chunks: multiples of p), and none depends on m. Other values are
    refused: use `Schedule.simulate`.

    It is the whole bubble of a step, except for zero_bubble_v, where each device starts and ends later than the
    previous one: there it is the most that a device idles between its first forward and its last weight gradient, the
    bubble if the optimizer does not wait for all devices.

    Args:
        stages: number p of pipeline devices.
        microbatches: microbatches m per step.
        schedule: a name of the table, ignoring capitals, "-", "_" and spaces, or the papers' "ZB-H1", "ZB-V", or
            "one_f_one_b".
        chunks: model chunks v per device, for the three schedules that have them; "1f1b" with chunks is "interleaved".
        forward: F, time of one microbatch's forward on one device.
        backward: B, time of its whole backward.
        weight: W, the weight-gradient part of B; None: half of B.

    Returns:
        Time, in the unit of the costs.

    Raises:
        ValueError: an unknown schedule; a size below 1; a cost that is not positive, or a weight above backward; chunks
            where the schedule has none; microbatches or costs for which the formula does not hold.

    Example:
        >>> sk.cost.bubble_time(4, 16)
        9.0
        >>> sk.cost.bubble_time(4, 16, "zero_bubble_h1")
        3.0

    Source: Huang et al., GPipe (arXiv:1811.06965); Narayanan et al. (arXiv:2104.04473), section 2.2; Lamy-Poirier,
    Breadth-First Pipeline Parallelism (arXiv:2211.05953); Qi et al., Zero Bubble Pipeline Parallelism
    (arXiv:2401.10241), table 2; DeepSeek-V3 (arXiv:2412.19437), table 2, and the DualPipe repository for dualpipe_v.
    """
    where = "bubble"
    name, stages, microbatches, chunks = _named(where, schedule, stages, microbatches, chunks)
    forward, backward = map(float, _check.positive(where, forward=forward, backward=backward))
    [weight] = map(float, _check.at_least_zero(where, weight=backward / 2 if weight is None else weight))
    if weight > backward:
        raise ValueError(
            f"bubble: weight must be a part of backward; got {weight} and {backward}. "
            "Pass the whole backward's time as backward."
        )
    both = forward + backward
    if stages > 1:
        _in_range(name, stages, microbatches, chunks)
        _at_costs(name, stages, microbatches, (forward, backward - weight, weight))
    if name in ("gpipe", "1f1b", *_CHUNKED):
        return (stages - 1) * both / chunks
    if name == "zero_bubble_h1":
        return (stages - 1) * (both - weight - min(forward, backward - weight, weight))
    if name == "zero_bubble_v":
        return 0.0
    return (stages - 1) * max(0.0, both + backward - 3 * weight) / 2


def _in_range(name: str, stages: int, microbatches: int, chunks: int) -> None:
    """Refuses microbatches for which the closed form does not hold."""
    if name in ("interleaved", "lockstep") and chunks > 1:
        fits, rule = microbatches % stages == 0, f"a multiple of stages={stages} microbatches"
    else:
        least = {"zero_bubble_h1": stages, "zero_bubble_v": 2 * stages - 1, "dualpipe_v": 2 * stages}
        if name == "breadth_first" and chunks > 1:
            least[name] = stages
        fits = microbatches >= least.get(name, 1)
        rule = f"at least {least.get(name, 1)} microbatches on {stages} stages"
    if not fits:
        _refuse(name, rule, str(microbatches), stages, microbatches, chunks)


def _at_costs(name: str, stages: int, microbatches: int, costs: tuple[float, float, float]) -> None:
    """Refuses costs of F, I and W for which the closed form does not hold."""
    forward, inputs, weight = costs
    if name == "zero_bubble_v":
        fits = math.isclose(forward, inputs) and math.isclose(forward, weight)
        rule = "equal times of forward, input gradient and weight gradient"
    elif name == "dualpipe_v":
        fits = math.isclose(forward, inputs) and (weight <= forward or math.isclose(forward, weight))
        rule = "equal times of forward and input gradient, and a weight gradient no longer"
    else:
        return
    if not fits:
        _refuse(name, rule, f"{forward}, {inputs} and {weight}", stages, microbatches, 1)


def _refuse(name: str, rule: str, got: str, stages: int, microbatches: int, chunks: int) -> NoReturn:
    sizes = f"{stages}, {microbatches}" + (f", {chunks}" if chunks > 1 else "")
    call = f"schedules.{name}({sizes}).simulate(...)"
    raise ValueError(
        f"bubble: the closed form of {name!r} needs {rule}; got {got}. Change them, or call {call}, which is exact."
    )


def bubble(
    stages: int,
    microbatches: int,
    schedule: str = "1f1b",
    *,
    chunks: int = 1,
    of: str = "ideal",
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
) -> float:
    """The pipeline bubble as a fraction: idle time over the ideal time, or over the total time.

    1F1B: (p-1)/m of the ideal time, (p-1)/(m+p-1) of the total; v chunks: (p-1)/(v m) of the ideal. The table of
    `bubble_time` has every schedule.

    Args:
        stages, microbatches, schedule, chunks, forward, backward, weight: as for `bubble_time`.
        of: "ideal", Megatron's convention: over m (F + B), the time without idling; or "total", GPipe's: over
            the ideal time and the bubble.

    Returns:
        The fraction, without unit.

    Raises:
        ValueError: as `bubble_time`, or another `of`.

    Example:
        >>> sk.cost.bubble(4, 16)
        0.1875
        >>> sk.cost.bubble(4, 16, "interleaved", chunks=3)
        0.0625

    Source: as `bubble_time`.
    """
    _check.one_of("bubble", "of", of, ("ideal", "total"))
    idle = bubble_time(
        stages,
        microbatches,
        schedule=schedule,
        chunks=chunks,
        forward=forward,
        backward=backward,
        weight=weight,
    )
    ideal = int(microbatches) * float(forward + backward)
    return idle / (ideal if of == "ideal" else ideal + idle)


def in_flight(stages: int, microbatches: int, schedule: str = "1f1b", *, chunks: int = 1) -> float:
    """The most microbatches in flight on one device; a chunk counts as 1/v.

    gpipe and breadth_first: m; 1f1b, zero_bubble_h1, zero_bubble_v: p; interleaved: p + (p-1)/v from 2p - 1
    microbatches on, p + (m-p)/v below; dualpipe_v: p + 1/2. Never more than m.
    Zero-bubble schedules count a microbatch until its weight gradient is done.

    Args:
        stages: number p of pipeline devices.
        microbatches: microbatches m per step.
        schedule: as in `bubble`, except "lockstep".
        chunks: model chunks v per device.

    Returns:
        The number, without unit; times the activation bytes of a microbatch on a p-th of the model it is bytes.

    Raises:
        ValueError: an unknown schedule, a size below 1, or "lockstep", which `Schedule.simulate` counts.

    Example:
        >>> sk.cost.in_flight(4, 16, "gpipe"), sk.cost.in_flight(4, 16, "1f1b")
        (16.0, 4.0)

    Source: as `bubble_time`; interleaved: Korthikanti et al. (arXiv:2205.05198), section 4.2.3.
    """
    name, stages, microbatches, chunks = _named("in_flight", schedule, stages, microbatches, chunks)
    if name == "lockstep":
        raise ValueError(
            "in_flight: 'lockstep' has no published form; got schedule='lockstep'. Simulate the schedule to count."
        )
    further = min(max(0, microbatches - stages), stages - 1)  # forwards of the second round that start in the warm-up
    most = {
        "gpipe": microbatches,
        "breadth_first": microbatches,
        "interleaved": stages + further / chunks if chunks > 1 else stages,
        "dualpipe_v": stages + 0.5,
    }
    return float(min(microbatches, most.get(name, stages)))
