"""`shoal pull` from real nodes: what it writes loads into plain PyTorch, and holds what the nodes
hold.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from shoal.node.tasks.gpt import GPT

SIZE = {"layers": 1, "width": 32, "heads": 2, "context": 32}


@pytest.mark.slow(reason="two real nodes train while a third process pulls")
def test_the_weights_of_a_running_swarm_load_into_plain_torch(shoal, eventually):
    table = shoal.toml(
        swarm={"name": "group", "start_when": 2},
        outer={"method": "diloco", "every": 20, "wait_s": 5.0},
        options=SIZE,
    )
    first = shoal.node("up", table, "a", "--keep-rounds")
    link = first.line()
    second = shoal.node("join", link, "b")
    eventually(lambda: all(len(shoal.rounds(name)) >= 3 for name in "ab"), 60, "three rounds")
    out = shoal.home / "out"
    report = shoal.start("pull", link, "--out", out, "--json", "--verbose").json()
    refused = shoal.start("pull", link, "--out", out).error()
    drawn = shoal.start("sample", out, "--prompt", "the ", "--tokens", "12", "--json").json()
    for node in (first, second):
        node.signal(2)
        assert node.wait() == 130
    assert "There are weights" in refused
    assert drawn["texts"][0].startswith("the ")
    assert (drawn["swarm"], drawn["round"]) == (report["swarm"], report["round"])
    card = (out / "README.md").read_text()
    assert "# Weights of the swarm `group`" in card
    assert "* Method: `diloco`, with `every=20" in card
    assert "* Peers: 2 " in card
    assert sorted(report["files"]) == ["README.md", "model.safetensors", "shoal.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted(report["files"])
    assert json.loads((out / "shoal.json").read_text())["model"] == SIZE
    state = load_file(out / "model.safetensors")
    model = GPT(**SIZE)
    model.load_state_dict(state)
    assert torch.isfinite(model(torch.zeros(1, 8, dtype=torch.int64))).all()
    # The slow weights before round r are those after round r - 1, of which the node kept a copy
    # each.
    kept = [load_file(path) for path in sorted((shoal.home / "a" / "rounds").iterdir())]
    held = [parameter.detach() for parameter in model.parameters()]
    assert any(
        all(torch.equal(copy[str(i)], tensor) for i, tensor in enumerate(held)) for copy in kept
    )
