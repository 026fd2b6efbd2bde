"""One trial of ``shoal tune``."""

import pytest
import torch

from shoal.node.config.settings import load
from shoal.node.tune.trial import train

pytestmark = pytest.mark.usefixtures("users_code")


def test_a_diverged_trial_is_not_evaluated(caplog):
    """Mutant: a warning for each tells the user to check evaluate(), which is right."""
    settings = load(None, {"task.hooks": "tests.support.tune_tasks:Never"})
    outcome = train(settings, 3, torch.device("cpu"), lambda: False)
    assert (outcome.steps, outcome.loss) == (3, None)
    assert not caplog.records
