"""``shoal sim``: a swarm of hundreds of peers in one process, on a virtual clock."""
