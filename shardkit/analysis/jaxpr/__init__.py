"""Readers of the traced program: the census, the lint and its rules, explain.

Start with `census.py`. A new lint rule is one file in `rules/` and one row of `RULES` there. Imports `_jaxprs.py`
and cost; needs no device and compiles nothing.
"""
