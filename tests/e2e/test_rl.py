"""Reinforcement learning in swarms of real nodes that share rollouts."""

import itertools
import json
import signal
import statistics
from pathlib import Path

import pytest

from tests.support.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "add_env.py"
QUICK = ("--set", "rl.held_out=100", "--policy", "tiny::60")


def rounds(shoal, name):
    return [event for event in shoal.metrics(name) if event["event"] == "rl"]


@pytest.mark.slow(reason="two real nodes learn for several rounds")
def test_two_nodes_learn_from_each_others_rollouts(shoal):
    demo = shoal.start(
        "demo",
        "--task",
        "rl",
        "--peers",
        "2",
        "--rounds",
        "300",
        "--option",
        "families=last",
        *QUICK,
        "--set",
        "rl.local=2",
        "--set",
        "rl.external=2",
        "--keep",
        "kept",
        "--json",
    )
    report = demo.json(150)
    assert (report["peers"], report["rounds"], report["method"], report["held_out"]) == (
        2,
        300,
        "none",
        100,
    )
    assert [node["policy"] for node in report["nodes"]] == ["tiny:copy:60", "tiny:first:60"]
    assert (report["sent"], report["unsent"]) == (2 * 2 * 300, 0)
    assert report["used"] > 0
    assert report["received"] > 0
    assert report["bytes_sent"] > report["sent"] * 200
    assert 0 < report["cumulative_reward"] < 300
    for node in report["nodes"]:
        assert 0 <= node["first_reward"] <= 1
        assert 0 <= node["final_reward"] <= 1
        assert node["received"] >= node["used"]
        network = {
            "forged",
            "replayed",
            "foreign-env",
            "foreign-swarm",
            "malformed",
            "stale",
            "quota",
        }
        assert not any(node["rejected"][reason] for reason in network)
    seen = [event for event in rounds(shoal, "kept/peer-0") if event["event"] == "rl"]
    assert [event["round"] for event in seen] == list(range(300))
    assert {event["own"] for event in seen} == {2}
    assert shoal.left() == []


@pytest.mark.slow(reason="three real nodes, one after another")
def test_who_joins_needs_the_environment_and_weights_may_travel_too(shoal):
    up = shoal.node(
        "up",
        shoal.toml(
            task={"hooks": "rl"},
            rl={"env": f"{EXAMPLE}:Add", "policy": "tiny:copy:60", "held_out": 50},
            train={"steps": 8},
            swarm={"start_when": 2},
            outer={"method": "noloco", "every": 2},
        ),
        "anna",
    )
    link = up.line(0, 120)
    unable = shoal.node("join", link, "carl")
    assert "name your copy with --env" in unable.error()
    other = shoal.node("join", link, "dora", "--env", "strings")
    assert "use the swarm's environment" in other.error()
    joined = shoal.node("join", link, "bert", "--env", f"{EXAMPLE}:Add", *QUICK)
    assert [joined.wait(), up.wait()] == [0, 0], joined.said() + up.said()
    results = [shoal.result("anna"), shoal.result("bert")]
    assert [result["progress"]["step"] for result in results] == [8, 8]
    # Two fragments in each of four rounds, and at the end the steps of the first since its last.
    assert [result["exchanges"]["with_partner"] for result in results] == [9, 9]
    assert all(result["rl"]["env"] == "add_env.py:Add" for result in results)


@pytest.mark.slow(reason="two real nodes, of which one follows the other's policy")
def test_sampler_follows_the_policy_of_the_creator(shoal):
    """The first version comes whole, later ones as patches, and its groups state the version."""
    settings = shoal.toml(
        task={"hooks": "rl"},
        rl={"policy": "tiny:copy:60", "held_out": 20, "local": 2, "publish": True},
        train={"steps": 0},
        swarm={"start_when": 2},
        outer={"method": "none"},
    )
    up = shoal.node("up", settings, "anna")
    follows = ["--set", "rl.follow=creator", "--set", "rl.only=share", "--set", "rl.publish=false"]
    joined = shoal.node("join", up.line(0, 120), "bert", *follows, "--policy", "tiny:first:60")
    until(lambda: len(rounds(shoal, "anna")) > 60 and len(rounds(shoal, "bert")) > 20, 240)
    shoal.interrupt(up, joined)
    taken = shoal.result("bert")["rl"]["followed"]
    assert taken["wholes"] >= 1
    assert taken["patches"] > 1
    assert 1 < taken["version"] <= rounds(shoal, "anna")[-1]["round"] + 1


def random_model(folder):
    """A language model of transformers, of a few thousand parameters, that was never trained."""
    transformers, tokenizers = (
        pytest.importorskip("transformers"),
        pytest.importorskip("tokenizers"),
    )
    words = {"<end>": 0, **{chr(code): code - 31 for code in range(32, 127)}}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>").save_pretrained(
        folder
    )
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=0,
        bos_token_id=None,
        max_position_embeddings=128,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow(reason="two language models generate")
def test_a_node_with_another_model_learns_from_text(shoal):
    model = random_model(shoal.home / "model")
    settings = shoal.toml(
        task={"hooks": "rl"},
        rl={"policy": "tiny:copy:150", "held_out": 50},
        swarm={"start_when": 2},
        options={"families": "last"},
    )
    up = shoal.node("up", settings, "anna")
    # Many steps, because for the first seconds all of anna's answers are wrong, and there is
    # nothing to learn from.
    joined = shoal.node(
        "join",
        up.line(0, 120),
        "bert",
        "--policy",
        f"hf:{model}",
        "--set",
        "rl.local=1",
        "--set",
        "rl.held_out=5",
        "--set",
        "rl.max_tokens=6",
        "--steps",
        "120",
        "--device",
        "cpu",
    )
    assert joined.wait(150) == 0, joined.said()
    shoal.interrupt(up)
    theirs, mine = shoal.result("anna"), shoal.result("bert")
    assert mine["setup"]["params"] != theirs["setup"]["params"]
    assert mine["rl"]["used"] > 0
    assert mine["rl"]["effective_sample_size"] is None  # the writer's tokens are not the reader's
    assert theirs["rl"]["received"] == mine["rl"]["sent"] == 120


@pytest.mark.slow(reason="eight real nodes on two cores")
@pytest.mark.timeout(600)
def test_eight_nodes_one_killed_and_one_joined_on_the_way(shoal, eventually):
    settings = shoal.toml(
        task={"hooks": "rl"},
        rl={"policy": "tiny:copy:100"},
        swarm={"start_when": 8},
        options={"families": "last,largest"},
    )
    own = (
        "--policy",
        "tiny:copy:100",
        "--set",
        "rl.held_out=100",
        "--set",
        "rl.local=4",
        "--set",
        "rl.external=4",
    )
    names = [f"peer{number}" for number in range(8)]
    nodes = {names[0]: shoal.node("up", settings, names[0], *own)}
    link = nodes[names[0]].line(0, 120)
    for number, name in enumerate(names[1:]):
        nodes[name] = shoal.node(
            "join",
            link,
            name,
            *own,
            "--policy",
            f"tiny:{['first', 'twice', 'drop', 'copy'][number % 4]}:100",
        )
    eventually(
        lambda: min(len(rounds(shoal, name)) for name in names) >= 20, 240, "20 rounds of all"
    )
    nodes["peer3"].popen.kill()
    nodes["late"] = shoal.node("join", link, "late", *own)
    eventually(lambda: len(rounds(shoal, "late")) >= 100, 240, "100 rounds of the late one")
    lived = [name for name in nodes if name != "peer3"]
    for name in lived:
        nodes[name].signal(signal.SIGINT)
    for name in lived:
        assert nodes[name].wait() == 130, nodes[name].said()
    stalls = {}
    for name in lived:
        seen = rounds(shoal, name)
        assert len(seen) >= 100
        stalls[name] = max(
            after["time"] - before["time"] for before, after in itertools.pairwise(seen)
        )
        rewards = [event["reward"] for event in seen]
        assert statistics.fmean(rewards[-20:]) > statistics.fmean(rewards[:20]) + 0.05, name
        assert sum(event["foreign"] for event in seen) > 50, name
    print(
        json.dumps(
            {
                "rounds": {name: len(rounds(shoal, name)) for name in lived},
                "longest_round_s": stalls,
            }
        )
    )
    assert max(stalls.values()) < 10.0, stalls  # what a node waits for a partner that does not come
    assert shoal.left() == []
