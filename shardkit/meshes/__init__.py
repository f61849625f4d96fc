"""Meshes, what is where on them, and keys. Start with `mesh.py`. Imports `_jax` and checks of arguments."""
