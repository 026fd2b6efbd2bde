"""Optional packages, and importing large ones."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.swarm.errors import ShoalError


def require(
    error: type[ShoalError], what: str, *packages: str, extra: str, otherwise: str = ""
) -> None:
    """Raise ``error`` unless all ``packages``, which ``what`` needs and shoal's ``extra`` installs,
    can be found; none is imported.

    ``otherwise``: what can be done without them, such as "name files".
    """
    missing = [package for package in packages if not _is_there(package)]
    if missing:
        lacking = f"the packages {', '.join(missing)}, which are"
        if len(missing) == 1:
            lacking = f"the package {missing[0]}, which is"
        instead = f", or {otherwise}" if otherwise else ""
        raise error(
            f"{what} needs {lacking} not installed: run pip install 'shoal[{extra}]'{instead}."
        )


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    # A package above it is missing, or was put in place by hand.
    except (ImportError, ValueError):
        return False


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection while modules are imported, and never look at what they hold again:
    it is no garbage.

    Collecting takes a sixth of the time that importing torch takes, because much is made then and
    all of it stays.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.freeze()
            gc.enable()
