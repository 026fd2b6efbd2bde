"""The dials that are put off after a failure, and where each peer was met.

Made-up members can name anybody's address under any number of peer ids, so failures count for an
address, whoever was expected there.
"""

from __future__ import annotations

import ipaddress
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from shoal.swarm.p2p.addresses import range_of

FIRST_WAIT_S = 2.0  # until an address that did not answer is dialled again, doubled each time
MAX_WAIT_S = 300.0
MAX_DOUBLINGS = 20  # so that no power overflows
FORGET_S = 3600.0  # without a failure, after which an address begins anew
MAX_HOSTS = 1024  # with failures
MAX_PORTS = 8  # of one host that are told apart; all further ones share a place
MAX_MET = 4096  # peers of whom it is known where they are
RELAYED = "relayed"
# No fault of the host that was dialled.
_NOT_ITS_FAULT = re.compile(r"network is unreachable|opening relay circuit|NO_RESERVATION")
_OTHER_KEY = re.compile(r"remote key matches (\w+)")


class DialBackoff:
    """Failures by address, with a wait that doubles each time. For any thread.

    The ports of a host beyond `MAX_PORTS` share one count. A peer that was met at a host, because
    it called from there or answered there, is dialled there whatever failed for others.
    ``chosen``: full multiaddrs that the user gave; they are never put off.
    """

    def __init__(
        self, chosen: Iterable[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._chosen = frozenset(chosen)
        self._clock = clock
        self._lock = threading.Lock()
        self._failed: OrderedDict[str, dict[str, tuple[int, float]]] = OrderedDict()
        """Host -> port, or "" for all further ones -> failures in a row and the time of the last.

        The newest host last.
        """
        self.met: OrderedDict[str, str] = OrderedDict()
        """Peer -> the IP address at which it was met last, or `RELAYED`.

        The newest last; to be read only.
        """
        self._ranges: Counter[str] = Counter()  # how many of them each address range has

    def meet(self, peer: str, host: str) -> None:
        """Note that ``peer`` is at the IP address ``host``, or behind a relay if that is empty.

        Where all places are taken the address range with the most gives its oldest up: whom a node
        has met counts in many choices.
        """
        with self._lock:
            self._count(self.met.get(peer), -1)
            self.met[peer] = host or RELAYED
            self.met.move_to_end(peer)
            self._count(self.met[peer], 1)
            if len(self.met) > MAX_MET:
                crowded = self._ranges.most_common(1)[0][0]
                oldest = next(other for other, at in self.met.items() if range_of(at) == crowded)
                self._count(self.met.pop(oldest), -1)

    def _count(self, host: str | None, more: int) -> None:
        if host is not None:
            where = range_of(host)
            self._ranges[where] += more
            if not self._ranges[where]:
                del self._ranges[where]

    def due(self, peer: str, addresses: Sequence[str]) -> list[str]:
        with self._lock:
            return [address for address in addresses if self._wait(peer, address) <= 0]

    def fail(self, addresses: Iterable[str], reason: str = "") -> None:
        """Note that this node could not connect at ``addresses``; ``reason``: the daemon's text."""
        now = self._clock()
        places = {_place(address): address for address in addresses}
        with self._lock:
            for (host, port), address in places.items():
                if not _is_excused(address, reason):
                    self._count_failure(host, port, now)
            while len(self._failed) > MAX_HOSTS:
                self._failed.popitem(last=False)
        hosts = {host for host, _ in places}
        if len(hosts) == 1:  # otherwise it is not known which of them has that key
            for other in _OTHER_KEY.findall(reason):
                self.meet(other, *hosts)

    def _count_failure(self, host: str, port: str, now: float) -> None:
        ports = self._failed.setdefault(host, {})
        self._failed.move_to_end(host)
        slot = port if port in ports or len(ports) < MAX_PORTS else ""
        count, last = ports.get(slot, (0, now))
        if now - last > FORGET_S:
            count = 0
        ports[slot] = count + 1, now

    def _wait(self, peer: str, address: str) -> float:
        """Return the seconds until ``address`` is due; 0 or less if it is."""
        direct, circuit, _ = address.partition("/p2p-circuit")
        # By a relay, that is whom this node connects to.
        called = direct.rpartition("/p2p/")[2] if circuit else peer
        host, port = _place(address)
        ports = self._failed.get(host)
        if ports is None or direct in self._chosen or _area(self.met.get(called, "")) == host:
            return 0.0
        slot = port
        if port not in ports and len(ports) >= MAX_PORTS:
            slot = ""
        count, last = ports.get(slot, (0, 0.0))
        since = self._clock() - last
        if not count or since > FORGET_S:
            return 0.0
        return min(FIRST_WAIT_S * 2.0 ** min(count - 1, MAX_DOUBLINGS), MAX_WAIT_S) - since


def _is_excused(address: str, reason: str) -> bool:
    """Return whether the daemon's ``reason`` says that the failure at ``address`` is not its."""
    start = f"[{'/'.join(address.split('/')[:5])}"
    return any(start in line and _NOT_ITS_FAULT.search(line) for line in reason.splitlines())


def _place(address: str) -> tuple[str, str]:
    """Return the host that a dial of ``address`` goes to, and what tells its ports apart."""
    _, _, host, *rest = [*address.split("/"), "", ""]
    area = _area(host)
    parts = rest[:2]
    if area != host:
        parts = [host, *parts]
    return area, "/".join(parts)


def _area(host: str) -> str:
    """Return what counts as one host: an IPv4 address, a /64 of IPv6, or the last two labels of a
    name.
    """
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return ".".join(host.lower().rstrip(".").split(".")[-2:])
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped or ipaddress.ip_network((ip.packed[:8] + bytes(8), 64)))
    return str(ip)
