"""The newest link to a running node's swarm, in a file of its folder for ``shoal link``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from shoal.node.config.links import LINK
from shoal.node.runtime.result import write_json
from shoal.swarm.membership.membership import Membership

REFRESH_S = 10.0

log = logging.getLogger(__name__)


class LinkFile:
    """The link file of one run in ``folder``; call `refresh` often: it writes every ten seconds, and uses no network."""

    def __init__(self, folder: Path, membership: Membership, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._membership, self._clock = folder.absolute() / LINK, membership, clock
        self._next = float("-inf")

    def refresh(self) -> None:
        """Write the link with the addresses that are known now, if it is time. A disk that is full costs only this file."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + REFRESH_S
        manifest = self._membership.manifest
        link = {"link": str(self._membership.link_now()), "name": manifest.name, "invite_only": manifest.invite_only}
        try:
            write_json(self._path, {**link, "written": time.time()})
        except OSError as error:
            log.info("the link was not written to %s (%s)", self._path, error.strerror)
