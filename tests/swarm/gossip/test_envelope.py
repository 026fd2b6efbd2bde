"""Gossip envelopes: round trips, compression with its limits, and every wrong message with its own
reason.
"""

import os
import tracemalloc
import zlib

import msgpack
import pytest

from shoal.swarm.errors import MessageError
from shoal.swarm.gossip.envelope import (
    Body,
    BodyAnnouncement,
    GossipEnvelope,
    content_of,
    expand,
    make_announcement,
    make_body,
    make_envelope,
    open_body,
    open_envelope,
    room_for,
)
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import swarm_id
from shoal.swarm.topics.rollout import Rollout
from shoal.swarm.wire.envelope import MAX_MESSAGE, pack, seal
from tests.support.gossip_nodes import SWARM, rollout_of
from tests.support.reasons import raises_for

ME = Identity.ephemeral()
ROOM = room_for(Rollout)


def rollout(**changes):
    return rollout_of(ME.peer_id, **{"nonce": bytes(16), **changes})


def opened(data):
    """Decode data as the node does with data from the network."""
    envelope = open_envelope(data, SWARM, ROOM)
    return open_body(envelope.encoding, envelope.size, envelope.body, Rollout, BodyAnnouncement)


def enveloped(body, **changes):
    return pack(
        GossipEnvelope(
            **{
                "swarm": SWARM,
                "encoding": body.encoding,
                "size": body.size,
                "body": body.data,
                **changes,
            }
        )
    )


def plain(sealed):
    return Body("plain", len(sealed), sealed)


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def sealed_bytes(payload, kind="rollout", version=1):
    return msgpack.packb([ME.peer_id, payload, ME.sign(f"shoal/{kind}/{version}", payload)])


def reason_of(data):
    with pytest.raises(MessageError) as caught:
        opened(data)
    assert str(caught.value).isprintable()
    return caught.value.reason


def test_round_trip():
    record = rollout()
    found = opened(make_envelope(SWARM, make_body(record, ME)))
    assert (found.author, found.message, found.content) == (
        ME.peer_id,
        record,
        content_of(ME.peer_id, record),
    )


def test_text_is_compressed_and_what_would_grow_is_not(monkeypatch):
    text = make_body(rollout(completions=("again and again " * 1000, "")), ME)
    assert text.encoding == "zlib"
    assert len(text.data) < text.size / 10
    monkeypatch.setattr(zlib, "compress", lambda data, level: data + b"more")
    noise = make_body(rollout(), ME)
    assert (noise.encoding, noise.data) == ("plain", seal(rollout(), ME))


def test_what_does_not_fit_is_announced():
    texts = tuple(os.urandom(16_384).hex() for _ in range(20))
    record = rollout(completions=texts, finish=("stop",) * 20)
    body = make_body(record, ME)
    assert len(body.data) > MAX_MESSAGE
    assert make_envelope(SWARM, body) is None
    data = make_announcement(SWARM, body, ME)
    announcement = opened(data).message
    assert open_body(announcement.encoding, announcement.size, body.data, Rollout).message == record
    assert len(data) < 1024


def test_the_largest_envelope_is_gossiped():
    body = Body("plain", 9, bytes(MAX_MESSAGE - 512))
    assert len(make_envelope(SWARM, body)) <= MAX_MESSAGE
    assert make_envelope(SWARM, Body("plain", 9, bytes(MAX_MESSAGE - 511))) is None


def test_content_is_what_was_said_not_how_it_was_packed():
    payload = pack(rollout())
    usual = sealed_bytes(payload)
    # The same three parts, the signature under a longer header: other bytes, the same record.
    other = usual[: -(64 + 2)] + b"\xc5\x00\x40" + usual[-64:]
    assert usual != other
    assert opened(enveloped(plain(usual))).content == opened(enveloped(plain(other))).content


NESTED = rollout().model_dump() | {"finish": []}
for _ in range(40):
    NESTED["finish"] = [NESTED["finish"]]

HOSTILE = {
    "empty": (b"", "truncated"),
    "cut envelope": (enveloped(make_body(rollout(), ME))[:-5], "truncated"),
    "cut record": (enveloped(plain(seal(rollout(), ME)[:-5])), "truncated"),
    "cut payload": (enveloped(plain(sealed_bytes(pack(rollout())[:-5]))), "truncated"),
    "cut zlib": (enveloped(Body("zlib", 4000, zlib.compress(bytes(4000))[:-6])), "truncated"),
    "shorter than it says": (enveloped(plain(seal(rollout(), ME)), size=9999), "truncated"),
    "too long a message": (
        enveloped(Body("plain", 9, bytes(MAX_MESSAGE - 512))) + bytes(512),
        "oversized",
    ),
    "claims too much": (enveloped(make_body(rollout(), ME), size=ROOM + 1), "oversized"),
    "too long a text": (
        enveloped(
            plain(
                sealed_bytes(
                    msgpack.packb(
                        [
                            "rollout",
                            1,
                            rollout().model_dump()
                            | {"completions": b"\x01\x80\x00\x00" + bytes(32_769)},
                        ]
                    )
                )
            )
        ),
        "oversized",
    ),
    "nested": (b"\x91" * 200_000, "malformed"),
    "nested maps": (b"\x81\xa1a" * 60_000, "malformed"),
    "nested record": (enveloped(plain(b"\x91" * 200_000)), "nested"),
    "nested payload": (
        enveloped(plain(sealed_bytes(msgpack.packb(["rollout", 1, NESTED])))),
        "malformed",
    ),
    "version of the envelope": (msgpack.packb(["parcel", 2, {}]), "version"),
    "version of the record": (
        enveloped(plain(sealed_bytes(msgpack.packb(["rollout", 2, {}]), version=2))),
        "version",
    ),
    "another kind": (
        enveloped(plain(sealed_bytes(msgpack.packb(["member", 1, {}]), "member"))),
        "kind",
    ),
    "no envelope": (seal(rollout(), ME), "malformed"),
    "forged": (enveloped(plain(flipped(seal(rollout(), ME)))), "forged"),
    "another's": (enveloped(plain(seal(rollout(), Identity.ephemeral()))), "forged"),
    "another swarm": (
        enveloped(make_body(rollout(), ME), swarm=swarm_id(b"other")),
        "foreign-swarm",
    ),
    "bomb": (enveloped(Body("zlib", 1000, zlib.compress(bytes(100 << 20), 9))), "bomb"),
    "no zlib": (enveloped(Body("zlib", 4, b"junk")), "malformed"),
    "longer than it says": (enveloped(plain(seal(rollout(), ME)), size=9), "malformed"),
    "a rest after zlib": (
        enveloped(Body("zlib", 9, zlib.compress(bytes(9)) + b"rest")),
        "malformed",
    ),
    "missing field": (
        enveloped(plain(sealed_bytes(msgpack.packb(["rollout", 1, {}])))),
        "malformed",
    ),
}


@pytest.mark.parametrize(("data", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_hostile_is_refused_by_its_reason(data, reason):
    assert reason_of(data) == reason


def test_a_bomb_costs_neither_time_nor_memory():
    bomb = zlib.compress(bytes(200 << 20), 9)
    tracemalloc.start()
    try:
        with raises_for("bomb", MessageError):
            expand("zlib", 1000, bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(bomb) + 100_000
