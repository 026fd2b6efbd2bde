"""What a node remembers of the claims it checked: the odds against each peer, and what other verifiers state."""
