"""A peer's record fits its limit whatever is in it: one that does not would not be published, and
its node be gone for all.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.access.invitation import MAX_SHOWN, MAX_USES, Invitation, issue
from shoal.swarm.access.invitation import admission as shown
from shoal.swarm.identity import Identity
from shoal.swarm.membership.records import MAX_RECORD_BYTES, bits_of, make_record, open_record
from shoal.swarm.wire.envelope import (
    ENVELOPE,
    FAILURES,
    MAX_BLAMED,
    MAX_BYTES,
    MAX_COUNT,
    MAX_RATE,
    MAX_REAL,
    MAX_SHARE,
    SKETCH,
    pack,
    seal,
    unpack,
    unseal,
)
from shoal.swarm.wire.messages import (
    MAX_NAMED,
    Member,
    MemberEnd,
    SeedReply,
    SeedRequest,
)
from shoal.swarm.wire.record import MAX_MISSING

ME, OTHER = Identity.ephemeral(), Identity.ephemeral()
WIDE = "\U0001d538"  # a character of four bytes
LARGEST = {
    "swarm": "a" * 52,
    "peer": ME.peer_id,
    "name": WIDE * 64,
    "addresses": ("/" + "a" * 255,) * 8,
    "round": MAX_COUNT,
    "step": MAX_COUNT,
    "loss": -MAX_REAL / 3,
    "steps_per_s": MAX_RATE / 3,
    "tokens_per_s": MAX_RATE / 3,
    "mfu": MAX_SHARE / 3,
    "unused": (1 / 3, "a" * 16),
    "shard": MAX_COUNT - 1,
    "shards": MAX_COUNT,
    "model": "f" * 64,
    "state": "training",
    "issued": MAX_COUNT / 3,
    "version": "v" * 64,
    "admission": bytes(MAX_SHOWN),
    "exchange_s": 1e9 / 3,
    "round_wait_s": 1e9 / 3,
    "lag_steps": MAX_COUNT,
    "lag_auto": True,
    "late": MAX_COUNT,
    "recent": MAX_COUNT,
    "failures": tuple((kind, MAX_COUNT) for kind in FAILURES),
    "blamed": ((OTHER.peer_id, max(FAILURES, key=len), MAX_COUNT),) * MAX_BLAMED,
    "partnerless": ("unreachable", MAX_COUNT),
    "internal_errors": MAX_COUNT,
    "missing": MAX_COUNT,
    "missing_of": MAX_COUNT,
    "missing_within_s": 1e9 / 3,
    "missing_names": (WIDE * 16,) * MAX_MISSING,
    "sketch": (MAX_COUNT, MAX_COUNT, (-MAX_REAL / 3,) * SKETCH),
    "reach": "unreachable",
    "bytes_per_s": MAX_RATE / 3,
    "bytes_sent": MAX_BYTES,
    "bytes_received": MAX_BYTES,
    "daemon_restarts": MAX_COUNT,
    "contributions_refused": MAX_COUNT,
    "change": MAX_COUNT,
    "finished": True,
    "end": MemberEnd(
        members=MAX_COUNT,
        names=(WIDE * 16,) * MAX_MISSING,
        loss_before=-MAX_REAL / 3,
        loss_after=-MAX_REAL / 3,
        refused=True,
    ),
}
TRAINING = {**LARGEST, "end": None}
AT_ITS_END = {**LARGEST, "missing_names": (), "sketch": None}
SMALL = {
    "name": "x",
    "addresses": (),
    "round": 0,
    "step": 0,
    "loss": None,
    "steps_per_s": 0.0,
    "tokens_per_s": 0.0,
    "mfu": None,
    "shard": 0,
    "issued": 0.0,
    "version": "0",
    "state": "done",
}
ONES = {
    name: tuple(LARGEST[name][:1]) for name in ("addresses", "failures", "blamed", "missing_names")
}
GIVEN = [name for name in LARGEST if name not in ("swarm", "peer", "shards", "model")]


def record(changes):
    return Member(**{**TRAINING, **changes})


@pytest.mark.parametrize("fields", [TRAINING, AT_ITS_END])
def test_the_largest_record_with_all_of_it_fits_its_limit(fields):
    assert set(LARGEST) == set(Member.model_fields)  # a field that is new belongs in here
    largest = Member(**fields)
    assert unpack(pack(largest), Member) == largest
    assert len(pack(largest)) <= Member.LIMIT
    prefix = bits_of(ME.peer_id)
    stored = make_record(prefix, largest, ME)
    assert len(stored) <= MAX_RECORD_BYTES
    assert open_record(stored).member == largest


def test_many_largest_records_fit_a_reply():
    """As many of the largest as a bootstrap node names fit its reply."""
    sealed = max((seal(Member(**fields), ME) for fields in (TRAINING, AT_ITS_END)), key=len)
    assert len(pack(SeedReply(members=(sealed,) * MAX_NAMED, reason="x" * 512))) <= SeedReply.LIMIT
    assert len(pack(SeedRequest(swarm="a" * 52, record=sealed))) <= SeedRequest.LIMIT


@given(st.dictionaries(st.sampled_from(GIVEN), st.sampled_from(["small", "one", "left out"])))
def test_every_record_that_may_be_said_can_be_published(chosen):
    fields = dict(AT_ITS_END if chosen.pop("end", "") == "one" else TRAINING)
    for name, how in chosen.items():
        if how == "left out" and not Member.model_fields[name].is_required():
            del fields[name]
        elif how == "one" and name in ONES:
            fields[name] = ONES[name]
        elif name in SMALL:
            fields[name] = SMALL[name]
    member = Member(**fields)
    sealed = seal(member, ME)
    assert len(sealed) <= Member.LIMIT + ENVELOPE
    assert unseal(sealed, Member) == (ME.peer_id, member)


@pytest.mark.parametrize(
    "more",
    [
        {"addresses": LARGEST["addresses"] + ("/a",)},
        {"name": WIDE * 65},
        {"admission": bytes(MAX_SHOWN + 1)},
        {"failures": LARGEST["failures"] + (("timeout", 1),)},
        {"blamed": LARGEST["blamed"] * 2},
        {"missing_names": (WIDE * 17,)},
        {"sketch": (0, 0, (0.0,) * (SKETCH + 1))},
    ],
)
def test_more_than_the_largest_is_no_record(more):
    with pytest.raises(ValueError, match=next(iter(more))):
        record(more)


def test_an_admission_of_any_invitation_fits_a_record():
    text = issue(OTHER, "a" * 52, lives=1e12, uses=MAX_USES, now=1e12)
    ticket = shown(text, ME, now=1e12)
    assert len(ticket) <= MAX_SHOWN
    assert len(seal(record({"admission": ticket}), ME)) <= Member.LIMIT + ENVELOPE
    assert (
        Invitation.LIMIT + ENVELOPE > MAX_SHOWN
    )  # so it is the content, not the limit, that makes it fit
