"""Verification of generative outputs by LSH consensus: fingerprints, claims, verdicts. Empty so far; nothing imports it yet."""
