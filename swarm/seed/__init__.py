"""The bootstrap node, which trains nothing and needs no torch."""
