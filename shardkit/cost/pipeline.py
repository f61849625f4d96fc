"""The bubble of a pipeline whose forwards and backwards are whole; `Schedule.simulate` has that of any schedule.

Symbols of the papers: p stages (devices of the pipe axis), m microbatches, v chunks per device. Communication between
stages is left out.
"""

from __future__ import annotations

from shardkit._arguments import checks

_CHUNKED = ("interleaved", "lockstep", "breadth_first")
SCHEDULES = ("gpipe", "1f1b", *_CHUNKED)
_OTHER_NAMES = {"one_f_one_b": "1f1b", "interleaved_1f1b": "interleaved"}


def bubble(stages: int, microbatches: int, schedule: str = "1f1b", *, chunks: int = 1, of: str = "ideal") -> float:
    """The pipeline bubble as a fraction: idle time over the ideal time, or over the total time.

    Each device idles while p-1 microbatches fill and drain the pipe, of a v-th of its layers each: (p-1)/(v m) of the
    ideal time, (p-1)/(v m + p-1) of the total. A forward and a backward may take any time.

    Args:
        stages: number p of pipeline devices.
        microbatches: microbatches m per step.
        schedule: "gpipe", "1f1b", "interleaved", "lockstep" or "breadth_first", ignoring capitals, "-", "_" and spaces.
            Of others, such as zero_bubble_h1, the bubble depends on the costs: use `Schedule.simulate`.
        chunks: model chunks v per device, for the last three; "1f1b" with chunks is "interleaved".
        of: "ideal", Megatron's convention: over the time without idling; or "total", GPipe's: over the ideal time and
            the bubble.

    Returns:
        The fraction, without unit.

    Raises:
        ValueError: an unknown schedule; a size below 1; chunks where the schedule has none; microbatches for which the
            form does not hold: with chunks, multiples of p ("breadth_first": at least p); another `of`.

    Example:
        >>> sk.cost.bubble(4, 16)
        0.1875
        >>> sk.cost.bubble(4, 16, "interleaved", chunks=3)
        0.0625

    Source: Huang et al., GPipe (arXiv:1811.06965); Narayanan et al. (arXiv:2104.04473), section 2.2; Lamy-Poirier,
    Breadth-First Pipeline Parallelism (arXiv:2211.05953).
    """
    checks.one_of("bubble", "of", of, ("ideal", "total"))
    name = checks.spelled("bubble", "schedule", schedule, SCHEDULES, _OTHER_NAMES)
    stages, microbatches, chunks = checks.whole("bubble", stages=stages, microbatches=microbatches, chunks=chunks)
    if chunks > 1 and name == "gpipe":
        raise ValueError(
            f"bubble: schedule {schedule!r} does not take chunks; got chunks={chunks}. "
            "Leave chunks out, or choose 'interleaved', 'lockstep' or 'breadth_first'."
        )
    fits = microbatches >= stages if name == "breadth_first" else microbatches % stages == 0
    if chunks > 1 and not fits:
        rule = "at least" if name == "breadth_first" else "a multiple of"
        call = f"schedules.{'interleaved' if name == '1f1b' else name}({stages}, {microbatches}, {chunks})"
        raise ValueError(
            f"bubble: the closed form of {name!r} needs {rule} stages={stages} microbatches; got {microbatches}. "
            f"Change them, or call {call}.simulate(...), which is exact."
        )
    ideal = microbatches * chunks
    return (stages - 1) / (ideal if of == "ideal" else ideal + stages - 1)


def least_makespan(
    devices: int,
    microbatches: int,
    chunks: int = 1,
    *,
    memory: float | None = None,
    forward: float = 1,
    backward: float = 2,
    input_grad: float | None = None,
    communication: float = 0,
) -> float:
    """What no schedule of a pipeline goes below, whatever it does in which order.

    The largest of three: the work of a device, after the first microbatch has come through the devices before the last;
    one microbatch through all stages and back; and, with a memory cap, the time that all microbatches are in flight on
    a device over how many may be there at once.

    Args:
        devices: number p of pipeline devices.
        microbatches: microbatches m per step.
        chunks: model stages v per device, in a loop or along a V.
        memory: the most microbatches in flight on a device, a chunk counts 1/v; None: any number.
        forward: time of one microbatch's forward through all chunks of a device.
        backward: time of its whole backward.
        input_grad: time of the part of the backward that the stage before waits for; None: half of it.
        communication: time from the end of an action until its result is on another device.

    Returns:
        The makespan, in the unit of the costs.

    Raises:
        ValueError: a size below 1, or a cost that is negative.

    Example:
        >>> sk.cost.least_makespan(8, 32, chunks=2)
        99.5
        >>> sk.cost.least_makespan(8, 32, chunks=2, memory=1)
        288.0
    """
    where = "least_makespan"
    p, m, v = checks.whole(where, devices=devices, microbatches=microbatches, chunks=chunks)
    forward, backward = checks.positive(where, forward=forward, backward=backward)
    back = backward / 2 if input_grad is None else input_grad
    back, communication = checks.at_least_zero(where, input_grad=back, communication=communication)
    hop = communication if p > 1 else 0.0
    work = m * (forward + backward) + (p - 1) * (forward / v + hop)
    # along a V no message is sent where it turns
    through = p * (forward + back) + (backward - back) / v + 2 * v * (p - 1) * hop
    if memory is None:
        return max(work, through)
    [memory] = checks.positive(where, memory=memory)
    # A chunk is held while its microbatch goes through all later stages and back, at least; the first device's are held
    # longest, in a loop those of stages 0, p, 2p, along a V those of 0, 2p - 1, 2p: the V holds less.
    stages, held = p * v, 0.0
    for chunk in range(v):
        later = stages - (chunk * p if chunk % 2 == 0 else (chunk + 1) * p - 1)
        held += (later * (forward + back) + backward - back) / v
    return max(work, through, m * held / (memory * v))
