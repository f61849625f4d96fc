"""`python -m shardkit` is the `shardkit` command."""

from shardkit.cli import main

main()
