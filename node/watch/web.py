"""Page of ``shoal watch --web [HOST:]PORT``, which shows the swarm live; to this machine alone, if
it is not shared.

The page gets a whole picture of the swarm at most once a second (at first more often), by
server-sent events. It only reads: there is no request by which a page could change anything. Of a
recording it can ask for the picture at any time in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import queue
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib import resources
from itertools import groupby
from typing import Any

import segno
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from shoal.node.console import dumps
from shoal.node.listen_address import HERE, Address
from shoal.node.watch.curves import chart
from shoal.node.watch.events import Event, WatchError
from shoal.node.watch.source import EventSource, Timeline
from shoal.node.watch.swarm_view import Peer, SwarmView, change_sentence, faults_label
from shoal.swarm.access.link import Link
from shoal.swarm.membership.link_addresses import lasting_link
from shoal.swarm.p2p.addresses import host_asked, range_of
from shoal.swarm.wire.record import TAIL

# The link that the page of ``shoal watch`` shows, and its QR code.
#
# It never has an invitation, also if the link that is watched has one. A recording has no link.

REFRESH_S = 30.0
IN_CODE = 4  # addresses in the QR code: with 16 it would be too fine for a camera


class ShownLink:
    """The link to the swarm of ``link``, with the members heard of lately; a new one every 30
    seconds.
    """

    def __init__(self, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._next = float("-inf")
        self._shown: dict[str, Any] = {}

    def picture(self, view: SwarmView) -> dict[str, Any]:
        """Return the link as text and as a QR code's SVG path on a square of ``size`` modules."""
        if self._clock() >= self._next:
            made = self._current(view)
            code = segno.make_qr(
                str(Link(made.swarm, made.bootstrap[:IN_CODE])), error="l", boost_error=False
            )
            self._shown = {
                "text": str(made),
                "qr": {"size": len(code.matrix), "path": _path(code.matrix)},
            }
            here = len(view.here())
            self._next = self._clock() + (
                REFRESH_S if here else 0.0
            )  # the first statuses are shown at once
        return self._shown

    def _current(self, view: SwarmView) -> Link:
        members = {peer: known.status for peer, known in view.peers.items() if known.here}
        given = self._link.bootstrap
        # Who answers and is no member is a bootstrap node.
        seeds: dict[str, list[str]] = {}
        for address in given:
            peer = address.rpartition("/p2p/")[2]
            if peer in view.connections.peers and peer not in view.peers:
                seeds.setdefault(peer, []).append(address)
        return lasting_link(
            self._link.swarm, members, seeds=seeds, met=view.connections.peers, otherwise=given
        )


def _path(matrix: Iterable[Iterable[int]]) -> str:
    """Return the dark modules as a path of rectangles, one for each run in a row."""
    parts = []
    for y, row in enumerate(matrix):
        x = 0
        for dark, modules in groupby(row, bool):
            width = len(list(modules))
            if dark:
                parts.append(f"M{x} {y}h{width}v1h{-width}z")
            x += width
    return "".join(parts)


POINTS = 160  # of a chart
LINES = 48  # peers that have a line of their own in a chart; all are in its mean and band
ROWS = 256  # peers in the table
EDGES = 512  # pairs on the map


def page_data(view: SwarmView, *, ended: bool, link: ShownLink | None = None) -> dict[str, Any]:
    """Return the data of the page, without addresses, for strangers may see it; ``ended``: no more
    events come.
    """
    rows = view.rows()
    peers = [peer for _, peer in rows]
    edges = sorted(view.meetings.edges().items(), key=lambda item: -item[1].time)[:EDGES]
    numbers = {key: index for index, key in enumerate(view.peers)}
    title = view.title
    fragments = 1 if title is None else title.fragments

    def names(tails: Iterable[str]) -> list[str]:
        return [view.name(tail) for tail in tails]

    confirmed = view.confirmed()
    return {
        "swarm": view.swarm,
        "title": None if title is None else title.model_dump(include={"name", "task", "method"}),
        "now": view.now,
        "begun": view.begun,
        "ended": ended,
        "fragments": fragments,
        "link": None if link is None else link.picture(view),
        "totals": view.totals(),
        "refused": dict(view.refused),
        "peers": [
            {
                **_peer_data(key, peer),
                "number": numbers[key],
                "heard_s_ago": max(view.now - peer.heard, 0.0),
                "confirmed": confirmed[key],
                "partners": names(peer.partners),
            }
            for key, peer in rows[:ROWS]
        ],
        "bootstrap": sorted(peer[-TAIL:] for peer in view.connections.bootstrap)[:LINES],
        "changes": [change_sentence(part) for part in view.changes],
        "charts": _charts(view, peers),
        "pairs": [[a, b, edge.times, edge.round // fragments, edge.time] for (a, b), edge in edges],
        "meetings": [
            [
                number // fragments,
                number % fragments,
                [names(group) for group in groups],
                names(alone),
            ]
            for number, groups, alone in view.meetings.newest()
        ],
        "news": [[item.time, item.kind, item.text] for item in view.log.lines],
    }


def _peer_data(key: str, peer: Peer) -> dict[str, Any]:
    """Return what the page shows of one peer: its record, and what is computed of it."""
    unshown = {"swarm", "peer", "addresses", "rounds", "projection"}
    return {
        "id": key,
        "tail": key[-TAIL:],
        "here": peer.here,
        "silent": peer.silent,
        "doing": peer.doing,
        "round": peer.round,
        "roles": peer.roles,
        "relayed": peer.relayed,
        "bytes_sent_per_s": peer.sent_rate,
        "bytes_received_per_s": peer.received_rate,
        "faults_text": faults_label(peer.faults),
        **peer.status.model_dump(mode="json", exclude=unshown),
    }


def _charts(view: SwarmView, peers: Sequence[Peer]) -> dict[str, Any]:
    rewards = [peer.reward.smooth() for peer in peers]
    losses = [peer.loss.smooth() for peer in peers]
    over_time = [peer.loss_over_time.smooth() for peer in peers]
    speed = {name: curve.smooth() for name, curve in view.rates.curves.items()}
    traffic = [speed["bytes_sent_per_s"], speed["bytes_received_per_s"]]
    return {
        "loss": chart(losses, POINTS, LINES),
        "loss_over_time": chart(over_time, POINTS, LINES),
        "reward": chart(rewards, POINTS, LINES) if any(rewards) else None,
        "consensus": chart([view.consensus.curve.smooth(), view.consensus.curve.points], POINTS, 2),
        "steps_per_s": chart([speed["steps_per_s"]], POINTS, 0),
        "tokens_per_s": chart([speed["tokens_per_s"]], POINTS, 0),
        "traffic": chart(traffic, POINTS, 2),
    }


NAMES = (HERE, "localhost")
FIRST_S = 0.1  # between two looks at the beginning, when peer after peer appears
SETTLING_S = 5.0
FRAME_S = 0.5
SHARED_FRAME_S = 2.0  # between two looks for strangers, who may be many
MOST_AT_ONCE = 5000  # events taken between two pictures
MAX_PAGES, MAX_SHARED = 32, 256  # served at once
MAX_CONNECTIONS = (
    400  # below the usual 1,024 descriptors of a process; this machine, as a proxy, may have all
)
MAX_OF_RANGE, MAX_OF_ADDRESS = 128, 64  # of one address range (/16 of IPv4), and of one address
HEADERS_S = 10.0  # seconds in which the header of a request must be there
# seconds in which a viewer must take a picture; SENT: bytes that may wait for it in the system
READ_S = 20.0
SENT = 64 * 1024
LONGEST_HEADER = 64 * 1024
MAX_ASKED = 16  # questions for a time of a recording that wait
INDEX = "index.html"
# in it; the newest picture takes null's place
FIRST = '<script id="first" type="application/json">null</script>'
KINDS = {
    INDEX: "text/html",
    "page.js": "text/javascript",
    "charts.js": "text/javascript",
    "map.js": "text/javascript",
    "style.css": "text/css",
    "uPlot.iife.min.js": "text/javascript",
    "uPlot.min.css": "text/css",
    "uPlot.LICENSE": "text/plain",
}
# Only what this server serves; names from the swarm can thus do no harm even if the page had a
# fault.
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}


@web.middleware  # type: ignore[untyped-decorator]
async def _only_here(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse requests for other host names: a web site elsewhere may let its own name point to this
    machine.
    """
    if host_asked(request.headers.get("Host", "")) not in NAMES:
        return web.Response(
            status=403, text="Open this page under http://127.0.0.1 or http://localhost."
        )
    return await handler(request)


class _Gate(asyncio.Protocol):
    """A connection to the page: refused where too many are open, ended where a request does not
    come. ``open``: of each address.
    """

    def __init__(self, inner: asyncio.Protocol, open: Counter[str]) -> None:
        self._inner = inner
        self._open = open
        self._host = ""
        self._unfinished = b""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        host = str((transport.get_extra_info("peername") or ("",))[0])
        of_range = sum(
            count for other, count in self._open.items() if range_of(other) == range_of(host)
        )
        few = self._open[host] < MAX_OF_ADDRESS and of_range < MAX_OF_RANGE
        if self._open.total() >= MAX_CONNECTIONS or not (
            few or ipaddress.ip_address(host).is_loopback
        ):
            transport.close()
            return
        self._host = host
        self._transport = transport
        if (link := transport.get_extra_info("socket")) is not None:
            link.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, SENT
            )  # so that it is seen when a viewer takes nothing
        self._open[host] += 1
        self._inner.connection_made(transport)
        self._waits()

    def _waits(self) -> None:
        self._deadline = self._deadline or asyncio.get_running_loop().call_later(
            HEADERS_S, self._transport.close
        )

    def data_received(self, data: bytes) -> None:
        if not self._host:
            return
        *whole, self._unfinished = (self._unfinished + data).split(b"\r\n\r\n")
        if len(self._unfinished) > LONGEST_HEADER:
            self._transport.close()
            return
        if self._deadline is not None and any(
            map(bytes.strip, whole)
        ):  # blank lines are no request
            self._deadline.cancel()
            self._deadline = None
        if self._unfinished:
            self._waits()
        self._inner.data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._host:
            self._open[self._host] -= 1
            if not self._open[self._host]:
                del self._open[self._host]
            if self._deadline is not None:
                self._deadline.cancel()
            self._inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._host else None

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class Page:
    """Server of the picture, kept up to date on the loop, for all open pages.

    ``link``: to the swarm that is watched, if the page is to show a link. ``timeline``: the
    recording that ``source`` replays. ``shared``: to everybody, under any name (of a reverse proxy,
    for instance).
    """

    def __init__(
        self,
        inbox: queue.Queue[Event],
        source: EventSource,
        *,
        live: bool,
        link: Link | None = None,
        timeline: Timeline | None = None,
        shared: bool = False,
    ) -> None:
        self.view = SwarmView()
        self._link = None if link is None else ShownLink(link)
        self._inbox = inbox
        self._source = source
        self._live = live
        self._shared = shared
        self._timeline = timeline
        self._reading = asyncio.Lock()
        self._asked = 0
        self._fresh = asyncio.Condition()
        self._number = 0
        self._text = ""
        self._pages: dict[
            asyncio.Task[object], str
        ] = {}  # stream -> the address of its viewer, the oldest first

    def app(self) -> web.Application:
        """Return the application: the page's files, the stream of pictures, and the picture at a
        time of a recording.
        """
        app = web.Application(middlewares=[] if self._shared else [_only_here])
        folder = resources.files("shoal.node.watch") / "page"
        for name, kind in KINDS.items():
            text = (folder / name).read_text(encoding="utf-8")
            app.router.add_get(f"/{'' if name == INDEX else name}", self._file(text, kind))
        app.router.add_get("/events", self._events)
        if self._timeline is not None:
            app.router.add_get("/at", self._at)
        return app

    def _picture(self, view: SwarmView, *, ended: bool) -> str:
        span = None if self._timeline is None else self._timeline.span
        return dumps({**page_data(view, ended=ended, link=self._link), "span": span})

    async def _at(self, request: web.Request) -> web.Response:
        """Answer with the picture at ``?time=``, Unix seconds.

        One is made at a time, in a thread, so the stream goes on.
        """
        try:
            time_s = float(request.query.get("time", ""))
        except ValueError:
            return web.Response(status=400, text="Pass ?time= in Unix seconds.")
        if self._asked >= MAX_ASKED:
            return web.Response(
                status=503, text="Too many ask for a time of this recording now: try again."
            )
        self._asked += 1
        try:
            async with self._reading:
                text = await asyncio.to_thread(self._text_at, time_s)
        finally:
            self._asked -= 1
        return web.Response(text=text, content_type="application/json", headers=HEADERS)

    def _text_at(self, time_s: float) -> str:
        assert self._timeline is not None
        view, whole = self._timeline.view_at(time_s)
        if not whole:
            view.tick(time_s)
        return self._picture(view, ended=whole)

    def _file(self, text: str, kind: str) -> Callable[[web.Request], Any]:
        before, mark, behind = text.partition(FIRST)

        async def answer(request: web.Request) -> web.Response:
            # No < from a stranger's name may end the element that the picture stands in.
            first = (
                FIRST.replace("null", (self._text or "null").replace("<", "\\u003c"))
                if mark
                else ""
            )
            return web.Response(text=before + first + behind, content_type=kind, headers=HEADERS)

        return answer

    async def keep(self, until: Callable[[], bool]) -> None:
        """Take in events and draw, until the source of a live swarm ends, or ``until``."""
        begun = time.monotonic()
        while not until():
            changed = await self.step()
            if self._live and self._source.ended.is_set():
                return
            settling = time.monotonic() - begun < SETTLING_S
            usual = SHARED_FRAME_S if self._shared else FRAME_S * (2 if changed else 1)
            await asyncio.sleep(FIRST_S if settling else usual)

    async def step(self) -> bool:
        """Take in waiting events; return whether there is a new picture."""
        taken = 0
        with contextlib.suppress(queue.Empty):
            while taken < MOST_AT_ONCE:
                self.view.take(self._inbox.get_nowait())
                taken += 1
        if self._live:
            self.view.tick(time.time())
        ended = self._source.ended.is_set() and self._inbox.empty()
        text = self._picture(self.view, ended=ended)
        if text == self._text:
            return False
        async with self._fresh:
            self._text = text
            self._number += 1
            self._fresh.notify_all()
        return True

    async def _events(self, request: web.Request) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        if len(self._pages) >= (MAX_SHARED if self._shared else MAX_PAGES):
            gone = self._most_crowded()
            del self._pages[gone]
            gone.cancel()
        self._pages[task] = request.remote or ""
        try:
            response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
            await response.prepare(request)
            assert request.transport is not None
            request.transport.set_write_buffer_limits(0)  # written: the system has it all
            seen = 0
            while True:
                async with self._fresh:
                    while self._number == seen:
                        await self._fresh.wait()
                    seen = self._number
                    text = self._text
                await asyncio.wait_for(response.write(f"data: {text}\n\n".encode()), READ_S)
        except (TimeoutError, ConnectionError):
            return response
        finally:
            self._pages.pop(task, None)
            if request.transport is not None:
                request.transport.abort()  # what waits to be taken would keep it open

    def _most_crowded(self) -> asyncio.Task[object]:
        """Return the stream that gives way to a new one: the oldest of the address range, and there
        of the address, with most.
        """
        hosts = self._pages.values()
        crowded = Counter(map(range_of, hosts)).most_common(1)[0][0]
        host = Counter(host for host in hosts if range_of(host) == crowded).most_common(1)[0][0]
        return next(task for task, other in self._pages.items() if other == host)


def serve(page: Page, place: Address, seconds: float | None, say: Callable[[str], None]) -> None:
    """Serve the page until a live source ends or time is up; pass its address to ``say``.

    WatchError if the port is taken.
    """

    async def main() -> None:
        # What is no request is no fault of this program, and so no line of its log.
        server_logger.addFilter(
            lambda record: not isinstance((record.exc_info or (None, None))[1], HttpProcessingError)
        )
        runner = web.AppRunner(page.app(), access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            open: Counter[str] = Counter()
            server = runner.server
            loop = asyncio.get_running_loop()
            assert server is not None  # it is there once the runner is set up
            try:
                site = await loop.create_server(
                    lambda: _Gate(server(), open), place.host, place.port
                )
            except OSError as error:
                what = error.strerror or "unknown reason"
                raise WatchError(
                    f"Cannot serve the page on port {place.port} ({what}): choose another with "
                    "--web."
                ) from None
            say(f"http://{place._replace(port=site.sockets[0].getsockname()[1])}/")
            end = None if seconds is None else time.monotonic() + seconds
            await page.keep(lambda: end is not None and time.monotonic() >= end)
            site.close()
        finally:
            await runner.cleanup()

    asyncio.run(main())
