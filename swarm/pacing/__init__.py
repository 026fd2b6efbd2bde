"""How fast bytes go to each peer, how long a transfer may take, and by which route it goes."""
