"""A node from start to end: join, resume, run, shut down."""
