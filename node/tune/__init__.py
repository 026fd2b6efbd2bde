"""The learning rate and the batch of a task, found by successive halving: `shoal tune`."""
