"""What a person runs: the command line, settings, tasks, the training loop, checkpoints and the display."""
