"""Every error of a schedule in full wording, with its grid."""

import inspect

import pytest

from shardkit import schedules
from shardkit.schedules import Schedule
from shardkit.schedules.action import Action
from support.pipelines import BUILDERS
from support.refusals import refused, type_error, value_error

pytestmark = pytest.mark.check

GOOD = "0F0,,,0B0\n,1F0,1B0,\n"


@pytest.mark.parametrize(
    "text, found",
    {
        "0F0,,,0B0,0B0\n,1F0,1B0,": """\
an action must run once; got 0B0 at ticks 3 and 4. Drop one.
tick      0   1   2   3   4
device 0  0F0 .   .   0B0 0B0
                          ^
device 1  .   1F0 1B0 .   .""",
        "0F0,,,\n,1F0,1B0,": """\
every stage must run every microbatch; 0B0 is missing on device 0. Add it.
tick      0   1   2   3
device 0  0F0 .   .   .
              ^
device 1  .   1F0 1B0 .""",
        "0F0,,,0B0\n,1B0,1F0,": """\
F must run before B; got 1B0 at tick 1 before 1F0. Swap them.
tick      0   1   2   3
device 0  0F0 .   .   0B0
device 1  .   1B0 1F0 .
              ^""",
        "0F0,,0W0,0I0\n,1F0,1B0": """\
I must run before W; got 0W0 at tick 2 before 0I0. Swap them.
tick      0   1   2   3
device 0  0F0 .   0W0 0I0
                  ^
device 1  .   1F0 1B0 .""",
        "0F0,,0I0,0B0\n,1F0,1B0": """\
a backward must be whole, B, or split, I and W; got 0I0 and 0B0. Drop one.
tick      0   1   2   3
device 0  0F0 .   0I0 0B0
                      ^
device 1  .   1F0 1B0 .""",
        "0F0,1F0,,0B0\n,,1B0,": """\
each stage must run on one device; got 1F0 on device 0, and stage 1 is on device 1. Move it there.
tick      0   1   2   3
device 0  0F0 1F0 .   0B0
              ^
device 1  .   .   1B0 .""",
        "(0F0;0F1),,0B0,0B1\n,1F0,1B0,1F1,1B1": """\
a device must run one action per tick, or a forward and then a backward; \
got 0F0 and 0F1 on device 0 at tick 0. Move one to another tick.
tick      0       1       2       3       4
device 0  0F0/0F1 .       0B0     0B1     .
          ^
device 1  .       1F0     1B0     1F1     1B1""",
        "0F0,,0I0,(0F1;0W0)\n,1F0,1B0,": """\
a device must run one action per tick, or a forward and then a backward; \
got 0F1 and 0W0 on device 0 at tick 3. Move one to another tick.
tick      0       1       2       3
device 0  0F0     .       0I0     0F1/0W0
                                  ^
device 1  .       1F0     1B0     .""",
        "0F0,0B0,0F1,0B1\n,1F1,1F0,1B0,1B1": """\
an order must not deadlock; got 0B0 on device 0, which waits for 1B0, which in turn waits for 0B0. Change the order.
tick      0   1   2   3   4
device 0  0F0 0B0 0F1 0B1 .
              ^
device 1  .   1F1 1F0 1B0 1B1""",
        # a number that nothing leads to was a MemoryError
        GOOD.replace("1F0", "1F4000000000"): """\
microbatches must be numbered from 0 without a gap; got 1F4000000000 in a schedule of 4 actions. Lower the number.
tick      0            1            2            3
device 0  0F0          .            .            0B0
device 1  .            1F4000000000 1B0          .
                       ^""",
        GOOD.replace("0B0", "4000000000B0"): """\
stages must be numbered from 0 without a gap; got 4000000000B0 in a schedule of 4 actions. Lower the number.
tick      0            1            2            3
device 0  0F0          .            .            4000000000B0
                                                 ^
device 1  .            1F0          1B0          .""",
    }.items(),
)
def test_illegal_tables(text, found):  # proves F39
    with value_error(f"from_csv: {found}"):
        Schedule.from_csv(text)


@pytest.mark.parametrize(
    ("schedule", "right", "wrong", "device", "home"),
    [
        (schedules.interleaved(2, 4, 2), "1F0", "2F0", 1, 0),
        (schedules.interleaved(4, 8, 2), "7F1", "4F1", 3, 0),
        (schedules.zero_bubble_v(4, 8), "3F1", "7F1", 3, 0),
        (schedules.dualpipe_v(4, 8), "4F1", "7F1", 3, 0),
    ],
)
def test_one_wrong_stage_does_not_turn_the_rest(schedule, right, wrong, device, home):
    with pytest.raises(ValueError) as error:
        lines = schedule.to_csv().splitlines()
        lines[device] = ",".join(wrong if cell == right else cell for cell in lines[device].split(","))
        Schedule.from_csv("\n".join(lines))
    reason, *grid = str(error.value).splitlines()
    assert reason == (
        f"from_csv: each stage must run on one device; got {wrong} on device {device}, and stage {wrong[0]} is on "
        f"device {home}. Move it there."
    )
    at = next(i for i, line in enumerate(grid) if line.strip() == "^")
    assert grid[at - 1].startswith(f"device {device}") and grid[at - 1][grid[at].index("^") :].startswith(wrong)


def test_a_table_with_an_input_that_comes_too_late():
    rows = Schedule.from_csv(GOOD).rows
    late = Schedule((rows[0], (*rows[1][1:], ())), name="mine")
    with value_error(
        "mine: an action must run after its inputs; got 1F0 at tick 0, and its input 0F0 at tick 0. "
        "Move 1F0 to tick 1 or later.\n"
        "tick      0   1   2   3\n"
        "device 0  0F0 .   .   0B0\n"
        "device 1  1F0 1B0 .   .\n"
        "          ^"
    ):
        late.check()
    with value_error(  # in a later tick than the first
        "mine: an action must run after its inputs; got 0B0 at tick 2, and its input 1B0 at tick 2. "
        "Move 0B0 to tick 3 or later.\n"
        "tick      0   1   2\n"
        "device 0  0F0 .   0B0\n"
        "                  ^\n"
        "device 1  .   1F0 1B0"
    ):
        Schedule(((*rows[0][:2], rows[0][3]), rows[1][:3]), name="mine").check()


def test_a_wide_grid_is_cut_about_the_arrow():
    text = schedules.gpipe(2, 40).to_csv().replace("1B30", "1B31")
    first, head, *_, arrow = refused(lambda: Schedule.from_csv(text)).splitlines()
    assert first == "from_csv: an action must run once; got 1B31 at ticks 71 and 72. Drop one."
    assert head.split() == ["tick", *map(str, range(64, 81))] and arrow.strip() == "^"
    assert arrow.index("^") == head.index("72")


@pytest.mark.parametrize(
    "message, call",
    {
        "from_csv: a cell must be empty, an action such as 2F0, or a pair such as (2F1;2B0)OVERLAP_F_B; got '0G0' "
        "on device 0 at tick 1. Write one.": lambda: Schedule.from_csv("0F0,0G0"),
        "from_csv: a schedule must have an action; got none. Write for example '0F0,0B0'.": lambda: Schedule.from_csv(
            ""
        ),
        "schedule: an op must be one of F, B, I and W; got 'X' at tick 0. Write one of them.\n"
        "tick      0\ndevice 0  0X0\n          ^": lambda: Schedule((((Action(0, "X", 0),),),)).check(),
    }.items(),
)
def test_errors(call, message):
    with value_error(message):
        call()


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_a_schedule_counts_devices_and_not_stages(build):
    """With two chunks four devices have eight stages: `stages=4` could mean either."""
    chunks = {"chunks": 2} if "chunks" in inspect.signature(build).parameters else {}
    assert build(devices=4, microbatches=8, **chunks) == build(4, 8, *chunks.values())
    with type_error(
        f"{build.__name__}: a schedule is made for devices, which may have several stages each; got stages=4. Pass "
        "devices=4."
    ):
        build(stages=4, microbatches=8, **chunks)
