"""Messages: round trips, and whatever a stranger may send instead."""

import time
import tracemalloc
import types
import typing

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, ValidationError

from shoal.swarm.errors import MessageError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Manifest, swarm_id
from shoal.swarm.wire import envelope
from shoal.swarm.wire.envelope import (
    ENVELOPE,
    MAX_TENSORS,
    MIN_RATE,
    Message,
    pack,
    seal,
    unpack,
    unseal,
)
from shoal.swarm.wire.messages import (
    Abort,
    Answer,
    ManifestReply,
    Member,
    Offer,
    OutcomeRequest,
    Ready,
    StateHeader,
)
from tests.support.message_kinds import Leaf
from tests.support.records import member_of

ME, OTHER = Identity.ephemeral(), Identity.ephemeral()
SWARM = swarm_id(b"")
KINDS = tuple(
    kind
    for kind in Message.__subclasses__()
    if kind.__module__ in ("shoal.swarm.wire.messages", "shoal.swarm.manifest")
)


def values(annotation, rules=()):
    """Return a strategy for what a field may hold, by its type and bounds; long ones are not drawn
    as long as they may be.
    """
    origin, parts, leaf = (
        typing.get_origin(annotation),
        typing.get_args(annotation),
        Leaf((), annotation, tuple(rules)),
    )
    least, most = leaf.bound("min_length") or 0, leaf.bound("max_length")
    checks = [rule.func for rule in rules if isinstance(rule, AfterValidator)]
    if origin is typing.Annotated:
        return values(
            parts[0],
            [*rules, *(rule for more in parts[1:] for rule in getattr(more, "metadata", [more]))],
        )
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(part, rules) for part in parts))
    if parts[1:] == (Ellipsis,):
        return st.lists(values(parts[0]), min_size=least, max_size=min(most, 8)).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, parts))
    if origin is typing.Literal:
        return st.sampled_from(parts)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return built(annotation)
    if annotation is int:
        return st.integers(leaf.bound("ge"), leaf.bound("le") or leaf.bound("lt") - 1)
    if annotation is float:
        found = st.floats(leaf.bound("ge"), leaf.bound("le"))
        return (
            st.just(0.0) | found.filter(lambda rate: rate >= MIN_RATE)
            if envelope._rate in checks
            else found
        )
    if annotation is bytes:
        return st.binary(min_size=least, max_size=min(most, 300))
    if annotation is str and envelope._peer_id in checks:
        return st.just(ME.peer_id)
    if annotation is str and leaf.bound("pattern"):
        return st.from_regex(leaf.bound("pattern"), fullmatch=True).filter(
            lambda text: len(text) <= (most or len(text))
        )
    if annotation is str:
        return st.text(
            st.characters(categories=["L", "N", "P", "S"]), min_size=least, max_size=most
        )
    return {type(None): st.none(), bool: st.booleans()}[annotation]


def built(kind):
    fields = {
        name: values(field.annotation, field.metadata) for name, field in kind.model_fields.items()
    }
    return st.builds(kind, **fields | TOGETHER.get(kind, {}))


TOGETHER = {Member: {"shard": st.integers(0, 9), "shards": st.integers(10, 2**53)}}
ALL = st.one_of(
    built(kind)
    for kind in KINDS
    if kind is not Manifest  # which has a test of its own
)


def member(**changes):
    usual = {
        "swarm": SWARM,
        "addresses": ("/ip4/1.2.3.4/tcp/5",),
        "round": 1,
        "step": 2,
        "loss": 1.5,
        "steps_per_s": 3.0,
    }
    return member_of(ME.peer_id, **{**usual, "issued": time.time(), **changes})


def raw(message, **changes):
    """Pack a message with fields changed behind the schema's back; ... removes one."""
    fields = {**message.model_dump(), **changes}
    return msgpack.packb(
        [message.KIND, message.VERSION, {k: v for k, v in fields.items() if v is not ...}]
    )


def refused(data, *types, says=None):
    with pytest.raises(MessageError, match=says) as caught:
        unpack(data, *types or (Member,))
    assert caught.value.reason in (
        "malformed",
        "oversized",
        "truncated",
        "nested",
        "kind",
        "version",
    )
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_every_kind_is_covered_and_has_its_own_name():
    assert len({kind.KIND for kind in KINDS}) == len(KINDS) == 34
    assert Manifest in KINDS


@given(ALL)
def test_round_trip(message):
    assert unpack(pack(message), *KINDS) == message
    assert unseal(seal(message, ME), *KINDS) == (ME.peer_id, message)
    assert len(seal(message, ME)) - len(pack(message)) <= ENVELOPE


@given(ALL, st.data())
def test_sealed_admits_no_change_to_signer_content_or_signature(message, data):
    sealed = seal(message, ME)
    at = data.draw(st.integers(0, len(sealed) - 1))
    flipped = sealed[:at] + bytes([sealed[at] ^ data.draw(st.integers(1, 255))]) + sealed[at + 1 :]
    for bad in (flipped, sealed[:at], sealed + b"\x00"):
        with pytest.raises(MessageError):
            unseal(bad, *KINDS)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
anything = st.recursive(
    scalars | st.text(max_size=9) | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=9) | st.integers(0, 9), inner, max_size=5)
    ),
    max_leaves=20,
)


def test_forgeries_are_refused():
    sealed = seal(member(), ME)
    _, payload, signature = msgpack.unpackb(sealed)
    for signer in (OTHER.peer_id, "", "x" * 52):
        with pytest.raises(MessageError, match="signature"):
            unseal(msgpack.packb([signer, payload, signature]), Member)
    with pytest.raises(MessageError, match="another peer than its peer"):
        unseal(seal(member(), OTHER), Member)
    # A signature over the same bytes in another context is not one over the message.
    with pytest.raises(MessageError, match="signature"):
        unseal(msgpack.packb([ME.peer_id, payload, ME.sign("shoal/offer/1", payload)]), Member)
    with pytest.raises(MessageError, match="not \\[peer id"):
        unseal(msgpack.packb([ME.peer_id, payload]), Member)
    with pytest.raises(MessageError, match="kind 'member' came in place of manifest"):
        unseal(sealed, Manifest)


def test_kind_and_version_are_named_before_anything_else():
    request = OutcomeRequest(nonce=bytes(16))
    refused(
        pack(request),
        Ready,
        Abort,
        says="kind 'outcome-request' came in place of abort or ready: run the same shoal",
    )
    for version, where in ((2, "here"), (0, "there")):
        says = f"has version {version}, this node speaks 1: update shoal {where}"
        refused(
            msgpack.packb(["outcome-request", version, {"other": 1}]), OutcomeRequest, says=says
        )
    newer = msgpack.packb(
        [ME.peer_id, msgpack.packb(["member", Member.VERSION + 1, {}]), bytes(64)]
    )
    with pytest.raises(
        MessageError, match=f"version {Member.VERSION + 1}, this node speaks {Member.VERSION}"
    ):
        unseal(newer, Member)
    refused(
        msgpack.packb(["\x1b[31m", 1, {}]), OutcomeRequest, says="came in place of outcome-request"
    )
    kind = "outcome-request"
    for head in (
        [kind.encode(), 1, {}],
        [kind, True, {}],
        [kind, "1", {}],
        [kind, 1],
        [kind, 1, {}, 2],
    ):
        refused(msgpack.packb(head), OutcomeRequest, says="not .kind, version, fields")
    refused(
        msgpack.packb(["outcome-request", 1, []]), OutcomeRequest, says="not .kind, version, fields"
    )
    refused(msgpack.packb({}), OutcomeRequest, says="does not start with a kind and version")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"round": ...}, "'round': Field required"),
        ({"extra": 1}, "'extra': Extra inputs"),
        ({"\x1b[31m" + "x" * 500: 1}, "x1b.*Extra inputs"),
        ({"round": "1"}, "'round'.*integer"),
        ({"round": True}, "'round'.*integer"),
        ({"round": 1.0}, "'round'.*integer"),
        ({"round": -1}, "'round'.*greater"),
        ({"round": 2**60}, "'round'.*less"),
        ({"loss": float("nan")}, "'loss'.*finite"),
        ({"issued": float("inf")}, "'issued'.*finite"),
        ({"loss": "1"}, "'loss'"),
        ({"name": ""}, "'name'"),
        ({"name": "x" * 65}, "'name'"),
        ({"name": "a\x1b[2J"}, "'name'.*printable"),
        ({"name": "a\u202eb"}, "'name'.*printable"),
        ({"name": b"a"}, "'name'.*string"),
        ({"peer": "x" * 52}, "'peer'.*peer id"),
        ({"swarm": "../../etc"}, "'swarm'"),
        ({"model": "0" * 63 + "G"}, "'model'"),
        ({"model": "0" * 64 + "\n"}, "'model'"),
        ({"state": "dead"}, "'state'"),
        ({"addresses": ["/a"] * 9}, "'addresses'"),
        ({"addresses": ["/a\n"]}, "'addresses.0'"),
        ({"addresses": ["/" + "a" * 256]}, "'addresses.0'"),
        ({"addresses": ["/a"] * 17}, "limits"),
        ({"shard": 1}, "shard must be below shards"),
        ({"shards": 0}, "'shards'"),
        ({"version": msgpack.ExtType(5, b"xx")}, "limits"),
        ({"issued": msgpack.Timestamp(1, 2)}, "limits"),
    ],
)
def test_the_wrong_field_is_named(changes, says):
    refused(raw(member(), **changes), says=says)


def test_size_is_checked_before_decoding(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("decoded")

    monkeypatch.setattr(envelope.msgpack, "unpackb", never)
    monkeypatch.setattr(envelope.msgpack, "Unpacker", never)
    refused(bytes(5121), Member, OutcomeRequest, says="5121 bytes where at most 5120")
    with pytest.raises(MessageError, match="5281 bytes where at most 5280"):
        unseal(bytes(5281), Member)


def test_the_limit_of_the_own_kind_holds_among_larger_ones():
    refused(
        raw(OutcomeRequest(nonce=bytes(16)), more=bytes(2000)),
        OutcomeRequest,
        Offer,
        says="where at most 1024",
    )
    with pytest.raises(MessageError, match=r"manifest-reply of 66\d+ bytes exceeds 65536"):
        pack(ManifestReply.model_construct(manifest=bytes(66_000), swarm=SWARM, reason=""))


def test_duplicate_keys_are_refused():
    packed = pack(OutcomeRequest(nonce=bytes(16)))
    head, field = packed[:-24], packed[-24:]  # fixmap of one: key (6), bin header (2), 16 bytes
    assert head[-1:] == b"\x81"
    refused(head[:-1] + b"\x82" + field * 2, OutcomeRequest, says="limits")


BOMBS = {
    "array of 2**32": b"\xdd\xff\xff\xff\xff",
    "map of 2**32": b"\xdf\xff\xff\xff\xff",
    "string of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "bytes of 4 GiB": b"\xc6\xff\xff\xff\xff",
    "extension of 4 GiB": b"\xc9\xff\xff\xff\xff\x01",
    "nested arrays": b"\x91" * 900_000,
    "nested wide arrays": b"\x9f" * 900_000,
    "nested arrays of 65535": b"\xdc\xff\xff" * 300_000,
    "nested maps": b"\x81\xa1a" * 300_000,
    "nested wide maps": b"\x8f\xa1a" * 300_000,
    "many maps": b"\x9f" + (b"\x9f" + b"\x80" * 15) * 15,
    "flat maps": b"\xdc\xff\xff" + b"\x80" * 65_535,
    "flat arrays": b"\xdd\x00\x0d\x00\x00" + b"\x90" * 0xD0000,
    "shapes of rank 0": b"\xc6\x00\x0d\x00\x00" + b"\x00" * 0xD0000,
    "shapes of rank 255": b"\xc6\x00\x0d\x00\x00" + b"\xff" * 0xD0000,
    "shapes of rank 8": b"\xc6\x00\x0c\xcc\xd2" + (b"\x08" + b"\xff" * 32) * 25_420,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_a_bomb_is_refused_quickly_and_costs_no_memory(bomb):
    offers = (
        b"\x93\xa5offer\x01\x81\xa6shapes" + bomb,
        bomb,
        b"\x93" + bomb,
        b"\x93\xa5offer\x01" + bomb,
    )
    envelopes = (*offers, b"\x93" + msgpack.packb(ME.peer_id) + bomb)
    for data in envelopes:  # imports and caches made by the first refusal are not the bomb's
        assert len(data) < Offer.LIMIT
    refused(b"", Offer)
    tracemalloc.start()
    started = time.thread_time()  # processor time: other processes do not count
    try:
        for data in offers:
            refused(data, Offer)
        for data in envelopes:
            with pytest.raises(MessageError):
                unseal(data, Offer)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20
    assert time.thread_time() - started < 5


def test_the_largest_offer_fits_its_limit():
    offer = Offer(
        swarm=SWARM,
        round=2**53,
        fragment=2**53,
        nbytes=2**40,
        shapes=((2**32 - 1, 0),) * MAX_TENSORS,
        dtype="x" * 64,
        codec="x" * 64,
        sha256=bytes(32),
        weight=0.1,
        model="f" * 64,
        nonce=bytes(16),
    )
    packed = pack(offer)
    assert len(packed) < Offer.LIMIT
    assert unpack(packed, Offer).shapes == offer.shapes


@pytest.mark.parametrize(
    "shapes",
    [
        [(1,)],
        ((1,) * 9,),
        ((-1,),),
        ((2**32,),),
        ((True,),),
        ((1.0,),),
        ((),) * 65_537,
        ((1,) * 8,) * 16_385,
    ],
)
def test_shapes_out_of_bounds(shapes):
    with pytest.raises(ValidationError):
        StateHeader(round=0, nbytes=0, shapes=shapes, dtype="float32", sha256=bytes(32))


def test_a_reason_is_cleaned_at_both_ends():
    assert (
        Abort(nonce=bytes(16), reason="two\nlines\x1b" + "x" * 600).reason
        == "two lines " + "x" * 502
    )
    got = unpack(raw(Abort(nonce=bytes(16)), reason="a\x07b"), Abort)
    assert got.reason == "a b"
    longest = Answer(verdict="refuse", reason="\U0001f41f" * 600, round=2**53)
    assert unpack(pack(longest), Answer) == longest


def test_messages_are_frozen():
    with pytest.raises(ValidationError):
        member().round = 5
