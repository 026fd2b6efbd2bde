"""Checks of the network: daemon, bootstrap peers, clock, dialling back, NAT and bandwidth."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import statistics
import time
from collections.abc import Sequence

from shoal.node.console import plural
from shoal.node.doctor.check import CheckOutcome, FaultError, Note, Skip, Tell
from shoal.node.doctor.visit import OPEN_S, Visit
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.membership.clock_check import MAX_ASKED, clock_problem
from shoal.swarm.p2p.addresses import host_of
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.reachability import (
    DIAL_PROTOCOL,
    DialBackView,
    Outcome,
    ask,
    dialled_port,
    listen_for_dial_back,
)
from shoal.swarm.p2p.seed_request import addresses_of, ask_seed
from shoal.swarm.p2p.stream import short
from shoal.swarm.p2p.throughput import SPEED_PROTOCOL, measure
from shoal.swarm.wire.messages import SEED_PROTOCOL

CONNECT_S = 8.0
"""For one bootstrap peer."""
ASK_S = 15.0
"""For a peer's answer."""
DIAL_BACK_S = 30.0
"""For a peer to dial back and say how it went."""
MEASURE_S = 30.0
"""For a measurement of bandwidth with one member."""
OPENED_S = 12.0
"""From its start, in which a daemon has a router open a port, and the host asks it for its
addresses.
"""
LOOK_S = 0.2
"""Between two looks for that address."""
MBIT = 8e-6
"""Megabits of a byte."""
SLOW_MBIT = 1.0
"""A second; less is a slow link."""
NAMED_MEMBERS = 8
"""That a bootstrap node names and that are tried."""
NOT_OFFERED = "does not offer"
"""Part of `Host.open`'s error for a protocol that a peer does not know."""


def daemon(visit: Visit, tell: Tell) -> str:
    """Check that the daemon starts and answers."""
    from shoal.swarm.membership.visit import start_unconnected

    # The addresses of the link are tried later, one by one.
    visit.daemon_began = time.monotonic()
    visit.host = start_unconnected(visit.identity, visit.link, ("/ip4/0.0.0.0/tcp/0",))
    return "the network daemon starts and answers"


async def _connected(host: Host, addresses: Sequence[str]) -> dict[str, str]:
    """Connect to all ``addresses`` at once; return of each in a few words why it could not be
    reached, or nothing.
    """

    async def one(address: str) -> str:
        try:
            await host.connect(address, CONNECT_S)
        except NetworkError as error:
            return str(error).removeprefix(f"{address} ").removesuffix(".")
        return ""

    return dict(zip(addresses, await asyncio.gather(*map(one, addresses)), strict=True))


def bootstrap(visit: Visit, tell: Tell) -> str:
    """Try each address of the link; a member that answers is enough, or a seed that names one."""
    assert visit.link is not None
    host = visit.running()
    addresses = visit.link.bootstrap
    problems = host.call(_connected(host, addresses), CONNECT_S + 2.0)
    # Each peer once: when one of its addresses works the others do not matter.
    answering = {_peer(address): address for address, problem in problems.items() if not problem}
    for address, problem in problems.items():
        if not problem:
            tell(CheckOutcome(f"peer {address}", "ok", "answers"))
            continue
        if _peer(address) in answering:
            # An address of its local network, for instance.
            problem = "no answer from here, but the peer answers at another of its addresses"
        tell(CheckOutcome(f"peer {address}", "note", problem))
    for address in answering.values():
        _sort(visit, address)
    if not answering:
        raise FaultError(
            "no bootstrap peer can be reached: see the lines above, or get a new link from "
            "somebody in the swarm."
        )
    if not visit.reached:
        raise FaultError(
            "only bootstrap nodes answer, and they name no member that does: the swarm's last node "
            "may have left, ask for one."
        )
    dead = len({_peer(address) for address in addresses} - answering.keys())
    said = (
        f"{plural(len(visit.reached), 'member')} and {plural(len(visit.seeds), 'bootstrap node')} "
        "answer"
    )
    if dead:
        raise Note(
            f"{said}, {dead} of the link's peers do not: that is enough, but see the lines above, "
            "or get a newer link."
        )
    return said


def _peer(address: str) -> str:
    """Return the peer id of a full multiaddr."""
    return address.rpartition("/p2p/")[2]


def _sort(visit: Visit, address: str) -> None:
    """Sort a reached peer: connect to the members that a seed names, and note any other as a
    member.
    """
    assert visit.link is not None
    link = visit.link
    host = visit.running()
    try:
        answer = visit.ask(
            address, SEED_PROTOCOL, lambda stream: ask_seed(stream, link.swarm), ASK_S
        )
        named = addresses_of(answer)
    except (NetworkError, MessageError) as error:
        # No seed: a member, unless it says otherwise when asked for the manifest.
        if NOT_OFFERED in str(error):
            _add(visit, address)
        return
    visit.seeds.append(address)
    problems = host.call(_connected(host, named[:NAMED_MEMBERS]), CONNECT_S + 2.0)
    for each, problem in problems.items():
        if not problem:
            _add(visit, each)


def _add(visit: Visit, address: str) -> None:
    """Note a reached member once: the link and a seed may both name it."""
    if _peer(address) not in map(_peer, visit.reached):
        visit.reached.append(address)


def clock(visit: Visit, tell: Tell) -> str:
    """Compare this machine's clock with the median of peers' clocks, each known within half a round
    trip.
    """
    for address in [*visit.seeds[:1], *visit.reached, *visit.seeds[1:]][:MAX_ASKED]:
        try:
            visit.seen.append(visit.ask(address, DIAL_PROTOCOL, ask, ASK_S))
        except (NetworkError, MessageError) as error:
            tell(CheckOutcome(f"clock of {short(address)}", "note", str(error)))
    if not visit.seen:
        raise Skip("no peer told its time: they may run an older shoal.")
    if problem := clock_problem(visit.seen):
        raise FaultError(problem)
    error_s = max(seen.error for seen in visit.seen)
    skew = statistics.median(seen.skew for seen in visit.seen)
    return (
        f"{abs(skew):.2f} s off the clock of {plural(len(visit.seen), 'peer')}, give or take "
        f"{error_s:.2f}"
    )


_NOT_REACHED = {
    "unreached": "{peer} could not connect back to port {port}",
    "refused": "the connection of {peer} to {address} port {port} was refused",
    "silent": "the connection of {peer} to {address} port {port} was not answered",
    "other": "something else answers at {address} port {port}",
}


def dialled(visit: Visit, tell: Tell) -> str:
    """Let a peer dial back to the port, on which only this check listens."""
    host = visit.running()
    problem = "no peer can be asked"
    for seen in visit.seen:
        if not seen.address:
            problem = "every connection goes through a relay"
            continue

        async def rung(peer: str = seen.peer) -> tuple[int, Outcome | None]:
            async with listen_for_dial_back(visit.port) as (number, token):
                return number, await _rung(host, peer, number, token)

        try:
            number, outcome = host.call(rung(), DIAL_BACK_S)
        except OSError as error:
            raise FaultError(
                f"port {visit.port} cannot be listened on ({error.strerror}): choose another one."
            ) from error
        except (NetworkError, MessageError) as error:
            problem = str(error).removesuffix(".")
            continue
        if outcome in ("busy", "unseen", None):
            problem = f"{short(seen.peer)} dials nobody now, ask again in a minute"
            continue
        visit.outcome = outcome
        if outcome == "reached":
            return f"{short(seen.peer)} connected back to {seen.address} port {number}"
        opened = _by_router(visit, seen)
        if opened is not None:
            visit.opened_at = seen.address
            return (
                f"{short(seen.peer)} connected back to {seen.address} port {opened}, which the "
                "router opened (UPnP or NAT-PMP)"
            )
        said = _NOT_REACHED[str(outcome)].format(
            peer=short(seen.peer), address=seen.address, port=number
        )
        raise Note(
            f"{said}: open it in the firewall and forward it in the router, or rely on a bootstrap "
            "node with --relay; a node that only dials out still trains."
        )
    raise Skip(f"not tried: {problem}.")


async def _rung(host: Host, peer: str, number: int, token: bytes = b"") -> Outcome | None:
    stream = await host.open(peer, DIAL_PROTOCOL, timeout=OPEN_S)
    with contextlib.closing(stream):
        view = await ask(stream, number, token)
        return view.outcome


def _by_router(visit: Visit, seen: DialBackView) -> int | None:
    """Return the port that the router opened for the daemon, if the peer that sees this machine
    there connects to it.
    """
    host = visit.running()
    port = None
    while not _own(seen.address):
        there = [address for address in host.addresses() if host_of(address) == seen.address]
        port = dialled_port(there)
        if port is not None or time.monotonic() > visit.daemon_began + OPENED_S:
            break
        time.sleep(LOOK_S)
    if port is None:
        return None
    try:
        outcome = host.call(_rung(host, seen.peer, port), DIAL_BACK_S)
    except (NetworkError, MessageError):
        return None
    # The daemon answers, and knows no token.
    return port if outcome == "other" else None


def _own(host: str) -> bool:
    """Return whether this machine has the IP address ``host``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


def nat(visit: Visit, tell: Tell) -> str:
    """Classify the NAT from the addresses that peers see and whether they could dial back."""
    seen = sorted({seen.address for seen in visit.seen if seen.address})
    if not seen:
        raise Skip("no peer sees an address of this machine.")
    hidden = [address for address in seen if not _own(address)]
    if len(hidden) > 1 and all(ipaddress.ip_address(address).version == 4 for address in hidden):
        raise Note(
            f"behind a NAT that shows {' and '.join(hidden)} to different peers: use a bootstrap "
            "node with --relay."
        )
    if visit.opened_at is not None:
        return (
            f"behind a NAT, seen as {visit.opened_at}, whose router opens a port by itself: "
            "nothing to forward or to announce"
        )
    reached = visit.outcome == "reached"
    if hidden and reached:
        return (
            f"behind a NAT, seen as {hidden[0]}, with the port forwarded: add --announce "
            f"/ip4/{hidden[0]}/tcp/PORT"
        )
    if hidden:
        raise Note(
            f"private, behind a NAT and seen as {hidden[0]}: forward a port, or have a bootstrap "
            "node with --relay in the link."
        )
    kind = "in the same network as its peers"
    if any(ipaddress.ip_address(address).is_global for address in seen):
        kind = "public"
    if visit.outcome is not None and not reached:
        raise Note(
            f"{kind}, seen as {seen[0]} without a NAT, but a firewall keeps others out: open the "
            "port."
        )
    return f"{kind}, seen as {seen[0]} without a NAT"


def bandwidth(visit: Visit, tell: Tell) -> str:
    """Measure the bandwidth: a few MB both ways at once with one member."""
    problem = ""
    for address in visit.reached[:MAX_ASKED]:
        try:
            speed = visit.ask(address, SPEED_PROTOCOL, measure, MEASURE_S)
        except (NetworkError, MessageError) as error:
            problem = str(error)
            continue
        down = speed.down * MBIT
        up = speed.up * MBIT
        said = f"{down:,.1f} Mbit/s from {short(address)}"
        if speed.whole:
            said += f" and {up:,.1f} to it, at once"
        else:
            said += f" and less than {up:,.1f} to it"
        if not speed.whole or min(down, up) < SLOW_MBIT:
            raise Note(
                f"{said}: the link is slow, so choose what it carries: `shoal plan --measure LINK`."
            )
        return said
    raise Skip(f"not measured: {problem.removesuffix('.')}.")
