"""The door for manifests: the size of the model before it is made, and whose names are imported and opened."""

import pytest
import torch

from shoal.node.config.settings import ConfigError, load
from shoal.node.runtime import door
from shoal.node.runtime.door import check_size, continued, enter, swarm_settings
from shoal.node.runtime.join import new_manifest
from shoal.node.tasks import text_size
from shoal.node.tasks.loader import HookError
from shoal.node.tasks.text import GPT, sized
from shoal.node.training import resources
from shoal.node.training.resources import GB, MemoryBudgetError
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import Terms, open_manifest
from shoal.swarm.state.sync import ModelDiffersError

ME = Identity.ephemeral()
TINY = {"layers": 1, "width": 8, "heads": 2, "context": 8, "batch": 1}
WIDE = {"layers": 1, "width": 2048, "heads": 2, "context": 8, "batch": 1}  # 51,417,088 parameters


def manifest(options, digest=None, **fields):
    size = {key: options[key] for key in ("layers", "width", "heads", "context")} if digest is None else None
    digest = digest or model_digest(list(sized(**size).parameters()))
    made = open_manifest(new_manifest(load(None, {"task.options": options}), ME, digest))
    return made.model_copy(update=fields)


@pytest.mark.parametrize("size", [(1, 8, 2, 8, 256), (3, 24, 4, 9, 301)])
def test_the_size_is_that_of_the_model_that_is_made(size):
    made, small = GPT(*size), sized(*size)
    assert model_digest(list(small.parameters())) == model_digest(list(made.parameters()))
    assert list(small.state_dict()) == list(made.state_dict())
    assert all(parameter.is_meta for parameter in small.parameters())
    assert text_size.parameters(size[0], size[1], size[3], size[4]) == sum(p.numel() for p in made.parameters())


def test_through_the_door_come_settings_and_a_task_and_no_model(monkeypatch):
    monkeypatch.setattr(GPT, "__init__", None)  # a model of any size would end this test
    monkeypatch.setattr(door, "check_size", lambda *arguments, **options: None)
    settings, task = enter(load(None, {"node.data": "mine"}), manifest(TINY, "0" * 64))
    assert (settings.task.options, task.data, task.width) == (TINY, "mine", 8)


def test_a_model_with_another_digest_than_the_manifests_is_refused():
    assert enter(load(), manifest(TINY))[1].width == 8
    with pytest.raises(ModelDiffersError, match="does not fit the swarm"):
        enter(load(), manifest(TINY, "1" * 64))


def test_a_strangers_model_is_refused_where_ones_own_is_only_warned_of(monkeypatch):
    monkeypatch.setattr(resources, "free_memory", lambda: (1.0 * GB, 8.0 * GB))
    monkeypatch.setattr(resources, "held", lambda: 100_000_000)
    with pytest.raises(MemoryBudgetError, match=r"about 1\.\d+ GB of memory .* 51,\d+,\d+ parameters and can have 1\.10: end"):
        enter(load(), manifest(WIDE))
    assert enter(load(), manifest(WIDE), trains=False)
    assert enter(load(None, {"node.ram": 4.0}), manifest(WIDE)), "the user allows it"
    with pytest.raises(MemoryBudgetError, match=r"and --ram allows 0\.5: allow more"):
        enter(load(None, {"node.ram": 0.5}), manifest(WIDE))
    logged = []
    own = load(None, {"task.options": WIDE})
    check_size(door.make_task(own), own, "cpu", logged.append)
    assert len(logged) == 1
    assert "so the system may end it" in logged[0]


@pytest.mark.parametrize(
    ("options", "needs"), [({"batch": 2**16, "context": 2**12}, "batch 5"), ({"shuffle": 2**28}, "batch 1.07")]
)
def test_batches_and_blocks_of_a_manifest_count_too(options, needs, monkeypatch):
    monkeypatch.setattr(resources, "free_memory", lambda: (1.0 * GB, 8.0 * GB))
    with pytest.raises(MemoryBudgetError, match=needs):
        enter(load(), manifest({**TINY, **options}))


def test_on_a_gpu_the_model_leaves_main_memory_before_the_rest_is_made(monkeypatch):
    monkeypatch.setattr(resources, "free_memory", lambda: (4e12, 4e12))
    monkeypatch.setattr(resources, "held", lambda: 0)
    params = [torch.empty(250_000_000, device="meta")]
    with pytest.raises(MemoryBudgetError, match=r"about 1\.00 GB of memory .*model"):
        resources.check(0.1, params, method="none", slow_here=False, device="cuda")


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"name": "../x"}, r"swarm\.name"), ({"shards": 2**53}, r"swarm\.shards"), ({"bucket": 3}, r"swarm\.bucket")],
)
def test_what_no_node_can_have_is_refused(fields, said):
    with pytest.raises(ConfigError, match=rf"^The swarm's manifest has a {said} that no node can have \(.*\): leave it\.$"):
        swarm_settings(load(), manifest(TINY, **fields))


def rl(env):
    return open_manifest(new_manifest(load(None, {"task.hooks": "rl", "rl.env": env}), ME, "0" * 64))


def test_a_checkpoint_of_ones_own_code_goes_on_with_the_code_that_is_named():
    theirs = rl("somewhere/add_env.py:Add")
    with pytest.raises(HookError, match=r"learns 'add_env\.py:Add', and a checkpoint carries no code: .* with --env\.$"):
        continued(load(), theirs)
    assert continued(load(None, {"rl.env": "mine/add_env.py:Add"}), theirs).rl.env == "mine/add_env.py:Add"
    assert continued(load(None, {"rl.env": "strings"}), theirs).rl.env == "strings", "a new swarm may learn something else"
    assert continued(load(), rl("sapo9")).rl.env == "sapo9"
    made = continued(load(None, {"task.hooks": "a/task.py:Mine"}), manifest(TINY, "0" * 64, task="task.py:Mine"))
    assert made.task.hooks == "a/task.py:Mine"
    with pytest.raises(HookError, match=r"trains 'task\.py:Mine', and a checkpoint carries no code: .* with --task\.$"):
        continued(load(), manifest(TINY, "0" * 64, task="task.py:Mine"))


@pytest.mark.parametrize("policy", ["tiny:copy:60", "hf:/models/mine"])
def test_a_policy_has_its_own_name_here_and_its_sampling_is_the_swarms(policy):
    terms = Terms(policy="tiny", base="0" * 64, group=4, temperature=1.0, max_tokens=8)
    settings = load(None, {"task.hooks": "rl", "verify.audit_rate": 1.0})
    theirs = open_manifest(new_manifest(settings, ME, "0" * 64, terms))
    found = swarm_settings(load(None, {"rl.policy": policy}), theirs).rl
    assert (found.policy, found.group, found.max_tokens) == (policy, 4, 8)
    with pytest.raises(ConfigError, match=r"^The swarm has rl\.group=4, and this node was given rl\.group=8: "):
        swarm_settings(load(None, {"rl.policy": policy, "rl.group": 8}), theirs)
