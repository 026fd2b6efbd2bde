"""What a node reports to the swarm's bootstrap nodes: itself, and its public swarm.

It meets the peers that they name. So a swarm can be joined though every other address in the link
is dead, and two parts of a swarm that lost each other, but not the bootstrap node, meet again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.p2p.messages import ask
from shoal.swarm.p2p.seed_request import ANSWER_S, addresses_of, ask_seed
from shoal.swarm.p2p.stream import Stream, short
from shoal.swarm.wire.envelope import MAX_BYTES, MAX_COUNT, seal
from shoal.swarm.wire.messages import (
    MAX_MANIFEST,
    SEED_PROTOCOL,
    SWARMS_PROTOCOL,
    Announcement,
    SwarmsReply,
    SwarmsRequest,
)
from shoal.swarm.wire.record import GONE

if TYPE_CHECKING:
    from shoal.swarm.membership.directory import Directory
    from shoal.swarm.p2p.host import Host

from shoal.swarm.membership.reconnector import Reconnector

log = logging.getLogger(__name__)


REPORT_S = 20.0  # between two reports; a seed forgets a silent node after six times as long
LOOK_S = 1.0  # between checks for changed addresses of this node
OPEN_S = 10.0


class SeedAnnouncer:
    """Reports of this node to the seeds, and redialling of lost peers, until `close`."""

    def __init__(self, host: Host, directory: Directory, identity: Identity, swarm: str) -> None:
        self._host = host
        self._directory = directory
        self._identity = identity
        self._swarm = swarm
        self._announced: Announcement | None = None
        self._running = host.submit(self._run())
        self._looking = host.submit(Reconnector(host, directory).run())

    def report(self, timeout: float) -> None:
        """Report to all seeds now, within ``timeout`` seconds; a missing answer is no error.

        For any thread but the host's.
        """
        if self._host.seeds():
            try:
                self._host.call(self._report(), timeout)
            except NetworkError as error:
                log.info("this node was not reported to the bootstrap nodes: %s", error)

    def announce(
        self, manifest: bytes, *, params: int, round_bytes: int, memory: int, device: str
    ) -> None:
        """From now on announce the public swarm of the sealed ``manifest`` to the seeds; see
        `Announcement`.
        """
        if len(manifest) > MAX_MANIFEST:
            why = (
                "this swarm is not announced to bootstrap nodes: its settings have %d bytes, "
                "more than %d."
            )
            log.warning(why, len(manifest), MAX_MANIFEST)
            return
        self._announced = Announcement(
            swarm=self._swarm,
            peer=self._identity.peer_id,
            manifest=manifest,
            params=min(params, MAX_COUNT),
            round_bytes=min(round_bytes, MAX_BYTES),
            memory=min(memory, MAX_BYTES),
            device=device,
            issued=0.0,
        )

    def close(self) -> None:
        """Stop reporting. The last report stays with the seeds until they forget it."""
        self._running.cancel()
        self._looking.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        reported = None
        while True:
            await asyncio.sleep(LOOK_S)
            own = self._directory.own()
            if own is None or (loop.time() < due and own.addresses == reported):
                continue
            due = loop.time() + REPORT_S
            reported = own.addresses
            try:
                await self._host.find_seeds()
                await self._report()
            except NetworkError as error:
                log.debug("this node was not reported to the bootstrap nodes: %s", error)
            except Exception as error:  # a bug must not make this node unfindable
                self._host.internal_errors.caught("directory", error)

    async def _report(self) -> None:
        own = self._directory.own()
        if own is None:
            return
        record = seal(own, self._identity)
        known = self._directory.members()
        for seed, addresses in self._host.seeds().items():
            try:
                opening = self._host.open(seed, SEED_PROTOCOL, addresses=addresses, timeout=OPEN_S)
                with contextlib.closing(await opening) as stream:
                    members = await ask_seed(stream, self._swarm, record)
                if self._announced is not None and own.state not in GONE:
                    await self._announce(seed, addresses, self._announced)
                new = [one for one in members if one.peer not in known and one.peer != own.peer]
                strangers = addresses_of(new)
                if strangers:
                    self._host.remember(strangers)
                    await self._host.meet(strangers)
            except (NetworkError, MessageError) as error:
                log.debug("this node was not reported to bootstrap node %s: %s", short(seed), error)

    async def _announce(self, seed: str, addresses: Sequence[str], announced: Announcement) -> None:
        """Announce the swarm to a seed, after this node's record.

        Raises NetworkError or MessageError.
        """
        sealed = seal(announced.model_copy(update={"issued": time.time()}), self._identity)
        stream = await self._host.open(seed, SWARMS_PROTOCOL, addresses=addresses, timeout=OPEN_S)
        if reason := (await ask_swarms(stream, SwarmsRequest(announcement=sealed))).reason:
            log.warning("bootstrap node %s does not list this swarm: %s", short(seed), reason)


async def ask_swarms(stream: Stream, request: SwarmsRequest) -> SwarmsReply:
    with contextlib.closing(stream):
        return await ask(stream, request, SwarmsReply, ANSWER_S)
