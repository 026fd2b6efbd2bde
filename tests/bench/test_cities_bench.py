"""Benchmarks of a swarm over the Internet: what is a fault, what is late, what is direct, and that
what was measured is kept.
"""

import copy
import json
import multiprocessing as mp

import pytest

from bench import cities, reach

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
        "status": [
            {"when": when, "seconds": 2.0, "members": dict(members), "findings": [SLOW]}
            for when in ("before", "after")
        ],
        "unheard_s": dict.fromkeys(TEAM, 30.0),
        "codes": dict.fromkeys(TEAM, 130),
    }


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda row: row["found_s"].update(anna=None), "anna never exchanged after all was whole"),
        (
            lambda row: row["heard_s"].update(anna=None),
            "anna never was shown by watch after all was whole",
        ),
        (lambda row: row["codes"].update(anna=1), "anna ended with 1"),
        (lambda row: row["status"][1]["members"].pop("anna"), "anna is None in status after"),
        (
            lambda row: row["status"][0]["members"].update(anna={"reach": "direct"}),
            "anna is direct in status before",
        ),
        (
            lambda row: row["status"][0]["findings"].append("anna fails: so."),
            "status before: anna fails: so.",
        ),
        (
            lambda row: row["status"][0]["findings"].append("carl fails: so."),
            "status before: carl fails: so.",
        ),
        (lambda row: row.update(local=0), "anna and dora have no connection at home"),
    ],
)
def test_what_does_not_happen_is_a_fault(change, fault):
    row = good()
    assert cities.faults(copy.deepcopy(row)) == []
    change(row)
    assert cities.faults(row) == [fault]
    assert cities.late(row) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row["computing"].update(anna=0.94), "anna computed 0.94 of the time"),
        (lambda row: row["stood_s"].update(anna=5.1), "anna stood still for 5.1 s (waited 1.0 s)"),
        (lambda row: row["found_s"].update(anna=60.1), "anna exchanged 60.1 s after all was whole"),
        (
            lambda row: row["heard_s"].update(anna=61.0),
            "anna was shown by watch 61.0 s after all was whole",
        ),
        (lambda row: row["unheard_s"].update(anna=31.0), "watch showed nothing of anna for 31.0 s"),
        (
            lambda row: row["status"][0]["findings"].append(SLOW.replace("carl", "dora")),
            f"status before: {SLOW.replace('carl', 'dora')}",
        ),
    ],
)
def test_what_takes_longer_is_late_and_no_fault(change, said):
    """A loaded machine is slow as well: only the benchmark, on an idle one, tells."""
    row = good()
    assert cities.late(copy.deepcopy(row)) == []
    change(row)
    assert cities.late(row) == [said]
    assert cities.faults(row) == []


def test_struck_peer_stands_still_and_comes_back():
    """To whom it happened may stand still be gone meanwhile and be blamed but comes back."""
    row = good(["anna"])
    row["stood_s"]["anna"], row["computing"]["anna"], row["unheard_s"]["anna"] = 150.0, 0.3, 150.0
    row["status"].append(
        {
            "when": "asleep",
            "seconds": 2.0,
            "members": dict(row["status"][0]["members"]),
            "findings": [],
        }
    )
    del row["status"][2]["members"]["anna"]
    row["status"][1]["findings"].append(
        "anna has not been heard of for 50 s: it may be asleep, stopped or cut off."
    )
    assert cities.faults(row) == cities.late(row) == []
    del row["status"][1]["members"]["anna"]
    assert cities.faults(row) == ["anna is None in status after"]


def test_table_shows_the_others_and_the_return():
    """The table says how it was for the others and when the struck came back."""
    row = good(["bert"], "cut") | {
        "down_s": 93.6,
        "exchanges": {"anna": [3, 4], "bert": [1, 4], "carl": [4, 4], "dora": [2, 5]},
    }
    row["computing"]["bert"], row["stood_s"]["bert"], row["found_s"]["bert"] = 0.4, 90.0, 28.6
    assert (
        cities.table([row]).splitlines()[-1]
        == "| cut | 94 s | 0.97 | 4.9 s | 29 s | 60 s | 10 of 17 |"
    )
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
    assert [json.loads(line)["scenario"] for line in results.read_text().splitlines()] == [
        "cut",
        "roam",
    ]


DIRECT, RELAYED = "/ip4/11.0.4.2/tcp/4001", "/ip4/11.0.1.2/tcp/4001/p2p/12D3KooWseed/p2p-circuit"


def test_pairs_that_were_measured_are_not_measured_again(tmp_path, monkeypatch):
    measured = []

    def pair(setup, first, second):
        measured.append((setup.listen, first, second))
        return {"outcome": "direct"}

    monkeypatch.setattr(reach, "pair", pair)
    results = tmp_path / "reach.jsonl"
    reach.run(reach.Setup(), ["none"], results)
    reach.run(reach.Setup(listen="quic"), ["none"], results)
    rows = reach.run(reach.Setup(), ["none", "port"], results)
    assert measured == [
        ("tcp", "none", "none"),
        ("quic", "none", "none"),
        ("tcp", "none", "port"),
        ("tcp", "port", "port"),
    ]
    assert [(row["first"], row["second"]) for row in rows] == [
        ("none", "none"),
        ("none", "port"),
        ("port", "port"),
    ]
    assert len(results.read_text().splitlines()) == 4
    assert reach.table(rows, ["none", "port"]).splitlines()[2:] == [
        "| none | direct | direct |",
        "| port | direct | direct |",
    ]


@pytest.mark.parametrize(
    ("ways", "outcome"),
    [
        ([[RELAYED], [RELAYED]], "relayed"),
        ([[RELAYED, DIRECT], [DIRECT]], "direct"),
        ([[RELAYED, DIRECT], [RELAYED]], "relayed"),  # one side's connection is on its way down
        ([[], [RELAYED]], "relayed"),
    ],
)
def test_direct_pair_has_no_relay(monkeypatch, ways, outcome):
    """A pair is direct when both sides have a connection without a relay."""
    monkeypatch.setattr(reach, "AFTER_S", 0.0)
    ends = [mp.Pipe() for _ in range(2)]
    for exchanges in range(1, 6):
        for (_, its), way in zip(ends, ways, strict=True):
            its.send(("round", exchanges, way))
    row = reach._watched([mine for mine, _ in ends], reach.time.monotonic())
    assert row["outcome"] == outcome
    assert min(row["exchanges"]) >= 1


def test_nodes_that_never_exchange_have_failed(monkeypatch):
    monkeypatch.setattr(reach, "DEADLINE_S", 0.0)
    ends = [mp.Pipe() for _ in range(2)]
    ends[1][1].send(("refused", "no member can be reached"))
    row = reach._watched([mine for mine, _ in ends], reach.time.monotonic())
    assert (row["outcome"], row["met_s"]) == ("failed", None)


def test_rows_in_the_results_are_of_pairs_of_known_kinds():
    rows = [json.loads(line) for line in reach.RESULTS.read_text().splitlines()]
    assert {row["outcome"] for row in rows} <= {"direct", "punched", "relayed", "failed"}
    assert {row[name] for row in rows for name in ("first", "second")} == set(reach.KINDS)
