"""The commands that run no node: pull, status, seed, invite and init."""
