"""The benchmark of verification runs, says what it promises, and sees the coarse cheats even with
few claims.
"""

import json

import numpy as np
import pytest
import torch

from bench import _verification_sequential as sequential
from bench import _verification_tiny as tiny
from bench._verification_claims import ACTIVATIONS, SAMPLING, examined
from bench._verification_figure import curve
from bench._verification_table import BEGIN, END
from bench._verification_world import CHEATS, honest, seed_of
from bench.verification import main, voted
from shoal.verification.calibration import Honest, Pair
from shoal.verification.fingerprints.fingerprint import Evidence
from shoal.verification.fingerprints.sampling import Drawn, margins
from shoal.verification.sequential import Reference, Series


@pytest.mark.slow(
    reason="20 s: every fingerprint and cheat of four pairs of dtypes; what it is made of is "
    "tested below"
)
def test_json_has_every_row(tmp_path, called, program):
    sizes = ("--claims", "2", "--calibrate", "20", "--tokens", "32", "--votes", "2000")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nobsolete\n{END}\nafter\n")
    options = (
        *sizes,
        "--dtypes",
        "fp32,bf16",
        "--keep",
        str(tmp_path),
        "--into",
        str(page),
        "--json",
    )
    done = program("verification.py", *options)
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result["proof_bytes_per_token"] == 258 / 32
    assert result["proof_cost"] > 0
    assert result["verify_cost"] > 0
    assert result["honest_false_positive_rate"] == 0
    assert result["honest_claims"] == 8  # two claims of each of four pairs
    assert result["honest_interval"][1] > 0.3
    assert set(result["detection"]) == set(CHEATS)
    titles = [f"{p} -> {v}" for p in ("fp32", "bf16") for v in ("fp32", "bf16", "vote")]
    assert list(result["pairs"]) == [
        f"{title}, temperature {heat}" for heat in (1, 0) for title in titles
    ]
    coarse = (
        "int4 weights",
        "a layer dropped",
        "another prompt",
        "another model",
        "its text, prefilled",
        "truncated, then filler",
    )
    for row in result["pairs"].values():
        assert row["honest"]["rate"] == 0
        assert "20 honest claims cannot show" in row["warning"]
        assert all(row["detection"][name] == 1 for name in coarse)
    assert len(result["vote"]) == 15
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "obsolete" not in text
    assert "| another model | 100 % (63.1 to 100 %) | 100 % (63.1 to 100 %) |" in text
    again = called(main, *options)  # from the scores that were kept
    assert {**json.loads(again.stdout), **COSTS} == {**result, **COSTS}


COSTS = {"proof_cost": 0, "verify_cost": 0}


def test_claims_in_rows_are_those_of_claims_alone():
    world, model = tiny.Tiny(), tiny.TinyGPT()
    tokens, states = honest(world, model, 40)(range(3), 1.0)
    for claim in range(3):
        alone, own = tiny.generate(model, tiny.prompt(claim), 40, seed_of(claim))
        assert torch.equal(tokens[claim], alone)
        torch.testing.assert_close(states[claim], own, rtol=1e-4, atol=1e-4)
    read, logits = world.read(model, world.prompts(range(3)), tokens)
    torch.testing.assert_close(read, states, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        logits[1],
        tiny.prefill_rows(model, tiny.prompt(1)[None], tokens[1:2])[1][0],
        rtol=0,
        atol=1e-4,
    )


@pytest.mark.parametrize("length", [64, 40])
def test_evidence_of_claims_together_is_that_of_each(length):
    world, model, other = tiny.Tiny(), tiny.TinyGPT(), tiny.TinyGPT().bfloat16()
    write = honest(world, model, length)
    found = examined(world, write, [other], range(3), 1.0)[0]
    tokens, states = write(range(3), 1.0)
    own, logits = world.read(other, world.prompts(range(3)), tokens)
    for claim, (activations, sampling) in enumerate(found):
        assert activations == ACTIVATIONS.compare(ACTIVATIONS.make(states[claim]), own[claim])
        drawn = Drawn(tokens[claim], logits[claim], seed_of(claim))
        assert sampling == SAMPLING.measured(margins(drawn))


def test_a_vote_refuses_what_two_of_three_refuse():
    assert [
        score > 0 for score in voted({"a": [1.0, 1.0], "b": [-1.0, 2.0], "c": [-2.0, -1.0]})
    ] == [False, True]


def test_a_curve_counts_what_is_above_each_threshold():
    alarms, found = curve([float(n) for n in range(100)], [98.5, 50.0, -1.0, 200.0])
    assert (alarms[0], found[0]) == (0.01, 0.25)  # above 99
    assert (alarms[-1], found[-1]) == (1.0, 0.75)  # above 0
    assert found == sorted(found)


class TestSequential:
    """The simulation of many peers at once is the product's test, and its summary is that of its
    rows.
    """

    def test_odds_are_those_of_the_series(self):
        """Two fingerprints of three features each, 40 calibrated claims and 30 of a peer, the
        numbers tied here and there.
        """
        source = np.random.default_rng(5)
        rows = np.round(np.abs(source.normal(0.3, 0.2, (70, 6))) / 0.03) * 0.03
        known, own = rows[:40], rows[40:]
        for across in (False, True):
            found = sequential.log_odds([(known, own)], across)[:, 0]
            series = []
            for number, (proof, part) in enumerate(
                zip((ACTIVATIONS, SAMPLING), sequential.PARTS, strict=True), start=1
            ):
                evidence = [
                    Evidence(proof.features, (tuple(row),), (1.0,))
                    for row in rows[:, part].tolist()
                ]
                pair = Pair(proof.name, "tiny", "bfloat16", "float32" if across else "bfloat16")
                reference = Reference(pair, Honest.of(evidence[:40]))
                series.append((reference, Series(reference, number), evidence[40:]))
            for at in range(30):
                for reference, one, evidence in series:
                    one.add(reference.scores(evidence[at]), reference.tolerances(evidence[at]))
                assert found[at] == pytest.approx(
                    max(one.log_odds for _, one, _ in series), abs=1e-9
                )

    def test_the_kept_distances_give_the_promised_figures(self, called):
        shown = json.loads(
            called(main, "--sequential", "--peers", "3", "--cheats", "5", "--json").stdout
        )
        assert shown["honest_ban_rate"] == shown["other_machine_ban_rate"] == 0
        assert (shown["honest_peers"], shown["claims_of_a_peer"], len(shown["pairs"])) == (
            27,
            1000,
            9,
        )
        assert shown["claims_to_ban"]["int8 weights"] <= 60
        assert shown["claims_to_ban"]["int8 weights, across dtypes"] <= 60
        assert shown["claims_to_ban"]["weights + 0.1 % noise"] <= 400

    def test_medians_and_alarms(self):
        alarm = sequential.ALARM
        assert sequential.first_alarms(np.array([[0.0, alarm], [alarm, 0.0], [0.0, 0.0]])) == [
            2.0,
            1.0,
        ]
        assert sequential.first_alarms(np.array([[0.0], [alarm - 1e-6]])) == [float("inf")]
        assert sequential._median([3.0, 1.0, float("inf")]) == 3.0
        assert sequential._median([3.0, float("inf"), float("inf")]) is None
        assert sequential._worst([3.0, None]) is None
