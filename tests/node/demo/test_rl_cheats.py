"""Nodes of a demo that cheat: what they do, and what the demo says of them."""

import copy

import pytest
import torch

from shoal.node.config.settings import ConfigError, load
from shoal.node.demo import cheating
from shoal.node.demo.rl import bans, policies, run_demo
from shoal.node.rl import rollout_sharing
from shoal.node.rl.loading import load_env
from shoal.node.rl.tiny import Tiny
from shoal.node.verify import checker, completions


def test_rounded_matrices_have_fifteen_values_a_row_within_the_block_and_the_old_ones_after():
    module = torch.nn.Linear(64, 3)
    before = copy.deepcopy(module.state_dict())
    with cheating.rounded(module):
        assert all(len(set(row.tolist())) <= 15 for row in module.weight)
        assert not torch.equal(module.weight, before["weight"])
        assert torch.equal(module.bias, before["bias"])
    assert torch.equal(module.weight, before["weight"])


def test_a_cheat_writes_with_rounded_weights_and_evaluates_and_checks_with_its_own(monkeypatch):
    seen = []

    def generate(policy, prompts, count, *, temperature, max_tokens, seed, choose=None):
        seen.append(len(set(policy.module.head.weight[0].tolist())))

    monkeypatch.setattr(Tiny, "generate", generate)
    monkeypatch.setattr(rollout_sharing, "load_policy", None)
    monkeypatch.setattr(completions, "prove", None)
    monkeypatch.setattr(checker, "prove", lambda policy: seen.append(len(set(policy.module.head.weight[0].tolist()))))
    cheating.cheat()
    policy = rollout_sharing.load_policy("tiny", load_env("strings", {}), 0)
    for writer, temperature in ((policy, 1.0), (policy, 0.0), (copy.deepcopy(policy), 1.0)):
        writer.generate(["?"], 1, temperature=temperature, max_tokens=4, seed=0)
    completions.prove(policy)
    assert [values <= 15 for values in seen] == [True, False, False, True]


def test_nodes_that_are_verified_have_one_policy():
    def chosen(**more):
        return policies(load(None, {"swarm.start_when": 2, "swarm.shards": 2, "task.hooks": "rl", **more}))

    assert chosen() == ["tiny:copy", "tiny:first"]
    assert chosen(**{"verify.audit_rate": 1.0}) == ["tiny", "tiny"]


@pytest.mark.parametrize(("cheat", "rate"), [(1, 0.0), (2, 1.0)])
def test_cheats_that_nobody_would_find_are_refused(cheat, rate):
    with pytest.raises(ConfigError, match="--cheat needs"):
        run_demo(peers=2, cheat=cheat, more={"verify.audit_rate": rate})


def history(peer, begins, *bans, ends=100.0):
    events = [{"event": "start", "peer": peer, "time": 0.0}, {"event": "rl", "time": begins}, {"event": "rl", "time": ends}]
    return events + [{"event": "verify", "time": time, "banned": banned} for time, banned in bans]


NODES = [
    {"name": name, "final_reward": value, "cumulative_reward": 10 * value} for name, value in (("a", 0.5), ("b", 0.7), ("c", 0.1))
]


def test_a_ban_counts_from_the_first_completions_until_the_last_honest_node_knows_it():
    found = bans(
        NODES,
        [history("A", 1.0, (30.0, []), (50.0, ["C"])), history("B", 1.0, (60.0, ["C"])), history("C", 10.0, (20.0, ["A"]))],
        cheat=1, round_s=5.0,
    )  # fmt: skip
    assert found["banned_after"] == {"c": 10.0}
    assert found["honest_banned"] == []  # only a cheat said so
    assert found["honest_final_reward"] == pytest.approx(0.6)
    assert found["honest_cumulative_reward"] == pytest.approx(6.0)


def test_a_cheat_that_one_honest_node_did_not_ban_and_bans_after_the_first_end_do_not_count():
    found = bans(
        NODES,
        [history("A", 1.0, (50.0, ["B", "C"]), ends=70.0), history("B", 1.0, (80.0, ["A", "C"])), history("C", 10.0)],
        cheat=1, round_s=5.0,
    )  # fmt: skip
    assert found["banned_after"] == {"c": None}
    assert found["honest_banned"] == ["b"]
