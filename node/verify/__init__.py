"""Verification on a node: claims about the rollouts that it wrote, how they are proved, and how
others' are checked.
"""
