"""A bootstrap node (`shoal seed`): what it knows, and the node itself."""
