"""The training loop, and the machine's resources that it takes."""
