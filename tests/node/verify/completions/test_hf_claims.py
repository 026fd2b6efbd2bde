"""Claims of a model of transformers with an adapter, where those are installed: a random one of a
few thousand parameters.
"""

import copy
from importlib.util import find_spec

import pytest
import torch

from shoal.node.rl.environment import Env, canonical
from shoal.node.rl.hf import load_hf
from shoal.node.rl.strings import Strings
from shoal.node.verify.calibrate import self_calibrate
from shoal.node.verify.checker import Checker
from shoal.node.verify.material import DTYPES, Agreed, Coordinates, seed_of
from shoal.node.verify.proven_group import make_claim, prove
from shoal.node.verify.snapshot import digest, load_snapshot, snapshot, trained
from tests.support.transformers_models import real_model, saved_model, wants_real_model

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("transformers", "peft")
]
ENV = Env("strings", canonical({}), Strings())
AGREED = Agreed(1.0, 10, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_model(
        tmp_path_factory.mktemp("model"),
        hidden_size=64,
        intermediate_size=128,
        initializer_range=0.2,
    )


def changed(policy, by):
    """As if trained: its adapter is no longer without effect."""
    other = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(by)
    with torch.no_grad():
        for value in trained(other.module).values():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.05)
    return other


@pytest.fixture(scope="module")
def policy(folder):
    return changed(load_hf(str(folder)), 1)


@pytest.fixture(scope="module")
def calibration(policy):
    return self_calibrate(
        policy, ENV, AGREED, policy_name="hf:model", claims=24, dtypes=("float32", "bfloat16")
    )


def claim(policy, data, index, dtype="float32", agreed=AGREED):
    by = copy.deepcopy(policy)
    by.module.to(DTYPES[dtype])
    at = Coordinates.of(ENV, 9, index)
    seed = seed_of("run", 1, "peer", 0, at.hash)
    proven = prove(by, ENV, at, agreed, seed, policy_name="hf:model", snapshot_bytes=len(data))
    return make_claim(
        proven, run="run", round=1, peer="peer", slot=0, model=digest(data)
    ), proven.material


def test_a_snapshot_is_the_adapter_alone(policy, folder):
    data, other = snapshot(policy), load_hf(str(folder))
    assert len(data) < sum(4 * value.numel() for value in policy.module.parameters())
    assert all("lora" in name for name in trained(policy.module))
    load_snapshot(other.module, data)
    assert snapshot(other) == data


def test_logits_are_those_of_log_probs(policy):
    prompts, rows = ["a", "a longer one"], [[3, 4, 5], [6, 0]]
    logits, mask = policy.logits(prompts, rows)
    logs, same = policy.log_probs(prompts, rows, 0.7)
    assert torch.equal(mask, same)
    for number, row in enumerate(rows):
        own = (logits[number, : len(row)] / 0.7).log_softmax(-1)
        torch.testing.assert_close(
            own[range(len(row)), row], logs[number, : len(row)], atol=1e-5, rtol=0
        )
    assert [policy.ends(token) for token in (0, 1)] == [True, False]
    assert policy.vocabulary == 96


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_honest_claims_pass_and_those_of_another_adapter_do_not(policy, calibration, folder, dtype):
    data, other = snapshot(policy), changed(policy, 2)
    checker = Checker(lambda: load_hf(str(folder)), ENV, AGREED, calibration, "hf:model")
    for index in range(4):
        record, material = claim(policy, data, index, dtype)
        found = checker.check(record, material, data)
        assert found.accepted, found.reason
        record, material = claim(other, data, index, dtype)
        assert not checker.check(record, material, data).accepted


@wants_real_model
def test_claims_of_a_real_model(monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made, agreed = load_hf(str(real_model())), Agreed(1.0, 16, 2)
    table = self_calibrate(made, ENV, agreed, policy_name="hf:model", claims=20)
    checker = Checker(lambda: made, ENV, agreed, table, "hf:model")
    data, other = snapshot(made), changed(made, 2)
    for policy, accepted in ((made, True), (other, False)):
        for index in range(3):
            record, material = claim(policy, data, index, agreed=agreed)
            found = checker.check(record, material, data)
            assert found.accepted == accepted, found.reason
