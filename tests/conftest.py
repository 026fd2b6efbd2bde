"""What every test wants: one thread, so that tests do not fight for the cores and sums are added in one order; and where tests run
in several processes, a folder for temporary files of each one's own, for they look at what daemons leave there."""

import os
import tempfile

import torch

torch.set_num_threads(1)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Short, because the daemon's sockets are below it and a socket's path may have some 100 bytes.
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix=os.environ["PYTEST_XDIST_WORKER"])
