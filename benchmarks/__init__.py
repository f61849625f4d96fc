"""One benchmark file per theme, all of them users of `shardkit.bench`."""
