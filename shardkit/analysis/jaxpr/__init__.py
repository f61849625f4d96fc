"""Readers of the traced program: the census, explain, and which values differ between devices.

Start with `census.py`. Imports `jaxprs.py` and cost; needs no device and compiles nothing.
"""
