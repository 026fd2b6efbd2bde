"""What every test wants: one thread, so that tests do not fight for the cores and sums are added in one order; and loggers as they
were, for commands that run in the test's own process choose how much is said.
"""

import logging

import torch

torch.set_num_threads(1)


def pytest_runtest_teardown():
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("shoal").setLevel(logging.NOTSET)
