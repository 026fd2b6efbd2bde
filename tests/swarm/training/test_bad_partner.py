"""A partner whose weights are bad is refused where data says so (``outer.check_loss``): real hosts
on loopback, loops in threads.
"""

import logging

import torch

import shoal
from shoal.optim import Alone, NoLoCo
from tests.support.session_loops import EVERY, HERE, ROUNDS, loop, model, sgd, together


def weights(module):
    return [parameter.detach().clone() for parameter in module.parameters()]


def batches(seed):
    data = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(8, 4, generator=data)


def loss(module, x):
    return (module(x) - x.sum(1, keepdim=True)).square().mean()


def drift(opt, module):
    """Step away from everything that fits, as far in each step as training does in all."""
    for _ in range(EVERY * ROUNDS):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, -100.0)
        opt.step()


def test_bad_partner_is_refused_to_the_end(caplog):
    """Mutants: a refused contribution is in the mean of a round; the last average is taken
    untried, or is not put back as a whole; nobody is told of either (the last average was only
    said at the level of what goes well).
    """
    caplog.set_level(logging.WARNING, "shoal")
    honest, bad = model(0), model(1)
    first = shoal.create(
        state=honest,
        method="noloco",
        every=EVERY,
        lag=0,
        check_loss=True,
        robust="none",
        codec="float32",  # of one for pairs nothing could be read at that distance
        start_when=2,
        wait_s=10.0,
        network=HERE,
        node="honest",
    )

    def train():
        with first:
            opt = first.optimizer(sgd(honest))
            first.try_partners(loss, batches(9))
            loop(opt, honest, 0)
            first.finish(lambda: loss(honest, next(batches(7))).item())
            return weights(honest)

    def spoil():
        with shoal.join(first.link, state=bad, network=HERE, node="bad") as session:
            opt = session.optimizer(sgd(bad))
            drift(opt, bad)
            session.finish()

    ends, _ = together(train, spoil)
    alone = model(0)
    opt = NoLoCo(sgd(alone), Alone(), every=EVERY, lag=0)
    loop(opt, alone, 0)
    opt.finish()
    assert all(map(torch.equal, ends, weights(alone)))
    assert first.ended.refused
    said = caplog.text
    for round in range(ROUNDS):
        assert (
            f"refused what bad sent in round {round}: it is suspicious: with it the loss on this "
            "node's own batches is"
        ) in said
    assert "the last average was not taken, because it is worse than this node's own model" in said
