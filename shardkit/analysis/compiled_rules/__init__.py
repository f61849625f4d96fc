"""The rules on a compiled program, one file for each or for a family, and `COMPILED_RULES`, the list of them.

Start with `program.py`, the argument of a rule; `host.py` is the shortest. Imports `analysis/hlo`, `analysis/jaxpr` and
`analysis/rules`.
"""

from shardkit.analysis.compiled_rules.host import host
from shardkit.analysis.compiled_rules.in_flight import in_flight
from shardkit.analysis.compiled_rules.leaves import copies, unplaced
from shardkit.analysis.compiled_rules.loops import loops
from shardkit.analysis.compiled_rules.rematerialized import rematerialized
from shardkit.analysis.compiled_rules.second_call import second_call
from shardkit.analysis.compiled_rules.sums import sums
from shardkit.analysis.compiled_rules.widths import widths
from shardkit.analysis.rules.rule import Rule

_ROWS = (
    ("summed-each-iteration", "an all-reduce in a loop that only adds up its results", loops),
    ("summed-separately", "all-reduces although only their sum is used", sums),
    ("gathered-each-iteration", "an all-gather in a loop that does not change its operand", loops),
    ("full-rematerialization", "a value that the partitioner makes whole to reshard it", rematerialized),
    ("replicated-leaf", "a large leaf that several devices hold and could share", copies),
    ("unplaced-leaf", "a leaf without a sharding in a program of several devices", unplaced),
    ("float32-traffic", "float32 that is sent and then rounded to 16 bits", widths),
    ("host-transfer", "a callback, a feed or a move between the memories of device and host", host),
    ("collectives-in-flight", "asynchronous collectives that can wait for each other, or never end", in_flight),
    ("second-compile", "a step that compiles again on its own results", second_call),
)
COMPILED_RULES = {name: Rule(name, finds, "compiled", check) for name, finds, check in _ROWS}
"""The rules that `audit` adds for a compiled program, by name."""

__all__ = ["COMPILED_RULES"]
