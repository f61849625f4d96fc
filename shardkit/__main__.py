"""`python -m shardkit` is the `shardkit` command."""

from shardkit_command import main

main()
