"""What rank 0 of a peer takes and gives for all ranks: slow weights, adoption, checkpoints, and
what is left when a rank dies.
"""

from pathlib import Path

import pytest
import rank_jobs as jobs
import worlds

from shoal.optim import Alone, Simulation

JOBS = Path(jobs.__file__)
KINDS = pytest.mark.parametrize("kind", ["ddp", "fsdp"])


@KINDS
def test_rank_0_answers_as_one_process(trio, kind):
    """What rank 0 asks for between steps is that of one process."""
    first, second, _ = trio.call(JOBS, "told", kind=kind)
    model = jobs.make_model()
    wanted = jobs.story(model, jobs.make("diloco", model, Alone()))
    for one, other in zip(first, jobs.listed(wanted), strict=True):
        assert one == other
    assert second[1] == []
    assert second[3:5] == [[], {"momentum": []}] or second[3:5] == [[], {}]
    assert (second[0], second[-2]) == (first[0], first[-2])


@KINDS
def test_refused_contribution_returns_to_rank_0(trio, kind):
    """A contribution that was refused goes back into the residual on rank 0."""
    first, _, other = trio.call(JOBS, "refused", kind=kind)
    wanted = Simulation(["0", "1"]).run(
        lambda exchange: jobs.alone(jobs.Losing(exchange), "sparseloco")
    )
    assert [len(members) for members in first["members"]] == [2, 0, 2, 2]
    for found, peer in ((first, "0"), (other, "1")):
        assert (found["slow"], found["state"]) == (wanted[peer]["slow"], wanted[peer]["state"])


@pytest.mark.thinned(3)
@pytest.mark.parametrize("method", ["streaming", "diloco, muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_layout_goes_on_from_the_checkpoint_of_another(trio, dtype, method):
    kinds = ["one", "ddp", "fsdp", "one"]
    found = trio.call(JOBS, "relay", dtype=dtype, kinds=kinds, method=method)[0]
    wanted = trio.call(JOBS, "relay", dtype=dtype, kinds=["one"] * 4, method=method)[0]
    assert found == wanted


@KINDS
def test_misfit_state_is_refused_by_all_ranks(trio, kind):
    """What does not fit is refused by all ranks and changes nothing."""
    first, second, _ = trio.call(JOBS, "misfits", kind=kind)
    assert first["errors"] == second["errors"]
    assert len(first["errors"]) == 3
    assert [one[key] for one in (first, second) for key in ("same", "round")] == [True, 0] * 2


@pytest.mark.ci
@KINDS
def test_dead_rank_ends_the_others_in_time(nursery, kind):
    """A rank that dies in an exchange ends the others before they apply it."""
    made = worlds.Ranks(nursery, 3)
    try:
        first, second, other = made.call(JOBS, "dies", kind=kind)
    finally:
        made.close()
    assert second is None
    assert "a rank of this peer is gone" in first["error"]
    assert (first["same"], first["rounds"]) == (True, 2)
    assert [len(members) for members in other["members"]] == [2, 2, 0, 0]
