"""The deterministic simulator: the real protocol code on virtual time and a simulated network."""
