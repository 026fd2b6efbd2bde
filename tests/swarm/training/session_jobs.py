"""Programs of the processes in the tests of sessions of several ranks.

Each peer is a torch.distributed job of its own.
"""

import contextlib
import os
import signal
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import shoal
from shoal.optim.ranks.orders import whole_slow
from shoal.swarm.changes import Change, ChangePart
from shoal.swarm.errors import ShoalError
from shoal.swarm.identity import Identity
from shoal.swarm.training.session_setup import SessionError
from shoal.swarm.wire.envelope import seal

HERE = shoal.NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",), relay="off")
EVERY, ROUNDS, BATCH = 5, 3, 8
HELD = {}


def plain(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def laid_out(kind, seed):
    model = plain(seed)
    if kind == "fsdp":
        fully_shard(model[0])
        return fully_shard(model)
    return DistributedDataParallel(model)


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(BATCH, 4, generator=generator)


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def steps(opt, model, data, count, ranks=None):
    """Take inner steps: in one process with the mean of the batch's halves, in two ranks each with
    its half.
    """
    for _ in range(count):
        halves = next(data).split(BATCH // 2)
        if ranks is None:
            for half in halves:
                (loss_of(model, half) / 2).backward()
        else:
            loss_of(model, halves[ranks.rank]).backward()
        opt.step()
        opt.zero_grad()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def numbers(tensors):
    return [tensor.detach().double().flatten().tolist() for tensor in tensors]


def full(model):
    return numbers(getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())


def begin(kind, seed, link=None, **options):
    """Make the session of this rank, of a new swarm or the one of ``link``; return its link on rank
    0.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the nursery ignores it
    model, ranks = laid_out(kind, seed), shoal.Ranks(timeout=30.0)
    make = shoal.create if link is None else lambda **rest: shoal.join(link, **rest)
    session = make(state=model, ranks=ranks, network=HERE, **options)
    HELD.update(model=model, ranks=ranks, session=session, met=[], slow={})
    return session.link if ranks.first else [session.shard.index, session.settings.every]


def cut(kind, seed, link=None):
    """Make a session whose fragments are those of ``link``'s creator, who names them; return this
    rank's.
    """
    model, ranks = laid_out(kind, seed), shoal.Ranks(timeout=30.0)
    inside = getattr(model, "module", model)
    named = {"fragments": [inside[2], inside[0]], "lag": 0, "every": EVERY}
    make = partial(shoal.create, **named) if link is None else partial(shoal.join, link)
    HELD.update(
        model=model, ranks=ranks, slow={}, session=make(state=model, ranks=ranks, network=HERE)
    )
    HELD["opt"] = opt = HELD["session"].optimizer(sgd(model))
    return [
        HELD["session"].link if ranks.first else None,
        [opt.positions(number) for number in range(opt.fragments)],
    ]


def optimize():
    """Become a member; return the round to begin with, and whether the first one does not count."""
    session = HELD["session"]

    def on_round(info):
        HELD["met"].append(len(info.members))
        HELD["slow"][info.key.round] = numbers(whole_slow(HELD["opt"]))

    HELD["opt"] = opt = session.optimizer(sgd(HELD["model"]), on_round=on_round)
    return [opt.round, opt.listens]


def train(data, count):
    HELD["data"] = HELD.get("data") or batches(data)
    steps(HELD["opt"], HELD["model"], HELD["data"], count, HELD["ranks"])
    return HELD["opt"].round


def end():
    """End the session; return what this rank holds."""
    session, opt = HELD["session"], HELD["opt"]
    with session:
        pass
    return {
        "fast": full(HELD["model"]),
        "slow": numbers(whole_slow(opt)),
        "met": HELD["met"],
        "round": opt.round,
    }


def whole_run(kind, seed, data, count, link=None, **options):
    """Do all of it."""
    if "session" not in HELD:
        begin(kind, seed, link, **options)
    optimize()
    train(data, count)
    return end()


def saved(data, folder):
    """Train on from saved state twice, the second time with a new model and optimizer that load it;
    return the weights of both.
    """
    ranks, model, opt = HELD["ranks"], HELD["model"], HELD["opt"]
    train(data, 3)
    state = opt.state_dict()
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    torch.save(state, path := f"{folder}/{ranks.rank}")
    ahead = [next(HELD["data"]) for _ in range(2 * EVERY)]
    steps(opt, model, iter(ahead), 2 * EVERY, ranks)
    wanted = full(model)
    model.load_state_dict(weights)
    again = shoal.NoLoCo(
        sgd(model),
        shoal.Alone(),
        every=EVERY,
        lag=0,
        codec=opt.codec.fresh(),
        model=model,
        ranks=ranks,
    )
    again.load_state_dict(torch.load(path, weights_only=False))
    steps(again, model, iter(ahead), 2 * EVERY, ranks)
    errors = []
    for wrong in (
        {**state, "rank": [1 - ranks.rank, 2]},
        {name: value for name, value in state.items() if name != "rank"},
    ):
        try:
            again.load_state_dict(wrong)
        except ValueError as error:
            errors.append(str(error))
    return {"wanted": wanted, "found": full(model), "errors": errors}


def go_on(data, until):
    """Train until there is a file ``until``; return what this rank holds after each round."""
    while not HELD["ranks"].agreed(os.path.exists(until)):
        train(data, 1)
    return HELD["slow"]


def come_back(data):
    """Train until the swarm's weights were taken over after missed rounds, and for two rounds more;
    return as ``go_on`` does.
    """
    ranks, session, taken = HELD["ranks"], HELD["session"], []
    if ranks.first:
        after_step = session._member.after_step
        session._member.after_step = lambda: (
            bool(taken.append(1)) or True if (back := after_step()) else back
        )
    while not ranks.agreed(bool(taken)):
        train(data, 1)
    model = full(HELD["model"])
    train(data, 2 * EVERY)
    return {"model": model, "slow": HELD["slow"], "met": HELD["met"]}


def dies(data):
    """Train until rank 1 is killed within a step; return what rank 0 raises at the end of its
    session.
    """
    try:
        with HELD["session"]:
            train(data, EVERY + 2)
            if not HELD["ranks"].first:
                os.kill(os.getpid(), signal.SIGKILL)
            train(data, EVERY)
    except RuntimeError as error:
        return [type(error).__name__, str(error)]
    return None


def refused(what, kind="ddp"):
    """Return what this rank raises for a wrong use."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    model, ranks = laid_out(kind, 0), shoal.Ranks(timeout=1.0 if what == "alone" else 30.0)
    first, session = ranks.first, None
    create = partial(shoal.create, network=HERE)
    wrong = {
        "type": lambda: create(state=model, ranks=2),
        "no ranks": lambda: create(state=model),
        "setting": lambda: create(state=model, ranks=ranks, every=0),
        "state": lambda: create(state=model if first else [], ranks=ranks),
        "model": lambda: create(state=model if first else nn.Linear(3, 3), ranks=ranks),
        "link": lambda: shoal.join("http://x", state=model, ranks=ranks, network=HERE),
        "alone": lambda: None if first else create(state=model, ranks=ranks),
        "size": lambda: create(
            state=model,
            ranks=shoal.Ranks(dist.new_group([dist.get_rank()], use_local_synchronization=True)),
        ),
    }
    try:
        if what in wrong:
            wrong[what]()
        else:
            session = create(state=model, ranks=ranks, every=EVERY, lag=0)
            if what == "optimizer":
                shoal.NoLoCo(sgd(model), session.exchange(), every=EVERY, lag=0, model=model)
            elif what == "every":
                shoal.NoLoCo(
                    sgd(model),
                    session.exchange(),
                    every=EVERY if first else 7,
                    lag=0,
                    model=model,
                    ranks=ranks,
                )
            elif what == "report":
                session.on_report = lambda info, report, done: 1 / 0
                opt = session.optimizer(sgd(model))
                steps(opt, model, batches(0), EVERY, ranks)
            elif what == "network":
                return (
                    None
                    if first
                    else [
                        str(raised(lambda name=name: getattr(session, name)))
                        for name in ("link", "membership")
                    ]
                )
    except (ShoalError, ArithmeticError, RuntimeError) as error:
        return [type(error).__name__, str(error)]
    finally:
        if session is not None:
            with contextlib.suppress(RuntimeError):
                session.close()
    return None


def raised(work):
    try:
        work()
    except Exception as error:
        return error


def join_late(kind, link):
    begin(kind, 7, link)
    found = [*optimize(), followed()]
    session, ranks = HELD["session"], HELD["ranks"]
    train(2, EVERY)
    session.finish()
    session.close()
    ranks.barrier()
    return found


def followed():
    """Let a schedule of this rank follow the swarm; return its step twice, and what the rank says
    of its progress.
    """
    session = HELD["session"]
    schedule = LambdaLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), lambda step: 1.0)
    done = session.follow(schedule, 1000)
    try:
        said = session.progress
    except SessionError as error:
        said = str(error)
    return done, schedule.last_epoch, said


def changed(kind, count):
    """Make a swarm, change its rate and steps for round 1, train so many steps; return what this
    rank's loop is told, and whether it was over before the last step and after it.
    """
    key, told = Identity.ephemeral(), []
    begin(kind, 0, every=EVERY, method="diloco", wait_s=0.5, identity=key)
    session, ranks = HELD["session"], HELD["ranks"]
    session.on_change = lambda train: told.append([HELD["opt"].round, train.lr])
    optimize()
    if ranks.first:
        parts = (ChangePart(round=1, lr=0.25, steps=count),)
        swarm = session.membership.swarm
        made = Change(swarm=swarm, creator=key.peer_id, number=1, parts=parts)
        session.membership.changes.take(seal(made, key))
    train(1, count - 1)
    early = session.over
    train(2, 1)
    return [told, session.train.lr, early, session.over]
