"""The creator changes a swarm's settings, whatever strangers state in records that cost nothing."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from shoal.node.commands import creator
from shoal.node.config.settings import ConfigError, load
from shoal.node.runtime.join import new_manifest
from shoal.swarm.changes import Change, ChangePart, ChangeReply, open_change
from shoal.swarm.errors import NetworkError
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest
from shoal.swarm.membership import change_exchange
from shoal.swarm.wire.envelope import seal
from tests.support.records import SWARM, member_of

CREATOR = Identity.ephemeral()
MANIFEST = open_manifest(new_manifest(load(None, {"train.steps": 1000}), CREATOR, "0" * 64))
FRAGMENTS = MANIFEST.outer.fragments_a_round
EVERY = MANIFEST.outer.resolved().every
EARLIER = Change(
    swarm=SWARM,
    creator=CREATOR.peer_id,
    number=2**40,  # by a clock that was ahead
    parts=(ChangePart(round=3, lr=0.5),),
)
MADE_UP = 2**53
"""A number that a stranger states."""


class Swarm:
    """The members that a visitor sees: those that were met answer, the others are made up."""

    def __init__(self, monkeypatch, held=b""):
        self.held = held
        self.members, self.taken = {}, {}
        self.host = SimpleNamespace(met={}, call=lambda coroutine, timeout: asyncio.run(coroutine))
        monkeypatch.setattr(creator, "visited", self.visited)
        monkeypatch.setattr(creator, "creator_key", lambda *given: CREATOR)
        monkeypatch.setattr(change_exchange, "swap_change", self.swap)

    def add(self, count, round=50, change=0, place=None, name="x"):
        """Add members; ``place``: where they were met; the ``name`` silent: they never answer."""
        for number in range(count):
            peer = Identity.ephemeral().peer_id
            progress = {"round": round * FRAGMENTS, "step": 50 * EVERY}
            self.members[peer] = member_of(peer, change=change, name=name, **progress)
            if place is not None:
                self.host.met[peer] = place.format(number)

    def call(self, coroutine, timeout):
        """Run it; what takes longer than all that were asked may take fails."""

        async def run():
            return await asyncio.wait_for(coroutine, timeout)

        return asyncio.run(run())

    @contextlib.contextmanager
    def visited(self, link):
        yield self.host, MANIFEST, self.members, len(self.members)

    async def swap(self, host, peer, addresses, swarm, sealed):
        if peer not in self.host.met:
            raise NetworkError("unreachable.")
        if self.members[peer].name == "silent":
            await asyncio.Event().wait()
        if sealed:
            self.taken[peer] = open_change(sealed, SWARM, CREATOR.peer_id)
        return ChangeReply(change=sealed or self.held)

    def change(self, at):
        return creator.change(SimpleNamespace(swarm=SWARM), {"train.lr": 1e-4}, None, at)

    def end(self, at=None):
        return creator.end(SimpleNamespace(swarm=SWARM), None, at)


@pytest.fixture
def swarm(monkeypatch):
    made = Swarm(monkeypatch)
    made.add(5, place="10.{}.0.1")
    return made


@pytest.mark.parametrize("place", [None, "10.9.0.{}"])
def test_stated_change_does_not_lock_the_creator_out(swarm, place):
    """Fault: one made-up record ended each change by "no member served that change: try again".

    Mutants: it is refused; who answers, and serves nothing, has it refused; the number follows what
    was stated; nobody is told what may be lost.
    """
    swarm.add(2, change=MADE_UP - 2, place=place)
    made = swarm.end()
    assert made["changed"] == {"steps": 51 * EVERY}
    assert made["told"] == (5 if place is None else 7)
    assert {change.number < MADE_UP // 2 for change in swarm.taken.values()} == {True}
    assert made["said"].endswith(
        " 2 members stated an earlier change that nobody served: if you made one, set its values "
        "again, for this change replaces it."
    )


def test_change_that_is_served_is_added_to(monkeypatch):
    """Mutants: what was changed before is lost; a number below that of the change before."""
    swarm = Swarm(monkeypatch, held=seal(EARLIER, CREATOR))
    swarm.add(3, change=EARLIER.number, place="10.{}.0.1")
    made = swarm.end()
    (found,) = {change.number: change for change in swarm.taken.values()}.values()
    assert found.number == EARLIER.number + 1
    assert [(part.round, part.lr) for part in found.parts] == [(3, 0.5), (51, None)]
    assert "nobody served" not in made["said"]


@pytest.mark.parametrize(("round", "strangers"), [(0, 20), (2**50, 20), (2**50, 300)])
def test_strangers_rounds_move_no_change(swarm, round, strangers):
    """Fault: the median of all records, so that a change counted from a made-up round on.

    Mutants: the median of all that answer; those that do not answer count, in the round or in the
    steps; 64 strangers leave no place for who was met.
    """
    honest = swarm.members
    swarm.members = {}
    swarm.add(strangers, round=round, place="10.9.0.{}" if strangers < 64 else None)
    swarm.members.update(honest)
    made = swarm.end()
    assert made["now"] == 50
    if strangers > 64:  # that do not answer
        assert made["changed"] == {"steps": 51 * EVERY}
    with pytest.raises(ConfigError, match=r"^Round 50 is over, for the swarm is in round 50"):
        swarm.end(at=50)


def test_round_of_liars_alone_is_bounded(monkeypatch):
    """Fault: the round after 2^53 is no count, and the command ended with a traceback."""
    swarm = Swarm(monkeypatch)
    swarm.add(3, round=2**53 // FRAGMENTS, place="10.{}.0.1")
    made = swarm.end()
    assert made["round"] * EVERY <= 2**53


@pytest.mark.parametrize("at", [2**53 // EVERY + 1, 10**400], ids=["next", "huge"])
def test_a_round_too_far_off_is_refused_with_the_last(swarm, at):
    """Fault: a round, or its steps, beyond 2^53 ended with a traceback of pydantic."""
    for command in (swarm.change, swarm.end):
        with pytest.raises(ConfigError) as caught:
            command(at)
        assert str(caught.value) == (
            f"The last round that --at can name is {2**53 // EVERY}: leave it out, or name an "
            "earlier one."
        )
    assert swarm.end(2**53 // EVERY)["round"] == 2**53 // EVERY


def test_a_rate_of_hundreds_of_digits_is_refused():
    with pytest.raises(
        ConfigError, match=r"^The setting train\.lr=10+\.\.\.0+ cannot be used: it should"
    ):
        creator.wanted({"train.lr": 10**400})
    part = ChangePart(round=0, **creator.wanted({"train.lr": 1}))
    assert isinstance(part.lr, float), "a whole number is a rate, too, and signed as any other"


def test_one_silent_member_costs_no_others_answer(swarm, monkeypatch):
    """Fault: the time of all together was one member's, so a slow one ended the command."""
    monkeypatch.setattr(change_exchange, "ANSWER_S", 0.01)
    swarm.add(1, place="10.9.0.{}", name="silent")
    assert swarm.end()["told"] == 5


def test_members_at_their_end_follow_no_change(monkeypatch):
    """Fault: all were said to have taken it, and those whose last step was done ended without."""
    swarm = Swarm(monkeypatch)
    swarm.add(2, place="10.0.{}.1")
    swarm.add(1, place="10.1.{}.1", name="anna")
    anna = next(peer for peer, member in swarm.members.items() if member.name == "anna")
    swarm.members[anna] = swarm.members[anna].model_copy(update={"finished": True, "step": 3})
    made = swarm.end()
    assert (made["told"], made["members"]) == (2, 2)
    assert anna not in swarm.taken
    assert made["changed"]["steps"] == 51 * EVERY
    assert made["said"] == (
        f"the run ends in round 51, for members that came late too (train.steps={51 * EVERY}); the "
        "swarm is in round 50. 2 of 2 members took the change. It does not reach anna, whose last "
        "step is done."
    )


def test_members_beyond_the_changed_steps_are_counted(monkeypatch):
    swarm = Swarm(monkeypatch)
    swarm.add(2, place="10.0.{}.1")
    link = SimpleNamespace(swarm=SWARM)
    said = creator.change(link, {"train.steps": 50 * EVERY}, None, None)["said"]
    assert "(2 members did as many steps already, and will end then); the swarm is in" in said


def test_nobody_that_answers_is_said(monkeypatch):
    swarm = Swarm(monkeypatch)
    swarm.add(3)
    with pytest.raises(NetworkError, match=r"^No member of the swarm is there to take the change"):
        swarm.end()
