"""The benchmark of rollout sharing runs, says what it promises, and gives the same numbers each
time.
"""

import json

import pytest

from bench import sapo

ROWS = ["8/0", "6/2", "4/4", "2/6", "poison", "trusting"]
LANGUAGE_ROWS = ["8/0", "4/4", "2/6"]


@pytest.mark.ci
def test_json_has_every_row_and_the_same_numbers_each_time(called, program):
    done = program("sapo.py", "--nodes", "3", "--seeds", "2", "--rounds", "10", "--json")
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert (result["policy"], result["nodes"], result["seeds"], result["rounds"]) == (
        "linear",
        3,
        2,
        10,
    )
    assert list(result["rows"]) == ROWS
    for row in result["rows"].values():
        assert set(row) == {"cumulative", "sd", "interval", "final"}
        # Student's t for two: 12.71 standard errors.
        low, high = row["interval"]
        assert high - row["cumulative"] == pytest.approx(12.706 * row["sd"] / 2**0.5, abs=0.02)
        assert row["cumulative"] - low == pytest.approx(high - row["cumulative"], abs=0.003)
        assert 10 / 32 < row["cumulative"] < 10
        assert 0 < row["sd"] < row["cumulative"]
        assert row["final"] > row["cumulative"] / 10  # it learns
    assert "poison" in done.stderr  # the table is for people, so it does not mix with the JSON
    assert (
        called(sapo.main, "--nodes", "3", "--seeds", "2", "--rounds", "10", "--json").stdout
        == done.stdout
    )


def test_sharing_pays_and_a_lie_is_not_believed(called):
    done = called(sapo.main, "--seeds", "1", "--rounds", "60", "--json")
    found = {name: row["cumulative"] for name, row in json.loads(done.stdout)["rows"].items()}
    assert found["4/4"] > 1.3 * found["8/0"]
    assert found["poison"] > 1.3 * found["trusting"]


@pytest.mark.slow(reason="trains a transformer on both sides")
def test_the_small_transformer_is_measured_too(program):
    done = program(
        "sapo.py", "--policy", "tiny", "--nodes", "2", "--seeds", "1", "--rounds", "3", "--json"
    )
    result = json.loads(done.stdout)
    assert (result["policy"], result["loss"]) == ("tiny", "positive")
    assert list(result["rows"]) == ROWS
    for row in result["rows"].values():
        assert 0 <= row["cumulative"] < 3
        assert 0 <= row["final"] < 0.5


def test_language_model_is_measured_row_by_row(called, tmp_path, monkeypatch):
    """A language model is measured row by row and its runs are kept."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("bench._language.ASKED", (20, 5))
    monkeypatch.setattr("bench._language.QUESTIONS", 100)
    kept, base = tmp_path / "runs.jsonl", tmp_path / "small"
    options = [
        "--policy",
        "small",
        "--env",
        "strings",
        "--solved",
        2,
        "--base",
        base,
        "--nodes",
        2,
        "--rounds",
        2,
        "--seeds",
        1,
    ]
    done = called(sapo.main, *options, "--resume", kept, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["policy"], result["loss"], result["env"]) == ("small", "sapo", "strings")
    assert list(result["rows"]) == LANGUAGE_ROWS
    for row in result["rows"].values():
        assert row["interval"] is None
        assert sum(row["parts"].values()) == pytest.approx(row["seconds"], abs=0.003)
        assert row["parts"]["write"] > 0 < row["tokens_s"]
    written = [result["rows"][name]["tokens"] for name in LANGUAGE_ROWS]
    assert written == sorted(written, reverse=True)
    assert [json.loads(line)["row"] for line in kept.read_text().splitlines()] == LANGUAGE_ROWS
    kept.write_text(
        "".join(kept.read_text().splitlines(keepends=True)[:2])
    )  # as if it was cut off in the third
    again = json.loads(called(sapo.main, *options, "--resume", kept, "--json").stdout)["rows"]
    for name in LANGUAGE_ROWS[:2]:
        assert again[name] == result["rows"][name]
    # the same numbers, from the model that was kept
    assert again["2/6"]["sums"] == result["rows"]["2/6"]["sums"]


def test_ratio_is_paired_seed_by_seed():
    """Seeds differ more among each other than the rows do."""
    found = sapo.ratio_of([9.0, 99.0, 900.0], [10.0, 100.0, 1000.0])
    low, high = found["interval"]
    assert found["mean"] == pytest.approx((0.9 * 0.99 * 0.9) ** (1 / 3), abs=1e-4)
    assert (low, high) == (pytest.approx(0.8104, abs=1e-4), pytest.approx(1.0651, abs=1e-4))
    assert sapo.ratio_of([9.0], [10.0]) == {"mean": 0.9, "interval": None}
    assert sapo.ratio_of([9.0, 0.0], [10.0, 1.0]) is None


def test_loss_has_the_mean_of_its_paper(called, monkeypatch):
    given = []

    def made(settings, seed):
        given.append(settings.per)
        return sapo.linear_world(settings, seed)

    monkeypatch.setitem(sapo.WORLDS, "linear", made)
    called(sapo.main, "--loss", "luspo", "--seeds", "1", "--rounds", "1", "--rows", "1/0")
    assert set(given) == {"completion_sum"}


@pytest.mark.parametrize("rows", ["8", "0/4", "a/b", "8/0,"])
def test_rows_that_are_none_are_refused(called, rows):
    done = called(sapo.main, "--rows", rows)
    assert done.returncode == 2
    assert "must be like 8/0,4/4" in done.stderr
