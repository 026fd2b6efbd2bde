"""The guarantees of the ``Exchange`` protocol, for every implementation (``worlds``): the same
scripts, played in each world.
"""

import pytest
import torch

VALUES = [[0.1, 1e-30, 3.0, -7.7], [0.2, 1e30, 5.0, 7.7], [0.3, 2.0, -5.0, 1.0]]


def start(name="x", peer=0, **options):
    return ["start", name, {"values": VALUES[peer], **options}]


def average(*peers, weights=None):
    weights = weights or [1.0] * len(peers)
    weighted = [
        weight * torch.tensor(VALUES[peer], dtype=torch.float64)
        for peer, weight in zip(peers, weights, strict=True)
    ]
    return (sum(weighted) / sum(weights)).tolist()


def whole(note, weights=None):
    """Return True if the note is exactly the mean of its members."""
    members = note["members"]
    expected = average(*members, weights=weights and [weights[member] for member in members])
    assert note["values"] == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert note["weight"] == (
        sum(weights[member] for member in members) if weights else len(members)
    )
    return True


def moved_by_both(peer, note):
    """Return True if the note is that of the middle of three: moved by half the way to each."""
    others = [member for member in note["members"] if member != peer]
    for value, mine, wanted in zip(note["values"], VALUES[peer], average(*others), strict=True):
        assert value == pytest.approx(wanted, rel=1e-6, abs=1e-6 * max(abs(mine), 1.0))
    assert note["weight"] == len(others) + 1
    return True


def each(world, script):
    """Return a script for each of the peers that average with each other."""
    return [script(peer) for peer in range(world.size)]


@pytest.mark.thinned(3)
def test_mean_is_exact_and_bit_equal(world):
    """The mean is exact and the same bits on all sides."""
    notes = world.play(each(world, lambda peer: [start(peer=peer), ["result", "x"]]))
    first = notes[0][0]
    assert whole(first)
    assert first["members"] == list(range(world.size))
    assert all(note == [first] for note in notes)
    if world.size == 2:
        assert first["values"] == ((torch.tensor(VALUES[0]) + torch.tensor(VALUES[1])) / 2).tolist()


def test_weights_count(world):
    weights = [3.0, 1.0, 2.5]
    notes = world.play(
        each(world, lambda peer: [start(peer=peer, weight=weights[peer]), ["result", "x"]])
    )
    assert whole(notes[0][0], weights)
    assert all(note == notes[0] for note in notes)


def test_the_codec_rounds_what_all_sides_have_of_a_peer(world):
    fine = 1 + 2.0**-12  # too fine for float16, whose rounding is then the same on all sides
    steps = [["start", "x", {"values": [fine, 5.0], "codec": "float16"}], ["result", "x"]]
    notes = world.play([steps] * world.size)
    assert notes[0][0]["values"] == pytest.approx([1.0, 5.0], rel=1e-6)
    assert all(note == notes[0] for note in notes)


def test_a_codec_that_averages_by_sender_does_so_everywhere(world):
    """Each peer sends index 0 and one of its own: 2 of 128 values.

    The largest is shortened to the median, the lower of two.
    """
    largest = [8.0, 16.0, 4.0]

    def script(peer):
        values = [largest[peer]] + [0.001] * 127
        values[1 + peer] = largest[peer] / 4
        return [
            ["start", "x", {"values": values, "codec": "topk2-senders+ef:0.95"}],
            ["result", "x"],
        ]

    notes = world.play(each(world, script))
    expected = {2: [(8 + 8) / 2, 2.0, 2.0], 3: [(8 + 8 + 4) / 3, 2.0, 2.0, 1.0]}[world.size]
    assert notes[0][0]["values"] == pytest.approx(
        expected + [0.0] * (128 - len(expected)), rel=1e-6
    )
    assert all(note == notes[0] for note in notes)


def test_result_can_be_asked_for_again(world):
    """The result is the same however often it is asked for."""
    notes = world.play(
        each(
            world,
            lambda peer: [
                start(peer=peer),
                *[["result", "x"]] * 2,
                ["done", "x"],
                ["result", "x", 0.0],
            ],
        )
    )
    for first, second, done, third in notes:
        assert whole(first)
        assert first == second == third
        assert done


def test_later_changes_of_tensors_do_not_matter(world):
    """What happens to the tensors after the start does not matter."""
    notes = world.play(each(world, lambda peer: [start(peer=peer, spoil=True), ["result", "x"]]))
    assert all(whole(note) for (note,) in notes)


def test_two_fragments_in_flight_are_two_means(world):
    if not world.overlaps:
        pytest.skip("one exchange at a time")

    def script(peer):
        other = {"values": [10.0 * peer, 1.0], "round": 1, "fragment": 1}
        return [start(peer=peer), ["start", "y", other], ["result", "y"], ["result", "x"]]

    for y, x in world.play(each(world, script)):
        assert whole(x)
        assert y["values"] == pytest.approx([10.0 * (world.size - 1) / 2, 1.0], rel=1e-6)


def test_non_finite_peer_is_left_out_that_round(world):
    """A contribution that is no number leaves out its peer alone and for that round only."""
    last = world.size - 1

    def script(peer):
        wrong = {"values": [float("nan"), 1.0, 1.0, 1.0]} if peer == last else {}
        together = [
            ["mark", f"{peer} through"],
            *[["after", f"{other} through"] for other in range(world.size)],
        ]
        return [
            start("0", peer=peer, **wrong),
            ["result", "0"],
            *together,
            start("1", peer=peer, round=1),
            ["result", "1"],
        ]

    notes = world.play(each(world, script))
    for peer, (first, second) in enumerate(notes):
        if peer == last or world.size == 2:
            assert first is None
        else:
            assert whole(first)
            assert first["members"] == list(range(last))
        assert whole(second)
        assert second["members"] == list(range(world.size))


@pytest.mark.thinned(3)
def test_a_late_peer_is_waited_for(world):
    def script(peer):
        if peer > 0:
            return [["after", "waiting"], start(peer=peer), ["result", "x"]]
        return [start(peer=peer), ["done", "x"], ["mark", "waiting"], ["result", "x"]]

    (done, first), *others = world.play(each(world, script))
    assert not done
    assert first["members"] == list(range(world.size))
    assert whole(first)
    assert all(note == [first] for note in others)


@pytest.mark.thinned(3)
def test_missing_peer_costs_the_wait_and_returns(world):
    """The last peer leaves out round 0.

    In rounds 1 and 2 it may be too late for peers that do not know of its return.
    """
    last = world.size - 1

    def play(r):
        return [start(str(r), peer=0, round=r), ["result", str(r)]]

    def script(peer):
        if peer == last:
            later = [step for r in (2, 3) for step in (play(r)[0], ["mark", f"in {r}"], play(r)[1])]
            return [["after", "gave up"], *play(1), ["mark", "came back"], *later]
        later = [step for r in (2, 3) for step in (["after", f"in {r}"], *play(r))]
        return [*play(0), ["mark", "gave up"], *play(1), ["after", "came back"], *later]

    notes = world.play(
        each(world, script), wait=5.0
    )  # on a loaded machine peers that begin together are seconds apart
    for peer in range(last):
        without = notes[peer].pop(0)
        assert without is None or last not in without["members"]
    for note in notes:
        assert note[-1]["members"] == list(range(world.size))
        assert all(
            each is None or each["values"] == pytest.approx(VALUES[0], rel=1e-6) for each in note
        )


@pytest.mark.thinned(3)
def test_after_a_deadline_the_exchange_is_over_for_all(world):
    """No peer gets a mean that another member misses: a peer that comes after the deadline finds no
    partner.
    """

    def script(peer):
        if peer == 0:
            return [
                start(peer=0),
                ["result", "x", 0.3],
                ["mark", "over"],
                ["done", "x"],
                ["result", "x"],
            ]
        return [["after", "over"], start(peer=peer), ["result", "x"]]

    first, *others = world.play(each(world, script), wait=2.0)
    assert first == [None, True, None]
    assert all(note is None or 0 not in note["members"] for (note,) in others)


@pytest.mark.thinned(3)
def test_killed_peer_leaves_whole_means_or_none(world):
    """The last of three dies in round 1, with its contribution in flight.

    The others begin each later round together.
    """
    rounds = 8

    def script(peer):
        steps = []
        for r in range(rounds):
            together = (
                [["mark", f"{peer} in {r}"], ["after", f"{1 - peer} in {r}"]]
                if r > 1 and peer < 2
                else []
            )
            death = [["die"]] if peer == 2 and r == 1 else []
            steps += [*together, start(str(r), peer=peer, round=r), *death, ["result", str(r)]]
        return steps

    *notes, dead = world.play([script(peer) for peer in range(3)], wait=1.0)
    assert dead is None
    for r in range(rounds):
        one, two = (note[r] for note in notes)
        for peer, note in enumerate((one, two)):
            if note is not None and len(note["members"]) > world.size:
                assert moved_by_both(peer, note)
            else:
                assert note is None or whole(note)
        assert all(note is None or peer in note["members"] for peer, note in enumerate((one, two)))
        if r > 1:
            assert one is None or one["members"] == [0, 1]
        if one is not None and two is not None:
            assert one == two or r < 2
    assert any(note is not None for note in notes[0][2:])
