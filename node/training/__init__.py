"""The training loop and its use of memory."""
