"""What a neighbour in gossip may send that is wrong: counted under its reason, passed on to nobody,
and nothing of it held. Of three members in a line the first is the liar.
"""

import asyncio
import contextlib
import os
import zlib
from types import SimpleNamespace

import pytest

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip import gossip as gossip_module
from shoal.swarm.gossip.bodies import BODY_PROTOCOL, MAX_PER_PUBLISHER, MAX_WAITING, BodyFetcher
from shoal.swarm.gossip.envelope import (
    Body,
    BodyAnnouncement,
    BodyRequest,
    GossipEnvelope,
    make_envelope,
)
from shoal.swarm.gossip.frames import MAX_TOPICS, GossipTopics, frame_of
from shoal.swarm.wire.envelope import MAX_MESSAGE, pack, seal
from tests.sim.gossip import SWARM, GossipSwarm

ELSEWHERE = "b" * 52
LINE = {0: {1}, 1: {0, 2}, 2: {1}}
FLOOD = 300
FUTURE = 10**6
"""From this number on a note is of a time to come."""


class Line:
    """A liar, the member that checks, and one behind it."""

    def __init__(self):
        self.swarm = GossipSwarm(1, 3, views=LINE)
        self.liar, self.middle, self.far = self.swarm.all
        for each in (self.middle, self.far):
            each.topic._handler = self.judged(each)
        self.swarm.run(5.0)
        assert set(self.middle.linked) == {self.liar.peer, self.far.peer}

    @staticmethod
    def judged(peer):
        def take(author, note):
            if note.number >= FUTURE:
                raise MessageError("A note was refused: it is of a time to come.", "future")
            peer.got[author, note.number] += 1

        return take

    def sealed(self, message):
        return seal(message, self.liar.host.identity)

    def note(self, number=1, **changes):
        return self.sealed(self.liar.note(number).model_copy(update=changes))

    def announcement(self, number=0, size=1000):
        return self.sealed(
            BodyAnnouncement(
                swarm=SWARM,
                peer=self.liar.peer,
                encoding="plain",
                size=size,
                nbytes=size,
                sha256=number.to_bytes(32, "big"),
            )
        )

    def send_frame(self, frame):
        async def sent():
            await self.liar.linked[self.middle.peer].stream.send(frame, 10.0)

        self.liar.host.start(sent())

    def held(self):
        """Return what the middle node still has in hand of others."""
        gossip = self.middle.gossip
        return len(gossip._unknown) + len(self.middle.topic._fetcher._wanted)


@pytest.fixture
def line():
    made = Line()
    yield made
    made.swarm.end()


def enveloped(sealed, encoding="plain", size=None, body=None):
    data = make_envelope(
        SWARM,
        Body(encoding, len(sealed) if size is None else size, sealed if body is None else body),
    )
    assert data is not None
    return data


def elsewhere(sealed):
    packed = GossipEnvelope(swarm=ELSEWHERE, encoding="plain", size=len(sealed), body=sealed)
    return pack(packed)


ENVELOPES = {
    "nothing": (lambda line: b"", "truncated"),
    "bytes at random": (lambda line: os.urandom(1000), "malformed"),
    "as many bytes as fit": (lambda line: bytes(MAX_MESSAGE), "malformed"),
    "cut short": (lambda line: enveloped(line.note())[:-1], "truncated"),
    "no envelope": (lambda line: line.note(), "malformed"),
    "no record of the topic": (
        lambda line: enveloped(line.sealed(BodyRequest(swarm=SWARM, sha256=bytes(32)))),
        "kind",
    ),
    "a claim beyond the bound": (lambda line: enveloped(line.note(), size=1 << 30), "oversized"),
    "less than it claims": (lambda line: enveloped(line.note(), size=1000), "truncated"),
    "more than it claims": (
        lambda line: enveloped(b"", "zlib", size=100, body=zlib.compress(bytes(10**6))),
        "bomb",
    ),
    "not compressed as said": (
        lambda line: enveloped(b"", "zlib", size=100, body=b"x" * 100),
        "malformed",
    ),
    "another swarm's envelope": (lambda line: elsewhere(line.note()), "foreign-swarm"),
    "another swarm's record": (
        lambda line: enveloped(line.note(swarm=ELSEWHERE)),
        "foreign-swarm",
    ),
    "another's name": (lambda line: enveloped(line.note(peer=line.far.peer)), "forged"),
    "a changed byte": (
        lambda line: enveloped(line.note()[:-1] + bytes([line.note()[-1] ^ 1])),
        "forged",
    ),
    "of a time to come": (lambda line: enveloped(line.note(FUTURE)), "future"),
    "an announcement beyond the bound": (
        lambda line: enveloped(line.announcement(size=1 << 30)),
        "oversized",
    ),
}


@pytest.mark.parametrize(("make", "reason"), ENVELOPES.values(), ids=ENVELOPES)
def test_a_bad_envelope_is_counted_and_not_passed_on(line, make, reason):
    line.liar.send(make(line))
    line.swarm.run(5.0)
    assert line.middle.gossip.refused() == {reason: 1}
    assert line.far.topic.counts["received"] == 0
    assert line.held() == 0
    assert not line.middle.got
    good = line.liar.publish()
    line.swarm.run(1.0)
    assert line.far.got[good] == 1, "one fault ends nothing"


TOO_MANY = tuple(f"note/{number}" for number in range(MAX_TOPICS + 1))
FRAMES = {
    "nothing": (b"", "truncated"),
    "beyond the bound": (bytes(MAX_MESSAGE + 2), "malformed"),
    "a topic without a name": (frame_of(MAX_TOPICS - 1, b"x"), "malformed"),
    "no message": (bytes([MAX_TOPICS]), "malformed"),
    "another swarm": (pack(GossipTopics(swarm=ELSEWHERE, topics=("note/1",))), "malformed"),
    "too many topics": (
        pack(GossipTopics.model_construct(swarm=SWARM, topics=TOO_MANY)),
        "malformed",
    ),
}


@pytest.mark.parametrize(("frame", "reason"), FRAMES.values(), ids=FRAMES)
def test_a_bad_frame_is_counted_and_ends_the_stream(line, frame, reason):
    line.send_frame(frame)
    line.swarm.run(5.0)
    assert line.middle.gossip.refused()[reason] == 1
    assert line.liar.peer not in line.middle.linked
    assert line.far.topic.counts["received"] == 0
    assert line.held() == 0


@pytest.mark.parametrize("answers", [True, False], ids=["without it", "silent"])
def test_a_body_that_never_comes_is_given_up(line, answers):
    async def silent(stream):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

    if not answers:
        line.liar.host.serve(BODY_PROTOCOL, silent)
    line.liar.send(enveloped(line.announcement()))
    line.swarm.run(1.0)
    if not answers:
        assert line.held() == 1
    line.swarm.run(120.0)
    assert line.middle.gossip.refused() == {"unavailable": 1}
    assert line.held() == 0
    assert not line.middle.got


def test_a_flood_of_announcements_goes_no_further(line):
    line.liar.send(*(enveloped(line.announcement(number)) for number in range(FLOOD)))
    line.swarm.run(1.0)
    assert line.held() <= MAX_PER_PUBLISHER
    line.swarm.run(120.0)
    refused = line.middle.gossip.refused()
    assert refused["quota"] + refused["unavailable"] == FLOOD
    assert line.far.topic.counts["received"] == refused["unavailable"] < FLOOD / 2
    assert line.held() == 0


@pytest.mark.slow(reason="a million exceptions take some seconds")
def test_a_million_announced_ids_are_not_held():
    counted = []
    fetcher = BodyFetcher(None, None, counted.append)
    refused = 0
    for number in range(10**6):
        announced = SimpleNamespace(
            sha256=number, nbytes=9, size=9, encoding="plain", peer="a liar"
        )
        try:
            fetcher.want(f"key {number % 100}", announced)
        except MessageError:
            refused += 1
    assert len(fetcher._wanted) == MAX_WAITING
    assert refused + len(counted) + MAX_WAITING == 10**6


def test_ids_seen_are_few_and_the_newest(line, monkeypatch):
    seen = line.middle.topic._seen
    for number in range(3 * gossip_module.REMEMBERED):
        seen[number.to_bytes(32, "big")] = None
    assert len(seen) == gossip_module.REMEMBERED
    line.liar.send(*[enveloped(line.note())] * 2)
    line.swarm.run(2.0)
    assert line.middle.gossip.refused() == {"replayed": 1}
    assert sum(line.far.got.values()) == 1
