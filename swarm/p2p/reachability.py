"""What a peer is asked for: this node's address as it sees it, its time, whether it can dial this
node.

    asks                                     answers (a node or a bootstrap node)
      | dial-request (port, token) ----------> |
      | <------------ dial-seen (address, now) |   at once, so that half the round trip bounds the
                                                   error of the clock
      | <---------------- token over plain TCP |   it connects to that port of *that address* and
                                                   reads what it finds
      | <---------------- dial-reply (outcome) |

No peer can be made to dial a third party: only the address of the asker's own direct connection is
dialled, no port below 1024, a few times a minute, and nothing is sent there. At a private address
every outcome but the asker's own token is ``unreached``, so that nobody learns about a foreign
network.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from shoal.swarm.p2p.addresses import is_loopback, is_public_host
from shoal.swarm.p2p.messages import receive_message, send_message
from shoal.swarm.p2p.rate_limit import RateLimit, TokenBuckets
from shoal.swarm.p2p.stream import Stream
from shoal.swarm.wire.envelope import Message, Moment, Nonce, Reach, pack

DIAL_PROTOCOL = "/shoal/dial-back/1"
MESSAGE_S = 5.0  # for one small message
CONNECT_S = 3.0  # for a connection back
TOKEN_S = 2.0  # for the token over it
LOWEST_PORT = 1024
# dials a minute to one address, and in all
MAX_DIALS_EACH = 6
MAX_DIALS = 60

Outcome = Literal["reached", "unreached", "refused", "silent", "other", "unseen", "busy"]


class DialRequest(Message):
    """Question for the sender's address; with ``port``: also whether its TCP port hands out
    ``token``.
    """

    KIND = "dial-request"
    port: Annotated[int, Field(ge=LOWEST_PORT, le=65_535)] | None = None
    token: Nonce


class DialSeen(Message):
    """The IP address that the asker's connection comes from, empty if it is relayed; ``now``: the
    answering clock, Unix seconds.
    """

    KIND = "dial-seen"
    address: Annotated[str, Field(max_length=64, pattern=r"^[0-9a-f.:]*$")]
    now: Moment


class DialReply(Message):
    """The outcome of dialling back."""

    KIND = "dial-reply"
    outcome: Outcome


@dataclass(frozen=True)
class DialBackView:
    """A peer's view of this node: its ``address`` (empty: unknown), and the peer's clock minus its
    own, in seconds +- ``error``.

    ``outcome``: of dialling back, if the peer was asked to.
    """

    peer: str
    address: str
    skew: float
    error: float
    outcome: Outcome | None = None


def dialled_port(addresses: Sequence[str]) -> int | None:
    """Return the TCP port of the full multiaddrs ``addresses`` of a node that peers should dial,
    that of a public one first.
    """
    parts = [
        address.split("/")
        for address in addresses
        if "/p2p-circuit" not in address and not is_loopback(address)
    ]
    ports = [
        (not is_public_host(part[2]), int(part[4]))
        for part in parts
        if part[3] == "tcp" and part[4].isdecimal()
    ]
    return next((port for _, port in sorted(ports) if port >= LOWEST_PORT), None)


def reach_of(seen: Sequence[DialBackView], addresses: Sequence[str]) -> Reach | None:
    """Return who can dial a node that announces ``addresses``, by what peers saw; None if that does
    not say.

    A peer dials the address that it sees. So if a node announces others, as that of a tunnel, only
    its success proves anything.
    """
    outside = [view for view in seen if is_public_host(view.address)]
    if any(view.outcome in ("reached", "other") for view in outside):
        return "direct"
    parts = [address.split("/") for address in addresses if "/p2p-circuit" not in address]
    announced = {part[2] for part in parts if part[1].startswith("dns") or is_public_host(part[2])}
    failed = {
        view.address for view in outside if view.outcome in ("unreached", "refused", "silent")
    }
    if failed:
        return "unreachable" if not announced or announced & failed else None
    return "local" if seen and not outside and any(view.address for view in seen) else None


class ReachabilityProbe:
    """The answering side; ``clock`` is in Unix seconds. Use it on one loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._each = TokenBuckets(
            RateLimit(messages=MAX_DIALS_EACH, nbytes=MAX_DIALS_EACH, senders=256)
        )
        self._all = TokenBuckets(RateLimit(messages=MAX_DIALS, nbytes=MAX_DIALS, senders=1))

    async def answer(self, stream: Stream) -> None:
        """Serve one stream of `DIAL_PROTOCOL`. Raises NetworkError or MessageError."""
        request = await receive_message(stream, DialRequest, MESSAGE_S)
        await send_message(stream, DialSeen(address=stream.origin, now=self._clock()), MESSAGE_S)
        if request.port is not None:
            outcome = await self._dial(stream.origin, request.port, request.token)
            await send_message(stream, DialReply(outcome=outcome), MESSAGE_S)

    async def _dial(self, address: str, port: int, token: bytes) -> Outcome:
        if not address:
            return "unseen"
        if not (self._each.take(address, 1, 1) and self._all.take("", 1, 1)):
            return "busy"
        outcome = await _dial(address, port, token)
        return outcome if is_public_host(address) or outcome == "reached" else "unreached"


async def _dial(address: str, port: int, token: bytes) -> Outcome:
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_S)
    except ConnectionRefusedError:
        return "refused"
    except (TimeoutError, OSError):
        return "silent"
    try:
        found = await asyncio.wait_for(reader.readexactly(len(token)), TOKEN_S)
    except (TimeoutError, OSError, EOFError):
        return "other"
    finally:
        writer.close()
    return "reached" if hmac.compare_digest(found, token) else "other"


async def ask(stream: Stream, port: int | None = None, token: bytes = b"") -> DialBackView:
    """Ask the peer at the other end for its view of this node and, given a ``port``, for the
    outcome of dialling back.

    Raises NetworkError or MessageError; takes about 20 seconds at most.
    """
    request = pack(DialRequest(port=port, token=token or secrets.token_bytes(16)))
    began = time.monotonic()
    clock = time.time()
    await stream.send(request, MESSAGE_S)
    seen = await receive_message(stream, DialSeen, MESSAGE_S)
    half = (time.monotonic() - began) / 2
    outcome = None
    if port is not None:
        patience_s = MESSAGE_S + CONNECT_S + TOKEN_S
        outcome = (await receive_message(stream, DialReply, patience_s)).outcome
    return DialBackView(stream.peer_id, seen.address, seen.now - (clock + half), half, outcome)


@contextlib.asynccontextmanager
async def listen_for_dial_back(port: int = 0) -> AsyncIterator[tuple[int, bytes]]:
    """Hand a token to each connection to ``port`` (0: any) of this machine; yield port and token.

    Raises OSError.
    """
    token = secrets.token_bytes(16)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(token)
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(writer.drain(), TOKEN_S)
        writer.close()

    server = await asyncio.start_server(answer, "0.0.0.0", port)
    obtained = int(server.sockets[0].getsockname()[1])
    servers = [server]
    with contextlib.suppress(OSError):  # a machine without IPv6
        servers.append(await asyncio.start_server(answer, "::", obtained))
    try:
        yield obtained, token
    finally:
        for each in servers:
            each.close()
