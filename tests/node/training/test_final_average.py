"""The held-out loss of the model that the last average left."""

import pytest

from shoal.node.training.final_average import FinalAverage
from shoal.swarm.training.last_average import EndReport

MEMBERS = ("anna", "bert")


@pytest.mark.parametrize(
    ("report", "loss"),
    [
        (None, None),
        (EndReport(loss_before=2.0), 2.0),
        (EndReport(MEMBERS, loss_before=2.0, loss_after=1.5), 1.5),
        (EndReport((), loss_before=2.0, loss_after=9.0, refused=True), 2.0),
        (EndReport(MEMBERS, loss_before=2.0), None),
    ],
    ids=["no average", "alone", "taken", "refused", "not finite"],
)
def test_the_loss_is_that_of_the_weights_kept(report, loss):
    """The fault: a mean whose loss is not finite was shown with the loss before it."""
    assert FinalAverage(report=report).loss() == loss
