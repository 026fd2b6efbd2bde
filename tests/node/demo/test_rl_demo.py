"""What the demo of reinforcement learning reports, and the status with which it exits."""

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.demo.rl_demo import report, summary
from shoal.node.exit_code import ExitCode

LONELY = "this node trained alone though others were there"


def ended(name, received=3, **fields):
    """A node's result, as its `result.json` has it."""
    rl = dict.fromkeys(("first_reward", "final_reward", "cumulative_reward"), 0.5)
    counts = dict.fromkeys(("sent", "unsent", "used", "waiting", "bytes_sent", "bytes_received"), 0)
    more = {"env": "strings", "policy": "tiny", "rounds": 4, "held_out": 9, "rejected": {}}
    return {
        "name": name,
        "setup": {"method": "none", "params": 10},
        "wall_s": 1.0,
        "link": {"bytes_sent": 0, "bytes_received": 0},
        "exchanges": {"failed": 0},
        "internal_errors": {},
        "trained_alone": "",
        "rl": {**rl, **counts, **more, "effective_sample_size": 1.0, "received": received},
        **fields,
    }


def status(monkeypatch, found):
    monkeypatch.setattr("shoal.node.demo.rl_demo.run_demo", lambda **given: found)
    shown = CliRunner().invoke(cli, ["demo", "--task", "rl"], standalone_mode=False)
    return shown.return_value, shown.stdout


def test_rollouts_are_bytes_of_the_link_already():
    """The fault: what a node gossips was added to what its streams sent, gossip's among them."""
    one = ended("peer-0", link={"bytes_sent": 70, "bytes_received": 50})
    one["rl"].update(bytes_sent=30, bytes_received=20)
    found = report([one, one], 9.0, foreign=True)
    assert (found["bytes_sent"], found["bytes_received"]) == (140, 100)


@pytest.mark.parametrize(
    ("nodes", "foreign", "said"),
    [
        ([ended("peer-0"), ended("peer-1")], True, []),
        (
            [ended("peer-0"), ended("peer-1", received=0)],
            True,
            ["peer-1 learnt alone: no rollout of another node reached it"],
        ),
        ([ended("peer-0", received=0)], True, []),
        ([ended("peer-0", received=0), ended("peer-1", received=0)], False, []),
        ([ended("peer-0"), ended("peer-1", trained_alone=LONELY)], True, [LONELY]),
    ],
    ids=["together", "no rollouts", "one node", "own rollouts only", "no weights"],
)
def test_a_demo_that_exchanged_nothing_exits_as_such(monkeypatch, nodes, foreign, said):
    """The fault: 0, whatever happened. Mutant: rollouts count where none of others' were wanted."""
    found = report(nodes, 9.0, foreign=foreign)
    assert found["trained_alone"] == said
    code, shown = status(monkeypatch, found)
    assert code == (ExitCode.TRAINED_ALONE if said else ExitCode.OK)
    assert all(sentence in shown for sentence in said)


def test_errors_in_the_nodes_own_code_are_said():
    error = {"trial": {"count": 2, "first": "TypeError: planted", "newest_at": 1.0}}
    failed = ended("peer-0", exchanges={"failed": 2}, internal_errors=error)
    found = report([failed, ended("peer-1")], 9.0, foreign=True)
    assert (
        "2 errors in the nodes' own code, and not in the network, ended 2 exchanges (TypeError: "
        "planted): run again with --keep FOLDER, whose node.log files have the tracebacks"
    ) in summary(found)
