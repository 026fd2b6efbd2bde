"""The bench of real nodes from random weights: which runs it makes, at which rates, and its table;
nothing is trained here.
"""

import dataclasses
import json

import pytest

from bench import from_scratch, real
from bench.from_scratch import METHODS, RATES, arguments, best_rate, command, spec_of

STEPS = 100
TRIAL = 10
BEST = {"muon": 0.02, "adamw": 6e-3}


@pytest.fixture
def options(tmp_path):
    given = ["--size", "tiny", "--data", "a.txt,b.txt", "--steps", STEPS]
    given += ["--resume", tmp_path / "rows.jsonl", "--json"]
    return list(map(str, given))


@pytest.fixture
def runs(monkeypatch):
    """The runs that were made, in their order: the best rate ends lowest, groups at 2.1."""
    made = []

    def run(spec, options):
        made.append(spec)
        loss = 2.0 + (spec.method != "ddp") / 10 + (spec.lr != BEST[spec.inner])
        sent = 1e9 if spec.method == "ddp" else 1e7
        outer = dict(spec.outer)
        return {**dataclasses.asdict(spec), "outer": outer, "loss": loss, "bytes_sent": sent}

    monkeypatch.setattr(from_scratch, "run", run)
    return made


def rows(monkeypatch, capsys, options):
    monkeypatch.setattr("sys.argv", ["from_scratch.py", *options])
    assert from_scratch.main() == 0
    return capsys.readouterr()


def test_each_method_runs_at_its_best_rate(runs, monkeypatch, capsys, options):
    shown = rows(monkeypatch, capsys, options)
    report = json.loads(shown.out)
    assert report["complete"]
    trials = [run for run in runs if run.steps == TRIAL]
    whole = [run for run in runs if run.steps == STEPS]
    assert len(trials) == sum(len(RATES[method.inner]) for method in METHODS)
    assert {run.kind for run in trials} == {"alike"}
    assert [run.lr for run in whole] == 2 * [BEST[method.inner] for method in METHODS]
    assert [(row["kind"], row["method"]) for row in report["rows"]] == [
        (kind, method.name) for kind in ("alike", "unlike") for method in METHODS
    ]
    assert shown.err.count("+5.0 %") == 6  # three methods, two kinds of data
    assert shown.err.count("100 times fewer") == 6


def test_what_has_run_is_not_run_again(runs, monkeypatch, capsys, options):
    first = rows(monkeypatch, capsys, options).out
    runs.clear()
    assert rows(monkeypatch, capsys, options).out == first
    assert runs == []


def test_no_run_begins_after_the_minutes(runs, monkeypatch, capsys, options):
    shown = rows(monkeypatch, capsys, [*options, "--minutes", "-1"])
    assert json.loads(shown.out) == {"rows": [], "complete": False}
    assert "the time is up" in shown.err
    assert runs == []


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("kind", ["alike", "unlike"])
def test_a_run_is_a_command_of_the_other_bench(method, kind, options, monkeypatch):
    chosen = arguments(options)
    spec = spec_of(method, 0.02, kind, STEPS, 1, chosen)
    monkeypatch.setattr("sys.argv", command(spec, chosen))
    asked = real.arguments()
    asked.model = "tokenizer"
    assert (asked.inner, asked.lr, asked.seed, asked.steps) == (method.inner, 0.02, 1, STEPS)
    assert (asked.only_ddp, asked.unlike) == (method.name == "ddp", kind == "unlike")
    flags = real.swarm(asked, asked.method, ddp=asked.only_ddp)
    assert f"--set=train.optimizer={method.inner}" in flags
    if not asked.only_ddp:
        assert asked.method == method.name
        assert f"--set=outer.codec={method.codec}" in asked.outer


def test_a_diverged_rate_is_never_the_best():
    tried = [{"lr": 0.01, "loss": 3.0}, {"lr": 0.02, "loss": None}]
    assert best_rate(tried) == 0.01
    with pytest.raises(SystemExit, match="no rate"):
        best_rate(tried[1:])
