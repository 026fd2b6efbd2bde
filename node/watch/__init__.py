"""``shoal watch``: observe a swarm from outside, without torch and without a daemon."""
