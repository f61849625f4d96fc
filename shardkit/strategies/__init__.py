"""The strategies: `dp`, `zero1`, `zero2`, `fsdp`, `tp`, `cp`, `ep`, `pp`.

Start with `data.py`, the shortest. A new strategy is one file here, which says which dim of each leaf it splits; its
name in `shardkit/__init__.pyi`; one row in `PLANS` of `tests/support/conformance.py`; a call in
`tests/support/calls.py`; and a value in `tests/support/rows.py` if it uses an axis in a new way. Imports plans and
pipelines; never another strategy.
"""
