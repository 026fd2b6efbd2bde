"""A bootstrap node (`shoal seed`): what it knows, what it forwards, and the node itself."""
