"""ZB-V: two chunks placed as a V, so that no device idles between its first and its last action."""

from __future__ import annotations

from shardkit.schedules.base import Schedule, build_schedule, builder, check_sizes
from shardkit.schedules.words import parse_v_order


@builder
def zero_bubble_v(devices: int, microbatches: int) -> Schedule:
    """Two chunks on each device, placed as a V: device 0 computes the loss, and begins the backward at once.

    With fewer than 2p - 1 microbatches it is the order for 2p - 1, without the missing ones.

    Args:
        devices: number p of pipeline devices.
        microbatches: microbatches m per step.

    Returns:
        A Schedule with the placement "v".

    Raises:
        ValueError: a size below 1.

    Cost: if F = I = W and m is at least 2p - 1, no device idles between its first action and its last, and p
        microbatches are in flight.

    Example:
        >>> schedule = sk.schedules.zero_bubble_v(devices=4, microbatches=8)
        >>> schedule.simulate().bubble_of_span
        0.0
        >>> [schedule.device(stage) for stage in range(8)]
        [0, 1, 2, 3, 3, 2, 1, 0]

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 6.
    """
    p, microbatches = check_sizes("zero_bubble_v", devices=devices, microbatches=microbatches)
    total = max(microbatches, 2 * p - 1)
    orders = []
    # Worked example, device 0 of two with three microbatches: F0 F0 F0, then F1 I1 W twice, no steady state, I0 W F1 I1
    # W once, and I0 W twice.
    for d in range(p):
        words = ["F0"] * (2 * (p - d) - 1)
        words += ["F1", "F0"] * d
        words += ["F1", "I1", "W"] * (p - d)
        # From here on every device is busy: the six actions of two chunks, again and again.
        words += ["F0", "I0", "W", "F1", "I1", "W"] * (total - (2 * p - 1 - d))
        # No forward of chunk 0 is left, then none at all.
        words += ["I0", "W", "F1", "I1", "W"] * (p - 1 - d)
        words += ["I0", "I1"] * d
        words += ["I0", "W"] * (p - d)
        words += ["W"] * (2 * d)
        orders.append(parse_v_order(d, p, words))
    return build_schedule("zero_bubble_v", orders, microbatches, "v")
