"""Members of a method whose peers hold equal weights say so when theirs differ, and begin anew
together when asked to.
"""

import concurrent.futures
import logging
import threading
from functools import partial

import pytest
import torch

import shoal
from shoal.optim import DiLoCo, Simulation
from shoal.swarm.state.snapshot import State
from tests.support.session_loops import HERE, model, sgd

EVERY = 4
METHODS = {"diloco": {}, "streaming": {"fragments": 2, "lag": 1}, "co2": {}}


def train(opt, module, data, steps):
    for _ in range(steps):
        x = torch.randn(8, 4, generator=data)
        (module(x) - x.sum(1, keepdim=True)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def swarm(job, peers, **outer):
    """Run ``job(number, session, opt, module, data)`` in threads, the first in the session that
    makes the swarm; the results.
    """
    modules = [model(number) for number in range(peers)]
    first = shoal.create(
        state=modules[0],
        every=EVERY,
        network=HERE,
        node="peer0",
        start_when=peers,
        wait_s=60.0,
        **outer,
    )
    joined = [
        shoal.join(first.link, state=modules[n], network=HERE, node=f"peer{n}")
        for n in range(1, peers)
    ]

    def run(number, session, module):
        with session:
            return job(
                number,
                session,
                session.optimizer(sgd(module)),
                module,
                torch.Generator().manual_seed(number),
            )

    with concurrent.futures.ThreadPoolExecutor(peers) as pool:
        return [
            future.result(200)
            for future in list(
                map(partial(pool.submit, run), range(peers), [first, *joined], modules)
            )
        ]


def said(caplog):
    return [r.getMessage() for r in caplog.records if "opt.restart_from_model()" in r.getMessage()]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("method", "peers"), [("diloco", 2), ("diloco", 3), ("streaming", 3), ("co2", 3)]
)
def test_outside_change_is_noticed_in_quick_rounds(method, peers, caplog):
    """Mutants: sketches go by records alone, which come seconds later; who decides says nothing; it
    says so in each round.
    """
    caplog.set_level(logging.WARNING, "shoal.swarm.training.session")
    before = []

    def job(number, session, opt, module, data):
        train(opt, module, data, 8 * EVERY)
        before.extend(said(caplog))
        if number == 1:
            for tensor in opt.slow:
                tensor.add_(3.0)
        train(opt, module, data, 8 * EVERY)

    swarm(job, peers, method=method, **METHODS[method])
    assert before == []
    sentences = said(caplog)
    gives_way = [s for s in sentences if s.startswith("this node's weights differ from those of")]
    stays = [s for s in sentences if "differ from this node's" in s]
    assert (len(gives_way), len(stays), len(sentences)) == (1, peers - 1, peers)
    if peers == 3:
        assert {word.strip("(),") for word in gives_way[0].split()} >= {"2", "peer0", "peer2"}
        assert all("of 1 other member (peer1) differ" in s for s in stays)


@pytest.mark.ci
@pytest.mark.parametrize(
    "outer",
    [{"method": "diloco", "codec": "int8"}, {"method": "streaming", "fragments": 2, "lag": "auto"}],
)
def test_honest_members_never_say_that_weights_differ(outer, caplog):
    """Mutant: weights of different rounds, which a lag of one's own brings, or of a lossy codec's
    roundings are compared.
    """
    caplog.set_level(logging.WARNING, "shoal.swarm.training.session")

    def job(number, session, opt, module, data):
        train(opt, module, data, 16 * EVERY)
        return opt.sketch_of(0)

    found = swarm(job, 3, **outer)
    assert all(sketch == pytest.approx(found[0], abs=1e-4) for sketch in found)
    assert said(caplog) == []


def test_differing_node_takes_over_the_others():
    """Mutant: it only says so.

    Between two rounds all wait until what it fetches is there, for these are quicker than a fetch.
    """
    meeting = threading.Barrier(3)

    def job(number, session, opt, module, data):
        train(opt, module, data, 4 * EVERY)
        if number == 1:
            for tensor in opt.slow:
                tensor.add_(3.0)
        for _ in range(8):
            train(opt, module, data, EVERY)
            if number == 1:
                concurrent.futures.wait(
                    filter(None, [session._member.sync._resynchronizer._pending]), 60
                )
                meeting.wait(60)
            else:
                with session._member.sync.at_rest():
                    meeting.wait(60)
        return [t.clone() for t in opt.slow]

    found = swarm(job, 3, method="diloco")
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def simulated(rounds):
    """The slow weights of two peers that both begin anew from ``model(5)`` after ``rounds``, and
    train as many again.
    """

    def run(exchange):
        module, number = model(0), int(exchange.peer)
        opt, data = (
            DiLoCo(sgd(module), exchange, every=EVERY),
            torch.Generator().manual_seed(number),
        )
        train(opt, module, data, rounds * EVERY)
        module.load_state_dict(model(5).state_dict())
        opt.restart_from_model()
        train(opt, module, data, rounds * EVERY)
        return [t.clone() for t in opt.slow]

    return Simulation(["0", "1"]).run(run)["0"]


def test_common_restart_keeps_loaded_weights(
    caplog,
):
    """Mutants: weights that were fetched before replace the loaded ones; the sketches of before are
    compared with those after.
    """
    caplog.set_level(logging.WARNING, "shoal.swarm.training.session")

    def job(number, session, opt, module, data):
        train(opt, module, data, 4 * EVERY)
        resynchronizer = session._member.sync._resynchronizer
        if (
            number == 1
            # as after a missed round: the weights of before are there, and would be taken over
            # after a step
        ):
            resynchronizer._diverged.add(0)
            resynchronizer._pending = fetched = concurrent.futures.Future()
            fetched.set_result(
                State(
                    opt.round,
                    [torch.zeros_like(t) for t in opt.slow],
                    opt.shared,
                    list(opt.applied),
                )
            )
        module.load_state_dict(model(5).state_dict())
        opt.restart_from_model()
        train(opt, module, data, 1)
        assert (session._member.sync.sketch(), resynchronizer.diverged) == (
            None,
            False,
        )
        train(opt, module, data, 4 * EVERY - 1)
        return [t.clone() for t in opt.slow]

    found = swarm(job, 2, method="diloco")
    wanted = simulated(4)
    for mine in found:
        for one, other in zip(mine, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert said(caplog) == []


def test_optimizer_restarts_after_its_session():
    """Mutant: the session, whose network is gone, is asked what to forget, or the next round is
    never applied.
    """
    module, data = model(0), torch.Generator().manual_seed(1)
    with shoal.create(
        state=module, method="diloco", every=EVERY, network=HERE, wait_s=0.2
    ) as session:
        opt = session.optimizer(sgd(module))
        train(opt, module, data, EVERY)
    module.load_state_dict(model(5).state_dict())
    opt.restart_from_model()
    assert all(
        torch.equal(slow, p) for slow, p in zip(opt.slow, model(5).parameters(), strict=True)
    )
    train(opt, module, data, EVERY)
    assert opt.round == 2
    assert not any(
        torch.equal(slow, p) for slow, p in zip(opt.slow, model(5).parameters(), strict=True)
    )
