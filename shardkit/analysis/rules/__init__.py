"""The rules on a trace, one file for each or for a family, and `TRACE_RULES`, the list of them.

Read `_TRACED` first, and `_ROWS` of `compiled_rules`: what you miss may be half there. A new rule is a function of a
`TracedProgram` that yields findings, in a file of its name or of a family that shares a helper, and a row here.

Start with `rule.py`, the rule itself, then `program.py`, its argument; `replicated.py` is the shortest rule.
Imports `analysis/jaxpr`, and for kernels `remote_copies`. Rules on a compiled program are in
`analysis/compiled_rules/`.
"""

from shardkit.analysis.rules.divergence import divergence
from shardkit.analysis.rules.draws import draws
from shardkit.analysis.rules.fitting import fitting
from shardkit.analysis.rules.inner_gradients import inner_gradients
from shardkit.analysis.rules.kernel_orders import kernel_orders
from shardkit.analysis.rules.one_piece import one_piece
from shardkit.analysis.rules.outputs import outputs
from shardkit.analysis.rules.permutations import permutations
from shardkit.analysis.rules.processes import other_process
from shardkit.analysis.rules.reductions import reductions
from shardkit.analysis.rules.replicated import replicated
from shardkit.analysis.rules.reused_keys import reused_keys
from shardkit.analysis.rules.rule import Finding, Rule
from shardkit.analysis.rules.tiny_shards import tiny_shards
from shardkit.analysis.rules.unawaited import unawaited
from shardkit.analysis.rules.unchecked import unchecked
from shardkit.analysis.rules.unintended import unintended
from shardkit.analysis.rules.unread import unread

_TRACED = (
    ("divergent-collective", "a collective that only some devices of its axis reach", divergence),
    ("ppermute-in-divergent-branch", "a ppermute that some devices do not reach, over any axis", divergence),
    ("incomplete-permutation", "a ppermute that leaves some device with zeros only", permutations),
    ("non-bijective-permutation", "a ppermute that names a device twice or one that does not exist", permutations),
    ("identity-permutation", "a ppermute in which every device sends to itself", permutations),
    ("repeated-reduction", "a reduction over devices that hold the same value", reductions),
    ("repeated-draw", "the same random numbers for different elements on different devices", draws),
    ("check-vma-off", "a shard_map without checked types", unchecked),
    ("pmap", "jax.pmap in new code", unchecked),
    ("unequal-output", "a result that differs although out_specs declare it replicated", outputs),
    ("gather-one-shard-used", "an all_gather although each device uses one piece", one_piece),
    ("all-reduce-then-slice", "an all_reduce although each device keeps one piece", one_piece),
    ("unread-message", "a collective on whose result no result of the program depends", unread),
    ("unawaited-start", "a collective that is started, and not awaited where it must be", unawaited),
    ("kernel-order", "a Pallas kernel of remote copies that races or waits for ever", kernel_orders),
    ("large-replicated", "a large array that every device holds whole", replicated),
    ("tiny-shards", "a leaf split into pieces too small to be worth a message", tiny_shards),
    ("tensor-parallel-that-fits", "tensor parallelism for weights that fit one device", fitting),
    ("inner-gradient-of-a-constant", "a gradient inside a loss, summed over other examples", inner_gradients),
    ("mean-of-quotients", "a loss divided on each device by a sum over its examples", unintended),
    ("term-of-each-device", "a regularizer added to each device's total of a Mean", unintended),
    ("idle-axis", "a mesh axis with devices that all do the same in a training step", unintended),
    ("reused-key", "two draws of random numbers from one key", reused_keys),
    ("process-dependent-communication", "collectives that depend on jax.process_index()", other_process),
    ("process-dependent-program", "a program that is not the same on all processes", other_process),
)
# Programs in which these find something compute other numbers than one device, or never end: the first step refuses
# them.
_WRONG = {
    "divergent-collective",
    "ppermute-in-divergent-branch",
    "non-bijective-permutation",
    "repeated-reduction",
    "repeated-draw",
    "unequal-output",
    "inner-gradient-of-a-constant",
}
TRACE_RULES = {name: Rule(name, finds, "trace", check, name in _WRONG) for name, finds, check in _TRACED}
"""The rules that `lint` and `audit` apply to a trace, by name."""

__all__ = ["TRACE_RULES", "Finding", "Rule"]
