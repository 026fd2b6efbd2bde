"""``shoal chaos``: a swarm of real nodes on this machine, killed and stopped by a plan, and what that costs the others."""
