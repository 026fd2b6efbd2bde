"""Members of a group that went on alone while the others slept are rounds ahead, and nobody waits
for them there.
"""

from collections import defaultdict

from tests.sim.faults import Fault
from tests.sim.peers import Setting
from tests.sim.run import simulate

WAIT = 10.0
SIX = Setting(
    "group", 6, calm=100.0, wait=WAIT, chunk_timeout=5.0, exchange_timeout=20.0, pace=(6.0, 6.0)
)


def rounds_after_waking(lines):
    """By peer: (seconds, members) of the rounds that began when all were awake again."""
    events = [
        (float(time), who, what) for time, who, what in (line.split(" ", 2) for line in lines)
    ]
    awake = max(time for time, _, what in events if what == "woke")
    begun, rounds = {}, defaultdict(list)
    for time, who, what in events:
        if what.startswith("round ") and what.endswith(" begins"):
            begun[who] = time
        elif what.startswith("round ") and begun[who] > awake:
            rounds[who].append((time - begun[who], len(what.partition(": ")[2].split())))
    return rounds


def test_sleepers_do_not_wait_for_one_ahead(seeds):
    """They waited for all of ``wait`` in two rounds.

    Besides, an all-reduce in which they fell asleep left a stream open.
    """
    # When the first of them has called the others with its share.
    report = simulate(
        1,
        setting=SIX,
        faults=[Fault(385 + n, "sleep", n, 18.0, 0.5) for n in range(1, 6)],
        keep=True,
    )
    assert report.failure is None
    rounds = rounds_after_waking(report.lines)
    ahead = rounds.pop("p0")
    assert len(rounds) == 5
    assert all(seconds < WAIT / 2 for of_one in rounds.values() for seconds, _ in of_one)
    assert all(members == 6 for of_one in (*rounds.values(), ahead) for _, members in of_one[1:9])
