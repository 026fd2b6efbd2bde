"""``shoal doctor``: checks of what keeps this machine from training, each in one line with a
remedy.
"""
