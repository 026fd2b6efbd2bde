"""The compressed butterfly between real ranks."""

from pathlib import Path

import jobs
import pytest

from shoal.optim import Simulation

JOBS = Path(jobs.__file__)
NAMES = ["0", "1", "2"]


@pytest.mark.parametrize("back", ["sign+ef", "auto:2+ef", "e3m0+ef", "float32"])
def test_ranks_end_with_the_bits_of_the_simulation(ranks, back):
    """The means, and what each owner owes."""
    codec = f"sign+ef,back={back}"
    expected = Simulation(NAMES, size=3).run(
        lambda exchange: jobs.exchange_random_tensors(exchange, codec)
    )
    found = ranks(3).call(JOBS, "random_tensors", codec=codec)
    assert found == [expected[name] for name in NAMES]
    assert found[0][:-1] == found[1][:-1] == found[2][:-1]
