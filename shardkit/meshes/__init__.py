"""Meshes, what is where on them, and keys: start with `mesh.py`. Imports checks of arguments only."""
