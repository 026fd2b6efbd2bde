"""Decoders of what peers send and of links: messages, records, rosters, gossip, addresses."""

import functools
import types
import zlib

import msgpack

from shoal.node.config.settings import load as load_settings
from shoal.node.runtime.join import new_manifest
from shoal.node.verify.material import decode_material as decode_material
from shoal.swarm.access.invitation import admission, entry_of, issue
from shoal.swarm.access.link import Link
from shoal.swarm.errors import AdmissionError, LinkError, MessageError
from shoal.swarm.exchange.group.roster import encode_list, open_roster
from shoal.swarm.gossip import envelope
from shoal.swarm.manifest import Manifest, is_public, open_manifest, swarm_id, title_of
from shoal.swarm.membership.records import MemberValidator, make_record, open_record
from shoal.swarm.membership.swarm_list import read_listed
from shoal.swarm.p2p import multiaddr
from shoal.swarm.topics.rollout import Rollout
from shoal.swarm.wire.envelope import (
    Message,
    pack,
    pack_names,
    peek,
    seal,
    unpack,
    unpack_names,
    unseal,
)
from shoal.swarm.wire.messages import Announcement, GroupFormed, GroupReady, ListedSwarm, Member
from shoal.verification.consensus.log import Log, decode_log
from shoal.verification.consensus.log import encode as encode_log
from shoal.verification.consensus.records import Signed, VoteRecord
from shoal.verification.consensus.records import decode as decode_record
from shoal.verification.consensus.reputation import Standing, Table
from shoal.verification.consensus.sortition import Electorate
from tests.security.decoder import ME, OTHER, SWARM, TINY, Decoder, one, text
from tests.security.hostile import (
    INVITE,
    MSGPACK,
    PARTS,
    frames,
)
from tests.support.message_kinds import good, kinds


@functools.cache
def manifest(**changes):
    plain = open_manifest(
        new_manifest(load_settings(None, {"task.options": {**TINY, "batch": 1}}), ME, "0" * 64)
    )
    return seal(
        Manifest.model_validate(
            {**{name: getattr(plain, name) for name in Manifest.model_fields}, **changes}
        ),
        ME,
    )


def member(identity=ME):
    return good(Member).model_copy(update={"peer": identity.peer_id})


def messages():
    for kind in kinds():
        if issubclass(kind, Message) and kind is not Manifest:
            yield one(
                f"message {kind.KIND}",
                "swarm/wire/envelope.py:_kind swarm/wire/envelope.py:_decode",
                lambda data, kind=kind: unpack(data, kind),
                lambda kind=kind: pack(good(kind)),
                MSGPACK,
                MessageError,
                tree=False,
            )
        elif kind is not Manifest:
            yield one(
                f"record {kind.KIND}",
                "verification/consensus/records.py:decode",
                decode_record,
                lambda kind=kind: good(kind).encoded,
                MSGPACK,
                ValueError,
                sentence=False,
                tree=False,
                sound=lambda record: decode_record(record.encoded) == record,
            )


def listed():
    sealed = manifest(public=True)
    fields = {"swarm": swarm_id(sealed), "peer": ME.peer_id, "manifest": sealed}
    return pack(
        good(ListedSwarm).model_copy(
            update={
                "announcement": seal(good(Announcement).model_copy(update=fields), ME),
                "contacts": (seal(member().model_copy(update={"swarm": swarm_id(sealed)}), ME),),
            }
        )
    )


def log():
    records = [good(kind) for kind in kinds() if issubclass(kind, VoteRecord)]
    voters = Electorate(8, bytes(32), {ME.peer_id: "o"}, frozenset([bytes(32)]))
    everybody = Electorate(9, bytes(32), {OTHER.peer_id: "o"}, None)
    table = Table(7, {ME.peer_id: Standing(score=-5, until=9, bans=1)}, {})
    return encode_log(
        Log(table, (voters, everybody), tuple(Signed(record, bytes(64)) for record in records))
    )


@functools.cache
def readies():
    mine, theirs = (seal(good(GroupReady), one) for one in (ME, OTHER))
    return mine, theirs


def roster(data):
    formed = good(GroupFormed).model_copy(update={"members": data})
    return open_roster(formed, OTHER.peer_id, readies()[0], 8)


def dht(data):
    """Judge what a stranger asks this node to store, as a value and as its subkey."""
    found = False
    for value, subkey in (
        (data, msgpack.packb(ME.peer_id)),
        (msgpack.packb(make_record("", member(), ME)), data),
    ):
        found |= MemberValidator(SWARM).validate(
            types.SimpleNamespace(value=value, subkey=subkey, key=bytes(20), expiration_time=1.0)
        )
    return found


def body(data):
    return envelope.open_body("plain", len(data), data, Rollout)


def packed_body(data):
    return envelope.open_body("zlib", len(rollout()), data, Rollout)


@functools.cache
def rollout():
    return seal(good(Rollout).model_copy(update={"peer": ME.peer_id}), ME)


LINK = f"shoal://{SWARM}?peer=/ip4/203.0.113.5/tcp/4001/p2p/{ME.peer_id}&peer=/dns/a.example/udp/4001/quic-v1/p2p/{ME.peer_id}"


INVITED = issue(ME, SWARM, lives=1e6, uses=2)


ADDRESS = multiaddr.to_bytes(f"/ip4/203.0.113.5/tcp/4001/p2p/{ME.peer_id}")


def wire_decoders():
    return [
        *messages(),
        one(
            "sealed message",
            "swarm/wire/envelope.py:_decode",
            lambda data: unseal(data, Member),
            lambda: seal(member(), ME),
            MSGPACK,
            MessageError,
            tree=False,
        ),
        one(
            "fields of a sealed message",
            "",
            lambda data: peek(data, 4096),
            lambda: seal(member(), ME),
            MSGPACK,
            MessageError,
        ),
        one(
            "manifest",
            "swarm/manifest.py:open_manifest",
            open_manifest,
            manifest,
            MSGPACK,
            MessageError,
        ),
        one(
            "title of a manifest",
            "swarm/manifest.py:title_of",
            title_of,
            manifest,
            MSGPACK,
            MessageError,
        ),
        one(
            "whether it is public",
            "swarm/manifest.py:is_public",
            is_public,
            manifest,
            MSGPACK,
            MessageError,
        ),
        one(
            "listed swarm",
            "swarm/membership/swarm_list.py:read_listed",
            lambda data: read_listed(data, f"/ip4/1.2.3.4/tcp/5/p2p/{ME.peer_id}"),
            listed,
            MSGPACK,
            MessageError,
        ),
        one(
            "record of the directory",
            "swarm/membership/records.py:open_record",
            open_record,
            lambda: make_record("", member(), ME),
            MSGPACK,
        ),
        Decoder(
            "value to store",
            ("swarm/membership/records.py:_unpacked",),
            dht,
            lambda: [msgpack.packb(make_record("", member(), ME)), msgpack.packb("subkey")],
            MSGPACK,
        ),
        one(
            "members of a group",
            "swarm/exchange/group/roster.py:open_list swarm/exchange/group/roster.py:open_roster",
            roster,
            lambda: encode_list(readies()),
            frames(2),
            MessageError,
        ),
        one(
            "gossiped record",
            "swarm/gossip/envelope.py:open_body",
            body,
            rollout,
            MSGPACK,
            MessageError,
        ),
        one(
            "gossiped envelope",
            "swarm/gossip/envelope.py:open_envelope",
            lambda data: envelope.open_envelope(data, SWARM, 1 << 20),
            lambda: envelope.make_envelope(
                SWARM, envelope.Body("plain", len(rollout()), rollout())
            ),
            MSGPACK,
            MessageError,
        ),
        one(
            "compressed record",
            "swarm/gossip/envelope.py:expand",
            packed_body,
            lambda: zlib.compress(rollout()),
            None,
            MessageError,
        ),
        Decoder(
            "link",
            ("swarm/access/link.py:Link.parse", "swarm/access/address.py:_is_relay_id"),
            text(Link.parse),
            lambda: [
                LINK.encode(),
                f"{LINK}&invite={INVITED}".encode(),
                LINK.replace(
                    "/p2p/",
                    "/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N/p2p-circuit/p2p/",
                    1,
                ).encode(),
            ],
            PARTS,
            (LinkError,),
        ),
        one(
            "invitation",
            "swarm/access/invitation.py:_parts swarm/access/invitation.py:admission",
            text(lambda invite: admission(invite, OTHER)),
            lambda: INVITED.encode(),
            INVITE,
            AdmissionError,
        ),
        one(
            "shown invitation",
            "swarm/access/invitation.py:entry_of",
            lambda data: entry_of(data, OTHER.peer_id, SWARM, ME.peer_id),
            lambda: admission(INVITED, OTHER),
            MSGPACK,
        ),
        one(
            "address",
            "swarm/p2p/multiaddr.py:to_text",
            multiaddr.to_text,
            lambda: ADDRESS,
            None,
            ValueError,
            sentence=False,
        ),
        one(
            "address in words",
            "swarm/p2p/multiaddr.py:peer_bytes",
            text(multiaddr.to_bytes),
            lambda: multiaddr.to_text(ADDRESS).encode(),
            PARTS,
            ValueError,
            sentence=False,
        ),
        one("origin", "", multiaddr.origin, lambda: ADDRESS[:8]),
        one(
            "log of verification",
            "verification/consensus/log.py:_frames",
            decode_log,
            log,
            frames(4),
            ValueError,
            sound=lambda log: decode_log(encode_log(log)) == log,
            sentence=False,
        ),
        one(
            "names of parameters",
            "swarm/wire/envelope.py:unpack_names",
            unpack_names,
            lambda: pack_names(("0.weight", "0.bias")),
            None,
            MessageError,
        ),
    ]
