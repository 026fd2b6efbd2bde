"""``shoal tune``: what it finds, writes and says, for tasks whose best rate is known."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.commands.tune import table, tune
from shoal.node.config.settings import ConfigError, load
from shoal.node.tasks.user_class import HookError
from shoal.node.tune import knobs as knobs_module
from shoal.node.tune.knobs import TuneError, find_knobs
from tests.support.tune_tasks import CLOCK

pytestmark = pytest.mark.usefixtures("users_code")

FILE = "swarm.toml"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CLOCK, "now", 0.0)
    return tmp_path


def tuned(name, minutes=0.5, **given):
    settings = {"task.hooks": f"tests.support.tune_tasks:{name}", "node.threads": 1, **given}
    return tune(None, settings, minutes=minutes, clock=CLOCK)


def losses(rung):
    return {row["rate"]: row["loss"] for row in rung["trials"]}


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """A whole search: its report, and the file that it wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("tuned"))
        patch.setattr(CLOCK, "now", 0.0)
        report = tuned("Slope")
        return report, load(Path(FILE))


def test_the_best_rate_is_found_and_written(search):
    """Mutants: the highest finite rate wins; the present rate is written; the task is not."""
    report, written = search
    assert report["best"]["rate"] == 0.5
    assert report["compared"]["before"]["rate"] == 0.25
    assert written.task.options == {"lr": 0.5}
    assert written.task.hooks == "tests.support.tune_tasks:Slope"


def test_rates_that_diverge_are_out(search):
    """Mutant: a loss that is not finite ends the search."""
    first, *others = search[0]["rungs"]
    assert [rate for rate, loss in losses(first).items() if loss is None] == [2.0, 4.0]
    assert all(None not in losses(rung).values() for rung in others)


def test_the_stated_time_is_used_and_kept(search):
    """Mutants: rungs are equally long; the minutes are taken for each rung."""
    report, _ = search
    short, longer, longest = [rung["trials"][0]["steps"] for rung in report["rungs"]]
    assert longer >= 2 * short
    assert longest >= 2 * longer
    assert 27 < report["took_s"] <= 30


@pytest.fixture
def two_rates(monkeypatch):
    monkeypatch.setattr(knobs_module, "RATE_FACTORS", (1.0, 2.0))


def test_batches_are_compared_at_equal_time(two_rates):
    """Mutants: all train for equally many steps; the batch is not written."""
    report = tuned("Batched", minutes=1.5)
    rows = report["rungs"][0]["trials"]
    steps = {row["batch"]: row["steps"] for row in rows if row["loss"] is not None}
    assert sorted(steps) == [2, 4, 8]
    assert steps[2] / steps[4] == pytest.approx(2, rel=0.1)
    assert steps[4] / steps[8] == pytest.approx(2, rel=0.1)
    written = tomllib.loads(Path(FILE).read_text())["task"]["options"]
    assert written == {"lr": report["best"]["rate"], "batch": report["best"]["batch"]}


def test_a_batch_beyond_memory_is_left_out(two_rates):
    """Mutant: the whole search fails."""
    rows = tuned("Hungry", minutes=1.5)["rungs"][0]["trials"]
    assert {row["batch"] for row in rows} == {2, 4}


def test_a_kept_batch_is_not_searched(two_rates):
    report = tune(
        None,
        {"task.hooks": "tests.support.tune_tasks:Batched", "node.threads": 1},
        minutes=2,
        keep_batch=True,
        clock=CLOCK,
    )
    assert {row["batch"] for row in report["rungs"][0]["trials"]} == {None}


def test_an_existing_file_keeps_all_else(folder):
    """Mutants: the file is written anew; evidence of the last time stays."""
    hooks = '[task]\nhooks = "tests.support.tune_tasks:Slope"   # mine\n'
    before = f"{hooks}\n[task.options]\n# tune: of last time\nlr = 0.1\n"
    (folder / FILE).write_text(before)
    tuned("Slope")
    after = (folder / FILE).read_text()
    notes = [line for line in after.splitlines() if line.startswith("# tune: ")]
    assert after.startswith(before.partition("# tune")[0])
    assert after.endswith("\nlr = 0.8\n")
    assert "the best of 8 tried" in notes[0]
    assert notes[1].startswith("# tune: rate 0.8: ")
    assert notes[-1].startswith("# tune: rate 0.1: ")
    assert "of last time" not in after


def test_the_table_says_what_won_and_by_how_much(search):
    """Mutants: the percentage is of the best loss; the present one is not named."""
    report, _ = search
    best = report["best"]["loss"]
    before = report["compared"]["before"]["loss"]
    said = table(report)
    assert said.startswith("tests.support.tune_tasks:Slope: held-out loss of trials that ")
    assert re.search(r"│ +0\.5 │.*│ best ", said)
    assert re.search(r"│ +0\.25 │.*│ as it was ", said)
    assert re.search(r"│ +2 │ +diverged │", said)
    assert (
        f"\nBest: rate 0.5, held-out loss {best:.4g}, {100 * (1 - best / before):.1f} % below the "
        f"settings as they were (rate 0.25: {before:.4g}).\n"
    ) in said
    assert f"\nWritten into {FILE}: task.hooks = tests.support.tune_tasks:Slope, " in said


def test_what_was_found_is_started_on_the_same_data(search, folder):
    """Mutant: the built-in text trains on its own data where FOLDER was tuned on."""
    report, _ = search
    assert table(report).count(f"Start: shoal up {FILE}\n") == 1
    (folder / "my texts").mkdir()
    found = tuned("Reading", **{"node.data": "my texts"})
    assert f"Start: shoal up {FILE} --data 'my texts'\n" in table(found)
    assert "my texts" not in (folder / FILE).read_text()


def test_a_best_rate_at_the_end_is_told():
    """Mutant: nobody learns that a higher rate may be better still."""
    said = table(tuned("Slope", **{"task.options.lr": 0.01}))
    assert "Best: rate 0.16," in said
    assert "That is the highest rate that was tried: run it again to go on from there." in said


def test_batches_that_end_leave_what_was_found(folder):
    """Mutants: the search fails; nothing is written; longer trials are begun."""
    report = tuned("Ends")
    assert report["ended"] == (
        "The task's batches ended after 30 steps, so no trial can be longer: let batches(shard) go "
        "on without end."
    )
    assert [rung["trials"][0]["steps"] for rung in report["rungs"]] == [17, 30]
    assert load(folder / FILE).task.options["lr"] == 0.5


def test_ctrl_c_leaves_what_was_found(folder):
    """Mutants: nothing is written; a single trial of the next rung counts."""
    report = tuned("Stopped")
    assert report["interrupted"]
    assert len(report["rungs"]) == 1
    assert load(folder / FILE).task.options["lr"] == 0.5


def test_minutes_that_are_over_leave_what_was_found(folder):
    """Mutants: the minutes bound nothing; what was found before is lost."""
    report = tuned("Slowing")
    assert report["ended"].startswith("The 0.5 minutes were over before the last trials")
    assert report["took_s"] < 32
    assert load(folder / FILE).task.options["lr"] == 0.5


def test_ctrl_c_before_all_were_tried_writes_nothing(folder, monkeypatch):
    """Mutant: the best of the rates that happened to come first is written."""
    monkeypatch.setattr(CLOCK, "now", 8.0)
    report = tuned("Stopped")
    assert report["file"] is None
    assert not (folder / FILE).exists()
    assert table(report).endswith("Not all candidates were tried, so nothing was written.")


@pytest.mark.parametrize(
    ("name", "given", "kind", "said"),
    [
        (
            "Never",
            {},
            TuneError,
            "The loss was not finite at any rate from 0.03125 to 4: check the task's loss() and "
            "evaluate(), or set a much lower rate to begin with.",
        ),
        (
            "Slowing",
            {"task.options.from_s": 4.0},
            TuneError,
            "The 0.5 minutes were over before each candidate was tried once: give more of them, or "
            "--keep-batch.",
        ),
        (
            "Unevaluated",
            {},
            HookError,
            "The task 'tests.support.tune_tasks:Unevaluated' has no method 'evaluate': write it, "
            "as shoal.Task describes.",
        ),
        (
            "Unrated",
            {},
            TuneError,
            "The task 'tests.support.tune_tasks:Unrated' has no positive option 'lr' to begin "
            "with: let inner_optimizer() take its rate from an argument lr of the constructor, set "
            "that by --option lr=1e-3, or choose --set train.optimizer=adamw.",
        ),
        (
            "Slope",
            {"task.hooks": "rl"},
            TuneError,
            "The task rl has no held-out loss to compare rates by: set rl.lr yourself, as "
            "docs/rl.md says.",
        ),
    ],
)
def test_what_cannot_be_tuned_is_said_in_one_sentence(folder, name, given, kind, said):
    with pytest.raises(kind) as caught:
        tuned(name, **given)
    assert str(caught.value) == said
    assert not (folder / FILE).exists()


def test_too_few_minutes_are_refused_with_enough():
    """Mutant: what it says is enough is refused too."""
    with pytest.raises(TuneError, match=r"few to compare: give --minutes 1 or more\.$"):
        tuned("Slope", minutes=0.05)
    assert tuned("Slope", minutes=1)["best"]["rate"] == 0.5


def test_a_file_of_another_task_is_not_changed(folder):
    text = '[task]\nhooks = "tests.support.tune_tasks:Ends"\n'
    (folder / FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"is of the task .*Ends': name another file"):
        tuned("Slope")
    assert (folder / FILE).read_text() == text


@pytest.mark.parametrize(
    ("given", "key", "rate"),
    [
        ({}, "task.options.lr", 0.012),
        ({"train.optimizer": "adamw"}, "train.lr", 3e-4),
        ({"train.optimizer": "muon", "train.lr": 0.5}, "train.lr", 0.5),
    ],
)
def test_the_rate_is_that_of_the_optimizer(given, key, rate):
    """Mutants: the task's option is tuned though Shoal's optimizer trains, or the other way."""
    knobs = find_knobs(load(None, given), keep_batch=False)
    assert (knobs.rate, knobs.present.rate) == (key, rate)
    assert (knobs.batch, knobs.present.batch) == ("task.options.batch", 8)


def test_rates_beyond_the_settings_are_not_tried():
    knobs = find_knobs(load(None, {"train.optimizer": "muon", "train.lr": 2.0}), keep_batch=True)
    assert max(one.rate for one in knobs.candidates(accumulate=1)) == 8.0


def test_a_batch_divides_into_its_parts():
    knobs = find_knobs(load(None, {}), keep_batch=False)
    assert {one.batch for one in knobs.candidates(accumulate=8)} == {8, 16}


def test_the_command_prints_one_object_of_json(folder):
    """Mutants: progress goes to stdout; the exit code of Ctrl-C is 0."""
    hooks = "tests.support.tune_tasks:Stopped"
    CLOCK.now = 13.0
    ended = CliRunner().invoke(
        cli, ["tune", "mine.toml", "--task", hooks, "--json"], standalone_mode=False
    )
    assert json.loads(ended.stdout)["interrupted"]
    assert ended.return_value == 130
