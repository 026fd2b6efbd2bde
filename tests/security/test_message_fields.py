"""Every field of every message, at its bounds and beyond: it is taken, or refused in one sentence
with a reason that is counted.

The manifest has the same for itself, with all that a command makes of it (`test_manifest_fields`).
"""

import itertools
import math
import tracemalloc

import msgpack
import pytest

from shoal.swarm.errors import MessageError
from shoal.swarm.manifest import Manifest
from shoal.swarm.wire.envelope import MAX_DIMS, MAX_RANK, MAX_TENSORS, Message, pack, unpack
from shoal.verification.consensus.records import decode
from tests.support.message_kinds import ME, good, kinds, leaves

KINDS = [kind for kind in kinds() if kind is not Manifest]
NUMBERS = (
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    1,
    0.5,
    2**31,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    5e-324,
    1.7e308,
    -1.7e308,
    True,
    None,
)
OTHERS = (
    "",
    "x" * 70,
    "\x1b[2J",
    b"",
    b"x" * 70,
    b"\xff" * 70,
    (),
    (0,),
    ((0,),),
    {},
    {"x": 0},
    (((((((((),),),),),),),),),
)
MILLION = {
    "numbers": [0] * 10**6,
    "pairs": dict.fromkeys(range(10**6), 0),
    "text": "x" * 10**6,
    "bytes": bytes(10**6),
}
PACKED = {name: msgpack.packb(value) for name, value in MILLION.items()}
REASONS = ("malformed", "oversized", "truncated", "nested")
BY_HAND = {"shapes", "tokens", "logps", "completions", "finish"}
"""Fields that travel as one byte string, which is read by hand
(`test_what_is_read_by_hand_has_its_bounds`).
"""
BY_LIMIT = {"parcel": {"body"}}
"""Bounded by the size of the message alone."""
TOGETHER = {
    ("member", "shard"): {"shards": 2**53},
    ("invitation", "uses"): {"peer": None, "key": ME},
}
"""What else has to change for a field to be at its bounds."""


each = pytest.mark.parametrize("kind", KINDS, ids=[kind.KIND for kind in KINDS])


def bounded(kind):
    """Return the parts of its fields that have bounds of their own."""
    return [
        leaf
        for leaf in leaves(kind)
        if leaf.states and leaf.path[0] not in BY_HAND | BY_LIMIT.get(kind.KIND, set())
    ]


def raw(kind, packed):
    """Return the bytes of a message whose fields are packed already."""
    if issubclass(kind, Message):
        head = (
            b"\x93"
            + msgpack.packb(kind.KIND)
            + msgpack.packb(kind.VERSION)
            + msgpack.Packer().pack_map_header(len(packed))
        )
        return head + b"".join(msgpack.packb(name) + value for name, value in packed.items())
    head = msgpack.Packer().pack_array_header(1 + len(packed))
    return head + msgpack.packb(f"shoal/verification/1/{kind.KIND}") + b"".join(packed.values())


def fields_of(kind):
    return {name: msgpack.packb(value) for name, value in good(kind).model_dump().items()}


def changed(value, path, new):
    """Return a dumped value with ``new`` in place of what is at ``path``."""
    if not path:
        return new
    if isinstance(value, dict):
        return {**value, path[0]: changed(value[path[0]], path[1:], new)}
    return tuple(
        changed(part, path[1:], new) if place == path[0] else part
        for place, part in enumerate(value)
    )


def with_value(kind, leaf, new, **others):
    name, *inside = leaf.path
    dumped = {**good(kind).model_dump(), **others}
    dumped[name] = changed(dumped[name], inside, new)
    return raw(kind, {field: msgpack.packb(value) for field, value in dumped.items()})


def taken(kind, data):
    """Return the message in ``data``, or None if it is refused as it should be."""
    if not issubclass(kind, Message):
        try:
            record = decode(data)
        except ValueError:
            return None
        assert decode(record.encoded) == record
        return record
    refused = None
    try:
        found = unpack(data, kind)
    except MessageError as error:
        refused = error
    if refused is not None:
        said = str(refused)
        assert refused.reason in REASONS
        assert said.isprintable()
        assert said.endswith(("shoal.", "allowed."))
        assert len(said) < 500
        return None
    assert unpack(pack(found), kind) == found
    return found


@each
def test_every_number_and_size_has_two_bounds(kind):
    for leaf in bounded(kind):
        if leaf.type in (int, float):
            least, most = leaf.bound("ge"), leaf.bound("le", "lt")
            assert None not in (least, most), leaf
            assert max(abs(least), abs(most)) <= (2**64 if leaf.type is int else 1e30), (
                f"squares of {leaf} may not be finite"
            )
        elif leaf.type is bytes or not fixed(kind, leaf):
            assert leaf.bound("max_length") is not None, leaf


def fixed(kind, leaf):
    """Return whether a tuple has a number of parts that its type says."""
    inside = {
        other.path[len(leaf.path)]
        for other in leaves(kind)
        if other.path[: len(leaf.path)] == leaf.path and other != leaf
    }
    return len(inside) > 1


@each
def test_a_field_is_taken_at_its_bounds_and_refused_beyond(kind):
    for leaf in bounded(kind):
        if leaf.type is tuple and fixed(kind, leaf):
            continue
        others = TOGETHER.get((kind.KIND, leaf.path[0]), {})
        for value in at_bounds(kind, leaf):
            assert taken(kind, with_value(kind, leaf, value, **others)) is not None, (leaf, value)
        for value in beyond(kind, leaf):
            assert taken(kind, with_value(kind, leaf, value, **others)) is None, (leaf, value)


def at_bounds(kind, leaf):
    if leaf.type in (int, float):
        least, most = (leaf.bound(name) for name in ("ge", "le"))
        yield leaf.type(least)
        yield leaf.type(leaf.bound("lt") - 1 if most is None else most)
    else:
        sizes = (leaf.bound("min_length") or 0, leaf.bound("max_length"))
        yield from (filled(kind, leaf, size) for size in sizes if size is not None)


def beyond(kind, leaf):
    if leaf.type is int:
        yield leaf.bound("ge") - 1
        most = leaf.bound("le") + 1 if leaf.bound("lt") is None else leaf.bound("lt")
        if most < 2**64:  # msgpack holds no larger one
            yield most
    elif leaf.type is float:
        yield from (
            math.nextafter(leaf.bound("ge"), -math.inf),
            math.nextafter(leaf.bound("le"), math.inf),
        )
    else:
        least, most = leaf.bound("min_length"), leaf.bound("max_length")
        yield from (
            filled(kind, leaf, size)
            for size in (least and least - 1, most and most + 1)
            if size is not None
        )


def filled(kind, leaf, size):
    """Return a list or byte string of that length, of what a good one holds."""
    if leaf.type is bytes:
        return bytes(size)
    value = good(kind).model_dump()
    for step in leaf.path:
        value = value[step]
    return tuple(value[:1]) * size


@each
def test_whatever_a_field_holds_costs_one_sentence(kind):
    for leaf in leaves(kind):
        if leaf.path[0] in BY_HAND and leaf.path[1:]:
            continue
        for value in (*NUMBERS, *OTHERS):
            found = taken(kind, with_value(kind, leaf, value))
            if found is not None and leaf.type in (int, float) and value is not None:
                assert type(value) in (int, float), (leaf, value)
                assert math.isfinite(value), (leaf, value)


@each
def test_a_million_entries_cost_no_memory(kind):
    """The bytes themselves are there already; at most twice as much is made of them, for two
    readers see a text.
    """
    fields = fields_of(kind)
    for name, (what, value) in itertools.product(fields, PACKED.items()):
        data = raw(kind, {**fields, name: value})
        tracemalloc.start()
        try:
            found = taken(kind, data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert found is None or what in ("text", "bytes"), "10^6 entries are no field's"
        assert peak < 3 * len(data) + 2**20
        assert found is None or len(data) <= kind.LIMIT


def shapes(count, rank=0):
    return (bytes([rank]) + b"\xff" * 4 * rank) * count


def parts(count, size=4):
    return (size.to_bytes(4, "little") + bytes(size)) * count


@pytest.mark.parametrize(
    ("kind", "name", "good_ones", "bad_ones"),
    [
        (
            "offer",
            "shapes",
            [b"", shapes(MAX_TENSORS), shapes(MAX_DIMS // MAX_RANK, MAX_RANK)],
            [
                shapes(MAX_TENSORS + 1),
                shapes(MAX_DIMS // MAX_RANK + 1, MAX_RANK),
                shapes(1, MAX_RANK + 1),
                b"\x01\x00",
            ],
        ),
        (
            "state-header",
            "shapes",
            [b"", shapes(MAX_TENSORS)],
            [shapes(MAX_TENSORS + 1), shapes(1, MAX_RANK + 1), b"\x01\x00"],
        ),
        (
            "rollout",
            "completions",
            [parts(1), parts(1, 32 * 1024)],
            [b"", parts(65), parts(1, 32 * 1024 + 1), b"\x01\x00"],
        ),
        (
            "rollout",
            "tokens",
            [],
            [b"", parts(65), parts(1, 6), parts(1, 4 * 16_384 + 4), parts(2, 8), b"\x01"],
        ),
        (
            "rollout",
            "logps",
            [],
            [b"", parts(65), parts(1, 6), parts(1, 4 * 16_384 + 4), parts(2, 8), b"\x01"],
        ),
        ("rollout", "finish", [b"\x00", b"\x01"], [b"", b"\x02", bytes(2), bytes(65)]),
        (
            "claim-material",
            "tokens",
            [parts(1), parts(1, 4 * 16_384)],
            [b"", parts(65), parts(1, 0), parts(1, 6), b"\x01"],
        ),
        ("claim-material", "finish", [b"\x00", b"\x01"], [b"", b"\x02", bytes(2), bytes(65)]),
    ],
)
def test_what_is_read_by_hand_has_its_bounds(kind, name, good_ones, bad_ones):
    kind = next(one for one in KINDS if kind == one.KIND)
    fields = fields_of(kind)
    assert all(
        taken(kind, raw(kind, {**fields, name: msgpack.packb(value)})) is not None
        for value in good_ones
    )
    assert all(
        taken(kind, raw(kind, {**fields, name: msgpack.packb(value)})) is None for value in bad_ones
    )
