"""What a plan is: data, three layouts for each leaf and one spec for the batch. No collective is issued here.

Start with `plan.py`; `splits.py` says what a split means, `storage.py` how leaves are stored. Imports collectives
and what they import; no strategy and no layer.
"""
