"""Snapshots of a member's weights: serving, choosing, downloading, catching up, and noticing
drift.
"""
