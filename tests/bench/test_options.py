"""Small benchmarks: what they print, that each says what it promises, and options that all of them
refuse; no timings.
"""

import json
import math
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import (
    chaos_table,
    checkpoint,
    eclipse,
    exchange,
    gossip,
    latency,
    light,
    overlap,
    quality,
    sapo,
    table,
    verification,
    verification_135m,
    votes,
    waits,
)
from bench._interval import rate_interval
from bench._quality_train import task_of
from bench.buckets import main as buckets_main
from bench.buckets import markdown
from bench.eclipse import main as eclipse_main
from bench.light import INSIDE, main
from shoal.node.training import meter

REFUSED = {
    eclipse: ["--hostile 1", "--captured 2", "--peers 5", "--entries 0"],
    exchange: ["--mb 0", "--mb x", "--rtt 0", "--against smoke", "--repeats 0"],
    gossip: ["--nodes x", "--attack smoke"],
    latency: ["--samples 1", "--runs x", "--peers 1"],
    light: ["--peers 1", "--processes 0", "--period 30", "--share 0"],
    overlap: [
        "--delay -1",
        "--methods smoke",
        "--mbit 0",
        "--nodes 1",
        "--fragments 11",
        "--lag 100",
        "--codec smoke",
    ],
    quality: ["--methods magic", "--codecs zip", "--batch 30 --peers 4", "--steps 70", "--seeds 0"],
    sapo: ["--nodes 1", "--seeds 0", "--policy huge"],
    table: ["--methods magic", "--seeds 0", "--device cuda"],
    verification: ["--claims 0", "--calibrate 19", "--tokens 241", "--rate 0.6", "--dtypes fp64"],
    verification_135m: ["--honest 40", "--dtypes fp16"],
}
CASES = [(bench, options) for bench, refused in REFUSED.items() for options in refused]


@pytest.mark.parametrize(
    ("bench", "options"), CASES, ids=[f"{bench.__name__} {options}" for bench, options in CASES]
)
def test_a_wrong_option_is_named(bench, options, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refused(bench.main, *options.split())
    assert "error:" in said
    assert options.split()[0] in said or bench in (eclipse, light)


@pytest.mark.slow(reason="starts of real nodes, one after another")
def test_one_join_of_a_tiny_model(program):
    report = json.loads(
        program(
            "join.py",
            "--layers",
            "1",
            "--width",
            "32",
            "--joins",
            "1",
            "--json",
            timeout=400,
            nodes=True,
        ).stdout
    )
    assert 0 < report["weights_s"] <= report["round_s"] <= report["contribution_s"]
    assert (report["joins"], len(report["all"])) == (1, 1)


@pytest.mark.ci
def test_json_rows(tmp_path, called):
    options = ("--sizes", "tiny", "--saves", "1", "--steps", "2", "--folder", tmp_path, "--json")
    done = called(checkpoint.main, *options)
    (row,) = json.loads(done.stdout)["rows"]
    assert row["size"] == "tiny"
    assert row["checkpoint_mb"] > row["copy_mb"] > 0
    assert all(row[name] > 0 for name in ("step_s", "before_stall_s", "after_stall_s"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow(reason="eight daemons for a minute")
def test_few_peers_list_each_other(called, monkeypatch, tmp_path):
    """A few peers list each other and a stranger finds newcomers."""
    monkeypatch.setenv(
        INSIDE, "1"
    )  # no namespace: other programs' loopback traffic does not matter here
    options = (
        "--peers",
        "6",
        "--processes",
        "2",
        "--seconds",
        "10",
        "--period",
        "4",
        "--newcomers",
        "2",
    )
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


def test_captured_peers_are_cut_off_only_without_peer_exchange(called):
    done = called(
        eclipse_main,
        "--peers",
        "20",
        "--minutes",
        "2",
        "--hostile",
        ".2",
        "--seeds",
        "0",
        "--cases",
        "none",
        "few",
        "--json",
    )
    none, few = json.loads(done.stdout)["runs"]
    assert none["cut_off"] == none["parts"] == 0.5  # 8 of the 16 honest ones are captured
    assert none["bytes_per_s"] == 0
    assert few["cut_off"] == few["parts"] == 0
    assert 0 < few["hostile_passive"] < 0.5


def test_a_row_for_each_bucket_and_none_twice(called, tmp_path, monkeypatch):
    few = task_of(1).halves
    for half, windows in few.items():
        monkeypatch.setitem(few, half, windows[:16])
    file = tmp_path / "rows.jsonl"
    short = ("--peers", "4", "--steps", "4", "--every", "2", "--batch", "8", "--resume", str(file))
    said = called(buckets_main, *short, "--seeds", "0").stdout
    assert "| `diloco` | 4 of 4 |  |" in said
    rows = list(map(json.loads, file.read_text().splitlines()))
    assert [(row["size"], row["redrawn"]) for row in rows] == [(4, 1), (4, 4), (4, 0), (2, 4)]
    assert (
        rows[0]["loss"] == rows[1]["loss"] == rows[2]["loss"] == rows[0]["averaged"]
    )  # all in one bucket, however often drawn
    assert rows[3]["loss"] != rows[0]["loss"]
    called(buckets_main, *short, "--seeds", "0")
    assert len(file.read_text().splitlines()) == len(rows)


def test_the_difference_is_taken_seed_by_seed():
    rows = [
        {
            "method": "diloco",
            "size": size,
            "redrawn": 1,
            "seed": seed,
            "peers": 8,
            "loss": loss,
            "averaged": loss,
        }
        for size, seed, loss in ((8, 0, 2.0), (8, 1, 1.0), (4, 0, 2.02), (4, 1, 1.03))
    ]
    assert "| 4 of 8 | each round | 1.5250 | +2.00 ± 1.00 % |" in markdown(rows)


def test_json_rows_votes(called):
    rows = json.loads(called(votes.main, "--claims", "20000", "--json").stdout)["vote"]
    assert {(row["n"], row["collude"]) for row in rows} == {
        (n, f / 10) for n in (3, 5, 7) for f in range(5)
    }
    assert all(abs(row["errors"]) < 4 for row in rows)


@pytest.mark.parametrize("total", [1, 10, 1000, 10_000])
def test_ends(total):
    low, high = rate_interval(0, total)
    assert low == 0
    assert high == pytest.approx(1 - 0.025 ** (1 / total), rel=1e-9)
    assert rate_interval(total, total) == pytest.approx((1 - high, 1.0), rel=1e-9)


@pytest.mark.parametrize(
    ("found", "total", "confidence", "expected"),
    [
        (3, 10, 0.95, (0.06674, 0.65245)),
        (1, 100, 0.95, (0.000253, 0.054459)),
        (50, 100, 0.99, (0.36886, 0.63114)),
    ],
)
def test_tables(found, total, confidence, expected):
    assert rate_interval(found, total, confidence) == pytest.approx(expected, abs=5e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.floats(0.01, 0.99), st.sampled_from([0.5, 0.9, 0.95]))
def test_it_covers_the_rate_as_often_as_its_confidence(total, rate, confidence):
    covered = 0.0
    for found in range(total + 1):
        low, high = rate_interval(found, total, confidence)
        if low <= rate <= high:
            covered += math.comb(total, found) * rate**found * (1 - rate) ** (total - found)
    assert covered >= confidence - 1e-9


@pytest.mark.parametrize(
    "bad", [(-1, 10, 0.95), (11, 10, 0.95), (0, 0, 0.95), (1, 10, 0.0), (1, 10, 1.0)]
)
def test_refused(bad):
    with pytest.raises(ValueError, match="is not a count"):
        rate_interval(*bad)


REPORT = {
    "peers": 4,
    "minutes": 2.0,
    "method": "noloco",
    "byzantine": 1,
    "lie": "nan",
    "robust": "clipped-gossip",
    "suspect": 3.0,
    "seed": 7,
    "kills": 4,
    "stops": 1,
    "rejoins": 4,
    "max_stall_s": 5.0,
    "median_stall_s": 1.0,
    "resume_s": 0.1,
    "resume_max_s": 0.7,
    "join_s": None,
    "join_max_s": None,
    "steps": 900,
    "steps_lost": 0,
    "steps_lost_by_killed": 12,
    "throughput_kept": 0.987,
    "throughput_kept_with_starts": None,
    "loss_first": 5.695,
    "loss_last": 2.0,
    "orphans": 0,
    "rss_slope": 0.5,
    "daemon_rss_slope": None,
    "fd_slope": -0.1,
    "failed_starts": [],
    "troubles": [],
    "unharmed": None,
    "every": 25,
    "load": 1.5,
    "cores": 2,
}


def test_a_column_for_each_run(tmp_path, capsys):
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    clean = {
        **REPORT,
        "byzantine": 0,
        "robust": "none",
        "suspect": 0.0,
        "unharmed": {"max_stall_s": 0.3, "loss_last": 1.9},
    }
    results.write_text("".join(json.dumps(report) + "\n" for report in (REPORT, clean)))
    page.write_text(f"before\n{chaos_table.BEGIN}old\n{chaos_table.END}after\n")
    assert chaos_table.main(["--results", str(results), "--into", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    attacked = "4 × 2 min, noloco, every 25, 1 hostile (nan), clipped-gossip, suspect 3, seed 7"
    assert lines[0] == f"| run | {attacked} | 4 × 2 min, noloco, every 25, seed 7 |"
    assert "| throughput kept, with starts | 0.987, - | 0.987, - |" in lines
    assert "| unharmed: longest | not run | 0.30 s |" in lines
    assert {line.count("|") for line in lines} == {4}
    assert (
        page.read_text()
        == f"before\n{chaos_table.BEGIN}" + "\n".join(lines) + f"\n{chaos_table.END}after\n"
    )


CUDA = torch.device("cuda", 0)


@pytest.mark.gpu(standin=True)
def test_an_inner_step_waits_no_more_than_plain_pytorch(tmp_path):
    found = waits.measure(waits.task_of(20_000, tmp_path), CUDA, slow_on_device=False)
    assert found["inner"] == found["plain"] == Counter()
    assert sum(found["exchange"].values()) <= 3


@pytest.mark.gpu(standin=True)
def test_wait_in_a_step_is_counted_with_its_line(tmp_path, monkeypatch):
    """A wait in a step would be counted with its line."""
    monkeypatch.setattr(
        meter._MeanLoss, "add", lambda self, loss: setattr(self, "_sum", float(loss))
    )
    found = waits.measure(waits.task_of(20_000, tmp_path), CUDA, slow_on_device=False)
    assert sum(found["inner"].values()) == 2
    assert all("| item | " in what and "training/meter.py:" in what for what in found["inner"])


def test_without_the_stand_in_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["waits.py"])
    monkeypatch.setattr(waits, "WAITS", "no_standin")
    with pytest.raises(SystemExit, match="only the stand-in for a GPU counts waits"):
        waits.main()
