"""A peer of several processes: ranks that hold a part each and act as one peer of a swarm."""
