"""Paths that begin with the user's home folder."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.swarm.errors import ShoalError


class HomeError(ShoalError):
    """The home folder of a path is not known: as in a container whose user has no entry, without
    HOME.
    """


def expanded(path: str | Path) -> str:
    """Return ``path`` with the home folder in place of a leading ``~``, where there is no file of
    that very name.

    Raises HomeError: the home folder is not known. Python would take a folder named ``~`` in the
    current one instead.
    """
    found = os.path.expanduser(path)
    if found.startswith("~") and not os.path.lexists(found):
        raise HomeError(
            f"The home folder that {str(path)!r} begins with is not known (HOME is not set, and "
            "this user has no entry in the system): set HOME, or write the whole path."
        )
    return found
