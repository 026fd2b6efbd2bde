"""``shoal watch``: looking at a swarm from outside, without torch and without a daemon."""
