"""The benchmark of a real model goes on where it stopped, draws as it says, and judges kept
evidence as a node would.
"""

import json
import math
import random

import pytest
import torch

from bench import _verification_135m as bench
from bench import _verification_135m_report as report
from bench import verification_135m
from bench._questions import question
from bench._verification_world import seed_of
from shoal.verification.fingerprints.sampling import Drawn, gumbel, margins
from shoal.verification.sequential import ALARM

PLAN = bench.Plan(honest=256, across=64, cheats=64, variants=32)


def test_first_round_has_all_cheats_once():
    """Every claim is written once and a first round has all cheats."""
    units = PLAN.units()
    for way, first, many in (
        ("honest", bench.FRESH, 256),
        ("int8 weights", bench.CHEATING, 64),
        ("honest, 2 threads", bench.VARIANT, 32),
    ):
        for prover in bench.SIDES:
            claims = [
                claim for one, side, part in units if (one, side) == (way, prover) for claim in part
            ]
            assert claims == list(range(first, first + many))
    begun = {way for way, _, _ in units[: 2 + 2 * len(bench.CHEATS)]}
    assert begun == {"honest", *bench.CHEATS}


def test_other_dtype_reads_first_honest_claims():
    """Only the first honest claims are read in the other dtype."""
    assert PLAN.sides("honest", "bf16", range(bench.FRESH + 32, bench.FRESH + 64)) == bench.SIDES
    assert PLAN.sides("honest", "bf16", range(bench.FRESH + 64, bench.FRESH + 96)) == ("bf16",)
    assert (
        PLAN.sides("int8 weights", "fp32", range(bench.CHEATING + 640, bench.CHEATING + 672))
        == bench.SIDES
    )


class Stub:
    """A policy that is not called: units are stubs too."""

    weights = "one"

    def __init__(self, folder):
        self.changes = {"int8": 0.5}

    def digest(self):
        return self.weights


def test_stopped_run_goes_on_with_its_own_file(tmp_path, monkeypatch):
    """A stopped run goes on and another models file is refused."""
    path, done = tmp_path / "kept.json.gz", []

    def unit(policy, way, prover, sides, claims):
        done.append((prover, claims))
        return {side: [[float(claim), 0, 0, 0, 0, 0] for claim in claims] for side in sides}, {
            "write": 1.0
        }

    monkeypatch.setattr(bench, "Policy", Stub)
    monkeypatch.setattr(bench, "unit", unit)
    monkeypatch.setattr(bench, "CHEATS", {})
    monkeypatch.setattr(bench, "VARIANTS", {})
    small, large = bench.Plan(64, 32, 0, 0), bench.Plan(96, 32, 0, 0)
    assert not bench.measure(tmp_path, path, small, -1.0)
    assert done == []
    assert bench.measure(tmp_path, path, small, 60.0)
    assert bench.measure(tmp_path, path, large, 60.0)
    starts = [(prover, claims.start - bench.FRESH) for prover, claims in done]
    assert sorted(starts) == [(prover, at) for prover in ("bf16", "fp32") for at in (0, 32, 64)]
    kept = bench.load(path)
    assert [row[0] - bench.FRESH for row in kept["rows"]["bf16 bf16 honest"]] == list(range(96))
    assert len(kept["rows"]["bf16 fp32 honest"]) == 32
    assert kept["seconds"] == {"write": [1.0] * 6}
    monkeypatch.setattr(Stub, "weights", "another")
    with pytest.raises(SystemExit, match="name another file with --kept"):
        bench.measure(tmp_path, path, large, 60.0)


def test_draws_and_margins_are_those_of_the_fingerprint():
    claims, count, words = (5, 6), bench.TOKENS, 50
    noise = bench.noise_of(claims, words)
    assert torch.equal(noise[3, 1], gumbel(seed_of(6), range(3, 4), words)[0])
    logits = torch.randn(2, count, words, generator=torch.Generator().manual_seed(0))
    hot = bench.chooser(noise, bench.Way(temperature=2.0))
    tokens = torch.stack([hot(logits[:, at], at) for at in range(count)], dim=1)
    found = bench.margins(tokens, logits, noise)
    assert float(found.max()) > 0
    for row, claim in enumerate(claims):
        assert torch.equal(found[row], margins(Drawn(tokens[row], logits[row], seed_of(claim))))
    cool = bench.chooser(noise, bench.Way())
    own = torch.stack([cool(logits[:, at], at) for at in range(count)], dim=1)
    assert float(bench.margins(own, logits, noise).max()) == 0


def test_a_nucleus_is_the_smallest_set_of_that_probability():
    logits = torch.tensor(
        [[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5], [0.91, 0.03, 0.03, 0.03]]
    ).log()
    kept = torch.isfinite(bench.nucleus(logits, 0.9))
    assert kept.tolist() == [
        [True, True, True, False],
        [False, True, True, True],
        [True, False, False, False],
    ]


def test_changes_of_weights_are_what_they_are_called():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 64, generator=generator)
    again = bench.to_fp8(weight, generator)
    error = ((again - weight) / weight).abs()
    assert 0 < float(error.median()) <= 2**-4  # three bits of mantissa, rounded to nearest
    assert torch.equal(bench.to_fp8(again, generator), again)
    layer = torch.nn.Linear(6, 5, bias=False)
    adapted = bench.Adapted(layer, generator)
    x = torch.randn(3, 6)
    assert torch.equal(adapted(x), layer(x))
    with torch.no_grad():
        adapted.b.fill_(0.1)
    before = adapted(x)
    torch.testing.assert_close(adapted.merged()(x), before)


def test_questions_follow_from_their_number():
    assert question(7) == question(7)
    assert len({question(number) for number in range(50)}) > 45
    assert question(-1).startswith("Write three sentences about the ")


def rows(count, level, seed):
    source = random.Random(seed)
    return [[level * source.uniform(0.5, 1.5) for _ in range(6)] for _ in range(count)]


@pytest.fixture(scope="module")
def kept():
    found = {}
    for prover, verifier in report.PAIRS:
        found[f"{prover} {verifier} honest"] = rows(200, 1.0, f"{prover}{verifier}")
        found[f"{prover} {verifier} int4 weights"] = rows(32, 8.0, "cheat")
        found[f"{prover} {verifier} honest, 2 threads"] = rows(32, 1.0, "threads")
    return found


def test_evidence_is_judged_as_a_node_would(kept):
    table = report.detection(kept, 1)
    for row in table.values():
        assert row["honest"] == {"rate": 0.0, "of": 200, "interval": row["honest"]["interval"]}
        assert row["honest"]["interval"][1] == pytest.approx(1 - 0.025 ** (1 / 200))
        assert row["int4 weights"]["rate"] == 1.0
        assert row["honest, 2 threads"]["rate"] == 0.0
    assert table["fp32 -> fp32"][report.DECLARED]["of"] == 200
    assert report.detection(kept, 4)["bf16 -> bf16"]["int4 weights"]["of"] == 8


def test_several_claims_together_have_the_largest_distance_of_them_all():
    claims = report.claims_of([[0, 0, 0, 0, 0, 0.1], [0, 0, 0, 0, 0, 0.7], [0, 0, 0, 0, 0, 0.2]], 2)
    assert len(claims) == 1
    assert [row[2] for row in claims[0]["sampling"].values] == [0.7, 0.7]
    assert len(claims[0]["activations"].values) == 2


def test_alarms_follow_from_many_claims_and_honest_peers_have_none(kept):
    for row in report.alarms(kept).values():
        assert (
            row["honest"],
            row["honest, 2 threads"],
            row["calibrated"],
            row["honest_claims"],
        ) == (0.0, 0.0, 100, 100)
        # With 100 calibrated claims no p-value is below 1 / 101, so that some claims are needed
        # however bad they are.
        assert math.ceil(ALARM / math.log(101)) <= row["int4 weights"] <= 40


def test_tokens_alone_do_not_look_at_the_activations(kept):
    only = {key: [[*row[:3], 0.0, 0.0, 0.0] for row in found] for key, found in kept.items()}
    assert all(
        row["int4 weights"] is None for row in report.alarms(only, tokens_alone=True).values()
    )
    assert all(row["int4 weights"] <= 40 for row in report.alarms(only).values())


@pytest.mark.ci
def test_the_report_is_printed_from_the_file(tmp_path, kept, called):
    path = tmp_path / "kept.json.gz"
    bench.save(
        path,
        {
            "about": {},
            "rows": kept,
            "seconds": {"write fp32 32 at a time": [4.0], "read fp32 32 at a time": [2.0]},
            "changes": {},
        },
    )
    shown = json.loads(called(verification_135m.main, "--kept", str(path), "--json").stdout)
    assert shown["seconds"]["read / write, fp32"] == 0.5
    assert shown["bytes_per_token"] == 258 / 32
    assert shown["claims"]["fp32"]["int4 weights"] == 32
    assert (
        "| int4 weights | 100 (89 to 100) of 32 |"
        in called(verification_135m.main, "--kept", str(path)).stdout
    )
