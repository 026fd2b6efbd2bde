"""Connecting to bootstrap peers: which addresses answer, and if not, why; and which of them can be relays."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence

from shoal.swarm.errors import StartupError
from shoal.swarm.p2p.daemon import Daemon, DaemonError
from shoal.swarm.p2p.multiaddr import is_loopback

log = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds the other bootstrap peers get once one has answered
PROBE_S = 2.0  # seconds for a TCP connection to a possible relay
MAX_RELAYS = 2

# Words of p2pd -> words for the user. The first that matches.
_REASONS = (
    (r"peer id mismatch.*remote key matches (\w+)", r"answered but is another peer, \1: get a new link"),
    (r"connection refused", "refused the connection: no node listens there, start it or get a new link"),
    (r"no such host|lookup |failed to resolve|server misbehaving", "has a name that cannot be resolved: check it, and DNS"),
    (r"network is unreachable|no route to host", "cannot be reached from this machine's network: check the connection"),
    (r"not dialled again yet|dial backoff", "did not answer lately and is dialled again within minutes, or when it calls"),
    (r"dial to self", "is this node itself: give the address of another node"),
    (r"deadline exceeded|i/o timeout|timed out", "timed out: check that its machine is on and its firewall open"),
    (r"failed to negotiate", "is answered by something that is no node of this kind: check the port"),
    (r"no addresses|no good addresses|unknown transport|no transport", "is not an address that this node can dial"),
)


async def connect_any(daemon: Daemon, bootstrap: Sequence[str], timeout: float) -> tuple[list[str], dict[str, str]]:
    """Connect to all bootstrap addresses at once. Return the peer ids that answered, and address -> reason for the others.

    Once one has answered, the others get `PATIENCE` seconds more. Takes at most ``timeout`` seconds.
    """
    by_peer: dict[str, list[str]] = {}
    for address in bootstrap:
        by_peer.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    tasks = {asyncio.create_task(daemon.connect(peer, found)): peer for peer, found in by_peer.items()}
    loop = asyncio.get_running_loop()
    began = loop.time()
    end = began + timeout
    pending = set(tasks)
    reached: list[str] = []
    failed: dict[str, str] = {}
    try:
        while pending and loop.time() < end:
            done, pending = await asyncio.wait(pending, timeout=end - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                peer = tasks[task]
                error = task.exception()
                if error is None:
                    reached.append(peer)
                    end = min(end, loop.time() + PATIENCE)
                else:
                    failed.update((address, why(error, address)) for address in by_peer[peer])
    finally:
        for task in pending:
            task.cancel()
    for task in pending:
        failed.update((address, f"did not answer within {loop.time() - began:.3g} s") for address in by_peer[tasks[task]])
    return reached, failed


def why(error: BaseException, address: str) -> str:
    """Say in a few words why ``address`` could not be connected to, and what to do."""
    if not isinstance(error, DaemonError):
        return f"is not a valid address ({str(error)[:100]})"
    lines = str(error).splitlines()
    own = [line for line in lines if f"[{address.rpartition('/p2p/')[0]}]" in line]
    if address.startswith("/dns") and "no good addresses" in str(error):  # all that p2pd says of an unknown name
        own.insert(0, "no such host")
    for text in (*own, str(error)):
        for pattern, words in _REASONS:
            if found := re.search(pattern, text, re.DOTALL):
                return found.expand(words)
    return f"could not be connected to ({lines[-1].strip()[:200] if lines else 'no reason given'})"


def unreachable(failed: dict[str, str], tried_besides: int = 0) -> StartupError:
    """Make the error for bootstrap peers none of which answered, nor did so many known addresses besides."""
    one = "; ".join(f"{address} {reason}" for address, reason in failed.items())
    besides = f"; nor does any of {tried_besides} addresses known from an earlier run answer" if tried_besides else ""
    return StartupError(f"no bootstrap peer can be reached: {one}{besides}.")


def candidates(bootstrap: Sequence[str]) -> list[str]:
    """Return one address of each peer that may be reached directly, in the order given."""
    relayed = {address.rpartition("/p2p/")[2] for address in bootstrap if "/p2p-circuit/" in address}
    found: dict[str, str] = {}
    for address in bootstrap:
        peer = address.rpartition("/p2p/")[2]
        if peer not in relayed and address.split("/")[3:4] == ["tcp"] and not is_loopback(address):
            found.setdefault(peer, address)
    return list(found.values())


async def answering(bootstrap: Sequence[str]) -> list[str]:
    """Return the first `MAX_RELAYS` of the `candidates` that take a TCP connection. Takes `PROBE_S` seconds at most."""

    async def answers(address: str) -> bool:
        _, _, host, _, port, *_ = address.split("/")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), PROBE_S)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            log.debug("no relay at %s: %r", address, error)
            return False
        writer.close()
        return True

    found = candidates(bootstrap)
    alive = await asyncio.gather(*map(answers, found))
    return [address for address, answered in zip(found, alive, strict=True) if answered][:MAX_RELAYS]
