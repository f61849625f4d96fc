"""Readers of the traced program: the census, the lint and its rules, explain.

Start with `census.py`. A new lint rule is one file in `rules/` and one row of `RULES` there. Imports
collectives and below; needs no device and compiles nothing.
"""
