"""Addresses to listen on, connecting to bootstrap peers, and the slots that this node holds at
relays.

A slot ends with the connection on which it was given, and the daemon asks each relay once, when
libp2p finds that nobody can dial this node, and not again after the connection was lost. So from
then on this module asks: every `RENEW_S` seconds each of the first `MAX_RELAYS` relays that answer,
by libp2p's own protocol (circuit v2, RESERVE), which costs a relay nothing when it has the slot. A
connection on which two requests in a row got no answer is ended, and made anew. A machine that was
taken to another network has lost all connections: the daemon, which would find that out in half a
minute, is told to end them as soon as the machine's address is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from shoal.swarm.access import address_problem
from shoal.swarm.errors import ListenError, NetworkError, StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.addresses import by_peer, by_quic, host_of, is_loopback, is_public_host
from shoal.swarm.p2p.daemon import DAEMON_GONE, Daemon, DaemonError, read_message
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import MAX_ADDRESS

_BIND_PROBLEMS = {
    errno.EADDRINUSE: "the port is taken by another program, choose another with --listen or stop "
    "that program",
    errno.EACCES: "ports below 1024 need root, choose a higher one with --listen",
    errno.EADDRNOTAVAIL: "this machine has no such address, use /ip4/0.0.0.0/... to listen on all "
    "it has",
}


def _socket(ip: str, transport: str) -> socket.socket:
    """Return a socket for an address of ``ip4`` or ``ip6`` and ``tcp`` or ``udp``."""
    family = socket.AF_INET if ip == "ip4" else socket.AF_INET6
    return socket.socket(family, socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM)


def check_free(listen: Sequence[str]) -> None:
    """Raise StartupError for the first of the listen addresses that cannot be bound.

    The daemon itself would not notice: it shares its port with any other p2pd of the same user
    (SO_REUSEPORT), and is satisfied when one of several addresses works.
    """
    for address in listen:
        found = re.match(r"/(ip4|ip6)/([^/]+)/(tcp|udp)/(\d+)", address)
        if found is None:
            raise StartupError(f"cannot listen on {address}: write it like /ip4/0.0.0.0/tcp/4001.")
        if int(found[4]) > 65535:
            raise StartupError(f"cannot listen on {address}: a port is at most 65535.")
        try:
            with _socket(found[1], found[3]) as probe:
                if found[1] == "ip6":
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if found[3] == "tcp":
                    probe.setsockopt(
                        socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
                    )  # as the daemon does: TIME_WAIT does not matter
                probe.bind((found[2], int(found[4])))
        except OSError as error:
            other = f"{error.strerror or error}, choose another address with --listen"
            raise ListenError(
                f"cannot listen on {address}: {_BIND_PROBLEMS.get(error.errno or 0, other)}."
            ) from error


def beside(listen: Sequence[str]) -> list[str]:
    """Return where to listen by QUIC beside these addresses: at their TCP ports, where those are
    known and free.
    """
    found = []
    for address in listen:
        quic = by_quic(address)
        if quic not in listen and "/udp/0/" not in quic and not is_loopback(address):
            with contextlib.suppress(StartupError):
                check_free([quic])
                found.append(quic)
    return found


def check_announced(announce: Sequence[str], peer_id: str) -> None:
    """Raise StartupError for the first of the addresses to announce that no record or link could
    hold, with the id behind it.
    """
    for address in announce:
        full = f"{address}/p2p/{peer_id}"
        problem = address_problem(full)
        if len(full) > MAX_ADDRESS:
            problem = (
                f"it has {len(address)} characters, at most "
                f"{MAX_ADDRESS - len(full) + len(address)} are allowed"
            )
        if problem:
            raise StartupError(
                f"cannot announce {address[:80]}: {problem}; write it like "
                "/ip4/203.0.113.5/tcp/4001."
            )


_ANY_PORT = re.compile(r"^(/(ip4|ip6)/([^/]+)/(tcp|udp)/)0(?=/|$)")


def fixed_ports(listen: Sequence[str], addresses: Sequence[str]) -> tuple[str, ...]:
    """Return ``listen`` with each port 0 replaced by the port in ``addresses``, so that a restart
    keeps it.
    """

    def obtained(found: re.Match[str]) -> str:
        ports = {
            m[1] for a in addresses if (m := re.match(rf"/{found[2]}/[^/]+/{found[4]}/(\d+)", a))
        }
        return found[1] + (ports.pop() if len(ports) == 1 else "0")

    return tuple(_ANY_PORT.sub(obtained, address) for address in listen)


def obtain_ports(listen: Sequence[str]) -> tuple[str, ...]:
    """Return ``listen`` with each port 0 replaced by one that is free now."""

    def free(found: re.Match[str]) -> str:
        with _socket(found[2], found[4]) as probe:
            probe.bind((found[3], 0))
            return f"{found[1]}{probe.getsockname()[1]}"

    return tuple(_ANY_PORT.sub(free, address) for address in listen)


ANYWHERE = ("/ip4/0.0.0.0/tcp/0",)
"""Where a node listens if its user names no address."""
_LISTEN = re.compile(r"/(ip4|ip6)/[0-9a-fA-F.:]+/(tcp|udp)/[0-9]{1,5}(/|$)")


def as_before(listen: Sequence[str], before: Sequence[str]) -> tuple[str, ...]:
    """Return ``before`` if it differs from ``listen`` only in ports that are 0 there, or no address
    was named (`ANYWHERE`); else ``listen``.
    """
    if tuple(listen) == ANYWHERE and before and all(map(_LISTEN.match, before)):
        return tuple(before)
    port = re.compile(r"(?<=/tcp/|/udp/)[0-9]+(?=/|$)")
    same = len(listen) == len(before) and all(
        a in (b, port.sub("0", b, count=1)) for a, b in zip(listen, before, strict=True)
    )
    return tuple(before if same else listen)


log = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds the other bootstrap peers get once one has answered
PROBE_S = 2.0  # seconds for a TCP connection to a possible relay
MAX_RELAYS = 2

# Words of p2pd -> words for the user. The first that matches.
_REASONS = (
    (
        r"peer id mismatch.*remote key matches (\w+)",
        r"answered but is another peer, \1: get a new link",
    ),
    (
        r"connection refused",
        "refused the connection: no node listens there, start it or get a new link",
    ),
    (
        r"no such host|lookup |failed to resolve|server misbehaving",
        "has a name that cannot be resolved: check it, and DNS",
    ),
    (
        r"network is unreachable|no route to host",
        "cannot be reached from this machine's network: check the connection",
    ),
    (
        r"not dialled again yet|dial backoff",
        "did not answer lately and is dialled again within minutes, or when it calls",
    ),
    (r"dial to self", "is this node itself: give the address of another node"),
    (
        r"deadline exceeded|i/o timeout|timed out",
        "timed out: check that its machine is on and its firewall open",
    ),
    (
        r"failed to negotiate",
        "is answered by something that is no node of this kind: check the port",
    ),
    (
        r"no addresses|no good addresses|unknown transport|no transport",
        "is not an address that this node can dial",
    ),
)


async def connect_any(
    daemon: Daemon, bootstrap: Sequence[str], timeout: float
) -> tuple[list[str], dict[str, str]]:
    """Connect to all bootstrap addresses at once.

    Return the peer ids that answered, and address -> reason for the others.

    Once one has answered, the others get `PATIENCE` seconds more. Takes at most ``timeout``
    seconds.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    peers = by_peer(bootstrap)
    reached: list[str] = []
    failed: dict[str, str] = {}

    async def dial(peer: str, addresses: list[str]) -> None:
        try:
            await daemon.connect(peer, addresses)
        except Exception as error:
            failed.update((address, why(error, address)) for address in addresses)
            return
        reached.append(peer)
        if not limit.expired():
            limit.reschedule(min(limit.when() or 0.0, loop.time() + PATIENCE))

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout) as limit:
            await asyncio.gather(*itertools.starmap(dial, peers.items()))
    silent = [
        each
        for peer, addresses in peers.items()
        if peer not in reached
        for each in addresses
        if each not in failed
    ]
    return reached, failed | dict.fromkeys(
        silent, f"did not answer within {loop.time() - began:.3g} s"
    )


def why(error: BaseException, address: str) -> str:
    """Say in a few words why ``address`` could not be connected to, and what to do."""
    if not isinstance(error, DaemonError):
        return f"is not a valid address ({str(error)[:100]})"
    lines = str(error).splitlines()
    own = [line for line in lines if f"[{address.rpartition('/p2p/')[0]}]" in line]
    if address.startswith("/dns") and "no good addresses" in str(
        error
    ):  # all that p2pd says of an unknown name
        own.insert(0, "no such host")
    for text in (*own, str(error)):
        for pattern, words in _REASONS:
            if found := re.search(pattern, text, re.DOTALL):
                return found.expand(words)
    return f"could not be connected to ({lines[-1].strip()[:200] if lines else 'no reason given'})"


def candidates(bootstrap: Sequence[str]) -> list[str]:
    """Return one address of each peer that may be reached directly, in the order given."""
    relayed = by_peer(address for address in bootstrap if "/p2p-circuit/" in address)
    by_tcp = by_peer(
        address
        for address in bootstrap
        if address.split("/")[3:4] == ["tcp"] and not is_loopback(address)
    )
    return [addresses[0] for peer, addresses in by_tcp.items() if peer not in relayed]


async def answering(bootstrap: Sequence[str]) -> list[str]:
    """Return the first `MAX_RELAYS` of the `candidates` that take a TCP connection.

    Takes `PROBE_S` seconds at most.
    """

    async def answers(address: str) -> bool:
        _, _, host, _, port, *_ = address.split("/")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), PROBE_S)
        except (TimeoutError, OSError, ValueError) as error:
            log.debug("no relay at %s: %r", address, error)
            return False
        writer.close()
        return True

    found = candidates(bootstrap)
    alive = await asyncio.gather(*map(answers, found))
    return [address for address, answered in zip(found, alive, strict=True) if answered][
        :MAX_RELAYS
    ]


HOP = "/libp2p/circuit/relay/0.2.0/hop"
RESERVE = b"\x02\x08\x00"  # a HopMessage, its length before it; type: RESERVE
NO_SLOT = "gave no slot"
# fields of the answer: limits, the bytes in these; its status, and the good one
LIMIT = 4
DATA = 2
STATUS = 5
OK = 100
# bytes that a relay has to forward each way, and starts of a daemon until it does
LEAST = 1 << 30
STARTS = 5
RENEW_S = 15.0  # seconds between two requests to a relay
# seconds for the answer, and for a connection to it
ASK_S = 8.0
CONNECT_S = 5.0
AWAY = ("192.0.2.1", 9)  # an address elsewhere (RFC 5737), to which nothing is sent
LATER_S = 60.0  # seconds until a peer is asked again that is no relay, or gives no slot
# seconds without a slot until the daemon is restarted, and between two such restarts
STUCK_S = 30.0
RESTART_S = 300.0


def sends_from() -> str:
    """Return the IPv4 address from which this machine sends to others; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_port:
        try:
            any_port.connect(AWAY)
            return str(any_port.getsockname()[0])
        except OSError:
            return ""


def is_gone(address: str) -> bool:
    """Return whether this machine no longer has an ``address`` that it had."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_port:
        try:
            any_port.bind((address, 0))
        except OSError:
            return True
        return False


class RelaySlots:
    """The slots of a node with the peer id ``own`` at relays among ``bootstrap``, full multiaddrs;
    use it on one loop.

    ``needed``: whether nobody can dial this node; `look` sets it when libp2p has found that.
    ``clock``: seconds.
    """

    def __init__(
        self,
        own: str,
        bootstrap: Sequence[str],
        needed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.needed = needed
        self._found = False  # whether `needed` is libp2p's finding, by the daemon that runs
        self.moves = 0  # how often this machine was taken to another network
        self._own = own
        self._clock = clock
        self._here = ""  # the address from which it sends, if that is known
        self._candidates = candidates(bootstrap)
        self._held: dict[str, float] = {}  # address of a relay -> when it gave a slot last
        self._put_off: dict[str, float] = {}  # address of a relay -> until when it is not asked
        self._stuck: float | None = None
        """Since when the daemon has refused to dial a relay that takes connections, while no slot
        is held.
        """
        self._restarted = float("-inf")

    def addresses(self) -> list[str]:
        return [f"{relay}/p2p-circuit/p2p/{self._own}" for relay in self._held]

    def ended(self) -> None:
        """Note that the daemon has ended, and with it every slot and every delay."""
        self._held.clear()
        self._put_off.clear()
        self._stuck = None
        self._found = False

    async def look(self, daemon: Daemon, known: Sequence[str]) -> bool:
        """Ask the relays that are due; ``known``: the addresses that the daemon gives.

        Return whether it has to be restarted.

        That is so when it has refused for `STUCK_S` seconds to dial a relay that answers: it puts a
        peer off for up to five minutes after dials that failed. Raises one of `daemon.DAEMON_GONE`.
        """
        if self._here and is_gone(self._here):
            log.info("this machine is in another network now: it connects anew")
            self.moves += 1
            self.ended()
            for peer in await daemon.peers():
                await daemon.disconnect(peer)
        self._here = sends_from()
        if any("/p2p-circuit/" in address for address in known):
            self.needed = self._found = True
        elif self._found and any(
            is_public_host(host_of(address)) for address in known
        ):  # hidden until somebody dialled it
            self.needed = False
            self.ended()
        if not self.needed:
            return False
        refused = False
        for relay in self._candidates:
            others = len(self._held.keys() - {relay})
            if others < MAX_RELAYS and self._clock() >= self._put_off.get(relay, float("-inf")):
                refused |= not await self._renew(daemon, relay)
        if self._held or not refused:
            self._stuck = None
            return False
        now = self._clock()
        self._stuck = now if self._stuck is None else self._stuck
        if now - self._stuck < STUCK_S or now - self._restarted < RESTART_S:
            return False
        self._restarted = now
        return True

    async def _renew(self, daemon: Daemon, relay: str) -> bool:
        """Ask ``relay`` for a slot, or for the one that this node has; False: it answers, but the
        daemon does not dial it.
        """
        peer = relay.rpartition("/p2p/")[2]
        granted = False
        reason = ""
        try:
            granted = await self._reserve(daemon, relay, peer)
        except NetworkError as error:
            reason = str(error)
            log.debug("no slot at relay %s: %s", short(peer), reason)
        finally:
            if granted and relay not in self._held:
                log.info("relay %s forwards to this node", short(peer))
            if granted:
                self._held[relay] = self._clock()
                self._put_off[relay] = self._held[relay] + RENEW_S
            else:
                self._held.pop(relay, None)
        if "protocols not supported" in reason or NO_SLOT in reason:
            self._put_off[relay] = self._clock() + LATER_S
        return "dial backoff" not in reason

    async def _reserve(self, daemon: Daemon, relay: str, peer: str) -> bool:
        for attempt in range(2):
            try:
                if peer not in await daemon.peers():
                    if not await answering([relay]):
                        return False
                    await asyncio.wait_for(daemon.connect(peer, [relay]), CONNECT_S)
                await asyncio.wait_for(reserve(daemon, peer), ASK_S)
                return True
            except TimeoutError:
                if attempt:
                    log.info("relay %s does not answer; connecting to it anew", short(peer))
                    await daemon.disconnect(peer)
        return False


async def launch_relay(identity: Identity, *, listen: Sequence[str], **chosen: Any) -> Daemon:
    """Start a daemon (`Daemon.launch`) that counts as reachable and forwards for others, without a
    limit that anybody meets.

    Where a daemon counts as reachable, libp2p starts a relay of its own, which cuts connections off
    after 128 KiB. The daemon's comes after it and takes its place, but in about one of 24 starts
    before it. So it is asked for a slot, and started anew then.
    """
    for _ in range(STARTS):
        daemon = await Daemon.launch(identity, listen=listen, public=True, **chosen)
        try:
            if (
                chosen.get("relay") == "off"
                or all(map(is_loopback, listen))
                or await _forwards(daemon, listen)
            ):
                break
        except BaseException:
            await daemon.shutdown()
            raise
        await daemon.shutdown()
    else:
        daemon = await Daemon.launch(identity, listen=listen, public=True, **chosen)
        log.warning("this node cuts connections that it forwards off after 128 KiB; start it anew")
    return daemon


async def _forwards(daemon: Daemon, listen: Sequence[str]) -> bool:
    client: Daemon | None = None
    try:
        client = await Daemon.launch(
            Identity.ephemeral(), listen=["/ip4/127.0.0.1/tcp/0"], relay="off"
        )
        known = [
            f"{address}/p2p/{daemon.peer_id}" for address in listen if not address.endswith("/0")
        ] or await daemon.addresses()
        here = [
            address.replace("/0.0.0.0/", "/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/")
            for address in known
        ]
        await asyncio.wait_for(client.connect(daemon.peer_id, here), CONNECT_S)
        return await asyncio.wait_for(reserve(client, daemon.peer_id), ASK_S) >= LEAST
    except (TimeoutError, *DAEMON_GONE, StartupError) as error:
        log.info("how much this node forwards is not known: %s", error)
        return True
    finally:
        if client is not None:
            await client.shutdown()


def _fields(message: Empty) -> dict[int, Any]:
    fields = UnknownFieldSet(message)
    return {field.field_number: field.data for field in map(fields.__getitem__, range(len(fields)))}


async def reserve(daemon: Daemon, relay: str) -> float:
    """Have the connected peer ``relay`` forward connections to this node; return the bytes after
    which it cuts one off.

    Raises NetworkError or OSError.
    """
    reader, writer = await daemon.open(relay, HOP)
    try:
        writer.write(RESERVE)
        fields = _fields(await read_message(reader, Empty()))
        limits = fields.get(LIMIT, b"")
        most = _fields(Empty.FromString(limits)).get(DATA, 0) if isinstance(limits, bytes) else 0
        status = fields.get(STATUS)
    except (EOFError, DecodeError) as error:
        raise NetworkError(f"relay {short(relay)} gave no answer ({error!r}).") from None
    finally:
        writer.close()
    if status != OK:
        raise NetworkError(f"relay {short(relay)} {NO_SLOT} (status {status}).")
    return most if isinstance(most, int) and most > 0 else float("inf")
