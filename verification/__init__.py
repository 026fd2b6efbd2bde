"""Verification of generated outputs and training steps: fingerprints, calibration, and the vote on
claims.
"""
