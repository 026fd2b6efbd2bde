"""The libp2p daemon, the host on it, streams, relays, limits and the addresses known of peers."""
