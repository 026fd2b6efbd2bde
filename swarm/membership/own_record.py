"""This node's own membership record: who and where it is, and what it announced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.swarm.wire.envelope import MAX_BYTES, Reach, rate
from shoal.swarm.wire.messages import Member
from shoal.swarm.wire.record import LinkUse

MAX_ADDRESSES = 8  # in a record


class OwnRecord:
    """The record of the node ``peer`` in ``swarm``. For any thread.

    ``addresses``, ``now``, ``ticket`` return what a record has of the network, the clock and the
    admission.
    """

    def __init__(
        self,
        swarm: str,
        peer: str,
        *,
        addresses: Callable[[], tuple[str, ...]],
        now: Callable[[], float],
        ticket: Callable[[], bytes],
    ) -> None:
        self.dialled: Reach = "unknown"
        """Who can dial this node without a relay, as peers found that were asked
        (`shoal.swarm.p2p.reachability.reach_of`).
        """
        self.traffic: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Returns the bytes that this node sent and received so far."""
        self.exchanges: Callable[[], tuple[bool, float]] = lambda: (False, 0.0)
        """Returns whether exchanges go past a relay (`shoal.swarm.p2p.punch`), and the bytes a
        second that they move.
        """
        self.change: Callable[[], int] = lambda: 0
        """Returns the number of the newest change of the swarm's settings that this node holds."""
        self.announced: dict[str, Any] | None = None
        """The other fields; None before the first `Directory.announce`."""
        self._swarm = swarm
        self._peer = peer
        self._addresses = addresses
        self._now = now
        self._ticket = ticket

    def member(self, fields: dict[str, Any]) -> Member:
        """Return the record as of now.

        Raises pydantic's ValidationError if `Member` does not allow a field, or lacks one.
        """
        return Member(
            swarm=self._swarm,
            peer=self._peer,
            addresses=self._addresses()[:MAX_ADDRESSES],
            **dict(self.link()),
            issued=self._now(),
            admission=self._ticket(),
            change=self.change(),
            **fields,
        )

    def link(self) -> LinkUse:
        """Return what this node moves, and by which way others reach it."""
        sent, received = self.traffic()
        punched, bytes_per_s = self.exchanges()
        reach = self.dialled
        if reach != "direct" and any("/p2p-circuit" in one for one in self._addresses()):
            reach = "punched" if punched else "relayed"
        return LinkUse(
            bytes_sent=min(sent, MAX_BYTES),
            bytes_received=min(received, MAX_BYTES),
            bytes_per_s=rate(bytes_per_s),
            reach=reach,
        )
