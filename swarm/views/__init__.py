"""The peers that a node knows beside the directory: views of the swarm, and lost peers that are dialled again."""
