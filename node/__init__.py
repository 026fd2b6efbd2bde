"""The node: command line, settings, tasks, training loop, checkpoints and display."""
