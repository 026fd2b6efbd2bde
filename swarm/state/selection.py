"""Choosing among the snapshots that several peers offer.

Nobody should begin from weights on one stranger's word, so a second peer has to confirm them: by
offering the same id, or, where no two hold the same weights, by a sample of chunks that lies near.
Peers of one address range count as one wherever peers of several have answered. The later of two
confirmed snapshots is taken. Why, and what this cannot find: docs/internals.md, "Offers".
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from shoal.optim.codecs.floats import FLOAT32
from shoal.swarm.errors import NetworkError
from shoal.swarm.p2p.stream import short
from shoal.swarm.state.download import download, fetch_digests
from shoal.swarm.state.snapshot import chunks_in
from shoal.swarm.wire.envelope import CHUNK, fresh_nonce
from shoal.swarm.wire.messages import StateHeader, StateRequest

if TYPE_CHECKING:
    from shoal.swarm.p2p.host import Host

from shoal.swarm.state.offers import (
    CONFIRMING_PEERS,
    SnapshotOffer,
    _limit,
    _ranges,
    _spread,
    agreed,
    collect,
    plausible,
)

SAMPLE_CHUNKS = 4  # chunks that are compared
# of the larger norm: unrelated weights are 1.4 apart, opposite ones 2, nothing and something 1
MAX_NEAR_DISTANCE = 0.8

log = logging.getLogger(__name__)


class UnconfirmedError(NetworkError):
    """No two peers' weights are near each other."""


async def choose(
    host: Host,
    request: StateRequest,
    offers: Sequence[SnapshotOffer],
    check: Callable[[str, StateHeader], None],
    *,
    equal: bool,
    patience: float,
    strict: bool,
) -> list[SnapshotOffer]:
    """Return the offers of the snapshot to take.

    ``equal``: peers of this method hold the same weights. ``strict``: where offers
    are of several address ranges, one of another range must confirm weights that are near others'.

    Raises UnconfirmedError if several peers answered, and no two hold weights near each other;
    NetworkError if they are gone.
    """
    found = agreed(offers)
    if len(offers) < CONFIRMING_PEERS or (found and _spread(found, offers)):
        return found or list(offers)
    later = max(offer.header.round for offer in plausible(offers))
    behind = [offer.source for offer in offers if offer.header.round < later]
    if equal and behind and not found:
        nbytes = offers[0].header.nbytes
        again, _ = await collect(
            host, request.model_copy(update={"since": later}), behind, check, patience, nbytes
        )
        # A peer that has reached the later round may have gone beyond it, and offers that now.
        latest = {offer.peer: offer for offer in (*offers, *again)}
        for every in ([*offers, *again], list(latest.values())):
            if (found := agreed(every)) and _spread(found, every):
                return found
    best = await _confirmed(host, request.swarm, offers, strict)
    return [offer for offer in offers if offer.id == best.id]


async def _confirmed(
    host: Host, swarm: str, offers: Sequence[SnapshotOffer], strict: bool
) -> SnapshotOffer:
    """Return the offer of the latest believed round to whose weights another peer's are near."""
    samples = await _samples(host, swarm, offers)
    compared = [offer for offer in offers if offer.peer in samples]
    if not compared:
        raise NetworkError("the peers that offered weights are gone.")
    if len(compared) == 1:
        return compared[0]
    near = _near(compared, samples)
    limit = _limit(compared)
    place = {one.peer: number for number, one in enumerate(offers)}

    def rank(one: SnapshotOffer) -> tuple[int, int, bool, int, int]:
        there = near[one.peer]
        round = one.header.round
        return (
            _ranges(there),
            len(there),
            round <= limit,
            -min(place[other.peer] for other in there),
            round,
        )

    best = max(compared, key=rank)
    is_confirmed = len(near[best.peer]) >= CONFIRMING_PEERS
    is_spread = not strict or _spread(near[best.peer], compared)
    if not is_confirmed or not is_spread:
        names = " and ".join(short(one.peer) for one in compared[:2])
        raise UnconfirmedError(
            f"peers {names} serve weights that lie far from each other, and no other peer confirms "
            "either."
        )
    return best


def _near(
    offers: Sequence[SnapshotOffer], samples: Mapping[str, torch.Tensor]
) -> dict[str, list[SnapshotOffer]]:
    """Return for each peer the offers whose samples are near its own, and its own."""
    near = {one.peer: [one] for one in offers}
    for one, other in itertools.combinations(offers, 2):
        apart = distance(samples[one.peer], samples[other.peer])
        log.info(
            "the weights of peers %s and %s are %.3g apart",
            short(one.peer),
            short(other.peer),
            apart,
        )
        if apart <= MAX_NEAR_DISTANCE:
            near[one.peer].append(other)
            near[other.peer].append(one)
    return near


async def _samples(
    host: Host, swarm: str, offers: Sequence[SnapshotOffer]
) -> dict[str, torch.Tensor]:
    """Return the slow weights of each peer in the same random chunks, but of those that fail."""
    in_slow = FLOAT32.nbytes(offers[0].header.shapes)  # all have the same: ``check`` saw to it
    count = chunks_in(in_slow)
    chunks = sorted(random.Random(fresh_nonce()).sample(range(count), min(SAMPLE_CHUNKS, count)))
    samples: dict[str, torch.Tensor] = {}
    for offer in sorted(offers, key=lambda one: -one.header.round):
        try:
            samples[offer.peer] = await _sample(host, swarm, offer, chunks, in_slow)
        except NetworkError as error:
            log.info("no sample of the weights of peer %s: %s", short(offer.peer), error)
    return samples


async def _sample(
    host: Host, swarm: str, offer: SnapshotOffer, chunks: Sequence[int], in_slow: int
) -> torch.Tensor:
    """Fetch the slow weights in ``chunks``: float32, one after another. Raises NetworkError."""
    header = offer.header
    sources = [offer.source]
    digests = await fetch_digests(host, swarm, header, sources)
    sink = SampleSink()
    await download(host, swarm, header, digests, sources, sink, chunks)
    data = b"".join(sink.chunks[chunk][: max(in_slow - chunk * CHUNK, 0)] for chunk in chunks)
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


class SampleSink:
    """Sink that keeps some chunks of a snapshot."""

    def __init__(self) -> None:
        self.chunks: dict[int, bytes] = {}

    @property
    def have(self) -> set[int]:
        return set(self.chunks)

    def write(self, chunk: int, data: memoryview) -> None:
        self.chunks[chunk] = bytes(data)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the distance of two vectors over the larger norm: 0 if both are zero, infinite if a
    value is not finite.
    """
    larger = max(float(one.double().norm()), float(other.double().norm()))
    if not math.isfinite(larger):
        return math.inf
    return float((one.double() - other.double()).norm()) / larger if larger else 0.0
