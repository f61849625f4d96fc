"""Schedules of a compiled program that are wrong, of two collectives in flight together, each beside right ones.

A CPU's compiler starts no collective before it ends the one before it, so no program can be planted in its place.
"""

from typing import Any, NamedTuple

ALL = ((0, 1, 2, 3),)
ROWS = ((0, 1), (2, 3))
COLUMNS = ((0, 2), (1, 3))
RING = ((0, 1), (1, 2), (2, 3), (3, 0))

SYNCHRONOUS = {"collective_backend_config": {"is_sync": True}}
REDUCE = "all-reduce", {"groups": ALL}
GATHER = "all-gather", {"groups": ROWS}
ON_CHANNEL_7 = "all-gather", {"groups": ROWS, "channel": 7}
ON_JAXS_CHANNEL = "all-gather", {"groups": ROWS, "channel": 1}


class PlantedSchedule(NamedTuple):
    """A rule, the opcodes and the fields of two collectives that are in flight together, and what the rule says."""

    rule: str
    first: tuple[str, dict[str, Any]]
    second: tuple[str, dict[str, Any]]
    message: str


OTHER_ORDER = "the same 2 devices, on which they may run in another order"
SCHEDULED = [
    PlantedSchedule("collectives-in-flight", REDUCE, GATHER, OTHER_ORDER),
    PlantedSchedule("collectives-in-flight", ("all-reduce", {"groups": ()}), GATHER, OTHER_ORDER),
    PlantedSchedule(
        "collectives-in-flight",
        ("collective-permute", {"pairs": RING}),
        GATHER,
        "ppermute over 'data', 'model' at .* the same 2 devices",
    ),
    PlantedSchedule(
        "collectives-in-flight", ON_CHANNEL_7, ON_CHANNEL_7, "on the same channel 7, so that what one sends"
    ),
]
RIGHT = [
    (GATHER, GATHER),  # one communicator, which keeps the order
    (("all-gather", {"groups": COLUMNS}), GATHER),  # one device in common
    (("all-reduce", {"groups": ALL, "config": SYNCHRONOUS}), GATHER),
    (ON_JAXS_CHANNEL, ON_JAXS_CHANNEL),
]
