"""What a claim is about, in bytes: there and back, bounded, and each hash depends on all that it should."""

import dataclasses

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.node.verify.audit import VerifyError
from shoal.node.verify.checker import prove
from shoal.node.verify.material import (
    Agreed,
    Coordinates,
    decode_material,
    material_of,
    output_hash,
    seed_of,
)
from shoal.swarm.errors import MessageError
from shoal.swarm.wire.envelope import pack

AT = Coordinates("strings", "1", b"{}", 5, 6)
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)


def made(rows, **fields):
    said = {"proof": b"proof", "policy": "tiny", "dtype": "float32", "kernel": "cpu", "snapshot": 10, **fields}
    return material_of(AT, rows, ["stop"] * len(rows), **said)


@given(st.lists(TOKENS, min_size=1, max_size=8))
def test_there_and_back_again(rows):
    material = made(rows)
    again = decode_material(pack(material))
    assert again == material
    assert again.rows() == [tuple(row) for row in rows]
    assert again.coordinates == AT


@given(st.lists(TOKENS, min_size=1, max_size=5), st.lists(TOKENS, min_size=1, max_size=5))
def test_outputs_are_told_apart_also_where_only_the_completions_end_differently(left, right):
    assert (output_hash(left) == output_hash(right)) == (left == right)
    joined = [[token for row in left for token in row]]
    assert (output_hash(joined) == output_hash(left)) == (len(left) == 1)


def test_each_hash_depends_on_all_of_it():
    others = {"env": "x", "version": "2", "config": b"", "seed": 6, "index": 5}
    found = {dataclasses.replace(AT, **{name: value}).hash for name, value in others.items()}
    assert len(found | {AT.hash}) == 6
    agreed = Agreed(1.0, 12, 8)
    assert len({each.hash for each in (agreed, Agreed(0.9, 12, 8), Agreed(1.0, 11, 8), Agreed(1.0, 12, 7))}) == 4
    mine = ("run", 1, "peer", 0, AT.hash)
    seeds = {seed_of(*mine[:place], other, *mine[place + 1 :]) for place, other in enumerate(("x", 2, "y", 1, bytes(32)))}
    assert len(seeds | {seed_of(*mine)}) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("rows", "fields"),
    [
        ([], {}),
        ([[1], []], {}),
        ([[1]] * 65, {}),
        ([[0] * 16_000] * 9, {}),
        ([[1]], {"dtype": "float64"}),
        ([[1]], {"policy": "a b"}),
        ([[1]], {"snapshot": 0}),
        ([[1]], {"proof": bytes((2 << 20) + 1)}),
    ],
)
def test_what_no_claim_can_hold(rows, fields):
    with pytest.raises(ValidationError):
        made(rows, **fields)


def test_what_is_damaged_or_too_large_is_refused():
    data = pack(made([[1, 2], [3]]))
    for wrong in (data[:-1], data + b"x", bytes(5 << 20), msgpack.packb(["claim-material", 2, {}])):
        with pytest.raises(MessageError):
            decode_material(wrong)


def test_agreed_settings_are_bounded():
    for wrong in ((-1.0, 12, 8), (1.0, 0, 8), (1.0, 12, 65), (1.0, 20_000, 8)):
        with pytest.raises(ValueError, match="a group has"):
            Agreed(*wrong)


def test_a_policy_that_cannot_write_so_much_says_so(world):
    def many():
        for index in range(50):
            at = world.question(index)
            prove(world.policy, world.env, at, Agreed(100.0, 200, 8), index, policy_name="tiny", snapshot_bytes=1)

    with pytest.raises(VerifyError, match=r"stops after 95 tokens where 200 are agreed: set rl.max_tokens to 95\."):
        many()


def test_large_groups_go_in_parts(world, monkeypatch):
    large = dataclasses.replace(world, agreed=Agreed(1.0, 12, 20))
    proven = large.proven()
    assert len(proven.completions) == 20
    assert large.check(proven).accepted
    monkeypatch.setattr("shoal.node.verify.checker.PART", 3)
    assert [one.tokens for one in large.proven().completions] == [one.tokens for one in proven.completions]
