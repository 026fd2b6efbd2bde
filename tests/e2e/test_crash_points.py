"""Real processes that are killed (-9) or stopped at a named point of a protocol: the others have
one whole outcome, and go on.

One case of each point runs with every change; the others, so that every role meets both signals,
are marked slow. What a save that was killed at each of its points leaves is in
tests/node/checkpoint/test_writer.py.
"""

import signal

import pytest

from shoal.node.checkpoint import store as checkpoint
from shoal.optim import Alone, Simulation

FLOATS = 1_000_000  # 4 MB: several chunks, so that "in the middle" means something
ALONE, PAIR = {"alone"}, {"pair"}
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# A process which only waits for its turn on a busy machine is not to be taken for a dead one. So
# silence is short only where silence is what shows the end of the other: who is killed is noticed
# by its connections.
WAIT, SILENCE = 60.0, {KILL: 30.0, STOP: 3.0}
GROUP = {"wait": 30.0, "chunk": 4.0, "exchange": 30.0}
LONG = 120.0  # seconds that an event may take; how soon it comes is bench/latency.py's to say


@pytest.fixture(scope="module")
def outcomes(worker_module):
    """For each peer: digest of its slow weights -> which outcome that is. (The bits of the mean of
    two depend on no order.)
    """

    def slow(number, exchange, codec):
        return worker_module.sha256(worker_module.train(number, FLOATS, exchange, codec=codec))

    found = [{}, {}]
    for codec in ("float32", "mod4"):
        together = Simulation(["0", "1"]).run(
            lambda exchange, codec=codec: slow(int(exchange.peer), exchange, codec)
        )
        for number in range(2):
            found[number] |= {
                slow(number, Alone(), codec): "alone",
                together[str(number)]: f"pair {codec}",
            }
    return found


# Where a message is on its way when its sender dies it may arrive or not; both outcomes are whole
# then.
OFTEN = [
    (KILL, "caller", "offer", ALONE),
    (STOP, "callee", "offer", ALONE),
    (KILL, "callee", "chunk", ALONE),
    (STOP, "caller", "chunk", ALONE),
    (KILL, "callee", "ready", ALONE | PAIR),
    (STOP, "caller", "decided", ALONE),
    (KILL, "callee", "heard", PAIR),
    (STOP, "caller", "commit", PAIR),
]
NAMED = [
    (KILL, "callee", "ready", ALONE | PAIR),
    (KILL, "callee", "heard", PAIR),
    (STOP, "caller", "commit", PAIR),
]
"""Those at messages that name refused blocks."""
SELDOM = [
    (KILL, "caller", "chunk", ALONE),
    (KILL, "caller", "ready", ALONE),
    (KILL, "caller", "decided", ALONE),
    (KILL, "caller", "commit", ALONE | PAIR),
    (KILL, "callee", "offer", ALONE),
    (STOP, "caller", "ready", ALONE),
    (STOP, "callee", "chunk", ALONE),
    (STOP, "callee", "ready", PAIR),
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("number", "role", "point", "expected", "lag", "codec"),
    [
        # Lag 1: the mean is applied a step after the contribution was sent; 0: it is waited for.
        *(pytest.param(*case, 1, "float32") for case in OFTEN),
        *(pytest.param(*case, 1, "mod4") for case in NAMED),
        *(
            pytest.param(
                *case,
                lag,
                "float32",
                marks=pytest.mark.slow(reason="seldom; the frequent ones are in the default suite"),
            )
            for cases, lag in ((OFTEN, 0), (SELDOM, 0), (SELDOM, 1))
            for case in cases
        ),
    ],
    ids=lambda value: (
        value.name
        if isinstance(value, signal.Signals)
        else "-or-".join(sorted(value))
        if isinstance(value, set)
        else str(value)
    ),
)
def test_the_survivor_has_one_whole_outcome_and_goes_on(
    nursery, eventually, outcomes, number, role, point, expected, lag, codec
):
    pair = nursery.pair(wait=WAIT, chunk=SILENCE[number], overlap=lag > 0)
    victim, survivor = (0, 1) if role == "caller" else (1, 0)
    caller, callee = pair
    pair[victim].ask("arm", "armed", point=point, number=int(number))
    caller.tell("train", number=0, floats=FLOATS, lag=lag, codec=codec)
    if (role, point) == ("caller", "offer"):
        caller.wait("point")
    else:
        callee.wait("held")  # only then it is sure who calls
    callee.tell("train", number=1, floats=FLOATS, lag=lag, codec=codec)

    pair[victim].wait("point")
    next_step = pair[survivor].wait("step", LONG, step=3)
    assert outcomes[survivor][next_step["slow"]] in {
        f"{one} {codec}" if one == "pair" else one for one in expected
    }
    if number == KILL:
        eventually(
            lambda: not nursery.left(pair[victim].pid),
            LONG,
            "the end of the victim's daemon and sockets",
        )


def run(peers, round):
    for number, peer in enumerate(peers):
        peer.tell("mean", number=number, floats=FLOATS, round=round)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("count", "point", "number"),
    [
        pytest.param(3, "chunk", KILL, id="gather-SIGKILL"),
        pytest.param(4, "part", STOP, id="allreduce-SIGSTOP"),
        pytest.param(
            3,
            "chunk",
            STOP,
            id="gather-SIGSTOP",
            marks=pytest.mark.slow(reason="a stopped peer is waited for until its deadline"),
        ),
        pytest.param(
            4,
            "part",
            KILL,
            id="allreduce-SIGKILL",
            marks=pytest.mark.slow(reason="four processes in a group"),
        ),
    ],
)
def test_survivors_of_a_group_are_bit_equal(nursery, eventually, count, point, number):
    """The survivors of a group have the same bits and go on."""
    *survivors, victim = peers = nursery.group(count, **GROUP)
    victim.ask("arm", "armed", point=point, number=int(number))
    run(peers, 0)
    victim.wait("point")
    ids = {peer.wait("host")["peer"] for peer in survivors}
    first = [peer.wait("mean", LONG, round=0) for peer in survivors]
    assert len({mean["sha256"] for mean in first}) == 1
    assert ids <= set(first[0]["members"])
    run(survivors, 1)
    second = [peer.wait("mean", LONG, round=1) for peer in survivors]
    assert [set(mean["members"]) for mean in second] == [ids] * len(survivors)
    assert len({mean["sha256"] for mean in second}) == 1
    if number == KILL:
        eventually(
            lambda: not nursery.left(victim.pid), LONG, "the end of the victim's daemon and sockets"
        )


@pytest.mark.parametrize(
    "number",
    [
        KILL,
        pytest.param(
            STOP, marks=pytest.mark.slow(reason="a stopped peer is waited for until its deadline")
        ),
    ],
)
def test_leaderless_group_goes_on(nursery, number):
    """Without its leader nobody has a mean and all go on."""
    leader, *others = peers = nursery.group(3, **GROUP)
    leader.ask("arm", "armed", point="settle", number=int(number))
    run(peers, 0)
    leader.wait("point")
    assert [peer.wait("mean", LONG, round=0).get("members") for peer in others] == [None] * 2
    run(others, 1)
    ids = {peer.wait("host")["peer"] for peer in others}
    assert [set(peer.wait("mean", LONG, round=1)["members"]) for peer in others] == [ids] * 2


def sources_and_newcomer(nursery):
    """Two peers that hand out the same state, and one that wants it; and where the two are."""
    sources, newcomer = nursery.group(2, **GROUP), nursery.worker()
    newcomer.ask("host", "host")
    for source in sources:
        source.ask("serve", "serving", floats=FLOATS)
    return (
        sources,
        newcomer,
        [{key: source.wait("host")[key] for key in ("peer", "addresses")} for source in sources],
    )


@pytest.mark.parametrize(
    "number",
    [
        KILL,
        pytest.param(
            STOP, marks=pytest.mark.slow(reason="a stopped peer is waited for until its deadline")
        ),
    ],
)
def test_newcomer_survives_a_lost_source(nursery, worker_module, number):
    """A newcomer has the whole state though one of its sources goes."""
    sources, newcomer, places = sources_and_newcomer(nursery)
    source = sources[0]
    source.ask("arm", "armed", point="snapshot-chunk", number=int(number))
    newcomer.tell("fetch", sources=places, floats=FLOATS)
    source.wait("point")
    fetched = newcomer.wait("fetched", LONG)
    assert (fetched["round"], fetched["sha256"]) == (
        3,
        worker_module.sha256(worker_module.values(7, FLOATS)),
    )


@pytest.mark.parametrize(
    "number",
    [
        KILL,
        pytest.param(
            STOP, marks=pytest.mark.slow(reason="a stopped peer is waited for until its deadline")
        ),
    ],
)
def test_sources_survive_a_lost_newcomer(nursery, number):
    """The sources go on though the newcomer goes in the middle."""
    sources, newcomer, places = sources_and_newcomer(nursery)
    newcomer.ask("arm", "armed", point="write", number=int(number))
    newcomer.tell("fetch", sources=places, floats=FLOATS)
    newcomer.wait("point")
    run(sources, 0)
    means = [source.wait("mean", LONG, round=0) for source in sources]
    assert [set(mean["members"]) for mean in means] == [{network["peer"] for network in places}] * 2


@pytest.mark.ci
@pytest.mark.parametrize(
    "number",
    [
        KILL,
        pytest.param(
            STOP, marks=pytest.mark.slow(reason="a stopped peer is waited for until its deadline")
        ),
    ],
)
def test_crash_during_a_checkpoint(nursery, outcomes, tmp_path, number):
    """The other goes on alone, and the checkpoint before is whole; who was only stopped ends its
    save when it is let go on.
    """
    survivor, victim = nursery.pair(wait=WAIT, chunk=SILENCE[number])
    victim.ask("save", "saved", folder=str(tmp_path), step=1, floats=FLOATS)
    victim.tell("save", folder=str(tmp_path), step=2, floats=FLOATS, number=int(number))
    victim.wait("point")
    survivor.tell("train", number=0, floats=FLOATS)
    assert outcomes[0][survivor.wait("step", LONG, step=3)["slow"]] in ALONE
    assert checkpoint.load(tmp_path)[0] == 1
    if number == STOP:
        victim.signal(signal.SIGCONT)
        victim.wait("saved", LONG, step=2)
        assert checkpoint.load(tmp_path)[0] == 2
