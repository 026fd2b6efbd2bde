"""What is gossiped: rollouts, attestations, evidence and status records."""
