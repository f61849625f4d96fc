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
            For other schedules, such as zero_bubble_h1, the bubble depends on the costs: use `Schedule.simulate`.
        chunks: model chunks v per device, for the last three; "1f1b" with chunks is "interleaved".
        of: "ideal", Megatron's convention: over the time without idling; or "total", GPipe's: over the ideal time and
            the bubble.

    Returns:
        The fraction, without unit.

    Raises:
        ValueError: an unknown schedule; a size below 1; chunks for a schedule without chunks; with chunks, microbatches
            that are not a multiple of p ("breadth_first": fewer than p); another `of`.

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
    stages, microbatches, chunks = checks.integers_from_one(
        "bubble", stages=stages, microbatches=microbatches, chunks=chunks
    )
    if chunks > 1 and name == "gpipe":
        raise ValueError(
            f"bubble: schedule {schedule!r} does not take chunks; got chunks={chunks}. "
            "Leave chunks out, or choose 'interleaved', 'lockstep' or 'breadth_first'."
        )
    # Breadth-first, all microbatches pass a chunk before the next chunk begins. The other schedules take them in groups
    # of p.
    if name == "breadth_first":
        rule = "at least"
        fits = microbatches >= stages
    else:
        rule = "a multiple of"
        fits = microbatches % stages == 0
    if chunks > 1 and not fits:
        function = name
        if name == "1f1b":
            function = "interleaved"
        call = f"schedules.{function}({stages}, {microbatches}, {chunks})"
        raise ValueError(
            f"bubble: the closed form of {name!r} needs {rule} stages={stages} microbatches; got {microbatches}. "
            f"Change them, or call {call}.simulate(...), which is exact."
        )
    # In forwards and backwards of a chunk: 4 stages, 16 microbatches and 3 chunks are busy for 48, and idle for 3.
    busy = microbatches * chunks
    idle = stages - 1
    if of == "ideal":
        return idle / busy
    return idle / (busy + idle)
