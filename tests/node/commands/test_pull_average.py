"""The mean of all members' newest weights: who is in it, who is not and why, and what it says."""

import math
from types import SimpleNamespace

import pytest
import torch

from shoal.node.commands.pull_average import MOST, average, lines
from shoal.swarm.errors import NetworkError, ShoalError
from shoal.swarm.identity import Identity
from tests.support.records import member_of

ME, BERT, CARL = (Identity.ephemeral().peer_id for _ in range(3))
NAMES = {ME: "anna", BERT: "bert", CARL: "carl"}
MEMBERS = {peer: member_of(peer, name=name) for peer, name in NAMES.items()}


def taken(weights, loss=None, rounds=(7, 9, 8)):
    """The mean of three members of which each has one tensor of one value; None: it cannot be
    reached.
    """

    def fetch(number, source):
        if weights[number] is None:
            raise NetworkError("peer …x is gone.")
        header = SimpleNamespace(round=rounds[number])
        return header, [torch.full((2, 3), weights[number])]

    return average([(peer, ()) for peer in NAMES], MEMBERS, fetch, loss)


def test_mean_is_of_equal_shares_of_the_newest_round():
    """The mean is of all with equal shares and of the newest round."""
    made = taken([1.0, 2.0, 6.0])
    assert torch.equal(made.tensors[0], torch.full((2, 3), 3.0))
    assert made.tensors[0].dtype == torch.float32
    assert made.header.round == 9
    assert [part.round for part in made.parts] == [7, 9, 8]
    assert made.note() == "The weights are the mean of the newest ones of 3 members."
    assert list(lines(made.report(), None)) == ["mean of 3 members: anna, bert, carl"]


def test_rounds_are_said_as_a_node_shows_them():
    """Weights are numbered by exchanges, of which a round has one for each fragment."""
    said = []
    fetched = SimpleNamespace(round=33), [torch.zeros(1)]
    average([("a", ())], {}, lambda number, source: fetched, None, said.append, fragments=4)
    assert said == ["…a: weights after 8 rounds"]


def test_unusable_member_is_left_out_and_named():
    """A member that is gone or not finite is left out and named."""
    made = taken([1.0, None, math.nan])
    assert torch.equal(made.tensors[0], torch.full((2, 3), 1.0))
    assert list(lines(made.report(), None)) == [
        "mean of 1 member: anna",
        "without bert: peer …x is gone",
        "without carl: its weights hold NaN or infinity",
    ]


@pytest.mark.parametrize(("third", "there"), [(2.19, True), (2.21, False), (math.nan, False)])
def test_outlying_loss_leaves_a_member_out(third, there):
    """A held out loss far above the median leaves a member out."""
    losses = {1.0: 2.0, 2.0: 1.9, 6.0: third}
    made = taken([1.0, 2.0, 6.0], lambda tensors: losses[float(tensors[0][0, 0])])
    assert float(made.tensors[0][0, 0]) == (3.0 if there else 1.5)
    assert [part.loss for part in made.parts[:2]] == [2.0, 1.9]
    said = list(lines(made.report(), 1.95))
    assert "the mean is worse than the best member: their weights may lie far apart still" in said
    left = "without carl: its held-out loss is more than a tenth above the median's"
    assert (left in said) is not there


def test_without_usable_weights_the_first_reason_is_the_error():
    """Without weights that can be used the first reason is the error."""
    with pytest.raises(NetworkError, match=r"^peer …x is gone\.$"):
        taken([None, None, None])
    with pytest.raises(ShoalError, match=r"^No member has weights that are finite"):
        taken([math.nan, math.inf, -math.inf])


def test_at_most_so_many_members_are_asked():
    asked = []

    def fetch(number, source):
        asked.append(number)
        return SimpleNamespace(round=1), [torch.zeros(1)]

    average([(str(number), ()) for number in range(MOST + 5)], {}, fetch, None)
    assert asked == list(range(MOST))
