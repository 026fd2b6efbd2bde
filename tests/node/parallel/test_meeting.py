"""A rank that waits for another one says so, and can be ended."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from shoal.node.parallel import ranks
from shoal.node.parallel.launcher import Job, RankLostError, RankMissingError

CONFIG = """
[task.options]
width = 16
heads = 2
layers = 1
context = 16
"""


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_a_rank_without_the_others_names_them_and_ends_at_a_signal(tmp_path, rank, number):
    (tmp_path / "swarm.toml").write_text(CONFIG)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "up", "swarm.toml", "--device", "cpu"], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **{name: str(value) for name, value in place.items()}},
    )  # fmt: skip
    try:
        said = ""
        while f"waiting for rank {1 - rank} of 2" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == 130
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("rank", "heard"), [(0, True), (1, False)])
def test_the_wait_for_a_rank_has_a_limit_and_one_rank_says_which_it_was(monkeypatch, rank, heard):
    monkeypatch.setattr(ranks, "MEET_S", 0.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.PrefixStore("shoal/0", store).set(f"started/{1 - rank}", "")  # of three the third is missing
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RankLostError, match="rank 2 of 3 did not start within") as caught:
        ranks._all_started(Job(rank, 3))
    assert isinstance(caught.value, RankMissingError) is heard
