"""Reference models, written with the kernels."""

from shardkit.models import transformer

__all__ = ["transformer"]
