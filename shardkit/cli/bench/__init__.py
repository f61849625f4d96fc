"""`shardkit bench ...`: measurements; a file for each, which `shardkit_command` lists.

Start with `options.py`. Imports `bench` and the other folders; nothing imports it.
"""
