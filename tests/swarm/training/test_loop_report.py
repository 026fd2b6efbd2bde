"""What a training loop of one's own tells others, and how often."""

from types import SimpleNamespace

from shoal.swarm.training.loop_report import ANNOUNCE_S, LoopReport


def test_a_report_is_due_each_round_and_second(monkeypatch):
    """Mutants: it is due at each step, only in a new round, or only after a second."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("shoal.swarm.training.step_rate.time.monotonic", lambda: clock.now)
    opt = SimpleNamespace(round=0, steps=1, tokens=8)
    losses = []
    records = SimpleNamespace(lost=lambda training: losses.append(training))
    member = SimpleNamespace(records=records, exchange=SimpleNamespace(waited=0.0))
    report = LoopReport()
    assert report.is_due(opt)
    report.loss = 1.5
    report.write(opt, member)
    clock.now += ANNOUNCE_S / 2
    assert not report.is_due(opt)
    opt.round = 1
    assert report.is_due(opt)
    report.write(opt, member)
    clock.now += ANNOUNCE_S
    assert report.is_due(opt)
    assert losses == [1.5, 1.5]
