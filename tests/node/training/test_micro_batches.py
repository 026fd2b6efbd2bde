"""A batch is cut by rows into equal parts, whatever its nesting."""

from collections import namedtuple

import pytest
import torch

from shoal.node.training import inner_step
from shoal.node.training.trainer import TrainingError
from tests.node.training.loops import run

Pair = namedtuple("Pair", "first second")


def test_a_nested_batch_is_cut_by_rows_and_all_else_repeated():
    table, mask, rows = torch.arange(12).reshape(4, 3), torch.ones(3, 3), torch.arange(4)
    parts = inner_step.cut_batch({"a": [table, Pair(rows, mask)], "b": (torch.tensor(5), "text", None)}, 2)
    assert len(parts) == 2
    for number, part in enumerate(parts):
        at = slice(2 * number, 2 * number + 2)
        assert torch.equal(part["a"][0], table[at])
        assert isinstance(part["a"][1], Pair)
        assert torch.equal(part["a"][1].first, rows[at])
        assert part["a"][1].second is mask
        assert part["b"] == (torch.tensor(5), "text", None)
    whole = [table, "x"]
    assert inner_step.cut_batch(whole, 1)[0] is whole


@pytest.mark.parametrize("batch", [None, "text", torch.tensor(3.0), [torch.tensor(1)]])
def test_a_batch_without_rows_is_not_cut(batch):
    assert inner_step.cut_batch(batch, 1) == [batch]
    with pytest.raises(TrainingError, match=r"has no tensor with rows to cut into 2 parts: leave train\.accumulate at 1"):
        inner_step.cut_batch(batch, 2)


def test_a_batch_that_does_not_divide_is_one_sentence():
    with pytest.raises(TrainingError, match=r"A batch of 8 rows cannot be cut into 3 equal parts: choose train\.accumulate"):
        run(accumulate=3)
