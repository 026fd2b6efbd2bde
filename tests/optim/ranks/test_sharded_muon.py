"""A step of Muon has the bits of one process, whatever the matrices' shape and however they are
cut.
"""

from pathlib import Path

import muon_jobs as jobs
import pytest
import worlds

from shoal.optim.inner import Float32Muon

JOBS = Path(jobs.__file__)


@pytest.fixture(scope="module")
def four(nursery):
    made = worlds.Ranks(nursery, 4)
    yield made
    made.close()


def expected(kind):
    """Return what Muon makes of each matrix as a whole."""
    model = jobs.make_model(kind)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    inner = Float32Muon(matrices.values(), lr=0.1, weight_decay=0.2, momentum=0.9)
    for gradients in jobs.gradients(model):
        for name, p in matrices.items():
            p.grad = gradients[name]
        inner.step()
    return [[p.tolist(), inner.state[p]["momentum_buffer"].tolist()] for p in matrices.values()]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "tp", "tp and fsdp"])
def test_a_cut_matrix_steps_as_a_whole_one(four, kind):
    answers, wanted = four.call(JOBS, "stepped", kind=kind), expected(kind)
    assert all(answer["found"] == wanted for answer in answers)
    assert kind == "tp and fsdp" or any(
        answer["empty"] for answer in answers
    )  # ranks without a row
