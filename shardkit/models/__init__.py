"""Reference models, written with the kernels.

Start with `transformer.py`. Imports layers and remat, as a user's own model does.
"""

from shardkit.models import transformer

__all__ = ["transformer"]
