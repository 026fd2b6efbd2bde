"""Fingerprints of generated outputs: short proofs of which model saw the tokens, and how far they
are from the draws of a seed.
"""
