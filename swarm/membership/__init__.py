"""Joining a swarm, and knowing who is in it."""
