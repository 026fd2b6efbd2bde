"""`bench/reach.py`: what is measured is kept, and not measured again; what counts as direct."""

import json
import multiprocessing as mp

import pytest

from bench import reach

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
    assert measured == [("tcp", "none", "none"), ("quic", "none", "none"), ("tcp", "none", "port"), ("tcp", "port", "port")]
    assert [(row["first"], row["second"]) for row in rows] == [("none", "none"), ("none", "port"), ("port", "port")]
    assert len(results.read_text().splitlines()) == 4
    assert reach.table(rows, ["none", "port"]).splitlines()[2:] == ["| none | direct | direct |", "| port | direct | direct |"]


@pytest.mark.parametrize(
    ("ways", "outcome"),
    [
        ([[RELAYED], [RELAYED]], "relayed"),
        ([[RELAYED, DIRECT], [DIRECT]], "direct"),
        ([[RELAYED, DIRECT], [RELAYED]], "relayed"),  # one side's connection is on its way down
        ([[], [RELAYED]], "relayed"),
    ],
)
def test_a_pair_is_direct_when_both_sides_have_a_connection_without_a_relay(monkeypatch, ways, outcome):
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
