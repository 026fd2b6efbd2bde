"""The link that the page of ``shoal watch`` shows, and its QR code.

It never has an invitation, also if the link that is watched has one. A recording has no link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import segno

from shoal.node.watch.swarm_view import SwarmView
from shoal.swarm.access.link import Link
from shoal.swarm.membership.link_addresses import lasting_link

REFRESH_S = 30.0
IN_CODE = 4  # addresses in the QR code: with 16 it would be too fine for a camera


class ShownLink:
    """The link to the swarm of ``link``, with the members heard of lately; a new one every 30 seconds."""

    def __init__(self, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._clock = link, clock
        self._next = float("-inf")
        self._shown: dict[str, Any] = {}

    def picture(self, view: SwarmView) -> dict[str, Any]:
        """Return the link as text and as a QR code's SVG path on a square of ``size`` modules."""
        if self._clock() >= self._next:
            made = self._current(view)
            code = segno.make_qr(str(Link(made.swarm, made.bootstrap[:IN_CODE])), error="l", boost_error=False)
            self._shown = {"text": str(made), "qr": {"size": len(code.matrix), "path": _path(code.matrix)}}
            here = len(view.here())
            self._next = self._clock() + (REFRESH_S if here else 0.0)  # the first statuses are shown at once
        return self._shown

    def _current(self, view: SwarmView) -> Link:
        members = {peer: known.status for peer, known in view.peers.items() if known.here}
        given = self._link.bootstrap
        # Who answers and is no member is a bootstrap node.
        seeds: dict[str, list[str]] = {}
        for address in given:
            peer = address.rpartition("/p2p/")[2]
            if peer in view.connected and peer not in view.peers:
                seeds.setdefault(peer, []).append(address)
        return lasting_link(self._link.swarm, members, seeds=seeds, met=view.connected, otherwise=given)


def _path(matrix: Iterable[Iterable[int]]) -> str:
    """Return the dark modules as a path of rectangles, one for each run in a row."""
    parts = []
    for y, row in enumerate(matrix):
        begun = None
        for x, dark in enumerate([*row, 0]):
            if dark and begun is None:
                begun = x
            elif not dark and begun is not None:
                parts.append(f"M{begun} {y}h{x - begun}v1h{begun - x}z")
                begun = None
    return "".join(parts)
