"""A learning rate that is much too high is said in one sentence: the loss stays finite, and so
training goes on.
"""

from types import SimpleNamespace

import pytest
import torch

from shoal.node.runtime.training_node import TrainingNode
from shoal.node.task import Shard
from shoal.node.tasks.text import TextTask
from shoal.node.training import meter
from shoal.node.training.loss_rise import LossRise
from shoal.node.training.meter import Progress
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.training.step_rate import Rates

TINY = {"layers": 1, "width": 16, "heads": 1, "context": 16, "batch": 2}


def said_of(lr, monkeypatch, tmp_path):
    """Return what is said in twenty steps of the built-in task at the rate ``lr``."""
    monkeypatch.setattr(meter, "REPORT_S", 0.0)
    (tmp_path / "text.txt").write_text("one fish, two fish, red fish, blue fish. " * 40)
    task = TextTask(data=str(tmp_path), lr=lr, warmup=0, **TINY)
    made = Trainer(task, OuterSettings(method="none"), TrainSettings(steps=20, seed=0))
    made.connect(Alone(), "run", Shard(0, 1, 0))
    said = []
    made.run(on_progress=lambda progress: said.append(made.meter.rise.news(progress.loss)))
    return [sentence for sentence in said if sentence]


def test_absurd_learning_rate_is_said_once(monkeypatch, tmp_path):
    """Fault: the loss rose from 6 to 20,000 and nothing was said."""
    (said,) = said_of(10.0, monkeypatch, tmp_path)
    assert said.startswith("training diverges: the loss is ")
    assert said.endswith(
        " in the first step; begin again with a lower learning rate (`shoal tune` finds one)"
    )


@pytest.mark.parametrize("lr", [1.2e-2, 1e-9])
def test_usable_and_tiny_rates_are_not_called_diverging(lr, monkeypatch, tmp_path):
    assert said_of(lr, monkeypatch, tmp_path) == []


@pytest.mark.parametrize(
    ("first", "losses"),
    [
        (2.0, [7.0, 7.0, 2.0, 7.0, 7.0]),  # one batch, or two
        (2.0, [5.9] * 5),
        (-2.0, [1.0] * 5),  # of no sign that tells
        (0.0, [1.0] * 5),
    ],
)
def test_short_or_small_rise_is_no_divergence(first, losses):
    rise = LossRise()
    rise.add(torch.tensor(first))
    assert [rise.news(loss) for loss in losses] == [""] * 5


def test_divergence_is_said_once_and_not_of_trained_weights():
    """The fault: a newcomer whose first batch had a loss near 0 said so six times."""
    rise = LossRise()
    rise.add(torch.tensor(2.0))
    said = [bool(rise.news(loss)) for loss in (9.0, 9.0, 9.0, 2.0, 9.0, 9.0, 9.0)]
    assert said == [False, False, True, False, False, False, False]
    resumed = LossRise()
    resumed.stop()
    resumed.add(torch.tensor(2.0))
    assert [resumed.news(9.0) for _ in range(4)] == [""] * 4


def nothing(*_, **__):
    """What a node does beside it at a report."""


@pytest.mark.parametrize(("hooks", "shown"), [("text", True), ("rl", False)])
def test_node_shows_divergence_but_not_of_rewards(hooks, shown):
    said, written = [], []
    node = TrainingNode.__new__(TrainingNode)
    node.options = SimpleNamespace(display=SimpleNamespace(message=said.append, update=nothing))
    train = SimpleNamespace(steps=0)
    node.settings = SimpleNamespace(task=SimpleNamespace(hooks=hooks), train=train)
    whole = SimpleNamespace(steps=1, round=0, fragments=1)
    node.trainer = SimpleNamespace(meter=SimpleNamespace(rise=LossRise()), whole=whole)
    node.membership = SimpleNamespace(directory=SimpleNamespace(size=lambda: 1))
    records = SimpleNamespace(lost=nothing)
    node.member = SimpleNamespace(news=list, records=records, announce=nothing)
    node._link_file = SimpleNamespace(refresh=nothing)
    node.metrics = SimpleNamespace(
        write=lambda event, **given: written.append((event, given)), progress=nothing
    )
    node.trainer.meter.rise.add(torch.tensor(2.0))
    for step in range(5):
        node._on_progress(SimpleNamespace(news=nothing), Progress(step, 8.0, Rates(1.0, 0.0, None)))
    sentence = (
        "training diverges: the loss is 8, and was 2 in the first step; begin again with a lower "
        "learning rate (`shoal tune` finds one)"
    )
    assert said == [sentence] * shown
    assert written == [("diagnosis", {"about": "loss", "said": sentence})] * shown
