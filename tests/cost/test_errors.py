"""What the closed forms refuse, in full wording."""

import pytest

from shardkit import cost
from support.refusals import value_error

pytestmark = pytest.mark.check
NAMES = " or ".join([", ".join(map(repr, [*cost.chips][:-1])), repr([*cost.chips][-1])])
ERRORS = {
    "transformer_parameters: heads must divide hidden; got 3 and 8. Change one of them.": (
        lambda: cost.transformer_parameters(layers=1, hidden=8, heads=3)
    ),
    "transformer_parameters: kv_heads needs heads; got heads=None, kv_heads=2. Pass heads.": (
        lambda: cost.transformer_parameters(layers=1, hidden=8, kv_heads=2)
    ),
    "mfu: seconds must be greater than 0; got 0. Pass for example seconds=1.": lambda: cost.mfu(1, 0, peak=1),
    "bubble: schedule must be 'gpipe', '1f1b', 'interleaved', 'lockstep' or 'breadth_first'; got 'zero_bubble_v'. Pass "
    "for example schedule='gpipe'.": lambda: cost.bubble(4, 8, schedule="zero_bubble_v"),
    "bubble: schedule 'gpipe' does not take chunks; got chunks=2. Leave chunks out, or choose 'interleaved', "
    "'lockstep' or 'breadth_first'.": lambda: cost.bubble(4, 8, "gpipe", chunks=2),
    "bubble: the closed form of 'breadth_first' needs at least stages=4 microbatches; got 3. Change them, or call "
    "schedules.breadth_first(4, 3, 2).simulate(...), which is exact.": (
        lambda: cost.bubble(4, 3, "breadth_first", chunks=2)
    ),
    "bubble: the closed form of '1f1b' needs a multiple of stages=4 microbatches; got 6. Change them, or call "
    "schedules.interleaved(4, 6, 2).simulate(...), which is exact.": lambda: cost.bubble(4, 6, chunks=2),
    "bucket_bytes: share must be above 0 and below 1; got 1.0. Pass for example share=0.1.": (
        lambda: cost.bucket_bytes(cost.Link(1e-6, 1e9), 8, share=1.0)
    ),
    "scatter_from: latency must be 0 or more; got -1e-06. Pass for example latency=1.": (
        lambda: cost.scatter_from(cost.Link(-1e-6, 1e9), 8)
    ),
    "tensor_volume: regather must go with sequence_parallel; got regather=True and sequence_parallel=False. Without it "
    "the input is whole on every device: set regather=False.": (
        lambda: cost.tensor_volume(batch=1, sequence=8, hidden=8, ways=2, regather=True)
    ),
    f"chip: name must be {NAMES}; got 'v7'. Pass for example name='v4'.": lambda: cost.roofline(1, 1, "v7"),
    "group_bandwidth: axes must be at most 2 for chip 'v5e'; got 3. Choose fewer axes or another chip.": (
        lambda: cost.group_bandwidth("v5e", 3)
    ),
}


@pytest.mark.parametrize(("message", "call"), ERRORS.items())
def test_errors(message, call):
    with value_error(message):
        call()
