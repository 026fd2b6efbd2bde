"""A peer is killed, or hangs, in the middle of an exchange: the other has one whole outcome and goes on."""

import signal

import pytest

from optim import Alone, Simulation

FLOATS = 1_000_000  # 4 MB: several chunks, so that "in the middle" means something
WAIT, CHUNK_TIMEOUT = 20.0, 1.0
ALONE, PAIR = {"alone"}, {"pair"}
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture(scope="module")
def outcomes(worker_module):
    """For each peer: digest of its slow weights -> which outcome that is. (The bits of the mean of two depend on no order.)"""

    def slow(number, exchange):
        return worker_module.sha256(worker_module.train(number, FLOATS, exchange))

    together = Simulation(["0", "1"]).run(lambda exchange: slow(int(exchange.peer), exchange))
    return [{slow(number, Alone()): "alone", together[str(number)]: "pair"} for number in range(2)]


# Where a message is on its way when its sender dies it may arrive or not; both outcomes are whole then.
@pytest.mark.parametrize(
    ("number", "role", "point", "expected"),
    [
        (KILL, "caller", "offer", ALONE),
        (KILL, "caller", "chunk", ALONE),
        (KILL, "caller", "ready", ALONE),
        (KILL, "caller", "decided", ALONE),
        (KILL, "caller", "commit", ALONE | PAIR),
        (KILL, "callee", "offer", ALONE),
        (KILL, "callee", "chunk", ALONE),
        (KILL, "callee", "ready", ALONE | PAIR),
        (KILL, "callee", "heard", PAIR),
        (STOP, "caller", "chunk", ALONE),
        (STOP, "caller", "ready", ALONE),
        (STOP, "caller", "decided", ALONE),
        (STOP, "caller", "commit", PAIR),
        (STOP, "callee", "offer", ALONE),
        (STOP, "callee", "chunk", ALONE),
        (STOP, "callee", "ready", PAIR),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value if isinstance(value, str) else "-or-".join(value),
)
def test_the_survivor_has_one_whole_outcome_and_goes_on(nursery, eventually, outcomes, number, role, point, expected):
    pair = nursery.pair(wait=WAIT, chunk_timeout=CHUNK_TIMEOUT)
    victim, survivor = (0, 1) if role == "caller" else (1, 0)
    caller, callee = pair
    pair[victim].ask("arm", "armed", point=point, number=int(number))
    caller.tell("train", number=0, floats=FLOATS)
    if (role, point) == ("caller", "offer"):
        caller.wait("point")
    else:
        callee.wait("held")  # only then it is sure who calls
    callee.tell("train", number=1, floats=FLOATS)

    hit = pair[victim].wait("point")["at"]
    next_step = pair[survivor].wait("step", step=3)
    assert next_step["at"] - hit < CHUNK_TIMEOUT + 2.0
    assert outcomes[survivor][next_step["slow"]] in expected
    if number == KILL:
        eventually(lambda: not nursery.left(pair[victim].pid), 5, "the end of the victim's daemon and sockets")
