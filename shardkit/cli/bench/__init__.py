"""`shardkit bench ...`: measurements; a file for each, which `BENCH` of `shardkit.cli` lists.

Start with `options.py`. Imports `bench` and the other folders; nothing imports it.
"""
