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


SAYS = {
    "loss_last": 2.0,
    "loss_ddp": 2.0,
    "bytes_sent": 1e7,
    "ddp_bytes": 1e9,
    "params": 1,
    "exchanges": 1,
    "pairs_none": 0,
}


@pytest.fixture
def fails(monkeypatch):
    """Call with which runs fail: they are processes that end with an error; the others end well."""

    def fails(is_bad):
        def command(spec, options):
            end = "sys.exit('its loss is NaN')" if is_bad(spec) else f"print({json.dumps(SAYS)!r})"
            return ["-c", f"import sys; {end}", spec.method]

        monkeypatch.setattr(from_scratch, "command", command)

    return fails


def test_a_trial_that_fails_has_diverged(fails, monkeypatch, capfd, options):
    """The fault: one rate at which training ends with an error ended the bench."""
    lowest = {inner: rates[0] for inner, rates in RATES.items()}
    fails(lambda spec: spec.lr == lowest[spec.inner])
    shown = rows(monkeypatch, capfd, [*options, "--kinds", "alike"])
    report = json.loads(shown.out)
    assert report["complete"]
    assert [row["lr"] for row in report["rows"]] == [RATES[method.inner][1] for method in METHODS]
    assert shown.err.splitlines().count("its loss is NaN") == len(METHODS)
    assert "this trial failed with code 1" in shown.err


def test_a_whole_run_that_fails_ends_the_bench(fails, monkeypatch, options):
    fails(lambda spec: spec.steps == STEPS)
    monkeypatch.setattr("sys.argv", ["from_scratch.py", *options])
    with pytest.raises(SystemExit, match=r"^bench: this run failed with code 1: .* ddp$"):
        from_scratch.main()


@pytest.mark.parametrize("method", METHODS[:2], ids=str)
def test_the_table_shows_runs_without_figures(method, options):
    """The fault: it divided by the bytes of a run that has sent none."""
    specs = [
        spec_of(each, 0.02, kind, STEPS, 0, arguments(options))
        for kind in ("alike", "unlike")
        for each in METHODS
    ]
    found = [{**dataclasses.asdict(spec), "loss": 2.0, "bytes_sent": 1e7} for spec in specs]
    for one in found:
        if (one["method"], one["inner"]) == (method.name, method.inner):
            one.update(loss=None, bytes_sent=0)
    shown = from_scratch.table(found)
    loss, over, sent = (list(column.cells) for column in shown.columns[4:])
    assert loss.count("diverged") == sent.count("0.0 MB") == 2
    # Without all-reduce there is nothing to compare with.
    assert over.count("+0.0 %") == (0 if method is METHODS[0] else len(found) - 2)
