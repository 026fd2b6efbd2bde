"""A claim on its way to a vote: who is asked for what, for how long, and what becomes of it if nobody has it."""

import json

import pytest

from shoal.node.verify.audit import Budget, Finding, NotCheckable
from shoal.node.verify.material import Material
from shoal.node.verify.service import Auditor
from shoal.swarm.errors import MessageError, NetworkError
from shoal.verification.consensus.records import Claim

FETCH_S, GOOD = 3.0, Finding(True, "Good.")
MATERIAL, SNAPSHOT, OTHERS = b"material", b"snapshot", ("bob", "ann", "cat", "dan", "eve")
CLAIM = Claim(
    peer="ann", run="run", round=5, slot=0, model=b"m" * 32, prompt=bytes(32), sampling=bytes(32), seed=1, tokens=9,
    output=bytes(32), fingerprint=b"f" * 32,
)  # fmt: skip
BODIES = {CLAIM.fingerprint: MATERIAL, CLAIM.model: SNAPSHOT}


class World:
    """``has``: of each peer the hashes that it hands out; ``slow``: seconds that others let one wait."""

    def __init__(self, has, slow=0.0, knows=False, finding=GOOD, seconds=60.0):
        self.has, self.slow, self.knows_it, self.finding = has, slow, knows, finding
        self.now, self.asked, self.put_, self.told, self.checked = 0.0, [], [], [], []
        self.budget = Budget(seconds, lambda: self.now)
        self.auditor = Auditor(self, self, self.budget, lambda: OTHERS, self.tell, FETCH_S, lambda: self.now)

    def tell(self, *found):
        self.told.append(found)

    # -- the bodies
    def put(self, body):
        self.put_.append(body)
        return b""

    def get(self, peer, sha256, most, timeout):
        assert most == {CLAIM.fingerprint: Material.LIMIT, CLAIM.model: self.most_snapshot_bytes}[sha256]
        assert 0 < timeout <= FETCH_S
        self.asked.append((peer, BODIES[sha256]))
        if sha256 in self.has.get(peer, ()):
            return BODIES[sha256]
        if self.slow:
            self.now += min(self.slow, timeout)
            raise NetworkError("Too slow.")
        raise MessageError("The peer does not hold the body any more.", "unavailable")

    # -- the checker
    most_material_bytes, most_snapshot_bytes = Material.LIMIT, 1234

    def knows(self, model):
        return self.knows_it

    def check(self, claim, material, snapshot):
        self.checked.append((material, snapshot))
        if isinstance(self.finding, Exception):
            raise self.finding
        return self.finding


ALL = tuple(BODIES)


@pytest.mark.parametrize("accepted", [True, False])
def test_what_its_author_hands_out_is_checked_and_handed_on(accepted):
    world = World({"ann": ALL}, finding=Finding(accepted, "As found.", {"tokens": 9.0}))
    checked = world.auditor.check(CLAIM)
    assert checked.vote == ("valid" if accepted else "invalid")
    assert json.loads(checked.evidence) == {"accepted": accepted, "reason": "As found.", "tokens": 9.0}
    assert world.asked == [("ann", MATERIAL), ("ann", SNAPSHOT)]
    assert world.checked == [(MATERIAL, SNAPSHOT)]
    assert world.put_ == [MATERIAL, SNAPSHOT]
    ((claim, finding, *bodies),) = world.told
    assert (claim, finding.accepted, finding.reason, bodies) == (CLAIM, accepted, "As found.", [MATERIAL, SNAPSHOT])
    assert world.auditor.counts == {"checked": 1, checked.vote: 1}


def test_a_policy_that_is_known_is_not_fetched():
    world = World({"ann": ALL}, knows=True)
    assert world.auditor.check(CLAIM).vote == "valid"
    assert world.checked == [(MATERIAL, None)]
    assert world.asked == [("ann", MATERIAL)]


def test_what_the_author_withholds_is_asked_from_others():
    world = World({"cat": ALL})
    assert world.auditor.check(CLAIM).vote == "valid"
    assert world.asked == [(peer, body) for body in (MATERIAL, SNAPSHOT) for peer in ("ann", "bob", "cat")]


@pytest.mark.parametrize(("has", "what"), [((), "what it was made of"), ((CLAIM.fingerprint,), "the weights that made it")])
def test_what_nobody_has_makes_the_claim_invalid(has, what):
    world = World({"ann": has})
    checked = world.auditor.check(CLAIM)
    assert checked.vote == "invalid"
    assert json.loads(checked.evidence)["reason"] == f"The author of the claim does not serve {what}."
    assert [peer for peer, _ in world.asked][-4:] == ["ann", "bob", "cat", "dan"]  # the author once, and three others
    assert world.checked == []
    assert world.told[0][2] == (MATERIAL if has else None)


def test_peers_that_let_one_wait_take_a_bounded_time_and_the_author_has_all_of_its_own():
    world = World({"dan": (CLAIM.fingerprint,)}, slow=1.5)
    assert world.auditor.check(CLAIM).vote == "invalid"
    assert [peer for peer, body in world.asked if body == MATERIAL] == ["ann", "bob", "cat"]
    assert world.now <= 3 * FETCH_S
    hanging = World({"bob": (CLAIM.fingerprint,)}, slow=100.0)
    assert hanging.auditor.check(CLAIM).vote == "invalid"
    assert hanging.asked == [("ann", MATERIAL), ("bob", MATERIAL), ("ann", SNAPSHOT), ("bob", SNAPSHOT)]
    assert hanging.now == 3 * FETCH_S


def test_what_this_node_cannot_judge_leaves_the_seat_empty():
    world = World({"ann": ALL}, finding=NotCheckable("There is no calibration."))
    assert world.auditor.check(CLAIM) is None
    assert world.auditor.counts == {"uncheckable": 1}
    assert world.told == []


def test_a_budget_that_is_spent_leaves_the_seat_empty_and_nobody_is_asked():
    world = World({"ann": ALL}, seconds=6.0)
    world.budget.spend(7.0)
    assert world.auditor.check(CLAIM) is None
    assert world.asked == []
    assert world.auditor.counts == {"skipped": 1}
    world.now += 20.0
    assert world.auditor.check(CLAIM).vote == "valid"
