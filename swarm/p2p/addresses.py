"""Addresses of peers: their forms, where they lead, those met before (kept in a file), and those
not to be dialled again at once.

The ones met before lead to the swarm when every address of the link is dead. So most places are for
peers that have answered, one of each address range before the second of any: however many others
are heard of, they do not displace them. The file also has the addresses that this node listened on:
peers that have only old addresses find it again on the same port. Needs no hivemind.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import logging
import os
import re
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any, TypeVar

from shoal.swarm.access import address_problem
from shoal.swarm.file_lock import replace_file
from shoal.swarm.identity import b58decode, b58encode

N = TypeVar("N", int, float)

MAX_ID = 64  # bytes of a peer id of any kind, and characters of one that is read

# Name -> code, and bytes of the value; None: the length precedes it.
_PARTS: dict[str, tuple[int, int | None]] = {
    "ip4": (4, 4),
    "ip6": (41, 16),
    "tcp": (6, 2),
    "udp": (273, 2),
    "dns": (53, None),
    "dns4": (54, None),
    "dns6": (55, None),
    "dnsaddr": (56, None),
    "p2p": (421, None),
    "p2p-circuit": (290, 0),
    "tls": (448, 0),
    "quic": (460, 0),
    "quic-v1": (461, 0),
    "ws": (477, 0),
    "wss": (478, 0),
}
_NAMES = {code: (name, size) for name, (code, size) in _PARTS.items()}
_UNIX = 400


def varint(number: int) -> bytes:
    """Encode a number above or equal 0 as an unsigned LEB128 varint."""
    head = bytearray()
    while number > 127:
        head.append(number & 127 | 128)
        number >>= 7
    return bytes([*head, number])


def peer_bytes(peer_id: str) -> bytes:
    """Decode a base58 peer id of any kind. Raises ValueError."""
    raw = b58decode(peer_id) if len(peer_id) <= MAX_ID else b""
    if not raw:
        raise ValueError(f"{peer_id[:80]!r} is no peer id")
    return raw


def to_bytes(address: str) -> bytes:
    """Encode a multiaddr.

    Raises ValueError if it is none, or has a part that this node does not know.
    """
    empty, *parts = address.split("/")
    rest = iter(parts)
    data = b""
    for name in rest:
        if name not in _PARTS:
            raise ValueError(f"{address[:80]!r} is no multiaddr that this node can use")
        code, size = _PARTS[name]
        value = b"" if size == 0 else _value(name, next(rest, ""))
        data += varint(code) + (varint(len(value)) if size is None else b"") + value
    if empty or not data:
        raise ValueError(f"{address[:80]!r} is no multiaddr")
    return data


def _value(name: str, text: str) -> bytes:
    if name in ("ip4", "ip6"):
        return (
            ipaddress.IPv4Address(text).packed
            if name == "ip4"
            else ipaddress.IPv6Address(text).packed
        )
    if name in ("tcp", "udp"):
        if not text.isdecimal() or int(text) > 65_535:
            raise ValueError(f"{text[:80]!r} is no port")
        return int(text).to_bytes(2, "big")
    if name == "p2p":
        return peer_bytes(text)
    if not text:
        raise ValueError(f"/{name} lacks a name")
    return text.encode()


def to_text(data: bytes) -> str:
    """Decode a binary multiaddr.

    Raises ValueError if it is none, or has a part that this node does not know.
    """
    text = ""
    at = 0
    while at < len(data):
        code, at = _read_varint(data, at)
        if code not in _NAMES:
            raise ValueError(
                f"the address {data.hex()[:80]} has a part that this node does not know"
            )
        name, size = _NAMES[code]
        if size is None:
            size, at = _read_varint(data, at)
        value = data[at : at + size]
        at = at + size
        if len(value) != size:
            raise ValueError(f"the address {data.hex()[:80]} is cut off")
        text += f"/{name}"
        if name in ("ip4", "ip6"):
            text += f"/{ipaddress.ip_address(value)}"
        elif name in ("tcp", "udp"):
            text += f"/{int.from_bytes(value, 'big')}"
        elif size:
            text += f"/{b58encode(value[:MAX_ID]) if name == 'p2p' else value.decode()}"
    return text


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift, byte in enumerate(data[at : at + 4]):
        number |= (byte & 127) << 7 * shift
        if byte < 128:
            return number, at + shift + 1
    raise ValueError("a number in the address is cut off")


def unix_address(path: Path) -> bytes:
    """Encode ``/unix/PATH``, the address of a socket of this machine."""
    name = os.fsencode(path)
    return varint(_UNIX) + varint(len(name)) + name


def by_quic(address: str) -> str:
    """Return the address at which whoever listens at this one by TCP listens by QUIC, if so: at the
    same port.
    """
    return re.sub("/tcp/([0-9]+)(?=/p2p/|$)", r"/udp/\1/quic-v1", address)


def origin(address: bytes) -> str:
    """Return the IP address in a binary multiaddr of a direct connection over TCP or QUIC; empty
    for any other, as by a relay.
    """
    with contextlib.suppress(ValueError):
        match to_text(address).split("/"):
            case ["", "ip4" | "ip6", host, "tcp", _] | [
                "",
                "ip4" | "ip6",
                host,
                "udp",
                _,
                "quic-v1",
            ]:
                return host
    return ""


def is_loopback(address: str) -> bool:
    """Return whether a multiaddr reaches no further than this machine."""
    return is_loopback_host(host_of(address))


def is_loopback_host(host: str) -> bool:
    """Return whether an IP address or a name reaches no further than this machine."""
    with contextlib.suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    return False


def is_public_host(host: str) -> bool:
    """Return whether ``host`` is a public IP address, which leads to the same machine from every
    network.
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_global
    return False


def host_asked(header: str) -> str:
    """Return the host in HTTP's header ``Host``, which may be any text, without the port."""
    return (header.rpartition("]")[0].strip("[") or header.partition(":")[0]).lower()


@functools.lru_cache(maxsize=4096)
def range_of(host: str) -> str:
    """Return the address range of an IP address; of anything else, as a name, its last two
    labels.
    """
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return ".".join(host.lower().split(".")[-2:])
    return str(ipaddress.ip_network((ip, 16 if ip.version == 4 else 32), strict=False))


def host_of(address: str) -> str:
    """Return the IP address or name in a multiaddr; nothing if it has none."""
    return "".join(address.split("/")[2:3])


def by_peer(addresses: Iterable[str]) -> dict[str, list[str]]:
    """Return peer id -> its addresses, of full multiaddrs."""
    found: dict[str, list[str]] = {}
    for address in addresses:
        found.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    return found


def range_met(peer: str, said: Sequence[str], met: Mapping[str, str]) -> str:
    """Return the address range in which a peer was ``met``, or is as it ``said`` (its addresses);
    one for all that say nothing.
    """
    return range_of(met.get(peer) or host_of(said[0] if said else ""))


def by_turns(hosts: Iterable[tuple[str, str]], place: Callable[[str], str] = range_of) -> list[str]:
    """Return the peers of (peer, host): first one of each ``place``, by default an address range,
    then a second, and so on.
    """
    turns: Counter[str] = Counter()
    placed = []
    for peer, host in hosts:
        where = place(host)
        placed.append((turns[where], peer))
        turns[where] += 1
    return [peer for _, peer in sorted(placed, key=lambda each: each[0])]


def known_first(claimed: Iterable[tuple[str, str]], met: Mapping[str, str]) -> list[str]:
    """Return the peers of (peer, host that it claims) by turns: first those that were ``met``, by
    where, then the others.
    """
    hosts = list(claimed)
    there = [(peer, met[peer]) for peer, _ in hosts if met.get(peer)]
    return [*by_turns(there), *by_turns((peer, host) for peer, host in hosts if not met.get(peer))]


def one_each(values: Iterable[tuple[str, N]]) -> list[N]:
    """Return of (host, value) one value for each address range, the lower median of its values:
    keys cost nothing.
    """
    ranges = defaultdict[str, list[N]](list)
    for host, value in values:
        ranges[range_of(host)].append(value)
    return [median_low(each) for each in ranges.values()]


def of_ranges(values: Iterable[tuple[str, N]], met: Mapping[str, str]) -> list[N]:
    """Return of (peer, value) one value for each address range at which peers were ``met``, or all
    values if none was.
    """
    every = list(values)
    return one_each((met[peer], value) for peer, value in every if met.get(peer)) or [
        value for _, value in every
    ]


log = logging.getLogger(__name__)

MAX_PEERS = 64
ANSWERED = 48  # places of them for peers that have answered
MAX_EACH = 4  # addresses of one peer
MAX_LISTEN = 8  # own addresses
# Of the file; 64 peers with 4 addresses of 512 characters, each named twice, fit in.
MAX_BYTES = 384 * 1024

HOUR = 3600.0
# seconds until an address that did not answer is dialled again, doubled each time
FIRST = 2.0
LONGEST = 300.0
FORGET = 3600.0  # seconds without a failure after which an address begins anew
# hosts with failures; and ports of one that are told apart, all further ones share a place
MAX_HOSTS = 1024
PORTS = 8
MAX_MET = 4096  # peers of whom it is known where they are
RELAYED = "relayed"
_NOT_OURS = re.compile(
    r"network is unreachable|opening relay circuit|NO_RESERVATION"
)  # no fault of the host that was dialled
_OTHER_KEY = re.compile(r"remote key matches (\w+)")


class Peerstore:
    """The peers heard of last, newest last, each with its newest addresses, and when each answered.

    For any thread.

    ``own``: the id of this node, which is not stored. ``path``: the file that keeps those of
    ``swarm`` from run to run. Its addresses have to pass the rules of a link; a file that is
    damaged, or of another swarm, is ignored and written anew. ``clock``: Unix seconds.
    """

    def __init__(
        self,
        own: str,
        path: Path | None = None,
        swarm: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._own = own
        self._clock = clock
        self.met: Mapping[str, str] = {}  # where each peer was met last, as in `DialBackoff`
        self._path = None if path is None else path.absolute()
        self._swarm = swarm
        self._lock = threading.Lock()
        self._peers: dict[str, tuple[str, ...]] = {}
        self._answered: dict[str, float] = {}  # of those addresses, when each answered last
        self.listened: tuple[
            str, ...
        ] = ()  # addresses, ports included, on which this node listens, or did in an earlier run
        if path is not None:
            self.remember(self._load(path))
        self._saved = self._content()

    def __contains__(self, peer: str) -> bool:
        return peer in self._peers

    def remember(self, addresses: Iterable[str]) -> None:
        """Note full multiaddrs, the best one of each peer first.

        Leave out this node's own, and those that no link can hold.
        """
        found = by_peer(address for address in addresses if address_problem(address) is None)
        found.pop(self._own, None)
        with self._lock:
            for peer, new in found.items():
                merged = list(dict.fromkeys((*new, *self._peers.pop(peer, ()))))
                last = max(merged, key=self._when)
                if (
                    self._when(last) and last not in merged[:MAX_EACH]
                ):  # the one that is known to lead there
                    merged.insert(MAX_EACH - 1, last)
                self._peers[peer] = tuple(merged[:MAX_EACH])
            self._forget()

    def learn(self, answered: Iterable[str]) -> None:
        """Note the peers that answered a dial: at the address of the host at which each was met, or
        else at any of its own.
        """
        now = self._clock()
        with self._lock:
            for peer in answered:
                known = self._peers.get(peer, ())
                there = [address for address in known if host_of(address) == self.met.get(peer)]
                self._answered.update(dict.fromkeys(there or known, now))

    def addresses(self) -> list[str]:
        """Return all addresses, those of the peer heard of last first."""
        with self._lock:
            return [address for peer in reversed(self._peers) for address in self._peers[peer]]

    def save(self) -> None:
        """Write the file, whole or not at all, if anything changed. A failure is logged."""
        with self._lock:
            kept = self._content()
        if (
            self._path is None or kept == self._saved
        ):  # dicts are equal in any order: a change of the order is not worth a write
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json.dumps({"swarm": self._swarm, **kept}, indent=1))
            self._saved = kept
        except OSError as error:
            log.warning(
                "the addresses of known peers were not saved in %s (%s)", self._path, error.strerror
            )

    def _content(self) -> dict[str, Any]:
        answered = {
            address: int(when // HOUR * HOUR) for address, when in self._answered.items()
        }  # or each dial would be a write
        return {"peers": dict(self._peers), "listened": self.listened, "answered": answered}

    def _when(self, address: str) -> float:
        return self._answered.get(address, 0.0)

    def _forget(self) -> None:
        """Leave out whoever has no place: beyond those that answered last, the peers not heard of
        for longest.
        """
        if len(self._peers) > MAX_PEERS:
            best = {peer: max(addresses, key=self._when) for peer, addresses in self._peers.items()}
            answered = sorted(
                (peer for peer in best if self._when(best[peer])),
                key=lambda peer: -self._when(best[peer]),
            )
            kept = set(by_turns((peer, host_of(best[peer])) for peer in answered)[:ANSWERED])
            newest = [peer for peer in self._peers if peer not in kept][-(MAX_PEERS - len(kept)) :]
            self._peers = {
                peer: addresses
                for peer, addresses in self._peers.items()
                if peer in kept or peer in newest
            }
        there = {address for addresses in self._peers.values() for address in addresses}
        self._answered = {
            address: when for address, when in self._answered.items() if address in there
        }

    def _load(self, path: Path) -> list[str]:
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            log.warning(
                "the addresses of known peers in %s cannot be read (%s) and are ignored",
                path,
                error.strerror,
            )
            return []
        try:
            if len(data) > MAX_BYTES:
                raise ValueError("it is too large")
            value = json.loads(data)
            if value["swarm"] != self._swarm:
                return []
            lists = list(value["peers"].values())[-MAX_PEERS:]
            self.listened = tuple(
                str(address) for address in list(value.get("listened", ()))[:MAX_LISTEN]
            )
            answered = dict(value.get("answered", {}))
            now = self._clock()
            self._answered = {
                at: float(max(0, min(when, now)))
                for at, when in answered.items()
                if isinstance(when, int)
            }
            return [
                address for each in lists for address in each[:MAX_EACH] if isinstance(address, str)
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.warning(
                "the addresses of known peers in %s are damaged and ignored (%s)", path, error
            )
            return []


class DialBackoff:
    """The dials that are put off, because made-up members can name anybody's address under any
    number of peer ids.

    So failures count for an address, whoever was expected there, and the ports of a host beyond
    `PORTS` share one count. A peer that was met at a host, because it called from there or answered
    there, is dialled there whatever failed for others. ``chosen``: full multiaddrs that the user
    gave; they are never put off. For any thread.
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

    def fail(self, peer: str, addresses: Iterable[str], reason: str = "") -> None:
        """Note that this node could not connect to ``peer`` at ``addresses``.

        ``reason``: the daemon's text.
        """
        now = self._clock()
        places = {_place(address): address for address in addresses}
        with self._lock:
            for (host, port), address in places.items():
                at = f"[{'/'.join(address.split('/')[:5])}"
                if any(at in line and _NOT_OURS.search(line) for line in reason.splitlines()):
                    continue
                ports = self._failed.setdefault(host, {})
                self._failed.move_to_end(host)
                slot = port if port in ports or len(ports) < PORTS else ""
                count, last = ports.get(slot, (0, now))
                ports[slot] = (1 if now - last > FORGET else count + 1), now
            while len(self._failed) > MAX_HOSTS:
                self._failed.popitem(last=False)
        if (
            len(hosts := {host for host, _ in places}) == 1
        ):  # otherwise it is not known which of them has that key
            for other in _OTHER_KEY.findall(reason):
                self.meet(other, *hosts)

    def _wait(self, peer: str, address: str) -> float:
        """Return the seconds until ``address`` is due; 0 or less if it is."""
        direct, circuit, _ = address.partition("/p2p-circuit")
        # By a relay, that is whom this node connects to.
        called = direct.rpartition("/p2p/")[2] if circuit else peer
        host, port = _place(address)
        ports = self._failed.get(host)
        if ports is None or direct in self._chosen or _area(self.met.get(called, "")) == host:
            return 0.0
        count, last = ports.get(port) or (
            ports.get("", (0, 0.0)) if len(ports) >= PORTS else (0, 0.0)
        )
        since = self._clock() - last
        return (
            0.0
            if not count or since > FORGET
            else min(FIRST * 2.0 ** min(count - 1, 20), LONGEST) - since
        )


def _place(address: str) -> tuple[str, str]:
    """Return the host that a dial of ``address`` goes to, and what tells its ports apart."""
    _, _, host, *rest = [*address.split("/"), "", ""]
    area = _area(host)
    return area, "/".join((host, *rest[:2]) if area != host else rest[:2])


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
