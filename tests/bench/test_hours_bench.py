"""The bench of hours sums up what it kept, also of a run that was cut off."""

import json

import pytest

from bench import hours

ABOUT = {"bench": "hours", "policies": ["tiny::60", "tiny::60"], "minutes": 20}


def lines(run, minutes, *, rss_mb=lambda minute: 100.0, about=ABOUT):
    for minute in range(minutes + 1):
        for node in hours.NODES:
            row = {"node": node, "minute": minute, "rounds": 7 * minute, "daemon_mb": 80.0}
            yield {
                "about": about,
                "run": run,
                **row,
                "rss_mb": rss_mb(minute),
                "files": 19,
                "threads": 8 + minute % 2,
            }


def report(called, tmp_path, rows):
    path = tmp_path / "hours.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = called(hours.main, "--minutes", 20, "--resume", path, "--report", "--json")
    return json.loads(done.stdout)["nodes"]["second"]


def test_growth_is_from_ten_minutes_on(called, tmp_path):
    found = report(called, tmp_path, lines(0, 20, rss_mb=lambda minute: 100.0 + minute))
    assert (found["settled_mb"], found["end_mb"], found["minutes"]) == (111.0, 119.0, 20)
    assert found["grown"] == pytest.approx(119 / 111 - 1, abs=1e-4)
    assert (found["files"], found["threads"], found["rounds"]) == ([19, 19], [8, 9], 140)


def test_longest_run_of_those_cut_off_is_reported(called, tmp_path):
    other = {**ABOUT, "minutes": 30}
    rows = [*lines(0, 12), *lines(1, 17), *lines(2, 3), *lines(0, 20, about=other)]
    assert report(called, tmp_path, rows)["minutes"] == 17
    assert report(called, tmp_path, lines(0, 13))["grown"] is None
