"""``shoal`` is the one import for users: all its names can be had, and none of them is loaded
before it is asked for.
"""

import json
import subprocess
import sys

import shoal
import shoal.optim


def test_every_public_name_can_be_got_and_is_listed():
    assert sorted(shoal.__all__) == sorted(set(shoal.__all__))
    assert all(getattr(shoal, name) is not None for name in shoal.__all__)
    assert {*shoal.__all__, "node", "optim", "swarm", "verification"} == set(dir(shoal))


def test_every_name_of_optim_is_a_name_of_shoal_too():
    own = {"NetworkOptions", "Run", "Session", "Shard", "Task", "create", "join"}
    assert set(shoal.__all__) == set(shoal.optim.__all__) | own
    assert all(getattr(shoal, name) is getattr(shoal.optim, name) for name in shoal.optim.__all__)


def test_importing_shoal_loads_neither_torch_nor_hivemind():
    program = (
        "import json, sys, shoal; dir(shoal); print(json.dumps(sorted({'torch', 'hivemind', "
        "'numpy'} & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == []
