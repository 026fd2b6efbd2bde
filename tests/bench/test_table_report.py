"""What the report of bench/table.py makes of runs: verdicts on the aims, tables, and the picture."""

import json
import re
import sys

import pytest

from bench import table as bench
from bench._table import aims, figure, methods, results
from tests.bench.table_runs import a_run, ddp


def test_report_writes_tables_numbers_and_a_picture_of_the_long_runs(tmp_path, monkeypatch):
    file, page, picture = tmp_path / "runs.jsonl", tmp_path / "page.md", tmp_path / "table.svg"
    runs = [ddp("adamw", 2.0), ddp("muon", 1.9), a_run(), a_run("noloco-overlap", "adamw", "int8"), a_run(steps=500, loss=9.0)]
    file.write_text("".join(json.dumps(run) + "\n" for run in runs))
    page.write_text(f"above\n{bench.BEGIN}old\n{bench.END}\nbelow\n")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["bench", "--report", str(file), "--into", str(page), "--figure", str(picture)])
    assert bench.main() == 0
    shown = page.read_text()
    assert shown.startswith("above\n")
    assert "| diloco | Muon | e3m0+ef | 4 | 50 | 2.000 (one seed) | +0.0 % | +5.3 % | 400 | 0.01953 | 1 |" in shown
    assert ("old" in shown, "9.000" in shown) == (False, False)
    assert "](table.svg)\n\nThe numbers of the picture: [table.csv](table.csv)." in shown
    numbers = picture.with_suffix(".csv").read_text().splitlines()
    assert len(numbers) == 5
    svg = picture.read_text()
    assert "prefers-color-scheme: dark" in svg
    assert "currentColor" in svg
    assert not {figure.INK, figure.FADED} & set(re.findall("#[0-9a-f]{6}", svg))
    assert ">NoLoCo, overlapped<" in svg
    assert ">4 bits, every 50<" in svg
    first = svg
    assert bench.main() == 0
    assert picture.read_text() == first


def judged(*runs, model="mini"):
    known = results.rows([{**run, "model": run["model"].replace("tiny", model)} for run in runs])
    return [verdict.met for verdict in aims.verdicts([row for row in known if row["model"] == model], known)]


DEFAULT = {"method": "noloco-overlap", "codec": "mod4", "every": 25}


def test_aims_are_judged_by_the_rows_that_they_are_about():
    base = [ddp("adamw", 2.0), ddp("muon", 1.96)]
    whole = base[0]["bytes_per_token"]
    assert judged(*base) == [None] * 6
    bits = {"codec": "sign+ef"}
    good = [
        a_run(**DEFAULT, loss=2.04, bytes_per_token=whole / 197),
        a_run("diloco", every=13, **bits, loss=2.0009, bytes_per_token=whole / 400),
        a_run(every=40, **bits, loss=2.03, bytes_per_token=whole / 1000),
        a_run("streaming", every=16, **bits, loss=2.03, bytes_per_token=whole / 400),
        a_run("local-sgd", codec="float32", every=1, loss=2.0),
    ]  # fmt: skip
    wide = [{**run, "model": "tiny-128", "steps": 500} for run in (base[0], a_run(**DEFAULT, peers=8, loss=2.06))]
    # 0.045 % above is 0.0 as printed; each other one is where its aim ends.
    assert judged(*base, *good, *wide) == [True] * 6
    for number, loss in enumerate((2.0421, 2.0011, 2.0311, 2.0311)):
        worse = [run | {"loss": loss} if index == number else run for index, run in enumerate(good)]
        assert judged(*base, *worse, *wide)[number] is False
    assert judged(*base, *good, *wide, a_run(every=10, loss=2.043))[4] is False  # farther than 2 points from the exact mean
    assert judged(*base, *good, *wide, a_run(every=10, loss=2.043, peers=8))[4] is True  # of eight peers there is none
    wide[1]["loss"] = 2.0621
    assert judged(*base, *good, *wide)[5] is False
    wide[1]["steps"] = 1000
    assert judged(*base, *good, *wide)[5] is None  # not at equal tokens


def test_an_aim_is_missed_by_the_bytes_or_the_utilisation_alone():
    base = [ddp("adamw", 2.0), ddp("muon", 1.96)]
    whole = base[0]["bytes_per_token"]
    assert judged(*base, a_run(**DEFAULT, loss=2.0, bytes_per_token=whole / 196))[0] is False
    assert judged(*base, a_run(**DEFAULT, loss=2.0, bytes_per_param=1000.0, bytes_per_token=whole / 197))[0] is False
    assert judged(*base, a_run(every=13, codec="sign+ef", loss=2.0, bytes_per_token=whole / 399))[1] is None


def test_what_was_aimed_at_stands_above_the_rows():
    base = [ddp("adamw", 2.0), ddp("muon", 1.96)]
    page = results.markdown(results.rows([*base, a_run(**DEFAULT, loss=2.1)]))
    assert "| +5.0 %, 200 times fewer, utilisation" in page
    assert "| not run |  |" in page
    assert "What was aimed at" not in results.markdown(results.rows([*base, a_run("co2")]))
    assert page.index("What was aimed at") < page.index("All rows at equal tokens")


def a_row(nbytes, over, **more):
    return {"bytes_per_token": nbytes, "over_ddp_adamw": over, "peers": 4, "method": "diloco", **more}


def test_the_line_in_the_picture_joins_what_nothing_beats_in_both_bytes_and_loss():
    rows = [a_row(100, 0.0), a_row(10, 0.02), a_row(10, 0.01), a_row(1, 0.05), a_row(20, 0.03), a_row(5, 0.05)]
    assert figure.frontier(rows) == [rows[3], rows[2], rows[0]]


def test_the_picture_is_of_four_peers_that_send_something_and_have_a_distance():
    rows = [a_row(1, 0.1), a_row(1, 0.1, peers=8), a_row(0, 0.1, peers=1), a_row(1, None)]
    assert figure.points(rows) == rows[:1]
    assert set(figure.LOOKS) | {"snoo"} == set(methods.RECIPES)
