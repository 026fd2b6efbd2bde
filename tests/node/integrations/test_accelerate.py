"""A loop under accelerate in a swarm: accumulation, resume by its own checkpoints, early stopping,
and the best model at the end.

Accelerators share flags between threads, so one peer has an accelerator, and the other one does the
same by hand.
"""

import copy

import pytest
import torch

from tests.node.integrations import two_peers
from tests.node.integrations.two_peers import EVERY, STEPS, flat

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

PARTS = 2


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def batches(name):
    return torch.randn(STEPS, PARTS, 5, 4, generator=torch.Generator().manual_seed(ord(name)))


def loss(model, part):
    return (model(part) - part.sum(1, keepdim=True)).square().mean()


def by_hand(model, session, steps, kept=None):
    """Train a peer; ``kept`` holds its state after 6 steps, or gets it."""
    opt, start = session.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05)), 0
    if kept:
        model.load_state_dict(kept["model"])
        opt.load_state_dict(kept["opt"])
        start = 2 * EVERY
    for step, batch in enumerate(batches("b")[start:steps], start + 1):
        opt.zero_grad()
        for part in batch:
            (loss(model, part) / PARTS).backward()
        opt.step()
        if kept is not None and step == 2 * EVERY:
            kept.update(copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()}))
    session.finish()
    return flat(opt.slow)


@pytest.fixture
def accelerator():
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def pair(with_accelerator, steps=STEPS, kept=None, **outer):
    """Two peers of a swarm, one of which ``with_accelerator(model, session)`` trains.

    Their results, and the first one's model.
    """
    models = [net(), net()]

    def train(name, *peer):
        return with_accelerator(*peer) if name == "a" else by_hand(*peer, steps, kept)

    return [*two_peers.pair(train, models, **outer), models[0]]


def train(accelerator, model, opt, start, steps):
    """Train from one step to another; yield after each."""
    for step, batch in enumerate(batches("a")[start:steps], start + 1):
        for part in batch:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, part))
                opt.step()
                opt.zero_grad()
        yield step


def prepared(accelerator, model, session):
    accelerator.free_memory()  # of what it prepared before
    return accelerator.prepare(
        model, session.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    )


@pytest.mark.ci
@pytest.mark.parametrize("lag", [0, 2])
def test_accelerate_checkpoint_resumes_bit_equal(tmp_path, accelerator, lag):
    """Where there is a lag, the checkpoint after step 6 holds what is in flight of round 2."""

    def end(model, opt, session):
        session.finish()
        return flat([*opt.optimizer.slow, *model.parameters()]), opt.optimizer.round

    def straight(model, session):
        model, opt = prepared(accelerator, model, session)
        for step in train(accelerator, model, opt, 0, STEPS):
            if step == 2 * EVERY:
                accelerator.save_state(str(tmp_path / "kept"))
        return end(model, opt, session)

    def resumed(model, session):
        model, opt = prepared(accelerator, model, session)
        accelerator.load_state(str(tmp_path / "kept"))
        for _ in train(accelerator, model, opt, 2 * EVERY, STEPS):
            pass
        return end(model, opt, session)

    kept = {}
    (wanted, rounds), others, _ = pair(straight, kept=kept, lag=lag)
    (found, round), others_again, _ = pair(resumed, kept=kept, lag=lag)
    assert round == rounds
    assert torch.equal(found, wanted)
    assert torch.equal(others_again, others)


def test_early_stop_keeps_the_best_model(tmp_path, accelerator):
    """The last mean is taken before the best weights are loaded: neither do these come into it, nor
    it into these.
    """

    def stopped(model, session):
        model, opt = prepared(accelerator, model, session)
        for step in train(accelerator, model, opt, 0, 2 * EVERY):
            if step == EVERY:
                accelerator.save_state(str(tmp_path / "best"))
                best = flat(model.parameters()).clone()
        session.finish()
        slow = flat(opt.optimizer.slow).clone()
        accelerator.load_state(str(tmp_path / "best"))
        return best, slow

    (best, slow), others, model = pair(stopped, steps=2 * EVERY, lag=0, finish="average")
    assert (flat(model.parameters()) - best).abs().max() == 0
    assert torch.equal(slow, others)
