"""Readers of the traced program: the census, the lint and its rules, explain.

Open `census.py` first. A new lint rule is one file in `rules/` and one row of `RULES` there. Imports
collectives and below; needs no device and compiles nothing.
"""
