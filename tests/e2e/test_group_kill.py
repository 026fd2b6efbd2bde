"""A member of a group, or its leader, is killed or hangs in the middle: the others have one whole outcome, and go on."""

import signal

import pytest

FLOATS = 1_000_000  # 4 MB: several chunks, so that "in the middle" means something
LIMITS = {"wait": 30.0, "chunk_timeout": 2.0, "exchange_timeout": 30.0}
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def run(peers, round):
    for number, peer in enumerate(peers):
        peer.tell("mean", number=number, floats=FLOATS, round=round)


@pytest.mark.parametrize("number", [KILL, STOP], ids=["kill", "stop"])
@pytest.mark.parametrize(("count", "point"), [(3, "chunk"), (4, "part")], ids=["gather", "allreduce"])
def test_the_survivors_of_a_group_have_the_same_bits_and_go_on(nursery, eventually, count, point, number):
    *survivors, victim = peers = nursery.group(count, **LIMITS)
    victim.ask("arm", "armed", point=point, number=int(number))
    run(peers, 0)
    victim.wait("point")
    ids = {peer.wait("host")["peer"] for peer in survivors}
    first = [peer.wait("mean", round=0) for peer in survivors]
    assert len({mean["sha256"] for mean in first}) == 1
    assert ids <= set(first[0]["members"])
    run(survivors, 1)
    second = [peer.wait("mean", seconds=20.0, round=1) for peer in survivors]  # well before the wait is over
    assert [set(mean["members"]) for mean in second] == [ids] * len(survivors)
    assert len({mean["sha256"] for mean in second}) == 1
    if number == KILL:
        eventually(lambda: not nursery.left(victim.pid), 5, "the end of the victim's daemon and sockets")


@pytest.mark.parametrize("number", [KILL, STOP], ids=["kill", "stop"])
def test_without_its_leader_nobody_has_a_mean_and_all_go_on(nursery, number):
    leader, *others = peers = nursery.group(3, **LIMITS)
    leader.ask("arm", "armed", point="settle", number=int(number))
    run(peers, 0)
    leader.wait("point")
    assert [peer.wait("mean", round=0).get("members") for peer in others] == [None] * 2
    run(others, 1)
    ids = {peer.wait("host")["peer"] for peer in others}
    assert [set(peer.wait("mean", round=1)["members"]) for peer in others] == [ids] * 2
