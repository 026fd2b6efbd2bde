"""A swarm whose single claims all pass: only the history can ban the peer that cheats, and it bans nobody else."""

import pytest

from shoal.node.verify import completions
from shoal.node.verify.history import explain
from shoal.verification.calibration import Calibration, Judgement
from tests.e2e.cheat import quantised
from tests.node.verify.board import Board, Node, calibrate, run

NAMES = ("ann", "bob", "cat", "dan", "quantised")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    return calibrate(tmp_path_factory.mktemp("calibration") / "tiny.calibration", 150)


@pytest.mark.slow(reason="trains and checks for some twenty rounds of five nodes")
def test_who_cheats_less_than_one_claim_shows_is_banned_by_all_its_claims(tmp_path, calibration, monkeypatch):
    monkeypatch.setattr(Calibration, "judge", lambda *a: Judgement(True, 0.0, 1.0, "as honest ones"))
    board, prove = Board(), completions.prove
    nodes = [Node(board, name, tmp_path, calibration, seed=seed, claims=2) for seed, name in enumerate(NAMES)]
    cheat = nodes[-1].task.policy
    monkeypatch.setattr(completions, "prove", lambda own, *a, **k: prove(quantised(own) if own is cheat else own, *a, **k))
    for _ in range(40):
        run(board, nodes, 1)
        if all(node.banned for node in nodes):
            break
    assert {node.me: node.banned for node in nodes} == {name: {"quantised"} for name in NAMES}
    standings = nodes[0].verification.report()["standings"]
    # Honest verifiers agree with each other, but for those whose own odds are not there yet: two claims are refused in all.
    assert all(standings[name]["seats"]["against"] <= 2 for name in NAMES[:4])
    assert all(standings[name]["score"] > -5 for name in NAMES[:4])
    assert all(standings[name]["claims"]["invalid"] == 0 for name in NAMES[:4])
    said = "\n".join(line for node in nodes[:4] for line in node.said)
    assert "the claims of quantised's node, taken together, are not honest ones: `shoal verify explain quantised` says why" in said
    assert "is invalid: Taken together, this peer's claims are not those of an honest one: " in said
    assert sum("taken together, are not honest" in line for line in nodes[0].said) <= 1
    report = explain("quantised", [tmp_path / name for name in NAMES[:4]])
    assert sum(one["alarm"] for one in report["nodes"]) >= 3
    for name in NAMES[:4]:
        assert not any(one["alarm"] for one in explain(f"{name}", [tmp_path / other for other in NAMES])["nodes"])
