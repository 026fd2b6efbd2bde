"""The signal by which the system reports the end of a child process: the network's, not torch's."""

from __future__ import annotations

from torch.utils.data._utils import signal_handling


def keep_child_signals() -> None:
    """Have DataLoaders leave SIGCHLD alone from now on.

    With its first worker processes torch takes this signal from the network's event loop (libuv), which then never learns that its
    daemon has ended: a crash would not be noticed, and leaving the swarm not end by itself. Torch finds dead workers without the
    signal too, only some seconds later.
    """
    signal_handling._SIGCHLD_handler_set = True
