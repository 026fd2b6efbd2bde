"""A node's report of itself in its record, and the notices for its user: of members, partners, what
was refused, and lag.
"""

import itertools
from types import SimpleNamespace

import pytest

from shoal.optim import RoundInfo, RoundKey, Seconds, Steps
from shoal.swarm.exchange.contribution import RECENT, ExchangeStats
from shoal.swarm.exchange.robust import RejectedUpdate
from shoal.swarm.identity import Identity
from shoal.swarm.membership.health_report import health_report, partner_remedy
from shoal.swarm.p2p.stream import short
from shoal.swarm.training.diagnosis import (
    ALONE_ROUNDS,
    PARTNERLESS,
    SAY_AGAIN_S,
    SAY_REFUSED_S,
    Diagnosis,
)
from shoal.swarm.training.lag_report import LATE_ROUNDS, LagReport
from shoal.swarm.training.partition_detector import CONFIRM_S, PartitionDetector
from shoal.swarm.wire.record import Exchanges, Faults
from tests.support.clock import Clock
from tests.support.records import member_of

MODEL = "0" * 64
ME, ANNA, BERT = (Identity.ephemeral().peer_id for _ in range(3))


def member(peer, **changes):
    name = {ME: "me", ANNA: "anna", BERT: "bert"}[peer]
    return member_of(peer, **{"name": name, "issued": 1.0, **changes})


def diagnosed(everyone=dict, departed=dict):
    """A diagnosis of a node that has the members that ``everyone`` returns in view, after those of
    ``departed`` have left, and its clock.
    """
    clock = Clock()
    directory = SimpleNamespace(
        members=everyone, everyone=everyone, departed=departed, belongs=lambda peer: True
    )
    expired = SimpleNamespace(yes=False)
    made = Diagnosis(ExchangeStats(), directory, ME, clock, has_expired=lambda: expired.yes)
    made.expired = expired
    return made, clock


def test_the_record_holds_what_went_wrong_and_who_is_missing():
    there = {peer: member(peer) for peer in (ME, ANNA, BERT)}
    diagnosis, clock = diagnosed(lambda: there)
    assert diagnosis.news() == []
    assert Exchanges(**diagnosis.seconds()).round_wait_s == 0.0
    diagnosis.stats.failed(RoundKey("run", 1), ANNA, "timeout")
    for seconds in [9.0, *[0.5] * RECENT]:
        diagnosis.waited(seconds)
    there = {ME: member(ME)}
    clock.now += 1.5
    assert diagnosis.news() == []
    clock.now += CONFIRM_S
    ((about, said),) = diagnosis.news()
    assert about == "partition"
    assert said.startswith(
        "a partition is suspected: 2 of 3 members vanished within 0 s (anna, bert)"
    )
    assert Exchanges(**diagnosis.seconds()).round_wait_s == 0.5
    faults = Faults(**diagnosis.faults())
    assert faults.failures == (("timeout", 1),)
    assert faults.blamed == ((ANNA, "timeout", 1),)
    assert (faults.missing, faults.missing_of, faults.missing_names) == (2, 3, ("anna", "bert"))


def test_strangers_that_vanish_are_forgotten_beyond_a_number():
    """Records cost nothing, and renewing none makes them missing: all pairs of 20,000 were compared
    once a second.
    """
    detector = PartitionDetector(ME)
    flood = {f"stranger-{n}": member(ANNA) for n in range(5000)}
    detector.look({ME: member(ME), **flood}, (), 0.0)
    detector.look({ME: member(ME)}, (), 1.0)
    detector.look({ME: member(ME)}, (), 1.0 + CONFIRM_S)
    assert len(detector._seen) == 4096 == len(detector.suspected.names) + 1  # this node


def test_it_looks_at_most_once_a_second():
    looks = []
    diagnosis, clock = diagnosed(lambda: looks.append(clock.now) or {})
    for quarter in range(12):
        clock.now = quarter / 4
        diagnosis.news()
    assert looks == [0.0, 1.0, 2.0]


def test_differing_weights_are_said_once():
    """Mutants: said in each round that lasts; one sentence of a liar hides that this node itself
    takes over others' weights.
    """
    diagnosis, clock = diagnosed()
    there = {peer: member(peer) for peer in (ME, ANNA)}
    diagnosis.apart((), there, False)
    assert diagnosis.news() == []
    for _ in range(20):
        diagnosis.apart({ANNA}, there, False)
        clock.now += (SAY_AGAIN_S - 1) / 20
    purpose = "; to load other weights on purpose, call opt.restart_from_model() on all members"
    assert diagnosis.news() == [
        (
            "weights",
            "the weights of 1 other member (anna) differ from this node's, and are to give way to "
            f"them{purpose}",
        )
    ]
    diagnosis.apart({ANNA, BERT}, there, True)
    ((_, said),) = diagnosis.news()
    names = ", ".join("anna" if peer == ANNA else short(BERT) for peer in sorted((ANNA, BERT)))
    assert (
        said
        == f"this node's weights differ from those of 2 other members ({names}), so it takes over "
        f"theirs{purpose}"
    )
    clock.now += SAY_AGAIN_S
    diagnosis.apart({ANNA}, there, False)
    assert len(diagnosis.news()) == 1
    assert diagnosis.news() == []


@pytest.fixture
def alone():
    """A node in view of bert, who trains the same model: what it is told after exchanges that had
    no partner.
    """
    members, number = {BERT: member(BERT, model=MODEL)}, itertools.count()
    departed = {}
    diagnosis, _ = diagnosed(lambda: members, lambda: departed)
    stats = diagnosis.stats

    def exchange(
        *others,
        kind=None,
        passed=False,
        fragments=1,
        error=None,
        ahead=None,
        about="partner",
    ):
        key = RoundKey("run", next(number), 0)
        if ahead:
            stats.caught(RoundKey("run", key.round + 1, 0), "trial", ahead)
        if error:
            stats.caught(key, "trial", error)
        if kind:
            stats.failed(key, BERT, kind)
        if passed:
            stats.pass_over(key, [BERT], [BERT] if passed == "slow" else [])
        diagnosis.met(RoundInfo(key, (ME, *others), 10, 0), MODEL, fragments)
        return [said for topic, said in diagnosis.news() if topic == about]

    return SimpleNamespace(
        exchange=exchange,
        members=members,
        departed=departed,
        partnerless=lambda: diagnosis.faults()["partnerless"],
        errors=stats.errors,
        expired=diagnosis.expired,
        trained_alone=diagnosis.trained_alone,
    )


def test_errors_of_its_own_are_those_of_their_exchanges(alone):
    """The fault: twelve of ten, for one in flight was told of the next one's.

    Of every pair the second is begun, and ended by an error, before the first is over.
    """
    for _ in range(5):
        alone.exchange(ahead=RuntimeError("planted"))
        alone.exchange()
    assert "the network, ended 5 of 10 exchanges" in alone.trained_alone(1)


def test_an_error_of_its_own_is_no_missing_partner(alone):
    """The fault: "no partner (all others were taken)", and advice about the length of rounds."""
    planted = RuntimeError("planted")
    caught, trains_alone = alone.exchange(error=planted, about="internal")[::-1]
    where = "its traceback is in the log: please report it"
    assert trains_alone == (
        "this node trains alone: an error in its own code, and not in the network, ended every "
        f"exchange of its last round (RuntimeError: planted); {where}"
    )
    assert caught == (
        "an error in this node's own code, and not in the network, was caught trying a partner's "
        f"weights on data (outer.check_loss) (RuntimeError: planted); {where}"
    )
    assert [alone.exchange(error=planted, about="partner") for _ in range(2 * ALONE_ROUNDS)] == [
        []
    ] * 6
    assert (alone.partnerless(), alone.errors.total) == (None, 1 + 2 * ALONE_ROUNDS)
    assert alone.trained_alone(1) == (
        "this node trained alone though others were there: an error in its own code, and not in "
        f"the network, ended 7 of 7 exchanges (RuntimeError: planted); {where}"
    )
    alone.exchange(BERT)
    assert alone.trained_alone(1) == ""


def test_partial_failure_is_not_training_alone(alone):
    """A round of fragments must fail whole before the node says that it trains alone."""
    said = [
        alone.exchange(error=RuntimeError("planted"), fragments=3, about="internal")
        for _ in range(3)
    ]
    assert [any("trains alone" in line for line in lines) for lines in said] == [False, False, True]


@pytest.mark.parametrize(
    ("kind", "there", "alone_in_the_end"), [("timeout", True, True), (None, False, False)]
)
def test_rounds_without_others_end_alone(alone, kind, there, alone_in_the_end):
    """Mutants: a node that nobody has joined ended badly; one round is enough."""
    if not there:
        alone.members.clear()
    for _ in range(ALONE_ROUNDS - 1):
        alone.exchange(kind=kind)
    assert alone.trained_alone(1) == ""
    alone.exchange(kind=kind)
    assert bool(alone.trained_alone(1)) == alone_in_the_end


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "waiting for the last average"])
def test_who_is_left_alone_at_the_end_learns_why(alone, gone):
    """The fault: others had ended, and a late member was to give them the link; that its model is
    another than theirs nobody said.
    """
    ended = alone.members.pop(BERT).model_copy(update={"finished": True})
    (alone.departed if gone else alone.members)[BERT] = ended
    alone.exchange()
    alone.exchange(BERT)
    said = [alone.exchange() for _ in range(ALONE_ROUNDS)]
    assert said == [
        [],
        [],
        [
            "3 rounds in a row had no partner (all others have come to their end), and training "
            "goes on without; `shoal pull LINK` fetches their model while any of them serves"
        ],
    ]


def test_an_expired_invitation_is_the_only_reason(alone):
    """Fault: partners were told to be slow, or taken."""
    alone.expired.yes = True
    told = [alone.exchange(kind="timeout") for _ in range(2 * ALONE_ROUNDS)]
    assert [said for lines in told for said in lines] == [
        "3 rounds in a row had no partner (this node's invitation has expired), and training goes "
        "on without; ask the creator of the swarm for a new link (`shoal invite`), and join again "
        "by it with --resume"
    ]


def test_partnerless_rounds_are_said_once(alone):
    """Mutants: said from the first round, in each, or never again."""
    told = [alone.exchange(kind="timeout") for _ in range(ALONE_ROUNDS - 1)]
    assert told == [[]] * (ALONE_ROUNDS - 1)
    assert alone.exchange(kind="timeout") == [
        "3 rounds in a row had no partner (bert did not answer in time), and training goes on "
        "without; its machine or its link is too slow, or asleep: free it, or leave it out"
    ]
    assert [alone.exchange(kind="timeout") for _ in range(20)] == [[]] * 20
    assert alone.partnerless() == ("timeout", 23)
    assert alone.exchange(BERT) == ["rounds have partners again, after 23 without"]
    assert alone.partnerless() is None
    assert alone.exchange(BERT) == []
    for _ in range(ALONE_ROUNDS):
        alone.exchange(kind="timeout")
    alone.exchange(error=RuntimeError("planted"), about="internal")  # the network is well
    assert alone.exchange(BERT) == []
    assert [len(alone.exchange(kind="timeout")) for _ in range(2 * ALONE_ROUNDS)] == [
        0,
        0,
        1,
        0,
        0,
        0,
    ]


def test_new_reason_is_said_at_once(alone):
    """Mutants: a peer that is passed over counts as taken; why it is, is not said; the first reason
    hides the next.
    """
    (refused,) = [alone.exchange(kind="refused") for _ in range(ALONE_ROUNDS)][-1]
    assert "(bert refused)" in refused
    assert "another version, other options, a ban, or an error of its own" in refused
    assert alone.exchange(passed=True) == []  # for the same reason, which was said
    (slow,) = alone.exchange(kind="timeout")
    assert "(bert did not answer in time)" in slow
    (taken,) = alone.exchange()
    assert "(all others were taken, or in other rounds)" in taken
    assert taken.endswith(PARTNERLESS["taken"][1])
    alone.members[BERT] = member(BERT, model="f" * 64)
    (model,) = alone.exchange()
    assert (
        "(all others train another model), and training goes on without; start all nodes with the "
        "same model" in model
    )
    alone.members.clear()
    (nobody,) = alone.exchange()
    assert (
        "(nobody else is here), and training goes on without; give others the link (`shoal link` "
        "shows a node's, `session.link` that of a loop of yours)" in nobody
    )
    assert alone.exchange() == alone.exchange(kind="timeout") == []


@pytest.mark.parametrize(
    ("speeds", "in_seconds", "advised"),
    [
        ((1.0, 8.0), False, True),
        ((1.0, 8.0), True, False),
        ((4.0, 5.0), False, False),
        ((0.0, 0.0), False, False),
    ],
)
def test_rounds_of_seconds_are_advised_only_where_they_would_help(speeds, in_seconds, advised):
    """The fault: seconds:auto was advised to a run that had seconds:10, and to nodes of one
    speed.
    """
    own, others = (
        member(peer, steps_per_s=speed) for peer, speed in zip((ME, BERT), speeds, strict=True)
    )
    said = partner_remedy("taken", [own.steps_per_s, others.steps_per_s], in_seconds=in_seconds)
    assert ("--round seconds:auto" in said) == advised
    (finding,) = [
        line
        for line in health_report(
            {ME: own.model_copy(update={"partnerless": ("taken", 5)}), BERT: others},
            1.0,
            in_seconds=in_seconds,
        )
        if "had no partner" in line
    ]
    assert finding.endswith(f"{said}.")


@pytest.mark.parametrize(
    ("kind", "passed", "why"),
    [
        (None, "slow", "bert held training for too long before, and is passed over for a while"),
        (
            "broken",
            "slow",
            "bert held training for too long before, and is passed over for a while",
        ),
        ("broken", "failed", "bert broke off before, and is passed over for a while"),
    ],
)
def test_who_is_passed_over_is_named_with_what_it_did(alone, kind, passed, why):
    """Mutant: a peer that is passed over for its cost is blamed for how an exchange with it failed
    once.
    """
    if kind:
        alone.exchange(BERT, kind=kind)
    (said,) = [alone.exchange(passed=passed) for _ in range(ALONE_ROUNDS)][-1]
    assert f"({why})" in said


def test_a_round_of_several_fragments_counts_once(alone):
    told = [len(alone.exchange(kind="timeout", fragments=4)) for _ in range(4 * ALONE_ROUNDS)]
    assert told == [*[0] * (4 * ALONE_ROUNDS - 1), 1]


def test_refusals_are_summed_once_a_minute():
    """Mutants: every change is said; what was refused within the minute is forgotten; all since the
    start is said each time.
    """
    diagnosis, clock = diagnosed()

    def told(**counts):
        diagnosis.refused(counts)
        return diagnosis.news()

    assert told(overflow=0) == []
    assert told(rate=3, forged=1) == [
        (
            "refused",
            "refused from other peers since it was last said: 3 over the rate limit (rate), 1 with "
            "a false signature or sender (forged)",
        )
    ]
    assert told(rate=3, forged=7) == []
    clock.now += SAY_REFUSED_S
    assert told(rate=3, forged=7) == [
        (
            "refused",
            "refused from other peers since it was last said: 6 with a false signature or sender "
            "(forged)",
        )
    ]
    clock.now += SAY_REFUSED_S
    assert told(rate=3, forged=7) == []


def test_refused_contribution_names_its_setting():
    """A contribution that was refused is named with the setting that would take it."""
    there = {ANNA: member(ANNA)}
    diagnosis, _ = diagnosed(lambda: there)
    diagnosis.rejected(
        [RejectedUpdate(RoundKey("run", 7), ANNA, "it is far away", "outer.robust=none")]
    )
    ((about, said),) = diagnosis.news()
    assert about == "update"
    assert said.startswith("refused what anna sent in round 7: ")
    assert said.endswith("; if you trust all peers, set outer.robust=none")


def over(report, *, members=("a", "b"), wait_s=2.0, late=False):
    report.on_round(RoundInfo(RoundKey("run", 0, 0), members, 10, 10, late), wait_s)


def optimizer(lag=10, lag_auto=True, every=10):
    return SimpleNamespace(
        lag=lag, lag_auto=lag_auto, schedule=SimpleNamespace(every=every), length=Steps()
    )


def test_it_counts_what_came_late():
    report = LagReport(optimizer(lag=3))
    assert report.late == 0
    for late in (True, False, True):
        over(report, late=late)
    assert report.late == 2


def test_long_exchanges_warn_once():
    """A node whose exchanges take longer than a round is warned once."""
    report = LagReport(optimizer())
    for _ in range(LATE_ROUNDS - 1):
        over(report)
        assert report.news() == []
    over(report, wait_s=10.0)
    ((about, sentence),) = report.news()
    assert about == "lag"
    assert "longer than a round, so training waits for each (3 s recently)" in sentence
    assert "`shoal plan`" in sentence
    for _ in range(2 * LATE_ROUNDS):
        over(report)
    assert report.news() == []


@pytest.mark.parametrize("harmless", [{"members": ()}, {"members": ("a",)}, {"wait_s": 0.0}])
def test_normal_exchange_restarts_the_count(harmless):
    """An exchange that shows nothing of the kind begins the count anew."""
    report = LagReport(optimizer())
    for _ in range(LATE_ROUNDS - 1):
        over(report)
    over(report, **harmless)
    for _ in range(LATE_ROUNDS - 1):
        over(report)
    assert report.news() == []


@pytest.mark.parametrize(
    "changed", [{"lag": 9}, {"lag_auto": False}, {"lag": 0, "lag_auto": False}]
)
def test_only_exhausted_lag_warns(changed):
    """Only a lag that can grow no more is worth a warning."""
    report = LagReport(optimizer(**changed))
    for _ in range(2 * LATE_ROUNDS):
        over(report)
    assert report.news() == []


def rounds(rate, *, wait_s, sent, count=LATE_ROUNDS + 1, computing_s=10.0, lag=0, length=None):
    """Return the sentences of a node with rounds of 40 steps that waits for each exchange."""
    clock = Clock()
    opt = SimpleNamespace(
        lag=lag,
        lag_auto=False,
        schedule=SimpleNamespace(every=40),
        shapes=[(250, 250), (500,)],
        length=length or Steps(),
    )
    report, found = LagReport(opt, lambda: rate, clock), []
    for number in range(count):
        report.on_round(
            RoundInfo(RoundKey("run", number, 0), ("a", "b"), 40 * number, lag, False), wait_s, sent
        )
        clock.now += computing_s + wait_s
        found += [said for _, said in report.news()]
    return found


def test_in_rounds_of_seconds_the_setting_to_change_is_theirs():
    """The fault: outer.every was named to a run whose rounds it does not make longer."""
    length = Seconds(10.0, Clock())
    (sentence,) = rounds(
        125_000.0, wait_s=24.0, sent=3_000_000, count=3 * LATE_ROUNDS, length=length
    )
    assert (
        "rounds 3 times as long (outer.round) or a smaller codec (outer.codec) would fit"
        in sentence
    )


def test_insufficient_link_is_named_once():
    """A link that does not carry the settings is named once with what would fit."""
    (sentence,) = rounds(125_000.0, wait_s=24.0, sent=3_000_000, count=3 * LATE_ROUNDS)
    assert "carries 1 Mbit/s, but these settings send 2.4 Mbit/s" in sentence
    assert (
        "rounds of 120 inner steps (outer.every, now 40)" in sentence
    )  # 24 s of bytes in 30 s of computing: 80 %
    assert "`shoal plan --params 63000 --mbit 1 --step 0.25`" in sentence


@pytest.mark.parametrize(
    "harmless",
    [
        {"rate": None},
        {"rate": 400_000.0},
        {"wait_s": 0.0},
        {"count": LATE_ROUNDS},
        {"sent": 1_200_000},
    ],
)
def test_sufficient_or_unknown_link_is_not_named(harmless):
    """A link that carries them or is not known is not named."""
    assert rounds(**{"rate": 125_000.0, "wait_s": 24.0, "sent": 3_000_000} | harmless) == []
