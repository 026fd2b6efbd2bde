"""Training in rounds that are not steps: what the settings mean to the trainer, and the speed that
it reports.
"""

import types

import pytest
import torch

from shoal.node.checkpoint import store as checkpoint
from shoal.node.task import Shard, tokens_in
from shoal.node.training import meter as meter_module
from shoal.node.training import trainer as trainer_module
from shoal.node.training.trainer import Trainer
from shoal.optim import Alone, RoundInfo, Simulation, by_rate, by_tokens, equal
from shoal.swarm.errors import OuterError
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings
from tests.support.blocking import blocking
from tests.support.trainer_loops import Small


class Timed(Small):
    """Batches of 32 tokens, each of which takes its time."""

    def __init__(self, on_step=lambda: None):
        self.on_step = on_step

    def loss(self, model, batch):
        self.on_step()
        return super().loss(model, batch)


def made(
    task=None,
    exchange=None,
    *,
    steps=40,
    index=0,
    clock=None,
    speeds=lambda: (),
    on_round=None,
    **outer,
):
    options = {"clock": clock} if clock else {}
    result = Trainer(
        task or Timed(),
        blocking(**outer),
        TrainSettings(steps=steps),
        speeds=speeds,
        on_round=on_round,
        **options,
    )
    result.connect(exchange or Alone(), "run", Shard(index, 2, 0))
    return result


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        ({}, equal),
        ({"round": "tokens:100"}, equal),
        ({"round": "seconds:5"}, by_tokens),
        ({"round": "seconds:auto", "weights": "equal"}, equal),
        ({"round": "seconds:5", "weights": "rate"}, by_rate),
        ({"weights": "tokens"}, by_tokens),
        ({"round": "seconds:5", "method": "decoupled"}, by_rate),
        ({"round": "seconds:5", "method": "local"}, by_tokens),
        ({"round": "seconds:5", "method": "none"}, equal),
        ({"weights": "tokens", "method": "none"}, equal),
    ],
)
def test_peers_are_weighted_by_tokens(settings, weight):
    """Peers are weighted by tokens where they learn from unequally much."""
    assert made(**settings).opt.weight is weight
    assert made(**OuterSettings(**settings).resolved().model_dump()).opt.weight is weight


def test_tokens_are_what_the_task_says_or_the_first_tensor():
    class Own(Timed):
        def tokens(self, batch):
            return 5

    assert tokens_in(object(), ("a", {"x": torch.zeros(2, 3)}, torch.zeros(9))) == 6
    for task, tokens in ((Timed(), 32), (Own(), 5)):
        trainer = made(task)
        trainer.step()
        assert trainer.opt.tokens == tokens

    class Wrong(Timed):
        def tokens(self, batch):
            return 0

    with pytest.raises(
        OuterError, match=r"^A batch counts 0 tokens: the task's tokens\(batch\) must return"
    ):
        made(Wrong()).step()


@pytest.mark.parametrize(
    ("round", "rounds"),
    [
        ("steps", 5),
        ("tokens:256", 5),
        ("tokens:64", 20),
        ("seconds:8", 5),
        ("seconds:10", 4),
        ("seconds:auto", 5),
    ],
)
def test_the_setting_decides_when_a_round_is_over(round, rounds):
    now, infos = [1000.0], []

    def pass_a_second():
        now[0] += 1.0

    task, speeds = (
        Timed(on_step=pass_a_second),
        [10 / 8, 30.0],
    )  # eight seconds for ten steps of the slower one
    trainer = made(
        task,
        round=round,
        every=8,
        clock=lambda: now[0],
        on_round=infos.append,
        speeds=lambda: speeds,
    )
    trainer.run()
    assert len(infos) == rounds
    assert [info.key.round for info in infos] == list(range(rounds))


def test_two_trainers_of_unequal_speed_meet_in_every_round():
    """As two nodes do; the virtual clock is the exchange's."""
    step_s = {"0": 1.0, "1": 5.0}

    def peer(exchange):
        infos: list[RoundInfo] = []
        trainer = made(
            Timed(on_step=lambda: exchange.sleep(step_s[exchange.peer])),
            exchange,
            index=int(exchange.peer),
            clock=lambda: exchange.simulation.now,
            on_round=infos.append,
            round="seconds:20",
            codec="float32",
        )
        while len(infos) < 6:
            trainer.step()
        return infos, trainer.opt.tokens, [slow.clone() for slow in trainer.opt.slow]

    found = Simulation(["0", "1"], wait=100.0).run(peer)
    for infos, _, _ in found.values():
        assert [(info.key.round, info.members) for info in infos] == [
            (round, ("0", "1")) for round in range(6)
        ]
    assert [tokens for _, tokens, _ in found.values()] == [120 * 32, 24 * 32]
    # With two peers the pull of the group is to the mean of all, so they stay equal.
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(found["0"][2], found["1"][2], strict=True)
    )


def test_a_run_of_tokens_resumes_bit_by_bit(tmp_path):
    whole = made(round="tokens:100", every=5, method="gasloc")
    for _ in range(13):
        whole.step()
    checkpoint.save(tmp_path, 13, whole.state())
    whole.run()
    again = made(round="tokens:100", every=5, method="gasloc")
    again.resume(checkpoint.load(tmp_path)[1])
    again.run()
    assert (again.opt.position, again.opt.round) == (whole.opt.position, whole.opt.round)
    mine, theirs = again.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_speed_leaves_out_waiting(monkeypatch):
    """The reported speed counts neither waiting nor what is done between steps."""
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0])
    monkeypatch.setattr(trainer_module, "time", clock)
    monkeypatch.setattr(meter_module, "time", clock)

    def compute():
        now[0] += 0.25

    class Slow(Alone):
        waited = 0.0

        def start(self, contribution):
            now[0] += 3.0
            self.waited += 3.0
            return super().start(contribution)

    def between():
        now[0] += 7.0

    reports = []
    trainer = made(Timed(on_step=compute), Slow(), steps=100, every=5)
    assert trainer.run(on_progress=reports.append, after_step=between) == 100 * 7.25 + 20 * 3
    assert len(reports) > 40
    assert {report.rates.steps_per_s for report in reports} == {4.0}
