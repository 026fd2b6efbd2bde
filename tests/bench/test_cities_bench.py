"""`bench/cities.py`: what counts as a fault, of whom, and that what was measured is kept."""

import copy
import json

import pytest

from bench import cities

TEAM = {"anna": 1, "bert": 2, "carl": 3, "dora": 4}
SLOW = "carl has a slow link: an exchange takes it 13.4 s, 4.1 times the median of all (3.28 s)"


def good(struck=(), scenario="neighbours"):
    """A row without faults."""
    members = {name: {"reach": "punched"} for name in TEAM}
    return {
        "scenario": scenario,
        "struck": list(struck),
        "computing": dict.fromkeys(TEAM, 0.97),
        "stood_s": dict.fromkeys(TEAM, 4.9),
        "waited_s": dict.fromkeys(TEAM, 1.0),
        "found_s": dict.fromkeys(TEAM, 59.9),
        "heard_s": dict.fromkeys(TEAM, 59.9),
        "status": [{"when": when, "seconds": 2.0, "members": dict(members), "findings": [SLOW]} for when in ("before", "after")],
        "unheard_s": dict.fromkeys(TEAM, 30.0),
        "codes": dict.fromkeys(TEAM, 130),
    }


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda row: row["computing"].update(anna=0.94), "anna computed 0.94 of the time"),
        (lambda row: row["stood_s"].update(anna=5.1), "anna stood still for 5.1 s (waited 1.0 s)"),
        (lambda row: row["found_s"].update(anna=60.1), "anna exchanged 60.1 s after all was whole"),
        (lambda row: row["found_s"].update(anna=None), "anna exchanged None s after all was whole"),
        (lambda row: row["heard_s"].update(anna=61.0), "anna was shown by watch 61.0 s after all was whole"),
        (lambda row: row["unheard_s"].update(anna=31.0), "watch showed nothing of anna for 31.0 s"),
        (lambda row: row["codes"].update(anna=1), "anna ended with 1"),
        (lambda row: row["status"][1]["members"].pop("anna"), "anna is None in status after"),
        (lambda row: row["status"][0]["members"].update(anna={"reach": "direct"}), "anna is direct in status before"),
        (lambda row: row["status"][0]["findings"].append("anna fails: so."), "status before: anna fails: so."),
        (lambda row: row["status"][0]["findings"].append("carl fails: so."), "status before: carl fails: so."),
        (lambda row: row.update(local=0), "anna and dora have no connection at home"),
    ],
)
def test_what_falls_short_is_a_fault(change, fault):
    row = good()
    assert cities.faults(copy.deepcopy(row)) == []
    change(row)
    assert cities.faults(row) == [fault]


def test_to_whom_it_happened_may_stand_still_be_gone_meanwhile_and_be_blamed_but_comes_back():
    row = good(["anna"])
    row["stood_s"]["anna"], row["computing"]["anna"], row["unheard_s"]["anna"] = 150.0, 0.3, 150.0
    row["status"].append({"when": "asleep", "seconds": 2.0, "members": dict(row["status"][0]["members"]), "findings": []})
    del row["status"][2]["members"]["anna"]
    row["status"][1]["findings"].append("anna has not been heard of for 50 s: it may be asleep, stopped or cut off.")
    assert cities.faults(row) == []
    del row["status"][1]["members"]["anna"]
    assert cities.faults(row) == ["anna is None in status after"]


def test_the_table_says_how_it_was_for_the_others_and_when_the_struck_came_back():
    row = good(["bert"], "cut") | {"down_s": 93.6, "exchanges": {"anna": [3, 4], "bert": [1, 4], "carl": [4, 4], "dora": [2, 5]}}
    row["computing"]["bert"], row["stood_s"]["bert"], row["found_s"]["bert"] = 0.4, 90.0, 28.6
    assert cities.table([row]).splitlines()[-1] == "| cut | 94 s | 0.97 | 4.9 s | 29 s | 60 s | 10 of 17 |"
    row["found_s"]["bert"] = None
    assert "| never | 60 s |" in cities.table([row])


def test_scenarios_that_were_measured_are_not_measured_again(tmp_path, monkeypatch):
    measured = []

    def made(scenario, folder):
        measured.append(scenario)
        return {"scenario": scenario, "faults": ["so"] if scenario == "cut" else []}

    monkeypatch.setattr(cities, "measured", made)
    results = tmp_path / "cities.jsonl"
    for scenarios in (["cut"], ["cut", "roam"]):
        monkeypatch.setattr("sys.argv", ["cities.py", *scenarios, "--results", str(results)])
        cities.main()
    assert measured == ["cut", "roam"]
    assert [json.loads(line)["scenario"] for line in results.read_text().splitlines()] == ["cut", "roam"]
