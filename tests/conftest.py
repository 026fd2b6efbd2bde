"""What every test wants: one thread, so that tests do not fight for the cores and sums are added in one order."""

import torch

torch.set_num_threads(1)
