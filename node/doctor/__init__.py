"""``shoal doctor``: what is in the way of training here, each thing in one line with what to do about it."""
