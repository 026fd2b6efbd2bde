"""Averaging with other peers: what exchanges in pairs and in groups share."""
