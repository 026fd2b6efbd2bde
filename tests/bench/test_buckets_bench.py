"""bench/buckets.py: a row for each size of bucket, against a mean over everyone; rows that are there are not run again."""

import json

from bench._quality_train import task_of
from bench.buckets import main, markdown


def test_a_row_for_each_bucket_and_none_twice(called, tmp_path, monkeypatch):
    few = task_of(1).halves
    for half, windows in few.items():
        monkeypatch.setitem(few, half, windows[:16])
    file = tmp_path / "rows.jsonl"
    short = ("--peers", "4", "--steps", "4", "--every", "2", "--batch", "8", "--resume", str(file))
    said = called(main, *short, "--seeds", "0").stdout
    assert "| `diloco` | 4 of 4 |  |" in said
    rows = list(map(json.loads, file.read_text().splitlines()))
    assert [(row["size"], row["redrawn"]) for row in rows] == [(4, 1), (4, 4), (4, 0), (2, 4)]
    assert rows[0]["loss"] == rows[1]["loss"] == rows[2]["loss"] == rows[0]["averaged"]  # all in one bucket, however often drawn
    assert rows[3]["loss"] != rows[0]["loss"]
    called(main, *short, "--seeds", "0")
    assert len(file.read_text().splitlines()) == len(rows)


def test_the_difference_is_taken_seed_by_seed():
    rows = [
        {"method": "diloco", "size": size, "redrawn": 1, "seed": seed, "peers": 8, "loss": loss, "averaged": loss}
        for size, seed, loss in ((8, 0, 2.0), (8, 1, 1.0), (4, 0, 2.02), (4, 1, 1.03))
    ]
    assert "| 4 of 8 | each round | 1.5250 | +2.00 ± 1.00 % |" in markdown(rows)
