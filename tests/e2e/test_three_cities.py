"""A team at home in three cities trains, and goes on when a line, an address, a machine or the
bootstrap node is gone for a while.

The world, what happens in it and what is promised are in bench/cities.py, which also keeps the
figures; what is late is no fault here, on a machine that may do other things.
"""

import json

import pytest

from bench import cities
from bench._nat import NatError


@pytest.mark.slow(reason="real nodes on slow lines, for 4 to 13 minutes each")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("scenario", cities.SCENARIOS)
def test_the_team_goes_on(scenario, tmp_path_factory, record_property):
    try:
        row = cities.measured(scenario, tmp_path_factory.mktemp("c"))
    except NatError as error:
        pytest.skip(f"no such networks here: {error}")
    record_property("figures", json.dumps(row))
    assert not row["faults"], json.dumps(row, indent=1)
