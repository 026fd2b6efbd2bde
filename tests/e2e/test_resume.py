"""Real nodes that return: from their checkpoint or the swarm's weights, whichever is newer, and
into swarms of another method.
"""

import json
import re
import signal

import pytest

from shoal.node.checkpoint.store import load

TASK = '''
import time

import torch
from shoal.node.task import Task

class Fit(Task):
    """A least-squares fit with a step that takes a while, as real ones do."""

    def model(self):
        return torch.nn.Linear(4, 1)

    def batches(self, shard):
        generator = torch.Generator().manual_seed(shard.index)
        while True:
            yield torch.randn(8, 4, generator=generator)

    def loss(self, model, batch):
        time.sleep({seconds})  # not in batches(): a resumed run draws all those before again
        return (model(batch).squeeze(1) - batch.sum(1)).square().mean()

    @torch.no_grad()
    def evaluate(self, model):
        return float(self.loss(model, torch.ones(4, 4)))
'''
EVERY = 5


def own(shoal, name, seconds=0.02):
    path = shoal.home / f"{seconds}" / "fit.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(TASK.replace("{seconds}", f"{seconds}"))
    return [*shoal.own(name), "--task", f"{path}:Fit"]


def up(shoal, name, *arguments, seconds=0.02):
    settings = (
        "--every",
        EVERY,
        "--set",
        "outer.wait_s=2.0",
        "--set",
        "node.checkpoint_every_rounds=2",
    )
    return shoal.start("up", *own(shoal, name, seconds), *settings, *arguments)


def join(shoal, link, name, *arguments):
    return shoal.start(
        "join", link, *own(shoal, name), "--set", "node.checkpoint_every_rounds=2", *arguments
    )


def starts(shoal, name):
    return [event for event in shoal.metrics(name) if event["event"] == "start"]


def saved(shoal, name):
    return sorted(
        int(path.name.removeprefix("step-")) for path in (shoal.home / name).glob("step-*")
    )


def killed(node):
    node.signal(signal.SIGKILL)
    node.wait()


@pytest.mark.slow(reason="starts of real nodes, one after another")
@pytest.mark.parametrize(
    "outer",
    [["noloco", "--set", "outer.lag=0"], ["noloco", "--set", "outer.lag=auto"], ["diloco"]],
    ids=["blocking", "overlapped", "diloco"],
)
def test_returning_peer_takes_newer_weights(shoal, eventually, outer):
    """A peer that returns takes the swarm's weights if they are newer."""
    first = up(shoal, "first", "--method", *outer)
    link = first.line()
    second = join(shoal, link, "second")
    eventually(lambda: saved(shoal, "second"), 60, "a checkpoint")
    killed(second)
    # Who was late counts its rounds from behind, so what the swarm has by now is the first's to
    # say.
    left, steps = shoal.rounds("first")[-1]["round"], saved(shoal, "second")[-1]
    eventually(lambda: shoal.rounds("first")[-1]["round"] > left + 3, 60, "rounds without it")
    done = len(shoal.rounds("second"))
    again = join(shoal, link, "second", "--resume")
    eventually(
        lambda: any(event["partner"] for event in shoal.rounds("second")[done:]),
        60,
        "a round together",
    )
    assert "took over the swarm's weights at round" in again.said()
    new = shoal.rounds("second")[done:]
    assert new[0]["round"] > left
    # Its own steps, learning rates and data go on from the checkpoint; with a lag a round is over
    # up to a round after it was sent.
    assert new[0]["step"] - steps <= (2 * EVERY if "outer.lag=auto" in outer else EVERY)
    assert (
        starts(shoal, "second")[0]["setup"]["shard"] == starts(shoal, "second")[1]["setup"]["shard"]
    )
    shoal.interrupt(first, again)


def left_by_its_creator(shoal, eventually, *settings):
    """Return the other node of a swarm whose creator, "first", was killed after a checkpoint."""
    first = up(shoal, "first", *settings)
    second = join(shoal, first.line(), "second")
    eventually(
        lambda: saved(shoal, "first") and shoal.rounds("second"),
        60,
        "a checkpoint and a round of the other",
    )
    killed(first)
    return second


@pytest.mark.slow(reason="starts of real nodes, one after another")
def test_returning_creator_takes_newer_weights(shoal, eventually):
    """The swarm went on without its creator, which has no link to come back by."""
    second = left_by_its_creator(shoal, eventually, "--steps", 0)
    left = shoal.rounds("first")[-1]["round"]
    eventually(lambda: shoal.rounds("second")[-1]["round"] > left + 10, 60, "rounds without it")
    ahead, done = shoal.rounds("second")[-1]["round"], len(shoal.rounds("first"))
    again = up(shoal, "first", "--steps", 0, "--resume")
    eventually(
        lambda: any(event["partner"] for event in shoal.rounds("first")[done:]),
        60,
        "a round together",
    )
    assert "took over the swarm's weights at round" in again.said()
    assert shoal.rounds("first")[done]["round"] > ahead
    shoal.interrupt(again, second)


@pytest.mark.slow(reason="starts of real nodes, one after another")
@pytest.mark.parametrize("lag", ["auto", 0])
def test_a_peer_whose_checkpoint_is_newer_keeps_its_own_weights(shoal, eventually, lag):
    """The swarm's creator is killed and returns from an older checkpoint than the other one has."""
    second = left_by_its_creator(shoal, eventually, "--set", f"outer.lag={lag}")
    before = len(shoal.rounds("second"))
    eventually(lambda: len(shoal.rounds("second")) > before + 30, 120, "rounds without the first")
    shoal.interrupt(second)
    ahead = shoal.rounds("second")[-1]["round"]

    first = up(
        shoal, "first", "--resume", seconds=1.0
    )  # so slow now that it does not make up for it
    done = len(shoal.rounds("second"))
    again = join(shoal, first.line(), "second", "--resume")
    eventually(lambda: len(shoal.rounds("second")) > done, 60, "a round")
    assert shoal.rounds("second")[done]["round"] > ahead
    assert "took over" not in again.said()
    shoal.interrupt(first, again)


@pytest.mark.slow(reason="starts of real nodes, one after another")
def test_other_method_needs_to_be_stated(shoal, eventually):
    """A checkpoint goes on in a swarm of another method only if that is said."""
    first = up(shoal, "first", "--method", "diloco", "--steps", 4 * EVERY, "--json").json()
    said = up(shoal, "first", "--method", "noloco", "--resume", "--steps", 8 * EVERY).error()
    assert "The swarm has outer.method='diloco', and this node was given outer.method='n" in said
    assert "--resume-from" in said

    creator = up(
        shoal,
        "second",
        "--method",
        "noloco",
        "--codec",
        "int8",
        "--resume-from",
        shoal.home / "first",
        "--steps",
        0,
    )
    link = creator.line()
    eventually(lambda: shoal.rounds("second"), 60, "a round")
    assert "begins with the weights of the checkpoint" in creator.said()
    assert starts(shoal, "second")[0]["loss"]["held_out_first"] == pytest.approx(
        first["loss"]["held_out"]
    )
    assert starts(shoal, "second")[0]["swarm"] != first["swarm"]

    # A newcomer takes over these weights, and one with a checkpoint of another swarm must say so.
    assert "is of swarm" in join(shoal, link, "first", "--resume").error()
    third = join(shoal, link, "third", "--resume-from", shoal.home / "first")
    eventually(lambda: shoal.rounds("third"), 60, "a round")
    assert "took over the swarm's weights" in third.said()
    shoal.interrupt(creator, third)


@pytest.mark.slow(reason="starts of real nodes, one after another")
def test_unbegun_swarm_has_its_seeds_weights(shoal, eventually):
    """A swarm that has not begun has the weights of its seed."""
    up(shoal, "first", "--steps", EVERY, "--json").json()
    waiting = up(shoal, "second", "--set", "swarm.start_when=3")
    said = join(shoal, waiting.line(), "third", "--resume-from", shoal.home / "first").error()
    assert "No peer of this swarm has finished a round" in said
    shoal.interrupt(waiting)
    assert starts(shoal, "second")[0]["loss"]["held_out_first"] is None  # it ended, unevaluated


@pytest.mark.slow(reason="starts of real nodes, one after another")
def test_a_late_node_begins_its_schedule_where_the_swarm_is(shoal, eventually):
    settings = (
        "--steps",
        2000,
        "--set",
        "train.optimizer=adamw",
        "--set",
        "train.schedule=cosine",
        "--set",
        "outer.lag=0",
    )
    first = up(shoal, "first", *settings)
    link = first.line()
    eventually(lambda: len(shoal.rounds("first")) >= 8, 60, "rounds")
    late = join(shoal, link, "late")
    eventually(lambda: saved(shoal, "late"), 60, "a checkpoint")
    shoal.interrupt(late, first)
    found = re.search(r"begins at step (\d+) of 2000, where the swarm is", late.said())
    begun = int(found[1])
    assert begun >= 8 * EVERY
    assert begun % EVERY == 0
    step, state = load(shoal.home / "late")
    assert state["trainer"]["schedule"]["done"] == step + begun
    assert state["trainer"]["scheduler"]["last_epoch"] == step + begun


def test_unsavable_optimizer_ends_at_its_first_step(shoal):
    """Fault: it trains to the end, saves nothing, says that --resume goes on, and exits with 0."""
    arguments = own(shoal, "first")
    path = shoal.home / "0.02" / "fit.py"
    path.write_text(
        path.read_text()
        + """
    def inner_optimizer(self, params):
        made = torch.optim.SGD(params, lr=0.01)
        step = made.step
        def keeping(closure=None):
            step(closure)
            for group in made.param_groups:
                group["seen"] = slice(3)
        made.step = keeping
        return made
"""
    )
    node = shoal.start("up", *arguments, "--steps", 1000, "--every", EVERY)
    assert node.wait() == 2
    last = node.said().splitlines()[-1]
    assert last.startswith(
        "Error: Cannot save a checkpoint: the optimizer keeps a slice (slice(None, 3, None)) at "
        "['trainer']['opt"
    )
    assert not list((shoal.home / "first").glob("step-*"))


def test_training_goes_on_without_saving(shoal, eventually):
    """A file in the place of the node's folder stands for a full disk: nothing can be made there,
    for root neither.
    """
    node = up(shoal, "first", "--steps", 0, "--json")
    eventually(lambda: shoal.rounds("first"), 60, "a round")
    (shoal.home / "first").rename(shoal.home / "moved")
    (shoal.home / "first").write_text("")
    done = len(shoal.rounds("moved"))
    eventually(lambda: len(shoal.rounds("moved")) > done + 6, 60, "more rounds")
    said = node.said()
    assert said.count("Cannot save the checkpoint") == 1
    assert "; training goes on, and the next save is tried as usual." in said
    node.signal(signal.SIGINT)
    assert node.wait() == 2
    (line,) = node.lines
    assert "Cannot save the checkpoint" in json.loads(line)["not_saved"]
    assert node.said().splitlines()[-1].startswith("Error: Cannot save the checkpoint")
