"""The lint's rules, one file for each or for a family, and `RULES`, the list of them.

A new rule is a file with a function `check(block, program)` and a row here. Start with `rule.py`, which says what a
rule is passed, then `replicated.py`, the shortest. Imports `analysis/jaxpr`.
"""

from shardkit.analysis.jaxpr.rules.divergence import divergence
from shardkit.analysis.jaxpr.rules.draws import draws
from shardkit.analysis.jaxpr.rules.fitting import fitting
from shardkit.analysis.jaxpr.rules.one_piece import one_piece
from shardkit.analysis.jaxpr.rules.outputs import outputs
from shardkit.analysis.jaxpr.rules.permutations import permutations
from shardkit.analysis.jaxpr.rules.processes import other_process
from shardkit.analysis.jaxpr.rules.reductions import reductions
from shardkit.analysis.jaxpr.rules.replicated import replicated
from shardkit.analysis.jaxpr.rules.reused_keys import reused_keys
from shardkit.analysis.jaxpr.rules.rule import Finding, Rule
from shardkit.analysis.jaxpr.rules.tiny_shards import tiny_shards
from shardkit.analysis.jaxpr.rules.unchecked import unchecked

RULES = {
    rule.name: rule
    for rule in (
        Rule("divergent-collective", "a collective that only some devices of its axis reach", divergence),
        Rule(
            "ppermute-in-divergent-branch", "a ppermute that some devices do not reach, whatever its axis", divergence
        ),
        Rule("incomplete-permutation", "a ppermute from which some device receives only zeros", permutations),
        Rule(
            "non-bijective-permutation", "a ppermute that names a device twice or one that does not exist", permutations
        ),
        Rule("identity-permutation", "a ppermute in which every device sends to itself", permutations),
        Rule("repeated-reduction", "a reduction over devices that hold the same value", reductions),
        Rule("repeated-draw", "the same random numbers for different elements on different devices", draws),
        Rule("check-vma-off", "a shard_map whose types are not checked", unchecked),
        Rule("pmap", "jax.pmap in new code", unchecked),
        Rule("unequal-output", "a result that out_specs declare replicated and that differs", outputs),
        Rule("gather-one-shard-used", "an all_gather of which each device uses one piece", one_piece),
        Rule("all-reduce-then-slice", "an all_reduce of which each device keeps one piece", one_piece),
        Rule("large-replicated", "a large array that every device holds whole", replicated),
        Rule("tiny-shards", "a leaf split into pieces too small to be worth a message", tiny_shards),
        Rule("tensor-parallel-that-fits", "tensor parallelism of what one device could hold", fitting),
        Rule("reused-key", "two draws of random numbers from one key", reused_keys),
        Rule("process-dependent-communication", "collectives that depend on jax.process_index()", other_process),
        Rule("process-dependent-program", "a program that is not the same on all processes", other_process),
    )
}
"""The rules of `lint`, by name."""

__all__ = ["RULES", "Finding", "Rule"]
