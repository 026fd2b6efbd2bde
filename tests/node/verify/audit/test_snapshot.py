"""Snapshots: equal weights are equal bytes, and what is not exactly one changes nothing."""

import pytest
import torch
from safetensors.torch import load, save

from shoal.node.rl.environment import Strings
from shoal.node.rl.tiny import Tiny, Warm
from shoal.node.verify import audit
from shoal.node.verify.audit import VerifyError, base, load_snapshot, most_bytes, snapshot


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
    assert base(first.module) == base(second.module)  # all of it is trained
    for policy in (first, second):
        policy.module.head.requires_grad_(False)
    assert base(first.module) != base(second.module)
    second.module.head.load_state_dict(first.module.head.state_dict())
    assert base(first.module) == base(second.module)
    assert base(first.module) != base(first.module.to(torch.bfloat16))


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
        (spoiled(lambda t: t.update({"head.weight": t["head.weight"].T.contiguous()})), "not as float32 of shape"),
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
    monkeypatch.setattr(audit, "MOST_BYTES", 10_000)
    with pytest.raises(VerifyError, match="train an adapter"):
        snapshot(small(1))
