"""Claims of training: proving and checking inner steps."""
