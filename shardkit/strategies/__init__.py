"""The strategies: `dp`, `zero1`, `zero2`, `fsdp`, `tp`, `cp`, `ep`, `pp`.

Start with `data.py`, the shortest. A new strategy is one file here, which says which dim of each leaf it splits, and
one row in `PLANS` of `tests/support/conformance.py`. Imports plans and pipelines; never another strategy.
"""
