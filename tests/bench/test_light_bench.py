"""bench/light.py: real daemons find each other's records, and what they send is counted; bad options are refused."""

import json

import pytest

from bench.light import INSIDE, main


@pytest.mark.slow(reason="eight daemons for a minute")
def test_a_few_peers_list_each_other_and_a_stranger_finds_newcomers(called, monkeypatch, tmp_path):
    monkeypatch.setenv(INSIDE, "1")  # no namespace: other programs' loopback traffic does not matter here
    options = ("--peers", "6", "--processes", "2", "--seconds", "10", "--period", "4", "--newcomers", "2")
    done = called(main, *options, "--into", tmp_path / "light.jsonl")
    (line,) = (tmp_path / "light.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert json.loads(done.stdout) == found
    assert found["listed"] == 1
    assert found["in_bucket"] == 6
    assert len(found["found_s"]) == 2
    assert max(found["found_s"]) < 60
    assert 0 < found["record_bytes"] < found["link_bytes"]
    assert found["statuses"] > 0
    assert found["memory_mb"] > 1
