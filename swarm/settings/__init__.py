"""The settings that the creator of a swarm fixes for all its peers."""
