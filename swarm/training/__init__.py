"""A training loop's part of a swarm: the session, a member's duties, the optimizer of the settings
and its synchronisation.
"""
