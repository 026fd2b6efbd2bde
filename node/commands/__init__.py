"""What the commands that run no node do."""
