"""Connecting to bootstrap peers: all at once, with a reason in words for each that fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
from collections.abc import Sequence

from shoal.swarm.p2p.addresses import by_peer, is_loopback
from shoal.swarm.p2p.daemon import Daemon, DaemonError

log = logging.getLogger(__name__)

PATIENCE_S = 1.0  # that the other bootstrap peers get once one has answered
PROBE_S = 2.0  # for a TCP connection to a possible relay
MAX_RELAYS = 2  # at which a node holds a slot

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

    Once one has answered, the others get `PATIENCE_S` seconds more. Takes at most ``timeout``
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
            limit.reschedule(min(limit.when() or 0.0, loop.time() + PATIENCE_S))

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout) as limit:
            await asyncio.gather(*itertools.starmap(dial, peers.items()))
    silence = f"did not answer within {loop.time() - began:.3g} s"
    for peer, addresses in peers.items():
        if peer in reached:
            continue
        for address in addresses:
            failed.setdefault(address, silence)
    return reached, failed


def why(error: BaseException, address: str) -> str:
    """Say in a few words why ``address`` could not be connected to, and what to do."""
    if not isinstance(error, DaemonError):
        return f"is not a valid address ({str(error)[:100]})"
    lines = str(error).splitlines()
    own = [line for line in lines if f"[{address.rpartition('/p2p/')[0]}]" in line]
    # That is all that p2pd says of an unknown name.
    if address.startswith("/dns") and "no good addresses" in str(error):
        own.insert(0, "no such host")
    for text in (*own, str(error)):
        for pattern, words in _REASONS:
            if found := re.search(pattern, text, re.DOTALL):
                return found.expand(words)
    last = lines[-1].strip()[:200] if lines else "no reason given"
    return f"could not be connected to ({last})"


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
    answered = [address for address, is_alive in zip(found, alive, strict=True) if is_alive]
    return answered[:MAX_RELAYS]
