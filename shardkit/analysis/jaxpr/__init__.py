"""What reads the traced program: the census, the lint and its rules, explain.

Start with `census.py`. A new lint rule is one function and one row of `RULES` in `rules.py`. Imports collectives and
below; needs no device and compiles nothing.
"""
