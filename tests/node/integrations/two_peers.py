"""Two peers of one swarm, in threads of this process."""

import torch

import shoal
from shoal.swarm.changes import Change, ChangePart
from shoal.swarm.identity import Identity
from shoal.swarm.wire.envelope import seal
from tests.support.session_loops import beside, together

HERE = shoal.NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",), relay="off")
EVERY, STEPS = 3, 9


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def pair(train, models, **outer):
    """``train(name, model, session)`` trains one, "a" or "b"; their results."""
    settings = {
        "every": EVERY,
        "lag": 2,
        "wait_s": 60.0,
        "start_when": 2,
        "network": HERE,
        "codec": "float32",
    } | outer
    first = shoal.create(state=models[0], **settings)
    link = first.link

    def peer(name, model, begin):
        with begin() as session:
            return train(name, model, session)

    return together(
        lambda: peer("a", models[0], lambda: first),
        lambda: peer("b", models[1], lambda: shoal.join(link, state=models[1], network=HERE)),
    )


def ended(model, train, steps):
    """Return what ``train(session)`` does in a swarm whose creator has ended it after ``steps``."""
    key = Identity.ephemeral()
    with shoal.create(state=model, every=EVERY, lag=0, network=HERE, identity=key) as session:
        parts = (ChangePart(round=0, steps=steps),)
        swarm = session.membership.swarm
        change = Change(swarm=swarm, creator=key.peer_id, number=1, parts=parts)
        session.membership.changes.take(seal(change, key))
        return train(session)


def joined_late(begun, late, train, steps):
    """Return what ``train(session)`` does: the module ``late`` joins a swarm in which ``begun`` has
    trained ``steps`` steps, and goes on.

    Without a last average, for which each would wait until the other's record says that it is at
    its end.
    """
    first = shoal.create(state=begun, every=EVERY, lag=0, network=HERE, wait_s=0.2, finish="none")
    inner = torch.optim.SGD([p for p in begun.parameters() if p.requires_grad], lr=0.01)
    opt = first.optimizer(inner)

    def step():
        for parameter in opt.parameters:
            parameter.grad = torch.zeros_like(parameter)
        opt.step()

    def join(end):
        with shoal.join(first.link, state=late, network=HERE) as session:
            found = train(session)
            end()
            return found

    for _ in range(steps):
        step()
    return beside(first, step, join)
