"""A claim on its way to a vote: what a session gets of its swarm, who is asked, snapshots, and how
much checking may take.
"""

import hashlib
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from shoal.node.rl.strings import Strings
from shoal.node.rl.tiny import Tiny, Warm
from shoal.node.verify import snapshot as snapshot_module
from shoal.node.verify.auditor import Auditor, Budget
from shoal.node.verify.errors import NotCheckable, VerifyError
from shoal.node.verify.finding import Finding
from shoal.node.verify.material import Material
from shoal.node.verify.snapshot import base_hash, load_snapshot, most_bytes, snapshot
from shoal.node.verify.swarm_network import LEAVE_S, SwarmNetwork
from shoal.swarm.errors import MessageError, NetworkError
from shoal.swarm.gossip.gossip import Topic
from shoal.swarm.internal_errors import InternalErrors
from shoal.swarm.p2p.counters import Counters
from shoal.verification.consensus.records import Claim
from tests.support.clock import Clock
from tests.support.fake_network import SWARM, Network

FETCH_S, GOOD = 3.0, Finding(True, "Good.")
MATERIAL, SNAPSHOT, OTHERS = b"material", b"snapshot", ("bob", "ann", "cat", "dan", "eve")
CLAIM = Claim(
    peer="ann",
    run="run",
    round=5,
    slot=0,
    model=b"m" * 32,
    prompt=bytes(32),
    sampling=bytes(32),
    seed=1,
    tokens=9,
    output=bytes(32),
    fingerprint=b"f" * 32,
)
BODIES = {CLAIM.fingerprint: MATERIAL, CLAIM.model: SNAPSHOT}


class World:
    """``has``: of each peer the hashes that it hands out; ``slow``: seconds that others let one
    wait.
    """

    def __init__(self, has, slow=0.0, knows=False, finding=GOOD, seconds=60.0):
        self.has, self.slow, self.knows_it, self.finding = has, slow, knows, finding
        self.now, self.asked, self.told, self.checked = 0.0, [], [], []
        self.internal_errors = InternalErrors()
        self.budget = Budget(seconds, lambda: self.now)
        as_found = lambda claim, finding: finding  # noqa: E731
        self.auditor = Auditor(
            self, self, self.budget, self.tell, FETCH_S, lambda: self.now, as_found, Counter()
        )

    def tell(self, *found):
        self.told.append(found)

    # -- the network
    def others(self):
        return OTHERS

    def get(self, peer, sha256, most, timeout):
        assert (
            most
            == {CLAIM.fingerprint: Material.LIMIT, CLAIM.model: self.most_snapshot_bytes}[sha256]
        )
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
def test_what_its_author_hands_out_is_checked(accepted):
    world = World({"ann": ALL}, finding=Finding(accepted, "As found.", {"tokens": 9.0}))
    checked = world.auditor.check(CLAIM)
    assert checked.vote == ("valid" if accepted else "invalid")
    assert json.loads(checked.evidence) == {
        "accepted": accepted,
        "reason": "As found.",
        "tokens": 9.0,
    }
    assert world.asked == [("ann", MATERIAL), ("ann", SNAPSHOT)]
    assert world.checked == [(MATERIAL, SNAPSHOT)]
    ((claim, finding, *bodies),) = world.told
    assert (claim, finding.accepted, finding.reason, bodies) == (
        CLAIM,
        accepted,
        "As found.",
        [MATERIAL, SNAPSHOT],
    )
    assert world.auditor.counts == {"checked": 1, checked.vote: 1}


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory"), IndexError("index out of range in self")]
)
def test_a_check_that_breaks_is_no_vote_and_no_end(error, caplog):
    world = World({"ann": ALL}, finding=error)
    assert world.auditor.check(CLAIM) is None
    assert world.auditor.counts == {"uncheckable": 1}
    assert f"a claim was not checked: {error}" in caplog.text
    world.finding = GOOD
    assert world.auditor.check(CLAIM).vote == "valid"


def test_a_policy_that_is_known_is_not_fetched():
    world = World({"ann": ALL}, knows=True)
    assert world.auditor.check(CLAIM).vote == "valid"
    assert world.checked == [(MATERIAL, None)]
    assert world.asked == [("ann", MATERIAL)]


def test_what_the_author_withholds_is_asked_from_others():
    world = World({"cat": ALL})
    assert world.auditor.check(CLAIM).vote == "valid"
    assert world.asked == [
        (peer, body) for body in (MATERIAL, SNAPSHOT) for peer in ("ann", "bob", "cat")
    ]


@pytest.mark.parametrize(
    ("has", "what"),
    [((), "what it was made of"), ((CLAIM.fingerprint,), "the weights that made it")],
)
def test_what_nobody_has_makes_the_claim_invalid(has, what):
    world = World({"ann": has})
    checked = world.auditor.check(CLAIM)
    assert checked.vote == "invalid"
    assert (
        json.loads(checked.evidence)["reason"] == f"The author of the claim does not serve {what}."
    )
    assert [peer for peer, _ in world.asked][-4:] == [
        "ann",
        "bob",
        "cat",
        "dan",
    ]  # the author once, and three others
    assert world.checked == []
    assert world.told[0][2] == (MATERIAL if has else None)


def test_slow_peers_cannot_delay_an_audit():
    """Peers that let one wait take a bounded time and the author has all of its own."""
    world = World({"dan": (CLAIM.fingerprint,)}, slow=1.5)
    assert world.auditor.check(CLAIM).vote == "invalid"
    assert [peer for peer, body in world.asked if body == MATERIAL] == ["ann", "bob", "cat"]
    assert world.now <= 3 * FETCH_S
    hanging = World({"bob": (CLAIM.fingerprint,)}, slow=100.0)
    assert hanging.auditor.check(CLAIM).vote == "invalid"
    assert hanging.asked == [
        ("ann", MATERIAL),
        ("bob", MATERIAL),
        ("ann", SNAPSHOT),
        ("bob", SNAPSHOT),
    ]
    assert hanging.now == 3 * FETCH_S


def test_what_this_node_cannot_judge_leaves_the_seat_empty():
    world = World({"ann": ALL}, finding=NotCheckable("There is no calibration."))
    assert world.auditor.check(CLAIM) is None
    assert world.auditor.counts == {"uncheckable": 1}
    assert world.told == []
    assert world.internal_errors.counts() == {}


def test_an_error_of_its_own_in_a_check_is_counted():
    """The fault: the place "verification" had none. Mutant: what it cannot judge is one too."""
    world = World({"ann": ALL}, finding=ZeroDivisionError("planted"))
    assert world.auditor.check(CLAIM) is None
    assert world.auditor.counts == {"uncheckable": 1}
    report = world.internal_errors.report()
    assert report["verification"]["count"] == 1
    assert report["verification"]["first"] == "ZeroDivisionError: planted"


def test_spent_budget_leaves_the_seat_empty():
    """A budget that is spent leaves the seat empty and nobody is asked."""
    world = World({"ann": ALL}, seconds=6.0)
    world.budget.spend(7.0)
    assert world.auditor.check(CLAIM) is None
    assert world.asked == []
    assert world.auditor.counts == {"skipped": 1}
    world.now += 20.0
    assert world.auditor.check(CLAIM).vote == "valid"


def test_budget_returns_within_a_minute():
    """What is spent comes back within a minute and no more is saved."""
    clock = Clock()
    budget = Budget(6.0, clock)
    assert budget.is_open
    budget.spend(6.0)
    assert not budget.is_open
    clock.now += 0.1
    assert budget.is_open
    clock.now += 3600.0
    assert budget.is_open
    budget.spend(6.0)  # an hour of rest is worth one minute
    assert not budget.is_open
    assert budget.spent == 12.0


def test_a_check_that_took_too_long_is_paid_for():
    clock = Clock()
    budget = Budget(6.0, clock)
    budget.spend(18.0)
    for _ in range(119):  # 12 seconds too much are two minutes
        clock.now += 1.0
        assert not budget.is_open
    clock.now += 2.0
    assert budget.is_open


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), max_size=50), st.floats(0.1, 60))
def test_in_the_long_run_no_more_is_spent_than_allowed(steps, seconds):
    clock = Clock()
    budget, began, most = Budget(seconds, clock), clock.now, 0.0
    for wait, takes in steps:
        clock.now += wait
        if budget.is_open:
            budget.spend(takes)
            most = max(most, takes)
    allowed = seconds + (clock.now - began) * seconds / 60
    assert budget.spent <= allowed + most + 1e-6


class Gossip:
    """Of all nodes in ``everyone``; a topic of itself."""

    counts = Topic.counts

    def __init__(self, everyone, identity):
        self.everyone, self.identity, self.swarm, self.counters = (
            everyone,
            identity,
            SWARM,
            Counters(),
        )
        everyone.append(self)

    def join(self, kind, handler, quota):
        self.handler = handler
        return self

    def publish(self, message):
        self.counters.add("sent")
        for other in self.everyone:
            if other is not self:
                other.handler(message.peer, message)

    def flush(self, seconds):
        self.flushed = seconds

    def close(self):
        assert self.flushed == LEAVE_S  # a record published just before was sent
        self.everyone.remove(self)


@pytest.fixture
def two():
    """Two nodes of a swarm: networks that are not open yet, and what all know of each other."""
    made, everyone, known = Network(), [], {}
    networks = []
    for name in ("ann", "bob"):
        host = made.host()
        known[host.peer_id] = SimpleNamespace(name=name, addresses=())
        directory = SimpleNamespace(everyone=lambda: known, barred=lambda peer: False)
        directory.members = lambda own=directory: {
            peer: member for peer, member in known.items() if not own.barred(peer)
        }
        directory.addresses = lambda peer: known[peer].addresses if peer in known else ()
        membership = SimpleNamespace(
            identity=host.identity, host=host, directory=directory, swarm=SWARM
        )
        networks.append(SwarmNetwork(membership, Gossip(everyone, host.identity)))
    yield networks
    for network in networks:
        network.close()
    made.close()


def test_records_bodies_and_logs_go_from_one_to_the_other(two):
    ann, bob = two
    came, asked = [], []
    ann.open(lambda *record: came.append(record), lambda since: b"log of ann", lambda peer: False)
    bob.open(
        lambda *record: came.append(record),
        lambda since: asked.append(since) or b"log of bob",
        lambda peer: False,
    )
    signature = ann.sign(b"record")
    assert bob.verify(ann.me, b"record", signature)
    assert not bob.verify(bob.me, b"record", signature)
    ann.publish(b"record", signature)
    assert came == [(ann.me, b"record", signature)]
    assert (ann.counts["sent"], bob.counts["sent"]) == (1, 0)
    sha256 = ann.put(b"body")
    assert sha256 == hashlib.sha256(b"body").digest()
    assert bob.get(ann.me, sha256, 100, 10.0) == b"body"
    with pytest.raises(MessageError):
        bob.get(ann.me, bytes(32), 100, 10.0)
    assert ann.fetch_log(bob.me, 7) == b"log of bob"
    assert asked == [7]
    assert (ann.name(bob.me), ann.name("nobody")) == ("bob", "nobody")


def test_banned_peer_is_left_out_but_can_be_asked(two):
    """Whoever is banned is left out and can still be asked."""
    ann, bob = two
    ann.open(lambda *record: None, lambda since: b"", lambda peer: False)
    bob.open(lambda *record: None, lambda since: b"", lambda peer: peer == ann.me)
    assert ann.others() == [bob.me]
    assert bob.others() == []
    assert bob.get(ann.me, ann.put(b"evidence"), 100, 10.0) == b"evidence"


def test_audit_counts_only_while_open(two):
    """Before it is open and after it is closed nothing is counted or handed out."""
    ann, bob = two
    assert ann.counts == {}
    ann.close()  # of a node that fails before it opens
    bob.open(lambda *record: None, lambda since: b"log", lambda peer: False)
    bob.close()
    with pytest.raises((MessageError, NetworkError)):
        ann.fetch_log(bob.me, 0)
    bob.close = lambda: None


def small(seed=0, **options):
    return Tiny(Strings(), seed=seed, width=16, warm=Warm(steps=0), **options)


def weights(policy):
    return {name: value.detach().clone() for name, value in policy.module.named_parameters()}


def test_there_and_back_again():
    policy, other = small(1), small(2)
    data = snapshot(policy)
    assert data == snapshot(small(1))
    assert data != snapshot(other)
    assert len(data) <= most_bytes(policy.module)
    load_snapshot(other.module, data)
    assert snapshot(other) == data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_policy_is_kept_exactly(dtype):
    policy, other = small(1), small(2)
    policy.module.to(dtype)
    load_snapshot(other.module, snapshot(policy))
    for name, value in weights(other).items():
        assert torch.equal(value.to(dtype), weights(policy)[name])
    other.module.to(dtype)
    load_snapshot(other.module, snapshot(policy))
    assert snapshot(other) == snapshot(policy)


def test_only_what_is_trained_is_in_it():
    policy = small(1)
    policy.module.tokens.requires_grad_(False)
    assert "tokens.weight" not in load(snapshot(policy))
    with pytest.raises(VerifyError, match="another policy"):
        load_snapshot(policy.module, snapshot(small(1)))


def test_what_is_not_trained_has_a_hash_of_its_own():
    first, second = small(1), small(2)
    assert base_hash(first.module) == base_hash(second.module)  # all of it is trained
    for policy in (first, second):
        policy.module.head.requires_grad_(False)
    assert base_hash(first.module) != base_hash(second.module)
    second.module.head.load_state_dict(first.module.head.state_dict())
    assert base_hash(first.module) == base_hash(second.module)
    assert base_hash(first.module) != base_hash(first.module.to(torch.bfloat16))


def spoiled(change):
    tensors = load(snapshot(small(1)))
    change(tensors)
    return save(tensors)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no safetensors"),
        (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", "no safetensors"),
        (bytes(1 << 20), "bytes where at most"),
        (spoiled(lambda t: t.pop("head.weight")), "another policy"),
        (spoiled(lambda t: t.update(x=torch.zeros(1))), "another policy"),
        (spoiled(lambda t: t.update({"head.weight": t["head.weight"].half()})), "float16 of shape"),
        (
            spoiled(lambda t: t.update({"head.weight": t["head.weight"].T.contiguous()})),
            "not as float32 of shape",
        ),
        (spoiled(lambda t: t["head.weight"].fill_(float("nan"))), "not finite"),
        (spoiled(lambda t: t["norm.weight"].fill_(float("inf"))), "not finite"),
    ],
    ids=["empty", "header", "large", "missing", "more", "dtype", "shape", "nan", "inf"],
)
def test_whole_or_not_at_all(data, said):
    policy = small(3)
    before = weights(policy)
    with pytest.raises(VerifyError, match=said) as raised:
        load_snapshot(policy.module, data)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(value, before[name]) for name, value in weights(policy).items())


def test_what_cannot_be_claimed_is_one_sentence(monkeypatch):
    policy = small(1)
    with torch.no_grad():
        policy.module.head.weight[0, 0] = float("nan")
    with pytest.raises(VerifyError, match="not all finite"):
        snapshot(policy)
    monkeypatch.setattr(snapshot_module, "MAX_SNAPSHOT_BYTES", 10_000)
    with pytest.raises(VerifyError, match="train a small adapter"):
        snapshot(small(1))
