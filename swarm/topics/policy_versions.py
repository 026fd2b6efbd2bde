"""Versions of a policy that other nodes take over as it is trained: samplers, and late joiners.

    publisher.begin_round(round, weights)     # on the node that trains
    follower.begin_round(round, weights)      # on one that follows it: they may be newer afterwards

A record names the newest version by the SHA-256 of its bits in bfloat16, and patches between the
versions before it (`shoal.optim.weight_patch`). Bodies go over a stream, by their SHA-256. Where a
link is missing, or does not make what it says, the whole is fetched.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from torch import Tensor

from shoal.optim.weight_patch import (
    VALUE_BYTES,
    PatchError,
    apply,
    bits_in,
    bits_of,
    digest_of,
    encode,
    set_bits,
    whole_of,
)
from shoal.swarm.errors import MessageError, NetworkError, ShoalError
from shoal.swarm.gossip.bodies import SERVE_S, BodyStore
from shoal.swarm.membership.record_reader import MAX_CLOCK_AHEAD_S
from shoal.swarm.p2p.rate_limit import RateLimit
from shoal.swarm.p2p.stream import short
from shoal.swarm.wire.envelope import KIB, Bytes, Count, Message, Moment, PeerId, Sha256, SwarmId

if TYPE_CHECKING:
    from shoal.swarm.gossip.gossip import Gossip
    from shoal.swarm.p2p.host import Host

log = logging.getLogger(__name__)

POLICY_PROTOCOL = "/shoal/policy/1"
MAX_LINKS = 16
"""Patches that a node hands out; who is further behind takes the whole."""
MAX_PATCH_BYTES = 256 << 20
"""Of all patches together."""
RECORDS = RateLimit(messages=120, nbytes=1 << 20)
"""Of one author in a minute."""
WHOLES_A_MINUTE = 2
"""That one peer gets; patches beside them."""
FIRST_S = 120.0
"""In which a node that begins may take over a first version."""
RETRY_S = 30.0
"""After which a version is fetched again where the network failed: a peer gets two wholes a minute.
"""

Addresses = Callable[[str], Sequence[str]]


class PolicyVersion(Message):
    """The newest version of ``peer``'s policy: its SHA-256 and size in bfloat16, and ``links``, the
    newest last: the SHA-256 of a version, and SHA-256 and size of the patch that makes the next one
    of it.
    """

    KIND = "policy-version"
    LIMIT = 2 * KIB
    AUTHOR = "peer"
    swarm: SwarmId
    peer: PeerId
    version: Count
    nbytes: Bytes
    sha256: Sha256
    links: Annotated[tuple[tuple[Sha256, Sha256, Bytes], ...], Field(max_length=MAX_LINKS)] = ()
    issued: Moment


class PolicyPublisher:
    """What this node trains, for others to follow."""

    def __init__(
        self,
        gossip: Gossip,
        host: Host,
        addresses: Addresses = lambda peer: (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.version = 0
        self._gossip = gossip
        self._host = host
        self._addresses = addresses
        self._clock = clock
        self._topic = gossip.join(PolicyVersion, None, RECORDS)
        self._store: BodyStore | None = None
        self._links = deque[tuple[bytes, bytes, int]](maxlen=MAX_LINKS)
        self._newest: tuple[bytes, Tensor] | None = None
        """Digest and bits, replaced together: the host's loop reads them."""

    def begin_round(self, round: int, weights: Sequence[Tensor]) -> None:
        """Publish ``weights``, if they have changed, as version ``round``."""
        self.version = round
        bits = bits_of(weights)
        nbytes = VALUE_BYTES * bits.numel()
        store = self._store_for(nbytes)
        digest = digest_of(bits)
        if self._newest is not None:
            older, older_bits = self._newest
            if digest == older:
                return
            patch = encode(older_bits, bits)
            if len(patch) < nbytes:
                self._links.append((older, store.put(patch), len(patch)))
            else:
                self._links.clear()
        self._newest = digest, bits
        self._topic.publish(
            PolicyVersion(
                swarm=self._gossip.swarm,
                peer=self._gossip.identity.peer_id,
                version=round,
                nbytes=nbytes,
                sha256=digest,
                links=tuple(self._links),
                issued=self._clock(),
            )
        )

    def _store_for(self, nbytes: int) -> BodyStore:
        if self._store is None:
            quota = RateLimit(messages=120, nbytes=WHOLES_A_MINUTE * nbytes + MAX_PATCH_BYTES)
            self._store = BodyStore(
                self._host,
                self._gossip.swarm,
                self._addresses,
                protocol=POLICY_PROTOCOL,
                bodies=MAX_LINKS,
                nbytes=MAX_PATCH_BYTES,
                quota=quota,
                more=self._whole,
            )
        return self._store

    def _whole(self, sha256: bytes) -> bytes | None:
        newest = self._newest
        if newest is None or newest[0] != sha256:
            return None
        return whole_of(newest[1])

    def close(self) -> None:
        self._topic.close()


class PolicyRelay:
    """Passes records of versions on, on a node that neither publishes a policy nor follows one."""

    version = 0

    def __init__(self, gossip: Gossip) -> None:
        self._topic = gossip.join(PolicyVersion, None, RECORDS)

    def begin_round(self, round: int, weights: Sequence[Tensor]) -> None:
        """Do nothing."""

    def close(self) -> None:
        self._topic.close()


class PolicyFollower:
    """The policy of ``leader``, taken over by this node.

    ``always``: in each round; else only in round 0, for a node that goes on has its own. ``say``:
    gets a line for people.
    """

    def __init__(
        self,
        gossip: Gossip,
        host: Host,
        leader: str,
        addresses: Addresses = lambda peer: (),
        clock: Callable[[], float] = time.time,
        *,
        always: bool,
        say: Callable[[str], None] = log.info,
        first_s: float = FIRST_S,
    ) -> None:
        self.version = 0
        """Of the leader's policy that this node has."""
        self.counts = Counter[str]()
        """``patches``, ``wholes``, ``refused`` and ``bytes``."""
        self._host = host
        self._leader = leader
        self._clock = clock
        self._always = always
        self._say = say
        self._first_s = first_s
        self._store = BodyStore(host, gossip.swarm, addresses, protocol=POLICY_PROTOCOL)
        self._heard: PolicyVersion | None = None
        self._has_news = threading.Event()
        self._tried: PolicyVersion | None = None
        """The newest version whose fetch was begun, or that does not fit."""
        self._retry_at = 0.0
        """When a version may be fetched again, by the monotonic clock."""
        self._failure = ""
        """Why the last fetch took over nothing, in words."""
        self._fetching: concurrent.futures.Future[tuple[PolicyVersion, Tensor]] | None = None
        self._held: tuple[bytes, Tensor] | None = None
        """Digest and bits of the weights; None before the first round."""
        self._topic = gossip.join(PolicyVersion, self._take, RECORDS)

    def begin_round(self, round: int, weights: Sequence[Tensor]) -> None:
        """Give ``weights`` the newest version that has arrived.

        The first time it waits for one, at most `FIRST_S`; later it never waits.
        """
        if round > 0 and not self._always:
            return
        if self._held is None:
            bits = bits_of(weights)
            self._held = digest_of(bits), bits
            self._wait_for_first(weights)
        elif self._always:
            self._advance(weights)

    def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
        self._topic.close()

    def _wait_for_first(self, weights: Sequence[Tensor]) -> None:
        until = time.monotonic() + self._first_s
        while (left_s := until - time.monotonic()) > 0:
            if self._fetching is not None:
                concurrent.futures.wait([self._fetching], left_s)
            else:
                if self._heard is not self._tried:
                    left_s = min(left_s, max(0.0, self._retry_at - time.monotonic()))
                self._has_news.wait(left_s)
                self._has_news.clear()
            if self._advance(weights):
                self._say(f"the policy is that of peer {short(self._leader)}, as of {self.version}")
                return
        self._say(self._why_none())

    def _why_none(self) -> str:
        """Return why no first version was taken over, for people."""
        leader = short(self._leader)
        within = f"within {self._first_s:.0f} s"
        why = "it is still being fetched" if self._fetching is not None else self._failure
        if why:
            return (
                f"the policy of peer {leader} was not taken over {within} ({why}), so this node "
                "begins with its own"
            )
        return (
            f"peer {leader} published no policy that fits {within}, so this node begins with its "
            "own: set rl.publish there, and the same rl.policy here"
        )

    def _advance(self, weights: Sequence[Tensor]) -> bool:
        """Take over what has arrived, or begin to fetch what is newer; return whether a version was
        taken over.
        """
        if self._fetching is None:
            return self._begin()
        if not self._fetching.done():
            return False
        fetched = self._fetching
        self._fetching = None
        try:
            heard, bits = fetched.result()
        except (ShoalError, concurrent.futures.CancelledError) as error:
            self.counts["refused"] += 1
            self._failure = str(error).rstrip(".")
            if isinstance(error, NetworkError):
                self._tried = None
                self._retry_at = time.monotonic() + RETRY_S
            log.warning("a version of the policy was not taken over: %s", error)
            return False
        set_bits(weights, bits)
        self._held = heard.sha256, bits
        self.version = heard.version
        self._begin()
        return True

    def _begin(self) -> bool:
        """Begin to fetch the newest version, once, or again where the network failed; return
        whether this node has it already.
        """
        heard = self._heard
        if heard is None or heard is self._tried or time.monotonic() < self._retry_at:
            return False
        self._tried = heard
        assert self._held is not None
        digest, bits = self._held
        if heard.sha256 == digest:
            self.version = heard.version
            return True
        if heard.nbytes != VALUE_BYTES * bits.numel():
            self.counts["refused"] += 1
            log.warning(
                "the policy of peer %s has %d bytes, %d fit here: use its rl.policy",
                short(self._leader),
                heard.nbytes,
                VALUE_BYTES * bits.numel(),
            )
            return False
        self._fetching = self._host.submit(self._fetch(heard, digest, bits))
        return False

    async def _fetch(
        self, heard: PolicyVersion, digest: bytes, bits: Tensor
    ) -> tuple[PolicyVersion, Tensor]:
        """Return the bits of the version, by patches from ``bits`` or whole.

        Raises NetworkError or MessageError if it cannot be had.
        """
        links = _links_from(digest, heard)
        try:
            for _, sha256, nbytes in links:
                patch = await self._body(sha256, nbytes)
                loop = asyncio.get_running_loop()
                bits = await loop.run_in_executor(None, apply, patch, bits)
                self.counts["patches"] += 1
            if links and await _digest(bits) == heard.sha256:
                return heard, bits
        except (ShoalError, PatchError) as error:
            log.info("a patch of the policy was refused, so the whole is fetched: %s", error)
        if links:
            self.counts["refused"] += 1
        whole = await self._body(heard.sha256, heard.nbytes)
        self.counts["wholes"] += 1
        return heard, bits_in(whole)

    async def _body(self, sha256: bytes, nbytes: int) -> bytes:
        body = await self._store.fetch(self._leader, sha256, nbytes, SERVE_S)
        self.counts["bytes"] += nbytes
        return body

    # -- on the loop -------------------------------------------------------------------------------

    def _take(self, author: str, heard: PolicyVersion) -> None:
        if heard.issued > self._clock() + MAX_CLOCK_AHEAD_S:
            raise MessageError("A policy's version is dated in the future.", "future")
        if author != self._leader:
            return
        if self._heard is None or heard.issued > self._heard.issued:
            self._heard = heard
            self._has_news.set()


def _links_from(digest: bytes, heard: PolicyVersion) -> Sequence[tuple[bytes, bytes, int]]:
    """Return the patches from the version with ``digest`` on; none if the whole is smaller."""
    versions = [before for before, _, _ in heard.links]
    if digest not in versions:
        return ()
    links = heard.links[versions.index(digest) :]
    if sum(nbytes for _, _, nbytes in links) >= heard.nbytes:
        return ()
    return links


async def _digest(bits: Tensor) -> bytes:
    return await asyncio.get_running_loop().run_in_executor(None, digest_of, bits)
