"""Benches of schedules, hostile peers, the moving picture and a GPU's check: formulas, tables, and
what they take up again.
"""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from bench import adversaries, gpu_check
from bench import schedules as bench
from bench._moving_picture import draw, read
from bench._table import methods, text, train
from shoal.node.watch.source import Recorder
from shoal.optim.schedule.schedules import (
    Apply,
    Send,
    Streaming,
)
from tests.support.watched_peers import NOW, Author


@pytest.mark.parametrize(
    ("schedule", "first", "middle", "last"),
    [
        ("even", (1, 1), (1, 1), (1, 1)),
        ("qsr:25", (1, 1), (1, 1), (1, 1)),
        ("lr-line:1:0.5", (1, 1), (0.75, 1), (0.5, 1)),
        ("momentum-line:0:1.5", (1, 0), (1, 0.75), (1, 1.5)),
        ("to-mean", (1, 1), (1.125, 0.5), (1.25, 0)),
    ],
)
def test_factors_of_the_outer_rate_and_momentum(schedule, first, middle, last):
    for p, wanted in ((0.0, first), (0.5, middle), (1.0, last)):
        assert bench.factors(schedule, p, 0.8) == pytest.approx(wanted)


RATES = [1.0] * 400 + [0.5] * 400 + [0.1] * 200


def test_round_length_follows_the_rate():
    """A round is as long as the square of a over the rate and never shorter than the least."""
    ends = bench.quadratic(RATES, 20, 7.0)
    assert ends == (*range(49, 441 + 1, 49), 441 + 196, 637 + 196, 1000)  # 49, 196 and 4900 steps
    assert bench.quadratic(RATES, 60, 7.0)[:7] == tuple(range(60, 421, 60))
    assert bench.quadratic([1.0] * 100, 30, 1.0) == (30, 60, 100)  # 10 steps are no round


def test_rounds_are_as_many_as_the_even_schedule_has():
    ends = bench.qsr(RATES, 12, 20)
    lengths = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    assert (len(ends), ends[-1], min(lengths) >= 20) == (12, 1000, True)
    assert lengths[:-1] == sorted(lengths[:-1])
    with pytest.raises(ValueError, match="60 rounds of at least 20"):
        bench.qsr(RATES, 60, 20)


@pytest.mark.parametrize(("fragments", "lag"), [(1, 0), (4, 0), (4, 3)])
def test_rounds_of_equal_lengths_do_what_the_product_does(fragments, lag):
    uneven, even = bench.Uneven(12, (12, 24, 36), fragments, lag), Streaming(12, fragments, lag)
    assert [uneven.at(step) for step in range(1, 37)] == [even.at(step) for step in range(1, 37)]


def test_fragments_are_evenly_spaced_and_late():
    """Fragments lie evenly apart in each round and are applied as late in all."""
    uneven = bench.Uneven(8, (8, 24), 2, 3)
    found = {step: actions for step in range(1, 30) if (actions := uneven.at(step))}
    assert found == {
        4: [Send(0)], 7: [Apply(0, 3)], 8: [Send(1)], 11: [Apply(1, 3)],
        16: [Send(0)], 19: [Apply(0, 3)], 24: [Send(1)], 27: [Apply(1, 3)],
    }  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    lines = "".join(
        f"line {number} of some English text, as plain as it can be\n" for number in range(2_000)
    )
    (folder / "one.txt").write_text(lines)
    (folder / "two.txt").write_text(lines[::-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "LEAST", 2**14)
        patch.setattr(text, "PIECE", 2**11)
        patch.setitem(train.SIZES, "mite", train.Size(2, 8, 1, 16, 300, 4, 24, 24))
        patch.setattr(train, "marks", lambda steps, every: [])
        return_to = tmp_path_factory.mktemp("cache")
        yield train.Place(return_to), text.corpus(folder, 300, return_to).digest


@pytest.mark.parametrize(
    ("method", "schedules"),
    [("diloco", ["even", "restarts:2", "to-mean"]), ("noloco-overlap", ["even", "qsr:4"])],
)
def test_a_schedule_changes_the_loss_and_no_byte(cache, method, schedules):
    place, digest = cache
    settings = (
        digest,
        "mite",
        method,
        "muon",
        "float32",
        2,
        6,
        24,
        0.02,
        (("lr", 0.7), ("momentum", 0.6)),
        0,
    )
    plain = train.run(train.Spec(*settings), place)
    losses = {"plain": plain["loss"]}
    for schedule in schedules:
        found = bench.steered(bench.Steered(*settings, schedule), place)
        assert found["bytes_per_param"] == plain["bytes_per_param"]
        losses[schedule] = found["loss"]
    assert losses.pop("plain") == losses["even"]
    assert len(set(losses.values())) == len(losses)


def test_results_are_kept_and_no_run_is_made_twice(tmp_path, monkeypatch, called):
    made = []

    def steered(spec, place):
        made.append(spec)
        return {
            **{name: getattr(spec, name) for name in spec.__dataclass_fields__},
            "outer": dict(spec.outer),
            "loss": 3.0,
        }

    monkeypatch.setattr(bench, "steered", steered)
    monkeypatch.setattr(bench, "corpus", lambda *_: type("Text", (), {"digest": "t"}))
    for _ in range(2):
        assert (
            called(bench.main, "--resume", tmp_path / "found.jsonl", "--seeds", 2).returncode == 0
        )
    assert made == list(bench.specs("t", 1000, 2))
    assert len(set(made)) == 2 * sum(map(len, bench.TRIED.values()))


def test_every_run_has_an_even_one_to_compare_with():
    for (method, _, _), schedules in bench.TRIED.items():
        assert schedules[0] == "even"
        assert method in methods.BEST


TINY = [
    "--peers",
    "4",
    "--hostile",
    "1",
    "--steps",
    "6",
    "--every",
    "2",
    "--batch",
    "1",
    "--seeds",
    "0",
    "--attacks",
    "x1000",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adversaries")
    page = folder / "page.md"
    page.write_text(f"before\n{adversaries.BEGIN}old\n{adversaries.END}\nafter\n")
    assert adversaries.main([*TINY, "--resume", str(folder / "runs"), "--into", str(page)]) == 0
    return page


@pytest.mark.ci
def test_only_the_undefended_run_is_ruined(page, capsys):
    """The undefended run is ruined and the defended one is not."""
    lines = (page.parent / "runs").read_text().splitlines()
    assert adversaries.main([*TINY, "--resume", str(page.parent / "runs"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [json.loads(line) for line in lines] == found["runs"]  # nothing was run again
    loss = {(row["method"], row["attack"], row["defence"]): row["loss"] for row in found["runs"]}
    assert len(loss) == 8
    for method in adversaries.METHODS:
        clean = loss[method, "none", "undefended"]
        ruined = loss[method, "x1000", "undefended"]
        assert ruined is None or ruined > 1.2 * clean
        assert loss[method, "x1000", "public"] < 1.1 * clean
        assert loss[method, "none", "public"] == pytest.approx(clean, rel=0.05)
    harm = {(row["method"], row["attack"], row["defence"]): row["harm"] for row in found["rows"]}
    for cell, value in harm.items():
        assert (
            value is None
            if loss[cell] is None
            else value == pytest.approx(loss[cell] / loss[cell[0], "none", "undefended"] - 1)
        )


@pytest.mark.ci
def test_the_table_stands_between_its_marks(page):
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
    rows = [
        line.removeprefix("| ").split(" | ")[:2]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    assert rows == [
        ["method", "attack"],
        *([method, attack] for method in adversaries.METHODS for attack in ("none", "x1000")),
    ]


def test_a_page_without_a_place_is_named(tmp_path):
    (tmp_path / "page").write_text("nothing")
    with pytest.raises(SystemExit, match="no place for the table"):
        adversaries.main([*TINY, "--report", "--into", str(tmp_path / "page")])


DRAWN = Path(__file__).resolve().parents[2] / "docs" / "training.svg"
LIMIT = 150_000  # bytes


@pytest.fixture
def run(tmp_path):
    """Of two nodes; the second is gone from second 10 to 30."""
    anna, bert = Author("anna"), Author("<bert>")
    recorder = Recorder(tmp_path / "run.jsonl")
    for number in range(40):
        alone = 10 < number < 30
        recorder.take(anna.heard(anna.round(number, [] if alone else [bert]), at=NOW + number))
        if not alone:
            recorder.take(bert.heard(bert.round(number, [anna]), at=NOW + number))
    recorder.close()
    return read(tmp_path / "run.jsonl")


def test_run_has_meetings_curves_and_absences(run):
    """The run has the meetings the curves and who was gone."""
    assert (run.names, run.seconds) == (["<bert>", "anna"], 39.0)
    assert run.gone == [[(10.0, 30.0)], []]
    assert run.meetings == {(0, 1): [*map(float, range(11)), *map(float, range(30, 40))]}
    assert [len(curve) for curve in run.curves] == [21, 40]


def test_it_is_well_formed_and_says_in_words_what_happens(run):
    drawn = draw(run)
    texts = [
        element.text for element in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert "<bert> is killed: anna train on" not in texts
    assert "<bert> is killed: anna trains on" in texts
    assert "<bert> is back, and catches up" in texts
    label = ET.fromstring(drawn).get("aria-label")
    assert label.startswith("Training loss of <bert>, anna over 39 s")


@pytest.mark.parametrize("drawn", [DRAWN])
def test_docs_figure_is_small_and_self_contained(drawn):
    """The one in the docs is small and asks for nothing."""
    text = drawn.read_text(encoding="utf-8")
    assert len(text.encode()) < LIMIT
    assert "prefers-color-scheme: dark" in text
    assert "prefers-reduced-motion: no-preference" in text
    assert "is killed" in text
    assert "<script" not in text
    assert "url(" not in text


def test_report_has_a_row_for_each_step():
    """The report has a row for each step and the end of what it said."""
    long = "print('\\n'.join(map(str, range(100)))); raise SystemExit(3)"
    steps = [
        gpu_check.run(
            "fails",
            [[sys.executable, "-c", long], [sys.executable, "-c", "print('never')"]],
            limit_s=60,
        ),
        gpu_check.measured("breaks", lambda: f"{1 // 0}"),
        gpu_check.measured("works", lambda: "1.5 of it"),
    ]
    assert [one.passed for one in steps] == [False, False, True]
    report = gpu_check.report("a machine", steps)
    assert "| fails | **failed** |" in report
    assert "| works | passed |" in report
    assert "99\n```" in report
    assert "\n74\n" not in report
    assert "never" not in report
    assert "ZeroDivisionError" in report


def test_a_step_that_takes_too_long_is_ended():
    step = gpu_check.run(
        "long", [[sys.executable, "-c", "import time; time.sleep(600)"]], limit_s=0.5
    )
    assert not step.passed
    assert step.said == "ended after 0.5 s"
    assert step.seconds < 60


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr(gpu_check, "resolve_device", lambda name: torch.device("cpu"))
    with pytest.raises(SystemExit, match="PyTorch finds no GPU on this machine"):
        gpu_check.main()
