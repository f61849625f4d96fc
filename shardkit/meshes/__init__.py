"""Meshes, what is where on them, and keys. Start with `mesh.py`. Imports checks of arguments only."""
