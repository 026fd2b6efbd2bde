"""A node of several processes: a rank for each GPU, of which rank 0 is the node to the swarm."""
