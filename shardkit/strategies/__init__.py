"""The strategies, one file a plan: `dp`, `zero1`, `zero2`, `fsdp`, `tp`, `cp`, `ep`, `pp`.

Open `data.py` first, the shortest. A new strategy is one file here, which says for each leaf which dim it splits, and
one row in `tests/laws/`. Imports partitioning and the pipeline's machinery; never another strategy.
"""
