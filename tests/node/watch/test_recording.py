"""Events as lines, in a file and back."""

import queue
import threading

import pytest

from shoal.node.watch.source import PAUSE_MAX, Recorder, RecordError, event_sink, print_lines, recorded, replay, replayed
from shoal.node.watch.swarm_view import (
    Connected,
    Described,
    Disconnected,
    MessageRefused,
    ReplayError,
    Unreachable,
    Watching,
    event_of,
    line_of,
)
from tests.node.watch.conftest import NOW, SWARM


@pytest.fixture
def events(authors):
    anna, bert, _ = authors
    return [
        Watching(time=NOW, swarm=SWARM),
        Connected(time=NOW + 0.5, peer=anna.peer),
        Described(time=NOW + 0.6, name="first", task="text", method="noloco"),
        anna.heard(anna.round(1, [bert]), at=NOW + 1, reward=0.5, faults=(("no-partner", 1),), banned=(bert.peer,)),
        MessageRefused(time=NOW + 2, reason="forged"),
        Unreachable(time=NOW + 3, peer=bert.peer, reason="nobody answers"),
        Disconnected(time=NOW + 100, peer=anna.peer),
    ]


@pytest.fixture
def file(events, tmp_path):
    recorder = Recorder(tmp_path / "swarm.jsonl")
    for event in events:
        recorder.take(event)
    recorder.close()
    return tmp_path / "swarm.jsonl"


def test_every_event_survives_its_line(events):
    assert [event_of(line_of(event)) for event in events] == events


def test_a_recording_is_what_was_recorded(events, file):
    assert list(recorded(file)) == events


def test_a_last_line_that_was_cut_short_is_left_out(events, file):
    file.write_bytes(file.read_bytes()[:-20])
    assert list(recorded(file)) == events[:-1]


def test_a_replay_keeps_the_pauses(events, file):
    told, pauses = [], []
    replay(file, told.append, lambda seconds: pauses.append(seconds), speed=2.0)
    assert told == events
    assert pauses == pytest.approx([0.25, 0.05, 0.2, 0.5, 0.5, PAUSE_MAX / 2], abs=1e-6)
    replay(file, told.append, lambda seconds: pytest.fail("no pauses"), speed=0.0)
    assert told == events * 2


def test_a_replay_ends_when_it_is_told_to(events, file):
    told = []
    replay(file, told.append, lambda seconds: len(told) == 3)
    assert told == events[:3]


@pytest.mark.parametrize(
    "line", ["{}", "nonsense", '{"event": "status", "time": 1.0}', '{"event": "connected", "time": NaN, "peer": "x"}']
)
def test_a_line_that_is_no_event_is_one_sentence(file, line):
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(ReplayError, match=r"line 8 of .* is no event .*give a file that --record wrote") as caught:
        list(recorded(file))
    assert "\n" not in str(caught.value)


def test_other_files_are_one_sentence(tmp_path, file):
    with pytest.raises(ReplayError, match="No such file"):
        list(recorded(tmp_path / "none"))
    with pytest.raises(RecordError, match="exists already"):
        Recorder(file)
    with pytest.raises(RecordError, match="Cannot record"):
        Recorder(tmp_path / "none" / "x")
    file.write_text("x" * 100_000)
    with pytest.raises(ReplayError, match="longer than"):
        list(recorded(file))


def test_a_slow_reader_costs_the_oldest_events_but_not_those_of_a_replay(events, file):
    inbox = queue.Queue(3)
    send = event_sink(inbox, None, drop=True)
    for event in events:
        send(event)
    assert [inbox.get_nowait() for _ in range(3)] == events[-3:]
    inbox = queue.Queue(3)
    source = replayed(file, 0.0, event_sink(inbox, None, drop=False))
    source.start()
    assert [inbox.get(timeout=10) for _ in events] == events


def test_lines_are_printed_and_recorded(events, file, tmp_path, capsys):
    inbox = queue.Queue()
    recorder = Recorder(tmp_path / "again.jsonl")
    source = replayed(file, 0.0, event_sink(inbox, recorder, drop=False))
    source.start()
    print_lines(inbox, source, None)
    source.check()
    assert capsys.readouterr().out == file.read_text() == (tmp_path / "again.jsonl").read_text()
    print_lines(inbox, Endless(), 0.01)  # ends when time is up


class Endless:
    ended = threading.Event()
