"""``shoal demo``: a swarm of several nodes on this machine."""
