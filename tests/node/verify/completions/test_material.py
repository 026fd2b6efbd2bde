"""What a claim is about, in bytes, and the training thread's part: groups for slots that are
due.
"""

import copy
import dataclasses
import threading

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.node.rl.environment import Env, Question
from shoal.node.verify.claimer import ASIDE, MAX_WRITTEN, Claimer
from shoal.node.verify.errors import VerifyError
from shoal.node.verify.material import (
    Agreed,
    Coordinates,
    decode_material,
    material_of,
    output_hash,
    seed_of,
)
from shoal.node.verify.proven_group import prove
from shoal.node.verify.snapshot import snapshot
from shoal.swarm.errors import MessageError
from shoal.swarm.wire.envelope import pack
from shoal.verification.consensus.participant import Slot
from tests.support.claims import PEER, RUN

AT = Coordinates("strings", "1", b"{}", 5, 6)
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)


def made(rows, **fields):
    said = {
        "proof": b"proof",
        "policy": "tiny",
        "dtype": "float32",
        "kernel": "cpu",
        "snapshot": 10,
        **fields,
    }
    return material_of(AT, rows, ["stop"] * len(rows), **said)


@given(st.lists(TOKENS, min_size=1, max_size=8))
def test_there_and_back_again(rows):
    material = made(rows)
    again = decode_material(pack(material))
    assert again == material
    assert again.rows() == [tuple(row) for row in rows]
    assert again.coordinates == AT


@given(st.lists(TOKENS, min_size=1, max_size=5), st.lists(TOKENS, min_size=1, max_size=5))
def test_outputs_differ_by_their_ends(left, right):
    """Outputs are told apart also where only the completions end differently."""
    assert (output_hash(left) == output_hash(right)) == (left == right)
    joined = [[token for row in left for token in row]]
    assert (output_hash(joined) == output_hash(left)) == (len(left) == 1)


def test_each_hash_depends_on_all_of_it():
    others = {"env": "x", "version": "2", "config": b"", "seed": 6, "index": 5}
    found = {dataclasses.replace(AT, **{name: value}).hash for name, value in others.items()}
    assert len(found | {AT.hash}) == 6
    agreed = Agreed(1.0, 12, 8)
    assert (
        len(
            {
                each.hash
                for each in (agreed, Agreed(0.9, 12, 8), Agreed(1.0, 11, 8), Agreed(1.0, 12, 7))
            }
        )
        == 4
    )
    mine = ("run", 1, "peer", 0, AT.hash)
    seeds = {
        seed_of(*mine[:place], other, *mine[place + 1 :])
        for place, other in enumerate(("x", 2, "y", 1, bytes(32)))
    }
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
        with pytest.raises(ValueError):
            Agreed(*wrong)


def test_a_policy_that_cannot_write_so_much_says_so(world):
    def many():
        for index in range(50):
            at = world.question(index)
            prove(
                world.policy,
                world.env,
                at,
                Agreed(100.0, 200, 8),
                index,
                policy_name="tiny",
                snapshot_bytes=1,
            )

    with pytest.raises(
        VerifyError, match=r"stops after 95 tokens where 200 are agreed: set rl.max_tokens to 95\."
    ):
        many()


def test_large_groups_go_in_parts(world, monkeypatch):
    large = dataclasses.replace(world, agreed=Agreed(1.0, 12, 20))
    proven = large.proven()
    assert len(proven.completions) == 20
    assert large.check(proven).accepted
    monkeypatch.setattr("shoal.node.verify.group.PART", 3)
    assert [one.tokens for one in large.proven().completions] == [
        one.tokens for one in proven.completions
    ]


SEED = 99


@pytest.fixture
def round():
    return [7]


@pytest.fixture
def claimer(world, round):
    return Claimer(world.env, world.agreed, RUN, PEER, policy_name="tiny", round=lambda: round[0])


def write(claimer, world, index=0, policy=None):
    return claimer.write(policy or world.policy, SEED, index)


def test_slot_is_filled_once_and_found_right(claimer, world):
    """A slot is filled once with what the policy wrote and others find it right."""
    claimer.offer([Slot(7, 1, False)])
    found = write(claimer, world)
    assert not found.planted
    assert len(found.completions) == world.agreed.group
    assert claimer.seconds > 0
    assert write(claimer, world, 1) is None
    claimer.offer(
        [Slot(7, 1, False)]
    )  # the claim is not published yet, so its slot is still offered
    assert write(claimer, world, 1) is None
    (written,) = claimer.take()
    assert claimer.take() == []
    assert written.snapshot == snapshot(world.policy)
    assert decode_material(written.material).rows() == [one.tokens for one in found.completions]
    assert written.claim.seed == seed_of(RUN, 7, PEER, 1, Coordinates.of(world.env, SEED, 0).hash)
    assert world.checker().check(written.claim, written.material, written.snapshot).accepted


def test_refused_dtype_is_named_before_a_claim(world):
    """A policy that computes in a dtype that others refuse is named before it claims."""
    claimer = Claimer(
        world.env,
        world.agreed,
        RUN,
        PEER,
        policy_name="tiny",
        round=lambda: 7,
        allowed=("float32",),
    )
    coarse = copy.deepcopy(world.policy)
    coarse.module.bfloat16()
    claimer.offer([Slot(7, 1, False)])
    with pytest.raises(VerifyError, match="computes in bfloat16"):
        write(claimer, world, policy=coarse)
    assert claimer.take() == []


def test_offers_are_due_while_they_stand(claimer, world):
    """Nothing is due before it was offered nor once it is offered no more."""
    assert write(claimer, world) is None
    claimer.offer([Slot(7, 1, False)])
    claimer.offer([])
    assert write(claimer, world) is None
    assert claimer.take() == []
    assert claimer.seconds == 0


def test_a_slot_of_another_round_is_too_late(claimer, world, round):
    claimer.offer([Slot(7, 0, False), Slot(7, 1, False)])
    round[0] = 8
    assert write(claimer, world) is None
    claimer.offer([Slot(8, 0, False)])
    assert write(claimer, world) is not None
    assert [written.slot for written in claimer.take()] == [Slot(8, 0, False)]


def test_slots_fill_in_order_within_bounds(claimer, world, round):
    """Several slots are filled in order and those that wait are bounded."""
    slots = [Slot(7, number, False) for number in range(3)]
    claimer.offer(slots)
    assert all(write(claimer, world, index) for index in range(3))
    assert [written.slot for written in claimer.take()] == slots
    assert claimer._written.maxlen == MAX_WRITTEN


def test_a_planted_group_answers_another_question_and_is_found_wrong(claimer, world):
    claimer.offer([Slot(7, 1, True), Slot(7, 2, False)])
    planted, right = write(claimer, world, 3), write(claimer, world, 4)
    assert (planted.planted, right.planted) == (True, False)
    written = claimer.take()[0]
    told = decode_material(written.material)
    assert (told.seed, told.index) == (SEED, 3)  # which is what it says
    finding = world.checker().check(written.claim, written.material, written.snapshot)
    assert "does not compute these activations" in finding.reason


class Few:
    """An environment of few questions."""

    version = "1"

    def __init__(self, of):
        self.of = of

    def question(self, seed, index):
        return Question(f"question {index % self.of}")

    def reward(self, question, completion):
        return 0.0


def test_a_planted_group_never_answers_the_same_question(world, round):
    assert ASIDE % 2 == 0  # so that the first aside of two is the question itself
    few = Env("few", b"{}", Few(2))
    claimer = Claimer(few, world.agreed, RUN, PEER, policy_name="tiny", round=lambda: 7)
    claimer.offer([Slot(7, 0, True)])
    other = dataclasses.replace(world, env=few)
    assert write(claimer, other).planted
    (written,) = claimer.take()
    assert not other.checker().check(written.claim, written.material, written.snapshot).accepted
    # Where there is but one question nothing can be planted, and a right claim must not be passed
    # off as a wrong one.
    claimer = Claimer(
        Env("one", b"{}", Few(1)), world.agreed, RUN, PEER, policy_name="tiny", round=lambda: 7
    )
    claimer.offer([Slot(7, 0, True)])
    assert claimer.write(world.policy, SEED, 0) is None
    assert claimer.take() == []


def test_other_thread_waits_for_no_writing(claimer, world):
    """While a group is written the other thread waits for nothing."""
    claimer.offer([Slot(7, 0, False)])
    came = []

    class Looked:
        """The policy, whose use lets the other thread offer and take."""

        module = world.policy.module

        def generate(self, *arguments, **options):
            thread = threading.Thread(
                target=lambda: (claimer.offer([Slot(7, 0, False)]), claimer.take()), daemon=True
            )
            thread.start()
            thread.join(60)
            came.append(not thread.is_alive())
            return world.policy.generate(*arguments, **options)

    assert write(claimer, world, policy=Looked()) is not None
    assert came == [True]
    assert write(claimer, world) is None  # the slot was being filled when it was offered again
