"""The benchmark of the exchange runs, says what it promises, and leaves nothing behind; its timings
are not judged here.
"""

import json

import pytest


@pytest.mark.slow(reason="30 s: three processes for each of two ways")
def test_groups_have_a_row_per_way_within_the_formula(program):
    command = ("--group", "3", "--mb", "4", "--back", "sign+ef", "--repeats", "1", "--json")
    done = program("exchange.py", *command, timeout=180)
    gathered, averaged = json.loads(done.stdout)["rows"]
    assert (gathered["codec"], averaged["codec"]) == ("sign+ef", "sign+ef,back=sign+ef")
    for row in (gathered, averaged):
        assert row["members"] == 3
        assert row["seconds"] > 0
        assert 1 <= row["over_formula"] <= 1.1
    assert averaged["formula"] < gathered["formula"]


@pytest.mark.slow(reason="20 s: a process for each end of each measurement")
def test_json_has_a_row_per_size(program):
    """JSON has a row per size and nothing is left behind."""
    done = program(
        "exchange.py", "--mb", "1", "--against", "tcp", "--repeats", "1", "--json", timeout=120
    )
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert result["repeats"] == 1
    assert set(result["machine"]) >= {"cores", "python", "torch"}
    (row,) = result["rows"]
    assert row["mb"] == 1
    assert row["seconds"] > 0
    assert row["tcp_seconds"] > 0
    assert row["ratio_tcp"] == pytest.approx(
        row["tcp_seconds"] / row["seconds"], rel=0.05, abs=1e-3
    )
    assert set(row["processor_seconds"]) == {"ours", "tcp"}
    assert row["hivemind_seconds"] is None
    assert row["ratio_hivemind"] is None
    assert row["peak_rss_mb"] >= row["before_rss_mb"] > 0
    assert "TCP" in done.stderr  # the table is for people, so it does not mix with the JSON
