"""Stored claims, the commands ``shoal verify``, and claims that say in which dtype and by what they
were computed.
"""

import json
import os
from statistics import fmean

import pytest
import torch
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.verify.calibrate import own_dtypes, read_calibration, self_calibrate
from shoal.node.verify.claim_file import find_claim, load_claim, save_claim
from shoal.node.verify.completion_claims import CompletionClaims
from shoal.node.verify.errors import VerifyError
from shoal.node.verify.material import decode_material, seed_of
from shoal.node.verify.proven_group import make_claim, prove
from shoal.node.verify.snapshot import digest
from shoal.node.verify.terms import make_terms
from shoal.swarm.identity import Identity
from shoal.swarm.topics.attestation import sign_record
from shoal.verification.calibration import Calibration
from shoal.verification.calibration_file import load_calibration, save_calibration
from shoal.verification.consensus.odds import vote
from shoal.verification.consensus.participant import Slot
from shoal.verification.consensus.records import Claim, Entry, Signed
from tests.node.verify.board import ROUND_S, Board, Net, settings_of, task_of

RUN, ROUND = "run", 3


@pytest.fixture(scope="module")
def identity():
    return Identity.ephemeral()


def claimed(world, identity, index=0, **options):
    """A claim with a real signature, and its material."""
    at = world.question(index)
    seed = seed_of(RUN, ROUND, identity.peer_id, 0, at.hash)
    proven = prove(
        world.policy,
        world.env,
        at,
        world.agreed,
        seed,
        policy_name="tiny",
        snapshot_bytes=len(world.snapshot),
        **options,
    )
    claim = make_claim(
        proven, run=RUN, round=ROUND, peer=identity.peer_id, slot=0, model=digest(world.snapshot)
    )
    return Signed.by(lambda data: sign_record(identity, data), claim), proven.material


def kept(world, identity, folder, index=0, **options):
    signed, material = claimed(world, identity, index, **options)
    return save_claim(folder, signed, material, world.agreed, world.snapshot)


def shoal(*words):
    return CliRunner().invoke(cli, list(map(str, words)), standalone_mode=False)


def test_there_and_back_again(world, identity, tmp_path):
    signed, material = claimed(world, identity)
    path = save_claim(tmp_path / "claims", signed, material, world.agreed, world.snapshot)
    found = load_claim(path)
    assert (found.claim, found.material, found.agreed, found.snapshot) == (
        signed.record,
        material,
        world.agreed,
        world.snapshot,
    )
    assert found.signed
    assert sorted(os.listdir(tmp_path / "claims")) == sorted(
        [path.name, f"{digest(world.snapshot).hex()}.safetensors"]
    )
    other = Entry(peer="p", run="r", round=0, operator="o", anchor=bytes(32))
    with pytest.raises(ValueError):
        save_claim(tmp_path, Signed(other, b""), material, world.agreed, None)


def test_the_newest_are_kept_and_policies_that_nobody_claims_go(world, identity, tmp_path):
    paths = []
    for index in range(4):
        signed, material = claimed(world, identity, index)
        snapshot = bytes([index])
        claim = Claim(**{**signed.record.model_dump(), "model": digest(snapshot)})
        paths.append(
            save_claim(tmp_path, Signed(claim, b""), material, world.agreed, snapshot, keep=2)
        )
        os.utime(paths[-1], ns=(index, index))
    assert {path.name for path in tmp_path.glob("*.claim")} == {path.name for path in paths[2:]}
    assert {path.stem for path in tmp_path.glob("*.safetensors")} == {
        digest(bytes([index])).hex() for index in (2, 3)
    }


@pytest.mark.parametrize(("most_bytes", "kept"), [(0, 1), (24_000, 2), (50_000, 4)])
def test_stored_claims_are_bounded_in_bytes(world, identity, tmp_path, most_bytes, kept):
    """The newest stay, weights included, and always the last."""
    paths = []
    for index in range(4):
        signed, _ = claimed(world, identity, index)
        snapshot = bytes([index]) * 10_000
        claim = Claim(**{**signed.record.model_dump(), "model": digest(snapshot)})
        paths.append(
            save_claim(
                tmp_path, Signed(claim, b""), b"m", world.agreed, snapshot, most_bytes=most_bytes
            )
        )
        os.utime(paths[-1], ns=(index, index))
    assert {path.name for path in tmp_path.glob("*.claim")} == {
        path.name for path in paths[4 - kept :]
    }
    assert len(list(tmp_path.glob("*.safetensors"))) == kept


def test_damaged_files_and_unknown_ids_are_one_sentence(world, identity, tmp_path):
    path = kept(world, identity, tmp_path)
    assert (
        find_claim(path.stem, [tmp_path])
        == find_claim(path.stem[:6], [tmp_path])
        == find_claim(str(path), [])
        == path
    )
    for name, said in (
        ("../../etc", "no claim's id"),
        ("abc", "4 or more"),
        ("0" * 64, "There is no claim"),
    ):
        with pytest.raises(VerifyError, match=said):
            find_claim(name, [tmp_path])
    (tmp_path / f"{path.stem[:10]}x.claim").write_bytes(b"")
    with pytest.raises(VerifyError, match="2 claims begin with"):
        find_claim(path.stem[:10], [tmp_path])
    for junk in (b"", b"junk", path.read_bytes()[:-1], bytes(5 << 20)):
        (tmp_path / "junk").write_bytes(junk)
        with pytest.raises(VerifyError) as raised:
            load_claim(tmp_path / "junk")
        assert "\n" not in str(raised.value)
    with pytest.raises(VerifyError, match="Cannot read"):
        load_claim(tmp_path)


def test_check_accepts_and_refuses(world, identity, tmp_path):
    good, bad = (
        kept(world, identity, tmp_path),
        kept(world, identity, tmp_path, 1, planted_prompt="count: aaaa"),
    )
    table = tmp_path / "calibration"
    save_calibration(world.calibration, table)
    # The world's policy has tiny's own size, so the command can make one for it.
    done = shoal("verify", good, "--calibration", table)
    assert done.return_value == 0, done.output
    assert done.output.startswith("accepted: The claimed policy wrote these completions")
    done = shoal("verify", "check", bad, "--calibration", table, "--json")
    assert done.return_value == 4
    report = json.loads(done.output)
    assert report["accepted"] is False
    assert "does not compute these activations" in report["reason"]
    assert report["peer"] == identity.peer_id


def test_check_by_id_without_a_calibration(world, identity, tmp_path, monkeypatch):
    path = kept(world, identity, tmp_path / "runs" / "anna" / "claims")
    monkeypatch.chdir(tmp_path)
    assert shoal("verify", path.stem[:12]).return_value == 0
    assert shoal("verify", path.stem, "--folder", "runs/anna", "--json").return_value == 0
    assert isinstance(shoal("verify", path.stem, "--folder", "runs/bert").exception, VerifyError)


def test_check_looks_at_the_signature_and_says_what_it_lacks(world, identity, tmp_path):
    signed, material = claimed(world, identity)
    other = Identity.ephemeral()
    forged = Signed.by(lambda data: sign_record(other, data), signed.record)
    path = save_claim(tmp_path, forged, material, world.agreed, world.snapshot)
    done = shoal("verify", path)
    assert (done.return_value, "not signed by the peer" in done.output) == (4, True)
    path = save_claim(tmp_path, signed, material, world.agreed, None)
    assert isinstance(shoal("verify", path, "--model", "hf:other").exception, VerifyError)
    assert "name it with --model" in str(shoal("verify", path, "--model", "hf:other").exception)
    (tmp_path / f"{digest(world.snapshot).hex()}.safetensors").unlink()
    assert "put them there" in str(shoal("verify", path).exception)


def test_calibrate_writes_a_file_and_warns(tmp_path):
    out = tmp_path / "calibration"
    options = (
        "--model",
        "tiny:copy:5",
        "--dtypes",
        "fp32,bf16",
        "--claims",
        20,
        "--max-tokens",
        4,
        "--group",
        2,
    )
    done = shoal("verify", "calibrate", *options, "--out", out, "--json")
    assert done.exception is None
    report = json.loads(done.stdout.splitlines()[-1])
    assert "extrapolated" in report["warning"]
    assert done.stderr.startswith("Warning: 20 honest claims cannot show")
    assert len(load_calibration(out).pairs) == 8
    assert len(report["pairs"]) == 4
    wrong = shoal("verify", "calibrate", "--model", "tiny", "--dtypes", "fp8", "--out", out)
    assert "there is no dtype 'fp8'" in str(wrong.exception.message)


def test_odds_are_those_of_the_library():
    report = json.loads(shoal("verify", "odds", "--n", 3, "--collude", 0.1, "--json").output)
    assert report["wrong_accepted"] == vote(3, 0.1).wrong_accepted
    assert [row["n"] for row in report["table"]] == [1, 3, 5, 7, 9]
    done = shoal("verify", "odds", "--n", 5, "--population", 6, "--collude", 0.5, "--audit", 0.01)
    assert "cheating" in done.output
    assert "at 1.00% it pays" in done.output
    assert "odd number" in str(shoal("verify", "odds", "--n", 4).exception.message)
    assert "however many" in shoal("verify", "odds", "--collude", 1).output


BOTH = ("float32", "bfloat16")


def noisy(weight):
    return weight + 0.004 * weight.std() * torch.randn(
        weight.shape, generator=torch.Generator().manual_seed(0)
    )


def statistics(world, checker, policy=None):
    found = [
        world.check(world.proven(index, policy, dtype="bfloat16"), checker) for index in range(8)
    ]
    assert {one.pair.prover for each in found for one in each.measured} == {"bfloat16"}
    assert all(
        one.kernel.startswith(f"torch {torch.__version__}, cpu")
        for each in found
        for one in each.measured
    )
    return [each.statistics["activations_statistic"] for each in found]


def test_hidden_noise_shows_in_the_provers_dtype(world):
    """A check in float32, or one that computes in the prover's dtype with weights that it has not
    rounded, sees no difference.
    """
    own, across = world.checker(own=BOTH), world.checker()
    changed = world.changed(noisy)
    assert fmean(statistics(world, own, changed)) > 1 + max(statistics(world, own))
    assert fmean(statistics(world, across, changed)) < max(statistics(world, across))


def test_two_dtypes_are_checked_without_rounding(world):
    """Claims of two dtypes are checked in turn and do not round each other's weights."""
    checker = world.checker(own=BOTH)
    snapshots = [world.snapshot, None, None, None]
    for number, (dtype, held) in enumerate(zip((*BOTH, *BOTH), snapshots, strict=True)):
        proven = world.proven(number, dtype=dtype)
        finding = checker.check(world.claim(proven), proven.material, held)
        assert finding.accepted, finding.reason
        assert {(one.pair.prover, one.pair.verifier) for one in finding.measured} <= {
            (dtype, dtype)
        }
        assert finding.measured
        assert finding.statistics["error of values (ulp)"] < (0.01 if dtype == "float32" else 0.3)


def test_a_claim_says_by_what_it_was_computed(world):
    capability = torch.backends.cpu.get_cpu_capability()
    assert (
        decode_material(world.proven().material).kernel
        == f"torch {torch.__version__}, cpu {capability}"[:64]
    )


def test_calibration_serves_its_dtype_or_float32(world, tmp_path):
    """A calibration serves in the prover's dtype or else in float32."""

    def kept(*pairs):
        path = tmp_path / "calibration"
        chosen = {
            pair: honest
            for pair, honest in world.calibration.pairs.items()
            if (pair.prover, pair.verifier) in pairs
        }
        save_calibration(Calibration(chosen), path)
        found = read_calibration(path, "tiny", ["bfloat16"])
        return own_dtypes(found, "tiny", ["bfloat16"])

    assert kept(("bfloat16", "bfloat16")) == ("bfloat16",)
    assert kept(("bfloat16", "float32")) == ()
    assert kept(("bfloat16", "float32"), ("bfloat16", "bfloat16")) == ("bfloat16",)
    with pytest.raises(VerifyError, match="says nothing about 'tiny' in bfloat16"):
        kept(("float32", "float32"), ("float32", "bfloat16"))


def test_a_node_measures_each_dtype_with_itself_alone(world):
    options = {"policy_name": "tiny", "claims": 20, "dtypes": BOTH, "across": False}
    found = self_calibrate(world.policy, world.env, world.agreed, **options)
    assert {(pair.prover, pair.verifier) for pair in found.pairs} == {(one, one) for one in BOTH}


@pytest.mark.ci
def test_bfloat16_node_claims_and_is_checked_in_it(tmp_path):
    """A node whose policy computes in bfloat16 claims in it and another checks it so."""
    board, found, agreed = Board(), [], None
    for name in ("ann", "bob"):
        task = task_of()
        task.connect(None, name)
        task.policy.module.to(torch.bfloat16 if name == "ann" else torch.float32)
        settings = settings_of(tmp_path / name)
        agreed = agreed or make_terms(settings, task)
        kind = CompletionClaims(settings, agreed, task, Net(board, name), lambda: board.now)
        found.append((task, kind))
    (task, ann), (_, bob) = found
    assert agreed.dtype == "bfloat16"
    ann.claimer.offer([Slot(int(board.now // ROUND_S), 0, False)])
    assert ann.claimer.write(task.policy, 0, 0) is not None
    (made,) = ann.claimer.take()
    assert decode_material(made.material).dtype == "bfloat16"
    finding = bob.prepare(lambda line: None).check(made.claim, made.material, made.snapshot)
    assert finding.accepted, finding.reason
    assert {(one.pair.prover, one.pair.verifier) for one in finding.measured} == {
        ("bfloat16", "bfloat16")
    }
