"""The metrics file is JSON line by line; the display shows strangers' names without obeying
them.
"""

import io
import json
import math
import re
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from shoal.node.exit_code import ExitCode, epilogue
from shoal.node.metrics.log import Metrics, MetricsError, RoundRecord
from shoal.node.runtime.display import (
    LINE_EVERY_S,
    LineDisplay,
    LiveDisplay,
    describe,
    make_display,
)
from shoal.node.runtime.result import Result, Setup, summary
from shoal.node.training.meter import Progress
from shoal.swarm.training.step_rate import Rates
from shoal.swarm.wire import record


def progress(step, loss, *rates):
    return Progress(step, loss, Rates(*rates))


def info(**changes):
    fields = {
        "round": 3,
        "step": 75,
        "members": 2,
        "partner": "bob",
        "bytes_sent": 543_000,
        "bytes_received": 544_000,
        "lag_steps": 0,
        "wait_s": 0.25,
        "loss": 2.5,
        "weights": "0123456789abcdef",
    }
    return RoundRecord(**(fields | changes))


def result(**fields):
    setup = Setup(method="noloco", device="cpu", shard="0/8", params=1)
    return Result(name="a", peer="p", swarm="s", setup=setup, **fields)


def read(path):
    def refuse(text):
        raise AssertionError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_lines_are_whole_json_without_nan(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    with closing(Metrics(path)) as metrics:
        metrics.write("round", loss=math.nan, bytes_sent=543_000)
        metrics.write("end", losses=[1.0, math.inf], more={"x": -math.inf})
        first, second = read(path)  # before the file is closed
    assert first["event"] == "round"
    assert first["loss"] is None
    assert first["bytes_sent"] == 543_000
    assert second["losses"] == [1.0, None]
    assert second["more"] == {"x": None}
    assert second["time"] >= first["time"] > 1.7e9


def test_appends_after_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "roun')
    with closing(Metrics(path)) as metrics:
        metrics.write("start", peers=4)
    assert json.loads(path.read_text().splitlines()[1])["peers"] == 4


def test_unwritable_file_is_one_sentence(tmp_path):
    with pytest.raises(MetricsError, match="Cannot write the metrics"):
        Metrics(tmp_path)
    metrics = Metrics(Path("/dev/full"))
    with pytest.raises(MetricsError, match="No space left"):
        metrics.write("x")
    metrics.close()
    metrics.close()
    assert Path("/dev/full").is_char_device()  # without a line, and yet not removed: root may


def test_only_an_empty_plain_file_is_removed(tmp_path):
    """An empty file is removed and a link or device is not."""
    file, link = tmp_path / "metrics.jsonl", tmp_path / "link"
    Metrics(file).close()
    assert not file.exists()
    file.touch()
    link.symlink_to(file)
    Metrics(link).close()
    assert link.is_symlink()
    assert file.exists()


def test_full_disk_is_reported_once(tmp_path, monkeypatch):
    """A full disk is told once and lines go on when there is space again."""
    messages, path = [], tmp_path / "metrics.jsonl"
    metrics = Metrics(path, messages.append)
    metrics.write("before")
    real = metrics._file

    class Full:
        """Takes five bytes of a line, and then nothing more."""

        def __init__(self):
            self.space = 5

        def write(self, data):
            if not self.space:
                raise OSError(28, "No space left on device")
            done, self.space = real.write(data[: self.space]), 0
            return done

    monkeypatch.setattr(metrics, "_file", Full())
    metrics.write("lost")
    metrics.write("lost")
    monkeypatch.setattr(metrics, "_file", real)
    metrics.write("after")
    metrics.close()
    assert messages == [
        f"Cannot write the metrics {str(path)!r} (No space left on device): free some space or "
        "choose another folder; training goes on without them.",
        "Metrics can be written again.",
    ]
    lines = path.read_text().splitlines()
    assert [len(lines), json.loads(lines[0])["event"], json.loads(lines[-1])["event"]] == [
        3,
        "before",
        "after",
    ]


def test_lines_name_the_round_and_hold_progress_back():
    now = [0.0]
    stream = io.StringIO()
    display = LineDisplay(stream, clock=lambda: now[0])
    display.start(1000)
    display.update(progress(1, 5.0, 100.0))
    display.round(info())
    display.round(info(partner=None, members=1, loss=None, why="bert broke off"))
    display.round(info(loss=None))
    display.round(info(round=14, fragment=2, fragments=4))
    display.round(info(round=16, fragment=4, fragments=4))
    now[0] = LINE_EVERY_S
    display.update(progress(2, 4.5, 100.0))
    display.update(progress(3, 4.0, 100.0))
    now[0] += LINE_EVERY_S
    display.update(progress(4, 4.5, 100.0, 51_200.0, 0.414))
    display.close()
    assert stream.getvalue().splitlines() == [
        "round 3 with bob: loss 2.5000, up 543 kB, down 544 kB, wait 250 ms",
        "round 3 without a partner (bert broke off): up 543 kB, down 544 kB, wait 250 ms",
        "round 3 with bob: up 543 kB, down 544 kB, wait 250 ms",
        "round 3, fragment 3 of 4, with bob: loss 2.5000, up 543 kB, down 544 kB, wait 250 ms",
        # the last average, of all fragments
        "round 4 with bob: loss 2.5000, up 543 kB, down 544 kB, wait 250 ms",
        "step 2 of 1000: loss 4.5000, 100.0 steps/s",
        "step 4 of 1000: loss 4.5000, 100.0 steps/s, 51,200 tokens/s, 41 % MFU",
    ]


@pytest.mark.parametrize("total", [0, 100])
def test_live_display_does_not_obey_a_name(total):
    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=160))
    display.start(total)
    display.update(progress(10, 2.0, 50.0))
    display.round(info(partner="[red]eve[/red]\x1b[2J\n"))
    display.message("[bold]joined[/nonsense]\x1b]0;title\x07")
    display.close()
    display.close()
    shown = stream.getvalue()
    assert "[red]eve[/red]?[2J?" in shown
    assert "[bold]joined[/nonsense]?]0;title?" in shown
    assert "\x1b[2J" not in shown


def test_live_display_fits_a_usual_terminal():
    """The live display shows the total and the whole round on a usual terminal."""
    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=80))
    display.start(2000)
    display.update(progress(1234, 2.0, 50.0, 123_456.7, 0.4))
    display.round(info(round=123, partner="a-machine-in-the-lab"))
    display.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "step 1234 of 2000 " in shown
    assert "loss 2.000, 50.0 steps/s" in shown
    assert "123,457 tokens/s, 40 % MFU" in shown
    assert "round 123 with a-machine-in-the-lab: loss 2.5000" in shown
    assert "wait 250 ms" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


def test_nothing_of_the_progress_follows_the_summary():
    now = [0.0]
    stream = io.StringIO()
    lines = LineDisplay(stream, clock=lambda: now[0])
    lines.start(100)
    lines.close()
    now[0] = 2 * LINE_EVERY_S
    lines.message("finished after 100 steps")
    lines.update(progress(98, 2.0, 50.0))
    lines.activity("leaving, 12 s so far")
    assert stream.getvalue() == "finished after 100 steps\n"


def test_the_bar_is_gone_when_the_summary_is_shown():
    stream = io.StringIO()
    live = LiveDisplay(Console(file=stream, force_terminal=True, width=80))
    live.start(100)
    live.update(progress(98, 2.0, 50.0))
    live.close()
    live.message("finished after 100 steps")
    live.close()
    erase_line = "\x1b[2K"
    *_, shown = stream.getvalue().split(erase_line)
    assert shown == "finished after 100 steps\n"


@pytest.mark.parametrize("begun", [False, True])
def test_a_link_is_in_one_line_whatever_the_width(begun):
    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=40))
    if begun:
        display.start(0)
    link = (
        "shoal://"
        + "a" * 52
        + "?peer=/ip4/127.0.0.1/tcp/4001/p2p/"
        + "1" * 52
        + "&peer="
        + "x" * 200
    )
    display.message(f"the swarm is up: {link}")
    display.close()
    assert f"the swarm is up: {link}\n" in stream.getvalue()


def test_end_report_says_how_to_go_on():
    """The end of a run says what came of it and how to go on."""
    made = result(
        progress=record.Progress(step=50),
        exchanges=record.Exchanges(rounds=5, ended=20, with_partner=16),
        loss=record.Loss(training=2.25, held_out_first=4.0, held_out=2.5),
    )
    done, where = summary(made, Path("runs/a"))
    assert (
        done
        == "finished after 50 steps and 5 rounds, 16 of 20 exchanges with others: held-out loss "
        "2.5000, 4.0000 at first"
    )
    assert where.startswith(
        "checkpoints, metrics.jsonl and result.json are in 'runs/a'; the same command with "
        "--resume and more"
    )
    resumed = made.model_copy(update={"began_at": 30})
    assert summary(resumed, Path())[0].startswith(
        "finished after 20 steps and 5 rounds since step 30, "
    )
    made.setup = made.setup.model_copy(update={"method": "none"})
    assert summary(made, Path("runs/a"))[0].startswith("finished after 50 steps and 5 rounds: held")
    made.setup = made.setup.model_copy(update={"method": "noloco"})
    made.interrupted = True
    done, where = summary(made, Path("runs/a"))
    assert (
        done
        == "stopped after 50 steps and 5 rounds, 16 of 20 exchanges with others: training loss "
        "2.2500"
    )
    assert where.endswith("the same command with --resume goes on from there")
    made.loss = record.Loss(held_out_first=4.0)
    assert summary(made, Path())[0].endswith("training loss unknown")
    made.exchanges = record.Exchanges(ended=20, lag_steps=7, lag_auto=True, late=2, wait_s=1.25)
    assert summary(made, Path())[1] == (
        "training went on for 7 steps (auto) during an exchange; 2 of 20 came later, and training "
        "waited 1.25 s for the network"
    )
    made.last_average = {"wait_s": 12.0}
    assert summary(made, Path())[1].endswith("for the network, and 12 s for the last average")


@pytest.mark.parametrize(
    ("there", "way"),
    [
        ((), "no checkpoint is there"),
        ((3, 5), "--resume goes on from step 5, the newest that is saved"),
    ],
)
def test_unsaved_end_is_no_resume_point(tmp_path, there, way):
    """Fault: "checkpoints are in ...; --resume goes on from there" after a save that failed."""
    for step in there:
        (tmp_path / f"step-{step:08d}").mkdir()
    made = result(not_saved="Cannot save")
    said = (
        f"metrics.jsonl and result.json are in {str(tmp_path)!r}, but not the end of this run; "
        f"{way}"
    )
    assert summary(made, tmp_path)[-1] == said


def test_a_round_that_overlapped_shows_its_lag():
    assert describe(info(lag_steps=7)).endswith("wait 250 ms, lag 7 steps")
    assert describe(info(lag_steps=1, late=True)).endswith("wait 250 ms, lag 1 step (late)")


def test_a_round_of_a_group_says_how_many():
    assert "with bob and 2 more: loss" in describe(info(members=4))
    assert "with bob: loss" in describe(info(members=2))


def test_no_terminal_means_lines():
    assert isinstance(make_display(io.StringIO()), LineDisplay)


def test_every_exit_code_is_documented():
    assert [int(code) for code in ExitCode] == [0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13, 130]
    assert all(f"{int(code):>3}  {code.meaning}" in epilogue() for code in ExitCode)
