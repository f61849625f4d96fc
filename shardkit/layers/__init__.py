"""Layers that a loss calls inside `jax.shard_map`: linear, attention, norms, vocabulary, mixtures of experts.

Start with `linear.py`. Every layer takes `axis=None` for one device without a mesh. Imports collectives and
partitioning; no strategy: a layer is passed its axis.
"""
