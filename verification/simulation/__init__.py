"""The vote among cheats, without a network."""
