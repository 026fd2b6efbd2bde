"""The outer optimizer: it wraps the inner one, keeps the slow weights, and saves and restores
both.
"""
