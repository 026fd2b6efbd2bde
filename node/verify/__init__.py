"""Verification on a node: claims about rollouts that it wrote, proved and checked with policies. No network here but in session.py."""
