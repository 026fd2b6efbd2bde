"""The record of a rollout: round trips, and the bounds of its fields."""

import functools

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.swarm.errors import MessageError
from shoal.swarm.identity import Identity
from shoal.swarm.topics.rollout import (
    MAX_COMPLETIONS,
    MAX_TEXT_BYTES,
    MAX_TOKENS,
    Rollout,
    pack_logps,
    pack_tokens,
)
from shoal.swarm.wire.envelope import pack, unpack
from tests.support.gossip_nodes import rollout_of

texts = st.lists(st.text(max_size=50), min_size=1, max_size=MAX_COMPLETIONS)
draws = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32)), max_size=20)


record = functools.partial(rollout_of, Identity.ephemeral().peer_id, nonce=bytes(16))


def with_tokens(ids, logps, **changes):
    return record(tokens=tuple(ids), logps=tuple(logps), tokenizer="0" * 64, **changes)


@given(texts, st.data())
def test_round_trip(completions, data):
    finish = tuple(data.draw(st.sampled_from(["stop", "length"])) for _ in completions)
    drawn = [data.draw(draws) for _ in completions]
    ids = [pack_tokens([token for token, _ in pairs]) for pairs in drawn]
    logps = [pack_logps([logp for _, logp in pairs]) for pairs in drawn]
    made = with_tokens(ids, logps, completions=tuple(completions), finish=finish)
    assert unpack(pack(made), Rollout) == made
    for behaviour, pairs in zip(made.behaviours(), drawn, strict=True):
        assert list(zip(behaviour.tokens.tolist(), behaviour.logps.tolist(), strict=True)) == pairs


def test_text_alone_is_enough():
    made = record()
    assert unpack(pack(made), Rollout) == made
    assert made.behaviours() == ()


def test_the_largest_texts_fit():
    made = record(
        completions=("x" * MAX_TEXT_BYTES,) * MAX_COMPLETIONS, finish=("stop",) * MAX_COMPLETIONS
    )
    assert unpack(pack(made), Rollout) == made


@pytest.mark.parametrize(
    "changes",
    [
        {"completions": (), "finish": ()},
        {"completions": ("x",) * 65, "finish": ("stop",) * 65},
        {"completions": ("é" * (MAX_TEXT_BYTES // 2) + "x",), "finish": ("stop",)},
        {"completions": ("\ud800",), "finish": ("stop",)},
        {"completions": ["list"], "finish": ("stop",)},
        {"finish": ("stop",)},
        {"finish": ("stop", "tired")},
        {"env": "../etc/passwd"},
        {"env": ""},
        {"env_version": "\x1b[0m"},
        {"env_config": bytes(4097)},
        {"seed": -1},
        {"seed": 2**63},
        {"index": 1.0},
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"policy_version": -1},
        {"round": True},
        {"nonce": bytes(15)},
        {"issued": float("inf")},
        {"swarm": "a"},
        {"peer": "a"},
        {"tokens": (b"", b"")},
        {"logps": (b"", b"")},
        {"tokenizer": "0" * 64},
        {"reward": 1.0},
    ],
    ids=str,
)
def test_fields_out_of_bounds(changes):
    with pytest.raises(ValidationError):
        record(**changes)


@pytest.mark.parametrize(
    ("ids", "logps"),
    [
        ((bytes(4),), (bytes(4),)),
        ((bytes(4), b""), (b"", bytes(4))),
        ((bytes(4), bytes(3)), (bytes(4), bytes(3))),
        ((pack_tokens([-1]), b""), (bytes(4), b"")),
        ((bytes(4), b""), (pack_logps([float("nan")]), b"")),
        ((bytes(4), b""), (pack_logps([float("-inf")]), b"")),
        ((bytes(4), b""), (pack_logps([0.1]), b"")),
        ((bytes(4 * MAX_TOKENS + 4), b""), (bytes(4 * MAX_TOKENS + 4), b"")),
    ],
    ids=range(8),
)
def test_tokens_and_log_probabilities_must_fit(ids, logps):
    with pytest.raises(ValidationError):
        with_tokens(ids, logps)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("completions", b"\x05\x00\x00\x00abc"),
        ("completions", b"\x05\x00"),
        ("completions", b"\x01\x00\x00\x00\xff"),
        ("completions", b"\x00\x00\x00\x00" * 65),
        ("completions", b"\xff\xff\xff\xff"),
        ("finish", b"\x00\x02"),
        ("finish", bytes(65)),
        ("tokens", b"\x03\x00\x00\x00abc"),
        ("tokens", 7),
    ],
)
def test_packed_fields_that_are_wrong_are_refused(field, value):
    data = msgpack.packb(["rollout", 1, record().model_dump() | {field: value}])
    with pytest.raises(MessageError):
        unpack(data, Rollout)
