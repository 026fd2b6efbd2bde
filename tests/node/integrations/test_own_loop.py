"""Checkpoints and metrics of a loop of one's own, in a swarm of one on loopback."""

import json
import threading
from urllib.request import urlopen

import pytest
import torch

import shoal
from shoal.node.checkpoint.folder import CheckpointError
from shoal.node.integrations.own_loop import RunError
from shoal.node.training.training_error import TrainingError
from tests.support.coded_tensor import Coded

HERE = shoal.NetworkOptions(listen=["/ip4/127.0.0.1/tcp/0"])


def parts(width=4):
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(run, model, inner, until, see=lambda run: None):
    with shoal.create(state=model, every=4, lag=0, network=HERE) as session:
        opt = session.optimizer(inner)
        with run.recording(session, opt):
            while run.step < until:
                loss = model(torch.ones(2, 4)).square().mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
                run.stepped(loss.item())
            run.evaluated(0.25)
            see(run)


def events(folder, name):
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [event for event in found if event["event"] == name]


def test_a_loop_goes_on_where_it_was(tmp_path):
    folder = tmp_path / "run"
    model, inner = parts()
    run = shoal.Run(folder, model, inner, checkpoint_every=3, keep=2)
    run.extra["place"] = 7
    train(run, model, inner, 8)
    assert [path.name for path in sorted(folder.glob("step-*"))][-1] == "step-00000008"

    again, its_inner = parts()
    resumed = shoal.Run(folder, again, its_inner, checkpoint_every=0)
    assert (resumed.step, resumed.extra) == (8, {"place": 7})
    assert torch.equal(again.weight, model.weight)
    kept = its_inner.state_dict()["state"][0]
    assert torch.equal(kept["exp_avg"], inner.state_dict()["state"][0]["exp_avg"])
    train(resumed, again, its_inner, 12)
    assert [event["step"] for event in events(folder, "round")] == [4, 8, 12]
    assert [event["loss"] is not None for event in events(folder, "round")] == [True] * 3
    assert [
        event["progress"]["step"] for event in events(folder, "start") + events(folder, "end")
    ] == [
        0,
        8,
        8,
        12,
    ]
    assert [event["held_out"] for event in events(folder, "evaluation")] == [0.25, 0.25]

    with pytest.raises(
        RunError, match="is of another model or optimizer: choose another folder, or resume=False"
    ):
        shoal.Run(folder, *parts(width=5))
    assert shoal.Run(folder, *parts(width=5), resume=False).step == 0


def test_curves_go_where_they_are_asked_for(tmp_path, caplog):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, inner = parts()
    run = shoal.Run(
        tmp_path / "run",
        model,
        inner,
        name="anna",
        metrics="127.0.0.1:0",
        tensorboard=str(tmp_path / "curves"),
    )
    pages = []

    def see(run):
        address = next(
            word for word in caplog.text.split() if word.startswith("http://127.0.0.1:")
        ).rstrip(",.")
        pages.append(urlopen(address, timeout=30).read().decode())

    train(run, model, inner, 8, see)
    assert 'shoal_loss_held_out{method="noloco",node="anna",swarm="own-loop"} 0.25' in pages[0]
    assert "shoal_exchanges_ended_total" in pages[0]
    curves = EventAccumulator(str(tmp_path / "curves" / "anna"))
    curves.Reload()
    assert [point.step for point in curves.Scalars("round/members")] == [4, 8]
    assert [point.value for point in curves.Scalars("evaluation/held_out")] == [0.25]


def test_an_exception_saves_nothing_and_a_run_is_recorded_once(tmp_path):
    model, inner = parts()
    run = shoal.Run(tmp_path, model, inner)
    with pytest.raises(RunError, match="Nothing is recorded yet"):
        run.stepped()

    def fail(run):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, model, inner, 2, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert events(tmp_path, "end")[0]["progress"]["step"] == 2
    with pytest.raises(RunError, match="A run is recorded once"):
        train(run, model, inner, 3)


def test_what_cannot_be_used_is_said(tmp_path):
    with pytest.raises(RunError, match="Cannot use 'nowhere:x' as metrics"):
        shoal.Run(tmp_path, *parts(), metrics="nowhere:x")


def test_unsavable_value_is_an_error_at_the_first_step(tmp_path):
    """A value that cannot be kept is an error at the first step."""
    model, inner = parts()
    run = shoal.Run(tmp_path, model, inner)
    run.extra["sampler"] = object()
    with pytest.raises(
        CheckpointError, match=r"run\.extra keeps a object .* at \['extra'\]\['sampler'\]"
    ):
        train(run, model, inner, 4)
    assert events(tmp_path, "end")[0]["progress"]["step"] == 1


def test_unresumable_run_ends_at_its_first_step(tmp_path):
    """The fault: it trained to its end, and no checkpoint could be loaded."""
    model, inner = parts()
    run = shoal.Run(tmp_path, model, inner)
    model.register_buffer("late", torch.zeros(2))
    with pytest.raises(TrainingError) as caught:
        train(run, model, inner, 4)
    assert str(caught.value) == (
        "No run could go on from a checkpoint: the model's 'late' is of another form after the "
        "first step than when the Run was: give the model its form before."
    )
    assert events(tmp_path, "end")[0]["progress"]["step"] == 1
    assert not [*tmp_path.glob("step-*")]


class Unmakeable(Coded):
    """A tensor of a class of its own that cannot be made from its parts."""

    @classmethod
    def __tensor_unflatten__(cls, inner, _context, _size=None, _stride=None):
        raise RuntimeError("not again")


class Odd(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = Unmakeable.of(parameter.detach())


def test_unrebuildable_optimizer_ends_the_run(tmp_path):
    """Mutant: only the first of several inner optimizers is looked at."""
    model, _ = parts()
    inner = [torch.optim.SGD([model.weight], lr=0.01), Odd([model.bias], lr=0.01)]
    run = shoal.Run(tmp_path, model, inner)
    with pytest.raises(TrainingError, match=r"Unmakeable at .* cannot be made again"):
        train(run, model, inner, 4)


def test_failed_last_checkpoint_is_raised_at_the_end(tmp_path):
    """Fault: a line in a log and exit code 0."""
    model, inner = parts()
    run = shoal.Run(tmp_path, model, inner, checkpoint_every=0)
    with pytest.raises(CheckpointError, match=r"run\.extra keeps a object"):
        train(run, model, inner, 4, lambda run: run.extra.update(late=object()))
    assert events(tmp_path, "end")[0]["progress"]["step"] == 4
    assert run._begun()[1].round == 1  # it was finished


def test_joiner_takes_over_restored_weights(tmp_path):
    """Who joins takes over what a run restored after its session began."""
    model, inner = parts()
    run = shoal.Run(tmp_path, model, inner, checkpoint_every=0)
    train(run, model, inner, 4)

    resumed, its_inner = parts()
    other, others_inner = parts()
    first = shoal.create(state=resumed, every=4, lag=0, start_when=2, network=HERE)
    with first, shoal.join(first.link, state=other, network=HERE) as second:
        shoal.Run(tmp_path, resumed, its_inner)
        joining = threading.Thread(target=lambda: second.optimizer(others_inner))
        joining.start()
        first.optimizer(its_inner)
        joining.join(60)
        assert torch.equal(other.weight, model.weight)
