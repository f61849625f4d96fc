"""The audit's rules, one file for each or for a family, and `AUDIT_RULES`, the list of them.

A new rule is a file with a function `check(program)` and a row here. Start with `host.py`, the
shortest. Imports `program.py` and `analysis/hlo`.
"""

from shardkit.analysis.auditing.rules.host import host
from shardkit.analysis.auditing.rules.leaves import replicated, unplaced
from shardkit.analysis.auditing.rules.loops import loops
from shardkit.analysis.auditing.rules.rematerialized import rematerialized
from shardkit.analysis.auditing.rules.rule import Rule
from shardkit.analysis.auditing.rules.second_call import second_call
from shardkit.analysis.auditing.rules.sums import sums
from shardkit.analysis.auditing.rules.widths import widths

AUDIT_RULES = {
    rule.name: rule
    for rule in (
        Rule("summed-each-iteration", "an all-reduce in a loop that only adds up its results", loops),
        Rule("summed-separately", "all-reduces of which only the sum is used", sums),
        Rule("gathered-each-iteration", "an all-gather in a loop that does not change its operand", loops),
        Rule("full-rematerialization", "a value that the partitioner makes whole to reshard it", rematerialized),
        Rule("replicated-leaf", "a large leaf that several devices hold and could share", replicated),
        Rule("unplaced-leaf", "a leaf without a sharding in a program of several devices", unplaced),
        Rule("float32-traffic", "float32 that is sent and then rounded to 16 bits", widths),
        Rule("host-transfer", "a callback, a feed or a move between the memories of device and host", host),
        Rule("second-compile", "a step that compiles again on its own results", second_call),
    )
}
"""The rules of `audit`, by name; it also applies those of `lint`."""

__all__ = ["AUDIT_RULES", "Rule"]
