"""Outer rules: the contribution that a peer sends, and the update of the slow weights by the
mean.
"""
