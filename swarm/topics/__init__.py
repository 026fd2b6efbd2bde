"""Gossiped records: rollouts, attestations, evidence and status."""
