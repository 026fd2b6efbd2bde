"""Events as lines, in a file and back; and what a terminal shows of them, driven without a
terminal.
"""

import asyncio
import queue

import pytest
from rich.text import Text

from shoal.node.watch import tui as pictures
from shoal.node.watch.events import (
    Connected,
    Described,
    Disconnected,
    MessageRefused,
    Unreachable,
    WatchError,
    Watching,
    event_of,
    line_of,
)
from shoal.node.watch.source import (
    PAUSE_MAX,
    EventSource,
    Recorder,
    event_sink,
    print_lines,
    recorded,
    replay,
    replayed,
)
from shoal.node.watch.swarm_view import SwarmView
from shoal.node.watch.tui import LABEL, MEAN, plot
from tests.support.watched_peers import NOW, SWARM, Source


@pytest.fixture
def events(authors):
    anna, bert, _ = authors
    return [
        Watching(time=NOW, swarm=SWARM),
        Connected(time=NOW + 0.5, peer=anna.peer),
        Described(time=NOW + 0.6, name="first", task="text", method="noloco"),
        anna.heard(
            anna.round(1, [bert]),
            at=NOW + 1,
            reward=0.5,
            without_partner=1,
            banned=(bert.peer,),
        ),
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
    "line",
    [
        "{}",
        "nonsense",
        '{"event": "status", "time": 1.0}',
        '{"event": "connected", "time": NaN, "peer": "x"}',
    ],
)
def test_a_line_that_is_no_event_is_one_sentence(file, line):
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(
        WatchError, match=r"line 8 of .* is no event .*give a file that --record wrote"
    ) as caught:
        list(recorded(file))
    assert "\n" not in str(caught.value)


def test_other_files_are_one_sentence(tmp_path, file):
    with pytest.raises(WatchError, match="No such file"):
        list(recorded(tmp_path / "none"))
    with pytest.raises(WatchError, match="exists already"):
        Recorder(file)
    with pytest.raises(WatchError, match="Cannot record"):
        Recorder(tmp_path / "none" / "x")
    file.write_text("x" * 100_000)
    with pytest.raises(WatchError, match="longer than"):
        list(recorded(file))


def test_slow_reader_loses_the_oldest_events(events, file):
    """A slow reader costs the oldest events but not those of a replay."""
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
    print_lines(inbox, Source(), 0.01)  # ends when time is up


def test_a_recording_that_stops_ends_the_watch_with_its_sentence():
    """Also where it is written to by one of several tasks."""

    def work(stopped):
        raise ExceptionGroup("tasks", [WatchError("Cannot record")])

    source = EventSource(work)
    source.start()
    source.join()
    with pytest.raises(WatchError, match="Cannot record"):
        source.check()


@pytest.fixture
def screen_events(authors):
    anna, bert, carl = authors
    return [
        Described(time=NOW, name="first", task="text", method="noloco"),
        *(anna.heard(*(anna.round(n, [bert]) for n in range(k)), at=NOW + k) for k in range(1, 5)),
        *(
            bert.heard(
                *(bert.round(n, [anna]) for n in range(k)),
                at=NOW + k,
                lag_steps=7,
                lag_auto=True,
                late=k - 2,
            )
            for k in range(2, 5)
        ),
        carl.heard(carl.round(0), at=NOW + 4, without_partner=1, reward=0.5),
        carl.heard(carl.round(1), at=NOW + 5, without_partner=2, reward=0.5, name="[b]carl[/b]"),
        MessageRefused(time=NOW + 5, reason="forged"),
    ]


@pytest.fixture
def view(screen_events):
    view = SwarmView()
    for event in screen_events:
        view.take(event)
    return view


def test_a_rising_line_is_drawn_from_corner_to_corner():
    lines = plot([[(0, 0), (9, 9)]], LABEL + 1 + 10, 6).plain.split("\n")
    assert [line[LABEL + 1 :] for line in lines[:-1]] == [
        "⠀⠀⠀⠀⠀⠀⠀⠀⡠⠊",
        "⠀⠀⠀⠀⠀⠀⡠⠊⠀⠀",
        "⠀⠀⠀⠀⡠⠊⠀⠀⠀⠀",
        "⠀⠀⡠⠊⠀⠀⠀⠀⠀⠀",
        "⡠⠊⠀⠀⠀⠀⠀⠀⠀⠀",
    ]
    assert lines[0].split()[0] == "9"
    assert lines[-1].split() == ["0", "9"]


def test_mean_is_drawn_on_top(view):
    """The mean is drawn on top in a style of its own."""
    drawn = plot(
        [[(0, 0), (9, 9)], [(0, 9), (9, 0)]], LABEL + 1 + 10, 6, [(0, 4), (9, 4)], axis="round"
    )
    assert drawn.plain.split("\n")[-1].split() == ["round", "0", "9"]
    assert {span.style for span in drawn.spans} >= {MEAN, "cyan", "magenta"}
    assert MEAN in {span.style for span in pictures.losses(view, 40, 8).spans}


@pytest.mark.parametrize("curves", [[], [[]], [[(1, 1)]], [[(1, 1), (2, 1)]], [[(5, 1), (5, 2)]]])
@pytest.mark.parametrize("size", [(1, 1), (20, 3), (200, 50)])
def test_any_curve_fits_any_size(curves, size):
    drawn = plot(curves, *size)
    assert len(drawn.plain.split("\n")) <= max(size[1], 3)


def test_a_mean_beside_all_curves_is_drawn_too():
    """It is rounded: of equal losses of a million it lies beside them, and ended the terminal
    view.
    """
    drawn = plot([[(0, 1234567.0), (9, 1234567.0)]] * 2, 40, 8, [(0, 1234600.0), (12, 1234600.0)])
    assert len(drawn.plain.split("\n")) == 8


def test_the_headline_says_how_the_swarm_is(view):
    line = pictures.headline(view)
    assert line.startswith("first · text · noloco   3 of 3 peers   rounds 1 to 3   loss ")
    assert "1 message refused" in line
    assert pictures.headline(SwarmView()) == "shoal watch   0 connections, no status yet"


def test_the_table_has_a_row_for_each_peer(view):
    rows = pictures.peer_rows(view)
    shown = [
        dict(zip(pictures.COLUMNS, [cell.plain for cell in cells], strict=True))
        for _, cells in rows
    ]
    assert [row["peer"] for row in shown] == ["[b]carl[/b]", "anna", "bert"]
    assert shown[1]["with"] == "bert"
    assert [row["lag"] for row in shown] == ["-", "-", "7 auto, 2 late"]
    assert shown[0] == {
        **shown[0],
        "with": "-",
        "faults": "no partner in 2",
        "reward": "0.500",
        "state": "training",
        "round": "1",
    }


def test_the_picture_of_exchanges_is_symmetric(view):
    lines = pictures.exchanges(view, 40, 10).plain.split("\n")
    assert [line[10:] for line in lines[1:]] == ["╲ · · ", "· ╲ ██", "· ██╲ "]


@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
def test_charts_fit_after_each_resize(screen_events, size):
    """The charts fit at first sight and after each change of size."""
    tui = pytest.importorskip("shoal.node.watch.tui", reason="textual is not installed")
    inbox = queue.Queue()
    for event in screen_events:
        inbox.put(event)
    app = tui.WatchApp(inbox, Source(), live=False)

    def fits():
        for name in ("losses", "exchanges"):
            picture = app.query_one(f"#{name}")
            # else the size of a layout in progress may be newer than what is painted
            picture.refresh()
            width, height = picture.content_size
            drawn = getattr(pictures, name)(app.view, width, height).plain.split("\n")
            shown = [picture.render_line(y).text.rstrip() for y in range(len(drawn))]
            assert shown == [line[:width].rstrip() for line in drawn], name

    async def drive():
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            fits()
            await pilot.resize_terminal(size[0] - 30, size[1] + 6)
            await pilot.pause()
            fits()

    asyncio.run(drive())


def test_late_frame_draws_nothing(screen_events):
    """A frame that is due while the screen is taken down draws nothing."""
    tui = pytest.importorskip("shoal.node.watch.tui", reason="textual is not installed")
    inbox = queue.Queue()
    app = tui.WatchApp(inbox, Source(), live=False)

    async def drive():
        async with app.run_test():
            await app.query("*").remove()
            inbox.put(screen_events[0])
            app.frame()
            assert inbox.empty()

    asyncio.run(drive())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("size", [(140, 40), (60, 30), (20, 8)])
def test_the_screen_shows_it_and_obeys_keys(screen_events, size):
    tui = pytest.importorskip("shoal.node.watch.tui", reason="textual is not installed")
    inbox = queue.Queue()
    for event in screen_events[:-3]:
        inbox.put(event)
    app = tui.WatchApp(inbox, Source(), live=False)

    def row(column):
        table = app.query_one("#peers", tui.DataTable)
        at = pictures.COLUMNS.index(column)
        return [table.get_row_at(index)[at].plain for index in range(table.row_count)]

    async def drive():
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            assert row("peer") == ["anna", "bert"]
            await pilot.press("p")
            for event in screen_events[-3:]:
                inbox.put(event)
            app.frame()
            assert row("peer") == ["anna", "bert"]
            await pilot.press("p")
            app.frame()
            assert row("peer") == ["[b]carl[/b]", "anna", "bert"]
            assert isinstance(
                app.query_one("#peers", tui.DataTable).get_row_at(0)[0], Text
            )  # no markup
            for key in ("down", "tab", "d", "d", "tab", "tab", "down"):
                await pilot.press(key)
            app.frame()
            assert len(app.query_one("#news", tui.RichLog).lines) >= (4 if size[0] > 30 else 0)
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(drive())


def test_the_screen_ends_when_a_live_source_fails(screen_events):
    tui = pytest.importorskip("shoal.node.watch.tui", reason="textual is not installed")
    source = Source()
    app = tui.WatchApp(queue.Queue(), source, live=True)

    async def drive():
        async with app.run_test() as pilot:
            source.ended.set()
            app.frame()
            await pilot.pause()
        assert app.return_code == 0

    asyncio.run(drive())
