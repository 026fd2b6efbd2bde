"""The command ``shoal watch``.

Heavy imports happen inside it, and neither torch nor hivemind is ever among them.
"""

from __future__ import annotations

import queue
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.node.cli.finite_range import FiniteRange
from shoal.node.cli.options import logging_option
from shoal.node.listen_address import HERE, Address, parse_address
from shoal.node.packages import require

if TYPE_CHECKING:
    from shoal.node.watch.events import Event
    from shoal.node.watch.source import EventSource
    from shoal.swarm.access.link import Link

PACKAGES = {"tui": ("textual",), "web": ("aiohttp", "segno"), "json": ()}
"""That each form needs."""
LOOPBACK = (HERE, "::1", "localhost")
MAX_WAITING = 100_000
"""Events that wait for the screen."""


@click.command(short_help="Watch a swarm live: peers, losses, exchanges, faults.")
@click.argument("link", required=False)
@click.option(
    "--tui", "form", flag_value="tui", help="Show a live screen.  [default: on a terminal]"
)
@click.option(
    "--json",
    "form",
    flag_value="json",
    help="Print every event as a line of JSON.  [default: elsewhere]",
)
@click.option(
    "--web",
    metavar="[HOST:]PORT",
    help="Serve a page, to this machine if no HOST is given; port 0: any free one.",
)
@click.option(
    "--share", is_flag=True, help="Let everybody who reaches that page read it, under any name."
)
@click.option("--no-link", is_flag=True, help="Leave the link to the swarm off that page.")
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write all events to a new file.",
)
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Show a recording in place of a swarm.",
)
@click.option(
    "--speed",
    type=FiniteRange(0.0),
    default=1.0,
    show_default=True,
    help="Speed of a replay; 0: without pauses.",
)
@click.option(
    "--seconds",
    type=FiniteRange(0.0, min_open=True),
    help="End after so many seconds.  [default: never]",
)
@logging_option
def watch(
    link: str | None,
    form: str | None,
    web: str | None,
    share: bool,
    no_link: bool,
    record: Path | None,
    replay: Path | None,
    speed: float,
    seconds: float | None,
) -> None:
    """Watch the swarm of LINK live, without taking part: peers, rounds, losses, bytes, exchanges
    and faults.

    \b
    Examples:
      shoal watch 'shoal://...'
      shoal watch 'shoal://...' --web 8080
      shoal watch 'shoal://...' --web 0.0.0.0:8080 --share
      shoal watch --replay swarm.jsonl --speed 10
    """
    from shoal.node.config.links import read_link
    from shoal.node.watch.events import WatchError
    from shoal.node.watch.source import Recorder, event_sink, live, replayed

    if (link is None) == (replay is None):
        raise WatchError("Pass either the LINK of a swarm or --replay FILE.")
    if web is not None and form is not None:
        raise WatchError(f"Pass either --web or --{form}.")
    place = _place(web, share)
    parsed = read_link(link) if link is not None else None
    form = _form(form, place)
    require(
        WatchError,
        f"shoal watch --{form}",
        *PACKAGES[form],
        extra="watch",
        otherwise="use --json, which needs none",
    )
    inbox: queue.Queue[Event] = queue.Queue(MAX_WAITING)
    recorder = None if record is None else Recorder(record)
    send = event_sink(inbox, recorder, drop=parsed is not None)
    source = live(parsed, send) if parsed else replayed(replay or Path(), speed, send)
    source.start()
    try:
        if place is not None:
            shown = None if no_link or share else parsed
            _serve(place, inbox, source, shown, replay, share=share, seconds=seconds)
        else:
            _show(form, inbox, source, is_live=parsed is not None, seconds=seconds)
    finally:
        source.stop()
        if recorder is not None:
            recorder.close()
    source.check()


def _form(form: str | None, place: Address | None) -> str:
    """Return how to show the swarm: a page, what the user chose, or what suits stdout."""
    if place is not None:
        return "web"
    if form is not None:
        return form
    return "tui" if sys.stdout.isatty() else "json"


def _show(
    form: str,
    inbox: queue.Queue[Event],
    source: EventSource,
    *,
    is_live: bool,
    seconds: float | None,
) -> None:
    if form == "tui":
        from shoal.node.watch.tui import WatchApp

        WatchApp(inbox, source, live=is_live, seconds=seconds).run()
    else:
        from shoal.node.watch.source import print_lines

        print_lines(inbox, source, seconds)


def _serve(
    place: Address,
    inbox: queue.Queue[Event],
    source: EventSource,
    shown: Link | None,
    replay: Path | None,
    *,
    share: bool,
    seconds: float | None,
) -> None:
    """Serve the page; ``shown``: the link to show on it."""
    from shoal.node.watch.source import Timeline
    from shoal.node.watch.web import Page, serve

    timeline = None if replay is None else Timeline(replay)
    page = Page(inbox, source, live=replay is None, link=shown, timeline=timeline, shared=share)
    serve(page, place, seconds, click.echo)


def _place(web: str | None, share: bool) -> Address | None:
    """Return where to serve the page, or None if no page is wanted. Raises WatchError."""
    from shoal.node.watch.events import WatchError

    if web is None:
        if share:
            raise WatchError("--share is about the page: pass --web [HOST:]PORT too.")
        return None
    try:
        place = parse_address(web)
    except ValueError as error:
        raise WatchError(f"Cannot use --web {web!r}: {error}.") from None
    if not share and place.host not in LOOPBACK:
        raise WatchError(
            f"The page at {place} could be read from elsewhere: pass --share if it may, or leave "
            "the host out."
        )
    return place
