"""Readers of the traced program: the census, explain, and which values differ between devices.

Start with `census.py`. Imports `_jax`, cost, meshes and on_device; needs no device and compiles nothing.
"""
