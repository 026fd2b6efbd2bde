"""Verification of generative outputs by LSH consensus: fingerprints, claims, verdicts."""
