"""The mathematics of a round: what a peer sends, and what the mean does to the slow weights."""
