"""A training loop of one's own in a swarm: real hosts on loopback, two loops in threads of this
process.
"""

import re
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch

import shoal
from shoal.optim import DiLoCo, GASLoC, NoLoCo
from shoal.optim.codecs.registry import INT8
from shoal.swarm.access.invitation import issue
from shoal.swarm.access.link import Link
from shoal.swarm.changes import Change, ChangePart
from shoal.swarm.errors import AdmissionError, LinkError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.overview import overview
from shoal.swarm.p2p.resource_manager import ResourceManager
from shoal.swarm.state.query import ModelDiffersError
from shoal.swarm.training.outer_sync import LEAST_SERVED_BYTES
from shoal.swarm.training.session_setup import SessionError, parameters_of, waiting_for
from shoal.swarm.wire.envelope import seal
from tests.support.session_loops import (
    EVERY,
    HERE,
    ROUNDS,
    beside,
    loop,
    model,
    sgd,
    simulated,
    together,
    trained,
)
from tests.support.waiting import until


def test_a_swarm_is_made_with_buckets():
    with shoal.create(state=model(0), bucket=16, epoch_s=90.0, network=HERE) as session:
        manifest = session._membership.manifest
        assert (manifest.bucket, manifest.epoch_s) == (16, 90.0)


@pytest.mark.parametrize(
    ("method", "make", "lag"),
    [("noloco", partial(NoLoCo, lag=0), {"lag": 0, "codec": "float32"}), ("diloco", DiLoCo, {})],
)
def test_two_loops_compute_what_a_simulation_computes(method, make, lag):
    begin = model(0)
    first = shoal.create(
        state=begin, method=method, every=EVERY, **lag, start_when=2, network=HERE, node="anna"
    )
    link, seen = first.link, {}

    def bert():
        other = model(7)  # it takes over what anna begins with
        with shoal.join(link, state=other, network=HERE, node="bert") as s:
            opt = s.optimizer(
                sgd(other), on_round=lambda info: seen.update({info.key.round: len(info.members)})
            )
            s.report(0.5)
            loop(opt, other, 2)
            status = s.status()
            seen["names"] = sorted(member["name"] for member in status["members"])
            expected = overview("x", s._membership.manifest, s._membership.directory.members(), 0.0)
            assert set(status) == {*expected, "peer", "refused", "confirmed", "internal_errors"}
            assert set(status["members"][0]) == set(expected["members"][0])
            return [t.clone() for t in opt.slow]

    slow = together(
        partial(trained, first, lambda s: make(sgd(begin), s.exchange(), every=EVERY), begin, 1),
        bert,
    )
    wanted = simulated(
        lambda module, exchange: make(sgd(module), exchange, every=EVERY), partial(model, 0)
    )
    assert seen == {**dict.fromkeys(range(ROUNDS), 2), "names": ["anna", "bert"]}
    for mine, theirs in zip(slow, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_two_loops_overlap_each_with_a_lag_of_its_own():
    begin, met = model(0), {"anna": [], "bert": []}
    first = shoal.create(
        state=begin,
        every=EVERY,
        start_when=2,
        network=HERE,
        node="anna",
        wait_s=60.0,
        finish="none",
    )
    link = first.link
    assert (first.settings.fragments, first.settings.lag) == (2, "auto")  # the model has two layers

    def anna():
        with first as s:
            opt = s.optimizer(sgd(begin), on_round=met["anna"].append)
            assert (opt.lag_auto, opt.fragments) == (True, 2)
            loop(opt, begin, 1)
            return opt

    def bert():
        other = model(7)
        with shoal.join(link, state=other, network=HERE, node="bert") as s:
            opt = NoLoCo(
                sgd(other), s.exchange(), every=EVERY, lag=2, on_round=met["bert"].append
            )  # cut as the swarm is
            loop(opt, other, 2)
            mine = next(member for member in s.status()["members"] if member["name"] == "bert")
            assert (mine["exchanges"]["lag_steps"], mine["exchanges"]["lag_auto"]) == (2, False)
            # Of passes over the model.
            rounds = mine["progress"]["round"] // s.status()["fragments"]
            assert rounds in (ROUNDS - 1, ROUNDS)
            return opt

    one, two = together(anna, bert)
    assert one.round == two.round == 2 * ROUNDS
    for infos in met.values():
        assert sorted(info.key.round for info in infos) == list(
            range(2 * ROUNDS)
        )  # after the end nothing is in flight
        assert all(len(info.members) == 2 for info in infos)
        assert all(
            info.lag > 0 for info in infos if info.key.round < 2 * ROUNDS - 1
        )  # the last is sent after the last step


def loaded(module, seed):
    """Load other weights, as a script that resumes does: after the session was made, before its
    optimizer.
    """
    module.load_state_dict(model(seed).state_dict())
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["diloco", "noloco", "co2"])
def test_all_begin_with_the_creators_weights(method, caplog):
    """Mutant: the weights of `create` count, so that a joiner of the same seed keeps them, or one
    that loaded keeps its own.
    """
    begin, same, other = model(0), model(0), model(0)
    first = shoal.create(state=begin, method=method, every=EVERY, start_when=3, network=HERE)
    joined = [shoal.join(first.link, state=one, network=HERE) for one in (same, other)]
    wanted, theirs = loaded(begin, 5), loaded(other, 6)
    assert not torch.equal(wanted[0], theirs[0])

    begun = threading.Barrier(3)

    def start(session, module):
        with session as s:
            opt = s.optimizer(sgd(module))
            begun.wait(60)  # who leaves before is missed by the others
            return [
                t.detach().clone()
                for t in (*opt.slow, *opt.rule_state.get("start", ()), *module.parameters())
            ]

    with caplog.at_level("WARNING", "shoal.swarm.training.session_setup"):
        found = together(
            lambda: start(first, begin),
            lambda: start(joined[0], same),
            lambda: start(joined[1], other),
        )
    for own in found:
        assert len(own) == len(wanted) * (3 if method == "co2" else 2)
        assert all(torch.equal(a, b) for a, b in zip(own, wanted * 3, strict=False))
    assert [r.getMessage() for r in caplog.records if "replaced" in r.getMessage()] == [
        "the model's weights were replaced by the swarm's, of round 0"
    ] * 2


def test_late_peer_takes_over_and_lone_one_goes_on():
    """A late peer takes over weights and round and one that leaves goes on alone."""
    begin, joined, progress = model(0), [], []
    first = shoal.create(state=begin, every=EVERY, lag=0, network=HERE, wait_s=1.0, shards=2)
    assert first.progress == 0
    opt = first.optimizer(sgd(begin))
    loop(opt, begin, 1)
    assert opt.round == ROUNDS

    def bert(end):
        other = model(7)
        with shoal.join(first.link, state=other, network=HERE) as s:
            mine = s.optimizer(sgd(other))
            joined.extend((mine.round, s.shard, first.shard, mine.steps, mine.listens))
            progress.extend((s.progress, mine.round))
            end()
        loop(mine, other, 2)  # the session is over
        return mine.round - joined[0]

    went_on = beside(first, lambda: loop(opt, begin, 1, steps=1), bert)
    assert joined[0] >= ROUNDS
    assert {joined[1].index, joined[2].index} <= {0, 1}
    assert joined[3:] == [0, True]  # its first round does not count
    assert (
        progress[0] == EVERY * progress[1]
    )  # where a late peer's learning-rate schedule can begin
    assert went_on == ROUNDS
    loop(opt, begin, 1)


@pytest.mark.parametrize("at_end", [False, True])
def test_loop_that_takes_no_step_serves_its_weights(at_end):
    """Fault: whoever joined waited ten seconds for a member that was evaluating, or waiting at its
    end, and a minute if there was no other.
    """
    begin, other = model(0), model(7)
    with shoal.create(state=begin, every=EVERY, lag=0, network=HERE, wait_s=1.0) as first:
        opt = first.optimizer(sgd(begin))
        loop(opt, begin, 1)
        waiting = nullcontext()
        if at_end:
            first._resting.close()
            waiting = first._end.last.waiting()
        with waiting, shoal.join(first.link, state=other, network=HERE) as session:
            mine = session.optimizer(sgd(other))
            assert mine.round == opt.round == ROUNDS
            assert all(map(torch.equal, mine.slow, opt.slow))


@pytest.fixture(scope="module")
def alone():
    module = model(0)
    with shoal.create(
        state=module, every=EVERY, lag=0, lr=0.5, network=HERE, wait_s=1.0
    ) as session:
        yield session, module


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda inner, e: NoLoCo(inner, e, every=6, lr=0.5, lag=0),
            "every is 6 and not 5; the swarm has noloco with every=5, lr=0.5",
        ),
        (lambda inner, e: NoLoCo(inner, e, every=5, lag=0), "lr is 1.0 and not 0.5"),
        (lambda inner, e: DiLoCo(inner, e, every=5, lr=0.5), "it is DiLoCo and not NoLoCo"),
        (lambda inner, e: GASLoC(inner, e, every=5, lr=0.5, lag=0), "it is GASLoC and not NoLoCo"),
        (
            lambda inner, e: NoLoCo(inner, e, every=5, lr=0.5, codec=INT8, lag=0),
            "the codec is int8 and not mod4",
        ),
        (
            lambda inner, e: NoLoCo(inner, e, every=5, lr=0.5, weight=2.0, lag=0),
            "weighted is True and not False",
        ),
    ],
)
def test_an_optimizer_that_averages_otherwise_is_refused_in_one_sentence(alone, make, sentence):
    session, module = alone
    with pytest.raises(SessionError, match=re.escape(sentence)):
        make(sgd(module), session.exchange())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            lambda net: model(1).parameters(),
            "None of the optimizer's parameters is in the session's state: make it of the model",
        ),
        (
            lambda net: net[2].parameters(),
            "trains 2 of the 4 parameters of the session's state, and not '0.weight': hand in",
        ),
        (
            lambda net: [*net.parameters(), torch.nn.Parameter(torch.zeros(3))],
            r"trains 1 parameters .* "
            r"one of shape \(3,\): hand",
        ),
    ],
)
def test_other_parameters_than_the_sessions_are_refused(alone, given, sentence):
    session, module = alone
    for make in (partial(NoLoCo, every=5, lr=0.5, lag=0), partial(NoLoCo, every=5), DiLoCo):
        with pytest.raises(SessionError, match=sentence):
            make(torch.optim.SGD(given(module), lr=0.1), session.exchange())


def test_a_session_has_one_optimizer(alone):
    session, module = alone
    opt = NoLoCo(sgd(module), session.exchange(), every=5, lr=0.5, lag=0)
    assert session.status()["members"][0]["progress"]["state"] == "training"
    assert session.status()["members"][0]["progress"]["steps_per_s"] == 0
    session.report(float("nan"))
    with pytest.raises(SessionError, match="has its optimizer already: train on with that one"):
        session.optimizer(sgd(module))
    before = [p.detach().clone() for p in module.parameters()]
    opt.count(640)
    loop(opt, module, 3, steps=5)
    assert opt.round == 1  # alone
    mine = session.status()["members"][0]
    progress = mine["progress"]
    assert (progress["round"], progress["step"], mine["loss"]["training"]) == (1, 5, None)
    assert 0 < progress["steps_per_s"] < progress["tokens_per_s"] < 1e9
    assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_record_and_status_carry_its_self_report_and_its_sketch():
    """Like nodes of `shoal up`, so that parts of a swarm that fell apart find each other, and
    `shoal status` knows of faults.
    """
    module = model(0)
    with shoal.create(state=module, method="diloco", every=EVERY, network=HERE, wait_s=0.2) as s:
        opt = s.optimizer(sgd(module))
        s.report(1.5)
        loop(opt, module, 1)
        (me,) = s._membership.directory.members().values()
        watched = s._member.reporter.status()
    assert me.sketch[:2] == (ROUNDS - 1, 0)
    assert me.round_wait_s >= 0
    assert [(done.round, done.members, done.partners, done.loss) for done in watched.rounds] == [
        (round, 1, (), 1.5) for round in range(ROUNDS)
    ]
    assert (watched.progress.state, watched.loss.training) == ("training", 1.5)
    assert watched.exchanges.without_partner == watched.exchanges.ended == ROUNDS


def test_a_swarm_by_invitation_only_admits_peers_with_one(tmp_path):
    key = Identity.create(tmp_path / "key")
    with shoal.create(state=model(0), identity=key, invite_only=True, network=HERE) as first:
        open_link = Link.parse(first.link)
        with pytest.raises(AdmissionError, match="by invitation only: ask the creator"):
            shoal.join(open_link, state=model(0), network=HERE)
        invited = Link(
            open_link.swarm, open_link.bootstrap, issue(key, open_link.swarm, lives=600.0)
        )
        with shoal.join(str(invited), state=model(0), network=HERE) as s:
            assert s.status()["name"] == "own-loop"


def test_lists_of_peers_hold_peer_ids():
    with pytest.raises(AdmissionError, match="'anna' is no peer id: correct the list"):
        shoal.create(state=model(0), network=shoal.NetworkOptions(deny=("anna",)))


def test_another_model_does_not_get_in(alone):
    session, _ = alone
    with pytest.raises(ModelDiffersError, match="model does not fit the swarm"):
        shoal.join(session.link, state=torch.nn.Linear(3, 1), network=HERE)
    with pytest.raises(
        ModelDiffersError, match=r"not of the dtype of the swarm's, torch.float32: make them so"
    ):
        shoal.join(session.link, state=model(0).bfloat16(), network=HERE)


def test_settings_are_no_optimizer_options(alone):
    """What the settings decide is no option of a session's optimizer."""
    session, module = alone
    for options, sentence in (
        ({"every": 7}, "The swarm's settings decide every, which is 5: leave it out."),
        (
            {"slow": "cpu"},
            "A session's optimizer has no option 'slow': it has slow_device and on_round.",
        ),
    ):
        with pytest.raises(SessionError, match=sentence):
            session.optimizer(sgd(module), **options)
    with pytest.raises(
        TypeError, match=r"exchange must be an exchange, got Session: hand in its exchange\(\)"
    ):
        NoLoCo(sgd(module), session)


def test_averaged_parameters_require_gradients():
    """What is averaged is what requires a gradient of a module or a list."""
    module = model(0)
    module[0].requires_grad_(False)
    assert [tuple(p.shape) for p in parameters_of(module)] == [(1, 8), (1,)]
    found = parameters_of(reversed([*module.parameters()]))
    assert [id(p) for p in found] == [id(module[2].bias), id(module[2].weight)]
    assert len(parameters_of([module[2].bias, module[2].bias])) == 1
    wrong = {
        "this Tanh": module[1],
        "nothing": [],
        "this list": ["x"],
        "this Parameter": module[2].weight,
        "this str": "model",
        "this NoneType": None,
        "this SGD": torch.optim.SGD(module.parameters()),
        "this tuple": (module[0].weight, torch.zeros(3, dtype=torch.int64)),
    }
    for name, state in wrong.items():
        with pytest.raises(
            SessionError, match=f"hand in the model that is trained, and not {name}."
        ):
            parameters_of(state)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"fragments": []},
            r"made with fragments as given: parameter 0 of shape \(8, 4\) is in 0 "
            r"fragments",
        ),
        (
            {"fragments": "two"},
            "made with fragments as given: fragments must be a number, or a list of modules, got "
            "'two'",
        ),
        (
            {"fragments": [torch.nn.Linear(2, 2)]},
            r"made with fragments as given: parameter 0 of shape "
            r"\(8, 4\) is in 0 fragments",
        ),
        ({"method": "none"}, "averages with no peer"),
        (
            {"method": "dilco"},
            "made with method as given: did you mean 'diloco'\\? The methods are noloco, ",
        ),
        ({"evry": 5}, "There is no setting 'evry' of a swarm: did you mean 'every'\\?"),
        ({"zzz": 5}, "There is no setting 'zzz' of a swarm: leave it out."),
        ({"every": 0}, "made with every as given"),
        ({"method": "diloco", "fragments": 4}, "the method 'diloco' has no fragments"),
        ({"start_when": 0}, "made with start_when as given"),
        ({"bucket": 3}, "made with bucket as given: a bucket holds 4 to 64 members"),
        (
            {"bucket": 64, "epoch_s": 5.0},
            "made with epoch_s as given: an epoch takes 30 to 86400 seconds",
        ),
        (
            {"epoch_s": 90.0},
            "The setting epoch_s is one of buckets: leave it out, or set bucket too",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_named_before_anything_starts(settings, sentence):
    with pytest.raises(SessionError, match=sentence):
        shoal.create(state=model(0), network=HERE, **settings)


def test_a_name_is_checked_before_anything_starts():
    for name in ("x" * 65, "a\nb"):
        with pytest.raises(SessionError, match="at most 64 printable characters"):
            shoal.create(state=model(0), node=name)


def test_link_is_checked_first_and_key_can_be_kept(tmp_path):
    """A link is checked before anything starts and a key can be kept."""
    with pytest.raises(LinkError, match="shoal up"):
        shoal.join("http://example.org", state=model(0))
    with shoal.create(state=model(0), identity=tmp_path / "key", network=HERE) as s:
        assert s.status()["peer"] == Identity.load(tmp_path / "key").peer_id
        with pytest.raises(AdmissionError, match="leads only to the node of this very key"):
            shoal.join(s.link, state=model(0), identity=tmp_path / "key", network=HERE)
    Identity.load(tmp_path / "key").lock().__exit__(None, None, None)
    with pytest.raises(AttributeError, match="no attribute 'leave'"):
        _ = shoal.leave


def test_one_missing_peer_is_one_peer():
    assert waiting_for(1) == "waiting for 1 more peer: share the link"
    assert waiting_for(2) == "waiting for 2 more peers: share the link"


def test_ended_session_reports_nothing_more():
    """After its end a session reports nothing more and the callback still comes."""
    module, rounds, called = model(0), [], []
    with shoal.create(state=module, every=EVERY, lag=0, network=HERE, wait_s=0.2) as s:
        opt = s.optimizer(sgd(module), on_round=rounds.append)
        loop(opt, module, 1, steps=EVERY)
    member, membership = s._member, s._membership
    member.on_round = member.report_round = lambda *args: called.append("member")
    membership.news = lambda: called.append("news")
    loop(opt, module, 2, steps=2 * EVERY)
    assert called == []
    assert len(rounds) == 3


def test_a_tiny_model_is_served_more_than_its_size(monkeypatch):
    """Fault: a few fetches of a model of 36 bytes used up what a peer is served in an hour, for
    the messages around it count too; it could not join.
    """
    served, tiny = [], torch.nn.Linear(8, 1)
    monkeypatch.setattr(
        ResourceManager, "meter", lambda manager, protocol, nbytes: served.append(nbytes)
    )
    with shoal.create(state=tiny, every=EVERY, network=HERE) as session:
        session.optimizer(sgd(tiny))
    assert served == [LEAST_SERVED_BYTES]


def test_creators_change_reaches_every_loop():
    """Rate and end. Mutants: only who was handed the change tells its loop; a loop is told before
    the round; a change is told twice; it is over a step late, or never.
    """
    key, begin, told = Identity.ephemeral(), model(0), {"anna": [], "bert": []}
    end = 3 * EVERY
    first = shoal.create(
        state=begin, every=EVERY, lag=0, start_when=2, network=HERE, node="anna", identity=key
    )
    link = first.link
    parts = (ChangePart(round=2, lr=0.01, steps=end),)
    change = Change(swarm=first.membership.swarm, creator=key.peer_id, number=1, parts=parts)

    def run(session, module, name, seed):
        with session as s:
            opt = s.optimizer(sgd(module))
            s.on_change = lambda train: told[name].append((opt.round, train.lr, train.steps))
            if name == "anna":
                s.membership.changes.take(seal(change, key))
            loop(opt, module, seed, steps=EVERY)
            until(lambda: s.membership.changes.number == 1)
            while not s.over and opt.steps < 2 * end:
                loop(opt, module, seed + 1, steps=1)
            assert s.status()["changes"][0]["lr"] == 0.01
        return s.train.lr, opt.steps, s.ended.members, parameters_of(module)

    def bert():
        other = model(7)
        return run(shoal.join(link, state=other, network=HERE, node="bert"), other, "bert", 2)

    (*mine, weights), (*theirs, their_weights) = together(
        lambda: run(first, begin, "anna", 1), bert
    )
    assert told == {"anna": [(2, 0.01, end)], "bert": [(2, 0.01, end)]}
    assert mine == theirs == [0.01, end, ("anna", "bert")]
    assert all(torch.equal(a, b) for a, b in zip(weights, their_weights, strict=True))


def test_a_loop_that_takes_no_changes_is_told_so(caplog):
    key, begin = Identity.ephemeral(), model(0)
    with shoal.create(state=begin, every=EVERY, network=HERE, identity=key) as session:
        opt = session.optimizer(sgd(begin))
        parts = (ChangePart(round=0, lr=0.01, steps=40),)
        change = Change(swarm=session.membership.swarm, creator=key.peer_id, number=1, parts=parts)
        session.membership.changes.take(seal(change, key))
        loop(opt, begin, 1, steps=2)
        assert not session.over
    assert session.over, "a closed session has no partners"
    said = [line for line in caplog.messages if "has changed" in line]
    assert said == [
        "the swarm's creator has changed train.steps=40: this loop ends there if it asks "
        "session.over",
        "the swarm's creator has changed train.lr=0.01: this loop has no session.on_change, so it "
        "goes on as before",
    ]
