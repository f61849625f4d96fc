"""The audit of any jitted step: memory, collectives and waste, each with the user's own line.

Start with `audit.py`; `program.py` is what the rules in `rules/` read. Imports `analysis/jaxpr` and `analysis/hlo`.
"""
