"""The ranks of a peer in float16: a gradient that is not finite on one of them lets all leave out
the step.
"""

import math
from pathlib import Path

import pytest
import torch

from shoal.node.training.precision import check_precision
from shoal.node.training.training_error import TrainingError

# Not imported here: what it imports takes a second.
JOBS = Path(__file__).with_name("precision_jobs.py")
STEPS, BAD = 8, 4


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_all_ranks_leave_out_the_same_steps(ranks, kind):
    try:
        check_precision("float16", torch.device("cpu"))
    except TrainingError as error:
        pytest.skip(str(error))
    one, other = ranks(2).call(JOBS, "steps", kind=kind, precision="float16", count=STEPS, bad=BAD)
    assert one == other
    assert not one["taken"][BAD]
    assert one["taken"][BAD + 1 :] == [True] * (STEPS - BAD - 1)
    flat = torch.cat([torch.tensor(weights).flatten() for weights in one["weights"]])
    assert math.isfinite(float(flat.sum()))
