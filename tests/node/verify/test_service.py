"""Sessions of several nodes over a board in memory: terms that fit, the guilty banned, nobody else,
and all reckon alike.
"""

import itertools
import json
import re
import threading

import pytest
import torch

from shoal.node.config.settings import ConfigError, Settings
from shoal.node.task import Task
from shoal.node.verify import claimer
from shoal.node.verify.claim_file import load_claim
from shoal.node.verify.errors import VerifyError
from shoal.node.verify.explain import explain
from shoal.node.verify.service import Verification
from shoal.node.verify.snapshot import most_bytes
from shoal.node.verify.terms import check_terms, make_terms
from shoal.swarm.errors import MessageError
from shoal.verification.calibration import Calibration, Judgement
from shoal.verification.calibration_file import load_calibration, save_calibration
from shoal.verification.consensus.records import Entry
from shoal.verification.fingerprints.fingerprint import Evidence
from tests.node.verify.board import (
    ROUND_S,
    TICKS,
    Board,
    Node,
    calibrate,
    run,
    settings_of,
    task_of,
    toy_signature,
)
from tests.support.quantised_policy import quantised

GUILTY = {"quantised", "withholding"}
HONEST = ("ann", "bob", "cat")


@pytest.fixture(scope="session")
def calibration(tmp_path_factory):
    return calibrate(tmp_path_factory.mktemp("calibration") / "tiny.calibration", 40)


@pytest.fixture
def node(tmp_path, calibration):
    return lambda board, name, **options: Node(board, name, tmp_path, calibration, **options)


@pytest.fixture
def five(node, monkeypatch):
    """Three honest nodes; one that claims what a policy of 4 bits wrote; and one that hands nothing
    out.
    """

    def make(board, **verify):
        prove = claimer.prove
        nodes = [
            node(board, name, seed=seed, **verify)
            for seed, name in enumerate((*HONEST, "quantised"))
        ]
        nodes.append(node(board, "withholding", seed=4, hands_out=False, **verify))
        cheat = nodes[3].task.policy
        monkeypatch.setattr(
            claimer,
            "prove",
            lambda own, *a, **k: prove(quantised(own) if own is cheat else own, *a, **k),
        )
        return nodes

    return make


@pytest.mark.ci
@pytest.mark.parametrize("planted", [0.0, 0.3])
def test_guilty_alone_are_banned(five, node, planted, tmp_path):
    """The guilty are banned and nobody else and a newcomer learns that."""
    board = Board()
    nodes = five(board, planted=planted)
    run(board, nodes, 14)
    assert {one.me: one.banned for one in nodes} == {one.me: GUILTY for one in nodes}
    late = node(board, "late", seed=9, planted=planted)
    claimed = [one.verification.report()["claimed"] for one in nodes]
    asked = len(nodes[0].network.asked)
    run(board, [*nodes, late], 5)
    # Whoever is banned claims no more, and nobody has to do with it.
    assert [
        one.verification.report()["claimed"] - was for one, was in zip(nodes, claimed, strict=True)
    ] == [5, 5, 5, 0, 0]
    assert not GUILTY & set(nodes[0].network.asked[asked:])
    assert all(
        nodes[0].network.is_banned(peer) == (peer in GUILTY)
        for peer in (*HONEST, *GUILTY, "a stranger")
    )
    nodes.append(late)
    assert len({one.verification.table.digest for one in nodes}) == 1
    assert late.banned == GUILTY
    reports = {one.me: one.verification.report() for one in nodes}
    assert reports["late"]["pulled"] > 100
    standings = reports["ann"]["standings"]
    for name in HONEST:
        told = standings[name]
        assert told["score"] > 0
        assert told["claims"]["valid"] >= 3
        assert (
            told["claims"]["invalid"]
            == told["seats"]["against"] + told["seats"]["missed"] + told["seats"]["absent"]
            == 0
        )
    assert all(
        standings[name]["claims"]["invalid"] == 2 for name in GUILTY
    )  # two are as many as it takes
    assert (sum(standings[name]["claims"]["planted"] for name in HONEST) > 0) == (planted > 0)
    assert all(report["skipped"] == report["uncheckable"] == 0 for report in reports.values())
    assert not any(reports[name]["lost"] for name in (*HONEST, "late"))
    assert all(json.loads(json.dumps(report)) == report for report in reports.values())
    # What people are told.
    said = "\n".join(nodes[0].said)
    assert (
        "of quantised's node is invalid: The claimed policy does not compute these activations ("
        in said
    )
    assert (
        "of withholding's node is invalid: The author of the claim does not serve what it was made "
        "of." in said
    )
    for one in (nodes[0], late):
        assert sorted(
            line.split("'")[0] for line in one.said if " is banned until " in line
        ) == sorted(GUILTY)
        assert all(
            line.endswith(": 2 claims found invalid")
            for line in one.said
            if " is banned until " in line
        )
    assert [line for line in nodes[3].said if line.startswith("this node is banned until")]
    assert nodes[0].events[-1]["banned"] == sorted(GUILTY)
    # And what can be looked at later.
    kept = [load_claim(path) for path in (tmp_path / "ann" / "claims").glob("*.claim")]
    assert {stored.claim.peer for stored in kept} > {"ann", "quantised"}
    assert all(stored.snapshot is not None for stored in kept)


def test_training_never_waits_for_a_check(node):
    """Training waits for nothing not even while a claim is checked."""
    board = Board()
    nodes = [node(board, name, seed=seed) for seed, name in enumerate((*HONEST, "dan"))]
    ann, found = nodes[0], []
    get = ann.network.get

    def look(*arguments):
        """What training, the network and people may want in the middle of a check, each by a thread
        that must come back.
        """
        verification = ann.verification
        wants = [
            lambda: ann.claimer.write(ann.task.policy, 1, 0),
            lambda: verification.is_banned("bob"), verification.report, lambda: ann.network.log(0),
            lambda: verification.tell(ann.said.append, lambda *a, **k: None),
        ]  # fmt: skip
        threads = [threading.Thread(target=want, daemon=True) for want in wants]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        found.append(any(thread.is_alive() for thread in threads))
        return get(*arguments)

    ann.network.get = look
    run(board, nodes, 8)
    assert len(found) > 3
    assert not any(found)


def test_nothing_is_written_for_a_claim_that_is_not_due(node):
    board = Board()
    ann = node(board, "ann")
    ann.step()
    assert ann.claimer.write(ann.task.policy, 1, 0) is None
    assert ann.claimer.seconds == 0


def test_late_claim_is_lost_and_counted(node):
    """A claim that was written too late is lost and counted."""
    board = Board()
    nodes = [node(board, name, seed=seed) for seed, name in enumerate(HONEST)]
    run(board, nodes, 6)
    ann = nodes[0]
    before = ann.verification.report()
    ann.step()
    ann.train()  # claims are due now
    board.now += ROUND_S
    ann.step()
    after = ann.verification.report()
    assert (after["lost"], after["claimed"]) == (1, before["claimed"])


def test_records_that_are_none_or_of_somebody_else_are_refused(node):
    board = Board()
    ann = node(board, "ann")
    entry = Entry(peer="cat", run="swarm", round=5, operator="cat", anchor=bytes(32))
    with pytest.raises(MessageError, match="its author did not send it"):
        ann.network.take("bob", entry.encoded, toy_signature("bob", entry.encoded))
    with pytest.raises(
        MessageError, match="A record of verification was refused: not a known kind of record"
    ):
        ann.network.take("bob", b"\x91\x01", bytes(64))
    ann.network.take("cat", entry.encoded, b"")
    ann.step()
    assert ann.verification.report()["records"] == {
        "accepted": 1,
        "forged": 1,
    }  # the first is its own entry


def test_without_a_calibration_a_node_measures_its_own_claims(node, tmp_path):
    ann = Node(Board(), "ann", tmp_path, None)
    ann.step()
    assert ann.said == ["measured 128 honest claims of its own, to check others by"]


def test_too_short_rounds_name_the_right_length(node, monkeypatch):
    """The fault: rounds of 60 s give a body 3 s to arrive, and an honest peer with a large adapter
    was banned for its link.
    """
    monkeypatch.setattr("shoal.node.verify.service.UPLINK_MBIT", 0.001)
    ann = node(Board(), "ann")
    ann.step()
    (said,) = [said for said in ann.said if "weights behind each claim" in said]
    bits, round_s = (
        3 * 8 * most_bytes(ann.task.policy.module),
        int(re.search(r"verify\.round_s=(\d+)", said)[1]),
    )
    assert bits / (round_s / 20) <= 0.001e6 < bits / ((round_s - 1) / 20)
    assert f"within {ROUND_S / 20:g} s" in said


def test_a_calibration_that_cannot_be_used_ends_the_start(tmp_path, calibration):
    (tmp_path / "none").write_text("none")
    with pytest.raises(VerifyError, match=r"^The calibration '.*ann/calibration' "):
        Node(Board(), "ann", tmp_path, tmp_path / "none")
    other = calibrate(tmp_path / "other", 20, "hf:other")
    with pytest.raises(
        VerifyError,
        match="says nothing about 'tiny' in float32: make another with `shoal verify calibrate`",
    ):
        Node(Board(), "ann", tmp_path, other)


def test_outdated_calibration_ends_the_start(tmp_path, calibration):
    """Every check would be an abstention, which costs reputation without a word."""
    found = load_calibration(calibration)
    for pair, honest in found.pairs.items():
        fewer = [
            Evidence(claim.features[:2], tuple(row[:2] for row in claim.values), claim.sizes)
            for claim in honest.claims
        ]
        found.add(pair, fewer)
    older = tmp_path / "older"
    save_calibration(found, older)
    with pytest.raises(
        VerifyError, match="measured other things: make another with `shoal verify calibrate`"
    ):
        Node(Board(), "ann", tmp_path, older)


def test_the_thread_ends_with_a_sentence_and_training_goes_on(node, monkeypatch):
    def fail(self):
        raise RuntimeError("no memory")

    board = Board()
    ann = node(board, "ann")
    monkeypatch.setattr(Verification, "step", fail)
    ann.verification.start()
    ann.verification._thread.join(60)
    ann.train()
    ann.verification.tell(ann.said.append, lambda *a, **k: None)
    said = (
        "verification has ended (RuntimeError: no memory): start the node again to take part in it"
    )
    assert ann.said == [said]
    assert ann.network.internal_errors.counts() == {"verification": 1}
    ann.verification.close()
    assert board.there == {}


def test_restarted_node_hands_out_its_claims(node, tmp_path):
    """A node that was restarted still hands out what it claimed."""
    board = Board()
    run(
        board,
        [node(board, name, seed=seed) for seed, name in enumerate(("ann", "bob", "cat", "dan"))],
        7,
    )
    claims = [load_claim(path).claim for path in (tmp_path / "ann" / "claims").glob("*.claim")]
    own = sorted((claim for claim in claims if claim.peer == "ann"), key=lambda claim: claim.round)
    assert 0 < len(own) < len(claims)
    again = node(board, "ann")
    assert list(again.network.bodies)[-2:] == [
        own[-1].fingerprint,
        own[-1].model,
    ]  # the newest last: it is kept longest
    assert set(again.network.bodies) == {claim.fingerprint for claim in own} | {
        claim.model for claim in own
    }
    (tmp_path / "ann" / "claims" / f"{own[-1].model.hex()}.safetensors").write_bytes(
        b""
    )  # as after a loss of power
    assert own[-1].model not in node(board, "ann").network.bodies
    board.now += 21 * ROUND_S  # nobody asks for it any more
    assert not node(board, "ann").network.bodies


def test_a_node_that_ends_reveals_its_votes_first(node):
    board = Board()
    nodes = [node(board, name, seed=seed) for seed, name in enumerate((*HONEST, "dan"))]

    def sent(kind):
        ledgers = [one.verification._participant.consensus.ledger for one in nodes]
        return [record for ledger in ledgers for record in ledger if kind == record.KIND]

    with torch.random.fork_rng([]):
        for tick, one in zip(range(12 * TICKS), itertools.cycle(nodes), strict=False):
            board.now += ROUND_S / TICKS
            one.step()
            if sent("commitment"):
                break
            if tick % (TICKS // 2) < len(nodes):
                one.train()
    one.verification.close()
    for other in nodes:
        other.step()
    (vote,), reveals = set(sent("commitment")), sent("reveal")
    assert len(reveals) > 1  # of the own ledger, and of another that has opened the draw
    assert all(reveal.fits(vote) for reveal in reveals)


def test_terms_are_the_creators_settings(tmp_path):
    task = task_of()
    terms = make_terms(settings_of(tmp_path), task)
    assert (terms.policy, terms.group, terms.temperature, terms.max_tokens) == ("tiny", 8, 1.0, 8)
    assert (
        terms.base == make_terms(settings_of(tmp_path), task_of(seed=5)).base
    )  # all of tiny's weights are trained
    check_terms(terms, settings_of(tmp_path), task)
    assert make_terms(settings_of(tmp_path, audit_rate=0.0), task) is None


def test_oversized_adapter_is_refused_at_once(tmp_path):
    """An adapter too large to be claimed is refused before training."""
    task = task_of()
    task.policy.module.register_parameter("large", torch.nn.Parameter(torch.empty(2**24)))
    with pytest.raises(VerifyError, match="claims need 1 to 67,108,864"):
        make_terms(settings_of(tmp_path), task)


def test_a_task_without_completions_has_nothing_to_claim(tmp_path):
    with pytest.raises(ConfigError) as refused:
        make_terms(settings_of(tmp_path), Task())
    assert str(refused.value) == "This task writes no completions to claim: pass --task rl with it."


def test_another_policy_is_refused(tmp_path):
    """Another policy is refused in a sentence and a habit is none."""
    terms = make_terms(settings_of(tmp_path), task_of())
    check_terms(terms, with_policy(settings_of(tmp_path), "tiny:first"), task_of())
    with pytest.raises(ConfigError) as refused:
        check_terms(terms, with_policy(settings_of(tmp_path), "hf:/models/small"), task_of())
    assert str(refused.value) == (
        "The swarm verifies the policy 'tiny', this node was given 'hf:small': pass --policy and "
        "where that one is."
    )


def test_other_untrained_weights_are_refused_in_a_sentence(tmp_path):
    task, other = task_of(), task_of()
    for made in (task, other):
        made.policy.module.tokens.weight.requires_grad_(False)
    terms = make_terms(settings_of(tmp_path), task)
    check_terms(terms, settings_of(tmp_path), other)
    other.policy.module.tokens.weight[0, 0] += 1e-3
    with pytest.raises(ConfigError) as refused:
        check_terms(terms, settings_of(tmp_path), other)
    assert str(refused.value) == (
        "This node's copy of 'tiny' has other weights than the swarm's: take the same version of "
        "the model."
    )


def with_policy(settings: Settings, policy: str) -> Settings:
    return settings.model_copy(update={"rl": settings.rl.model_copy(update={"policy": policy})})


@pytest.mark.slow(reason="trains and checks for some twenty rounds of five nodes")
def test_slight_cheat_is_banned_by_its_total(tmp_path, monkeypatch):
    """Who cheats less than one claim shows is banned by all its claims."""
    calibration = calibrate(tmp_path / "tiny.calibration", 150)
    monkeypatch.setattr(
        Calibration, "judge", lambda *a: Judgement(True, 0.0, 1.0, "as honest ones")
    )
    board, prove, names = Board(), claimer.prove, (*HONEST, "dan", "quantised")
    nodes = [
        Node(board, name, tmp_path, calibration, seed=seed, claims=2)
        for seed, name in enumerate(names)
    ]
    cheat = nodes[-1].task.policy
    monkeypatch.setattr(
        claimer,
        "prove",
        lambda own, *a, **k: prove(quantised(own) if own is cheat else own, *a, **k),
    )
    for _ in range(40):
        run(board, nodes, 1)
        if all(node.banned for node in nodes):
            break
    assert {node.me: node.banned for node in nodes} == {name: {"quantised"} for name in names}
    standings = nodes[0].verification.report()["standings"]
    # Honest verifiers agree with each other, but for those whose own odds are not there yet: two
    # claims are refused in all.
    assert all(standings[name]["seats"]["against"] <= 2 for name in names[:4])
    assert all(standings[name]["score"] > -5 for name in names[:4])
    assert all(standings[name]["claims"]["invalid"] == 0 for name in names[:4])
    said = "\n".join(line for node in nodes[:4] for line in node.said)
    assert (
        "the claims of quantised's node, taken together, are not honest ones: `shoal verify "
        "explain quantised` says why" in said
    )
    assert "is invalid: Taken together, this peer's claims are not those of an honest one: " in said
    assert sum("taken together, are not honest" in line for line in nodes[0].said) <= 1
    report = explain("quantised", [tmp_path / name for name in names[:4]])
    assert sum(one["alarm"] for one in report["nodes"]) >= 3
    for name in names[:4]:
        assert not any(
            one["alarm"]
            for one in explain(f"{name}", [tmp_path / other for other in names])["nodes"]
        )
