"""A torch.distributed job of two ranks is one peer of a session, by DDP or FSDP2, and holds what
one process would.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shoal.optim import DiLoCo, NoLoCo, Simulation

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "exchanges")]
import session_jobs as jobs  # noqa: E402
import worlds  # noqa: E402

JOBS = Path(jobs.__file__)
EVERY, STEPS = jobs.EVERY, jobs.EVERY * jobs.ROUNDS
KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp"])


@pytest.fixture(scope="module")
def nursery():
    process = worlds.start_nursery()
    yield process
    process.stdin.close()
    process.wait(20)


@pytest.fixture
def peers(nursery):
    """Two jobs of two ranks each."""
    made = [worlds.Ranks(nursery, 2) for _ in range(2)]
    yield made
    for ranks in made:
        ranks.close()


@pytest.fixture(scope="module")
def pair(nursery):
    """One job of two ranks."""
    made = worlds.Ranks(nursery, 2)
    yield made
    made.close()


def both(*calls):
    """Do the calls at once; their results."""
    with ThreadPoolExecutor() as threads:
        return [future.result(120) for future in [threads.submit(call) for call in calls]]


def beside(ranks, folder, call):
    """The call, and the training of other ranks until it is over, for ``both``."""

    def work():
        try:
            return call()
        finally:
            (folder / "over").touch()

    return work, lambda: ranks.call(JOBS, "go_on", data=1, until=str(folder / "over"))


def simulated(make, seed):
    """The slow weights that two peers of one process end with, both from the weights of
    ``seed``.
    """

    def peer(exchange):
        model = jobs.plain(seed)
        opt = make(jobs.sgd(model), exchange, every=EVERY, model=model)
        jobs.steps(opt, model, jobs.batches(int(exchange.peer)), STEPS)
        opt.finish()
        return jobs.numbers(opt.slow), jobs.full(model)

    return Simulation(["1", "2"]).run(peer)


@pytest.mark.ci
@pytest.mark.parametrize(("kinds", "method", "make"), [
    (("ddp", "fsdp"), {"lag": 0, "codec": "float32"}, lambda *a, **k: NoLoCo(*a, lag=0, **k)),
    (("fsdp", "ddp"), {"method": "diloco"}, DiLoCo),
])  # fmt: skip
def test_two_ranks_equal_one_process(peers, kinds, method, make):
    """The second has other weights, and takes over those of the first on both of its ranks."""
    link, told = peers[0].call(
        JOBS, "begin", kind=kinds[0], seed=0, every=EVERY, start_when=2, wait_s=60.0, **method
    )
    assert told[1] == EVERY  # rank 1 has the settings
    run = {"count": STEPS}
    found = both(
        lambda: peers[0].call(JOBS, "whole_run", kind=kinds[0], seed=0, data=1, **run),
        lambda: peers[1].call(JOBS, "whole_run", kind=kinds[1], seed=7, data=2, link=link, **run),
    )
    for (first, second), (slow, fast) in zip(found, simulated(make, 0).values(), strict=True):
        assert first["met"] == second["met"] == [2] * jobs.ROUNDS
        for mine, wanted in ((first["slow"], slow), (first["fast"], fast), (second["fast"], fast)):
            for here, there in zip(mine, wanted, strict=True):
                torch.testing.assert_close(
                    torch.tensor(here), torch.tensor(there), rtol=1e-5, atol=1e-6
                )


@pytest.mark.ci
def test_ranks_have_the_creators_fragments(peers, tmp_path):
    """It catches a rank without the manifest that cuts the model by layer."""
    made = peers[0].call(JOBS, "cut", kind="ddp", seed=0)
    joined = both(
        *beside(
            peers[0],
            tmp_path,
            lambda: peers[1].call(JOBS, "cut", kind="fsdp", seed=7, link=made[0][0]),
        )
    )[0]
    assert [parts for _, parts in made] == [parts for _, parts in joined] == [[[2, 3], [0, 1]]] * 2


@pytest.mark.ci
def test_every_rank_is_informed_of_a_change(peers):
    """Mutants: rank 0 alone changes its rate, and the ranks of one peer train with two; rank 0
    alone is over, and the others wait for its next step.
    """
    found = peers[0].call(JOBS, "changed", kind="ddp", count=2 * EVERY)
    assert found == [[[[1, 0.25]], 0.25, False, True]] * 2


@pytest.mark.ci
@KINDS
def test_a_late_peer_takes_over_round_and_weights_and_listens(peers, kind, tmp_path):
    link, _ = peers[0].call(
        JOBS, "begin", kind=kind, seed=0, every=EVERY, method="diloco", wait_s=0.5
    )
    peers[0].call(JOBS, "optimize")
    peers[0].call(JOBS, "train", data=1, count=STEPS)
    late = lambda: peers[1].call(JOBS, "join_late", kind=kind, link=link)  # noqa: E731
    joined, _ = both(*beside(peers[0], tmp_path, late))
    assert [found[0] for found in joined] == [joined[0][0]] * 2
    assert joined[0][0] >= jobs.ROUNDS
    assert joined[0][1]  # its first round does not count
    (done, step, progress), (other_done, other_step, said) = (found[-1] for found in joined)
    assert done == step == other_done == other_step >= STEPS
    assert progress >= done
    assert said == (
        "Rank 1 of this peer has no network: rank 0 has the link, the membership, the status and "
        "the progress (session.follow gives it to every rank)."
    )


@pytest.mark.ci
@KINDS
def test_ranks_resume_their_own_state(peers, kind, tmp_path):
    """Saved state of each rank goes on bit for bit and only there."""
    peers[0].call(JOBS, "begin", kind=kind, seed=0, every=EVERY, lag=0, wait_s=0.2)
    peers[0].call(JOBS, "optimize")
    for rank, found in enumerate(peers[0].call(JOBS, "saved", data=1, folder=str(tmp_path))):
        assert found["wanted"] == found["found"]
        assert (
            f"is of rank {1 - rank} of 2, and this is rank {rank} of 2: each rank loads its own"
            in found["errors"][0]
        )
        assert f"is of one process, and this is rank {rank} of 2" in found["errors"][1]


@pytest.mark.ci
@KINDS
def test_killed_rank_ends_its_peer_only(peers, kind):
    """A killed rank ends its peer with a sentence and the other peer goes on."""
    link, _ = peers[0].call(
        JOBS, "begin", kind=kind, seed=0, every=EVERY, lag=0, start_when=2, wait_s=1.0
    )
    both(
        lambda: peers[0].call(JOBS, "optimize"),
        lambda: (
            peers[1].call(JOBS, "begin", kind=kind, seed=0, link=link),
            peers[1].call(JOBS, "optimize"),
        ),
    )
    lost, rounds = both(
        lambda: peers[1].call(JOBS, "dies", data=2),
        lambda: peers[0].call(JOBS, "train", data=1, count=STEPS),
    )
    assert lost[0][0] == "RankLost"
    assert "a rank of this peer is gone" in lost[0][1]
    assert lost[1] is None
    assert rounds == [jobs.ROUNDS] * 2
    assert peers[0].call(JOBS, "end")[0]["met"][0] == 2


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("what", "kind", "sentences"),
    [
        (
            "type",
            "ddp",
            ["ranks= takes shoal.Ranks(), made on every rank after init_process_group, and not int"]
            * 2,
        ),
        (
            "no ranks",
            "fsdp",
            [
                "cut into shards (FSDP2), so this process is a rank of a peer: hand in "
                "ranks=shoal.Ranks()"
            ]
            * 2,
        ),
        (
            "setting",
            "ddp",
            [
                "cannot be made with every as given",
                "rank 0 of this peer failed: The swarm cannot be made with every",
            ],
        ),
        (
            "state",
            "ddp",
            [
                "rank 1 of this peer failed: The state must be a module",
                "The state must be a module",
            ],
        ),
        (
            "model",
            "ddp",
            [
                "rank 1 of this peer failed: Rank 1 has another model",
                "Rank 1 has another model than rank 0",
            ],
        ),
        ("link", "ddp", ["shoal up", "rank 0 of this peer failed: "]),
        ("size", "fsdp", ["The model is cut over 2 processes, and ranks= has 1"] * 2),
        ("alone", "ddp", [None, "a rank of this peer is gone, or did not answer for 1 s"]),
        ("optimizer", "ddp", ["The session and its optimizer must have the same ranks"] * 2),
        (
            "every",
            "ddp",
            ["rank 1 of this peer failed: The optimizer does not average", "every is 7 and not 5"],
        ),
        ("report", "ddp", ["division by zero", "rank 0 of this peer failed: division by zero"]),
    ],
)
def test_rank_limits_are_told_to_all(nursery, what, kind, sentences):
    """What a rank cannot do all are told in one sentence."""
    ranks = worlds.Ranks(nursery, 2)
    try:
        found = ranks.call(JOBS, "refused", what=what, kind=kind)
    finally:
        ranks.close()
    for raised, sentence in zip(found, sentences, strict=True):
        assert (raised is None) == (sentence is None), raised
        assert sentence is None or sentence in raised[1]


def test_a_rank_without_a_network_says_who_has_it(pair):
    assert (
        pair.call(JOBS, "refused", what="network")[1]
        == [
            "Rank 1 of this peer has no network: rank 0 has the link, the membership, the status "
            "and the progress (session.follow gives it to every rank)."
        ]
        * 2
    )


def test_ranks_need_torch_distributed():
    with pytest.raises(
        ValueError, match=r"torch\.distributed is not initialised: call init_process_group first"
    ):
        jobs.shoal.Ranks()
