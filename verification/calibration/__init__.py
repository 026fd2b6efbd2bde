"""Distributions of honest evidence, and the thresholds that follow."""
