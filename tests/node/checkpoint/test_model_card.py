"""The model card: what it says of a swarm, and that a stranger's names stay text in it."""

import pytest
import yaml

from shoal.node.checkpoint.model_card import model_card

ABOUT = {
    "swarm": "a" * 52,
    "name": "first",
    "created": 1_800_000_000.0,
    "round": 48,
    "rounds": 12,
    "task": "text",
    "task_options": {"data": "hf:owner/books:train", "width": 64},
    "method": "noloco",
    "outer": {"every": 50, "lr": 1.0, "codec": "int8", "round": "steps"},
    "train": {"optimizer": "muon", "lr": 0.02},
    "values": 135_808,
    "peers": 3,
    "steps": [600, 612],
    "train_loss": 2.3456,
    "held_out_loss": None,
    "held_out_on": None,
    "model": {"layers": 2},
    "notes": ["A note."],
}
HOW = ["model = load()"]


def header(card):
    _, front, body = card.split("---\n", 2)
    return yaml.safe_load(front), body


def test_card_states_the_origin_and_no_licence():
    """It says how the weights came to be and leaves the licence to the user."""
    card = model_card(ABOUT, HOW, "shoal.json")
    front, body = header(card)
    assert front == {
        "tags": ["shoal", "decentralized-training"],
        "pipeline_tag": "text-generation",
        "datasets": ["owner/books"],
    }
    assert "\n# license: " in card
    for line in [
        "# Weights of the swarm `first`",
        "A note.",
        "```python\nmodel = load()\n```",
        "* Task: `text`, with `width=64`",
        "* Data: `hf:owner/books:train`",
        "* Parameters: 135,808",
        "* Inner optimizer: `muon`, with `lr=0.02`",
        "* Method: `noloco`, with `every=50, lr=1.0, round=steps`",
        "* Codec: `int8`",
        "* Peers: 3 ",
        "* Rounds: 12\n",
        "* Inner steps of each of these peers: 600 to 612\n",
        "* Training loss: 2.3456 nats a token",
        "* Held-out loss: not known",
        f"* Swarm: `{'a' * 52}`, created on 2027-01-15",
    ]:
        assert line in body, line


def test_a_held_out_loss_is_given_with_its_data():
    card = model_card(
        {**ABOUT, "held_out_loss": 1.5, "held_out_on": "hf:owner/books"}, HOW, "shoal.json"
    )
    assert "* Held-out loss: 1.5000 nats a token, on `hf:owner/books`\n" in card


def test_what_is_not_known_is_left_out():
    card = model_card({"round": 3, "notes": []}, HOW, "shoal.json")
    assert "# Weights of a Shoal swarm\n" in card
    assert "\n* " not in card
    own = model_card(
        {**ABOUT, "task": "task.py:Mine", "task_options": {}, "steps": [7, 7]}, HOW, "shoal.json"
    )
    assert "* Data: not in the settings of the swarm; name it here\n" in own
    assert "* Training loss: 2.3456, the mean" in own  # a task of one's own has a unit of its own
    assert "peers: 7\n" in own
    assert "datasets" not in header(own)[0]


@pytest.mark.parametrize(
    "hostile",
    ["`</h1>` <script>", "a\n# Licence\nMIT", "---\nlicense: mit\n---", "![x](http://evil)", "```"],
)
def test_a_strangers_names_are_no_markup(hostile):
    options = {"data": hostile, "x": hostile}
    card = model_card({**ABOUT, "name": hostile, "task_options": options}, HOW, "shoal.json")
    front, body = header(card)
    assert set(front) == {"tags", "pipeline_tag"}
    outside = body.replace("```python\nmodel = load()\n```", "")
    assert outside.count("`") % 2 == 0
    in_spans = outside.split("`")[1::2]
    assert len([span for span in in_spans if "x=" in span or span in in_spans[:1]]) >= 2
    plain = "".join(outside.split("`")[::2])
    for mark in ("<script>", "evil", "MIT", "license: mit"):
        assert mark not in plain
    assert len(body.splitlines()) == len(
        header(model_card(ABOUT, HOW, "shoal.json"))[1].splitlines()
    )
