"""The page of ``shoal watch --web``: its files, the stream of pictures, and who may not look."""

import asyncio
import json
import queue
import re
from types import SimpleNamespace

import pytest

from shoal.node.watch.events import Described, MessageRefused, Unreachable, WatchError
from shoal.node.watch.source import Recorder
from shoal.node.watch.swarm_view import SwarmView
from shoal.swarm.access.link import Link
from tests.support.watched_peers import NOW, SWARM, Source

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from aiohttp import ClientPayloadError
from aiohttp.test_utils import TestClient, TestServer

from shoal.node.watch import source as source_module
from shoal.node.watch import web
from shoal.node.watch.web import LINES, POINTS, ROWS, page_data

PAGES = []  # the one that `gated` serves


def with_page(work, events=(), live=False, link=None, **options):
    """Run ``work(client, page, inbox, source)`` against the served page."""

    async def main():
        inbox, source = queue.Queue(), Source()
        for event in events:
            inbox.put(event)
        page = web.Page(inbox, source, live=live, link=link, **options)
        async with TestClient(TestServer(page.app())) as client:
            await asyncio.wait_for(work(client, page, inbox, source), 30)

    asyncio.run(main())


async def pictured(response):
    """The next picture of the stream."""
    line = await response.content.readline()
    await response.content.readline()
    return json.loads(line.removeprefix(b"data: "))


def test_its_files_are_served_and_ask_nobody_else():
    async def work(client, page, inbox, source):
        for name, kind in web.KINDS.items():
            response = await client.get(f"/{'' if name == web.INDEX else name}")
            assert (response.status, response.content_type) == (200, kind)
            assert response.headers["Content-Security-Policy"].startswith("default-src 'self'")
            text = await response.text()
            assert set(re.findall(r"https?://[^\"' ]+", text)) <= {
                "http://www.w3.org/2000/svg",
                "https://github.com/leeoniya/uPlot",
            }
            assert "innerHTML" not in text
        assert (await client.get("/../web.py")).status == 404

    with_page(work)


def test_page_may_have_a_link_never_an_invitation(authors):
    """A link is on the page if it is to be and an invitation never."""
    address = f"/ip4/198.51.100.7/tcp/4001/p2p/{authors[0].peer}"
    given = Link(SWARM, (address,), "secret")

    async def work(client, page, inbox, source):
        await page.step()
        text = await (await client.get("/")).text()
        assert (address in text) is shown
        assert "secret" not in text
        shot = await pictured(await client.get("/events"))
        assert (shot["link"] is None) is not shown
        if shown:
            assert Link.parse(shot["link"]["text"]) == Link(SWARM, (address,))

    for shown in (True, False):
        with_page(work, live=True, link=given if shown else None)


def test_another_name_for_this_machine_is_refused():
    async def work(client, page, inbox, source):
        assert (await client.get("/", headers={"Host": "evil.example:80"})).status == 403
        assert (await client.get("/", headers={"Host": "localhost:1"})).status == 200

    with_page(work)


def test_pictures_are_streamed_when_something_changed(authors):
    anna, bert, _ = authors
    events = [
        Described(time=NOW, name="first", task="text", method="noloco"),
        anna.heard(anna.round(0, [bert]), name="<b>anna</b>"),
        MessageRefused(time=NOW, reason="forged"),
    ]

    async def work(client, page, inbox, source):
        assert await page.step()
        assert not await page.step()
        first = re.search(
            r'<script id="first" type="application/json">([^<]*)</script>',
            await (await client.get("/")).text(),
        )
        assert json.loads(first[1])["peers"][0]["name"] == "<b>anna</b>"
        response = await client.get("/events")
        assert response.content_type == "text/event-stream"
        shown = await pictured(response)
        assert [peer["name"] for peer in shown["peers"]] == ["<b>anna</b>"]
        assert (shown["totals"]["refused"], shown["ended"]) == (1, False)
        inbox.put(bert.heard(bert.round(0, [anna])))
        assert await page.step()
        assert len((await pictured(response))["peers"]) == 2
        source.ended.set()
        assert await page.step()
        assert (await pictured(response))["ended"] is True
        response.close()

    with_page(work, events)


def test_a_further_viewer_takes_the_place_of_the_oldest(monkeypatch):
    """It was refused, so that streams that nobody reads shut everybody else out."""
    monkeypatch.setattr(web, "MAX_PAGES", 2)

    async def work(client, page, inbox, source):
        await page.step()
        streams = [await client.get("/events") for _ in range(3)]
        for stream in streams:
            assert stream.status == 200
            await pictured(stream)
        with pytest.raises(ClientPayloadError):
            await streams[0].content.read()
        assert len(page._pages) == 2
        for stream in streams:
            stream.close()

    with_page(work)


def test_crowded_address_gives_way():
    """The most crowded address of the most crowded range gives way."""
    page = web.Page(queue.Queue(), Source(), live=False)
    hosts = ["10.1.0.1", "10.2.0.1", "10.2.0.2", "10.2.0.1", "10.1.0.1", "10.2.0.3", "10.3.0.1"]
    page._pages = dict(enumerate(hosts))
    assert page._most_crowded() == 1
    page._pages = {0: "10.3.0.1", 1: "10.3.0.1", 2: "10.1.0.1", 3: "10.1.0.2", 4: "10.1.0.3"}
    assert page._most_crowded() == 2


def test_a_viewer_that_takes_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(web, "SENT", 4096)

    async def work(port, open):
        _, writer = await asyncio.open_connection(web.HERE, port, limit=1024)
        writer.transport.pause_reading()
        writer.write(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        while not PAGES[0]._pages:
            await asyncio.sleep(0)
        while PAGES[0]._pages:
            async with PAGES[0]._fresh:
                PAGES[0]._text = "x" * 1_000_000
                PAGES[0]._number += 1
                PAGES[0]._fresh.notify_all()
            await asyncio.sleep(0)
        while open.total():
            await asyncio.sleep(0)
        writer.close()

    gated(work, monkeypatch, READ_S=0.2)


def test_it_ends_when_a_live_source_does():
    async def work(client, page, inbox, source):
        source.ended.set()
        await page.keep(lambda: False)

    with_page(work, live=True)


def test_the_picture_of_a_large_swarm_is_bounded(authors):
    anna, *_ = authors
    view = SwarmView()
    for number in range(500):
        view.take(anna.heard(anna.round(number), at=NOW + number))
    assert len(page_data(view, ended=False)["charts"]["loss"]["x"]) == POINTS
    view.peers.update({f"{number}": view.peers[anna.peer] for number in range(2 * ROWS)})
    shown = page_data(view, ended=False)
    assert (len(shown["peers"]), len(shown["charts"]["loss"]["each"])) == (ROWS, LINES)
    assert shown["charts"]["loss"]["x"][-1] == 499


def test_shared_page_has_no_addresses(authors):
    """A shared page is read under any name and has no addresses."""
    events = [
        Unreachable(
            time=NOW,
            peer=authors[0].peer,
            reason="nobody answers as this peer at /ip4/198.51.100.7/tcp/4001",
        )
    ]

    async def work(client, page, inbox, source):
        await page.step()
        response = await client.get("/", headers={"Host": "swarm.example:80"})
        assert response.status == 200
        assert "198.51.100.7" not in await response.text()
        assert (await client.post("/events")).status == 405
        assert (await client.get("/at?time=1")).status == 404

    with_page(work, events, shared=True)


def test_replay_shows_the_events_so_far(authors, tmp_path, monkeypatch):
    """The picture at a time of a recording is that of its events so far."""
    monkeypatch.setattr(source_module, "KEPT_EACH", 3)
    anna, bert, _ = authors
    recorder = Recorder(tmp_path / "swarm.jsonl")
    for number in range(20):
        recorder.take((anna if number % 2 else bert).heard(anna.round(number), at=NOW + number))
    recorder.close()
    whole = source_module.Timeline(tmp_path / "swarm.jsonl")
    assert whole.span == (NOW, NOW + 19)

    async def work(client, page, inbox, source):
        for time, rounds in ((4.5, [3, 4]), (19, [19, 18]), (2, [1, 2]), (12, [11, 12]), (-1, [])):
            shown = await (await client.get(f"/at?time={NOW + time}")).json()
            assert [peer["round"] for peer in shown["peers"]] == rounds
            assert (shown["ended"], shown["span"]) == (time == 19, [NOW, NOW + 19])
        assert (await client.get("/at?time=now")).status == 400
        monkeypatch.setattr(web, "MAX_ASKED", 0)
        assert (await client.get("/at?time=1")).status == 503

    with_page(work, timeline=whole)


def test_a_taken_port_is_one_sentence():
    async def taken():
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        page = web.Page(queue.Queue(), Source(), live=True)
        with pytest.raises(
            WatchError, match=f"Cannot serve the page on port {port} .*choose another"
        ):
            await asyncio.to_thread(web.serve, page, web.Address(web.HERE, port), 1, print)
        server.close()

    asyncio.run(taken())


def test_its_address_is_told():
    said, source = [], Source()
    source.ended.set()
    web.serve(
        web.Page(queue.Queue(), source, live=True), web.Address(web.HERE, 0), None, said.append
    )
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", said[0])


def gated(work, monkeypatch, **limits):
    """Run ``work(port)`` against the page behind its gate, with ``limits`` in place of its own."""
    for name, limit in limits.items():
        monkeypatch.setattr(web, name, limit)

    async def main():
        page = web.Page(queue.Queue(), Source(), live=False)
        PAGES[:] = [page]
        runner, open = web.web.AppRunner(page.app(), access_log=None), web.Counter()
        await runner.setup()
        site = await asyncio.get_running_loop().create_server(
            lambda: web._Gate(runner.server(), open), web.HERE, 0
        )
        try:
            await asyncio.wait_for(work(site.sockets[0].getsockname()[1], open), 30)
        finally:
            site.close()
            await runner.cleanup()

    asyncio.run(main())


async def fetched(port):
    """The first line of the answer to a request for the page; nothing if the connection was
    refused.
    """
    reader, writer = await asyncio.open_connection(web.HERE, port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        return await reader.readline()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_half_requests_end_and_leave_room_for_whole_ones(monkeypatch):
    """1,100 of them ended the process for want of descriptors."""

    async def work(port, open):
        half = [await asyncio.open_connection(web.HERE, port) for _ in range(4)]
        for _, writer in half:
            writer.write(b"GET / HTTP/1.1\r\nHost: ")
        assert await fetched(port) == b""  # the fifth of four
        for reader, _ in half:
            assert await reader.read() == b""  # ended by the server, as its time was up
        while open.total():
            await asyncio.sleep(0)
        assert await fetched(port) == b"HTTP/1.1 200 OK\r\n"
        for _, writer in half:
            writer.close()

    gated(work, monkeypatch, MAX_CONNECTIONS=4, HEADERS_S=0.3)


def test_a_connection_that_goes_on_asking_stays(monkeypatch):
    async def work(port, open):
        reader, writer = await asyncio.open_connection(web.HERE, port)
        for _ in range(3):
            for part in (b"GET /style.css HTTP/1.1\r\n", b"Host: 127.0.0.1\r\n\r\n"):
                writer.write(part)
                await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", head)[1]))
        writer.close()

    gated(work, monkeypatch)


def test_a_crowded_range_leaves_connections_to_others(monkeypatch):
    monkeypatch.setattr(
        web.ipaddress, "ip_address", lambda host: SimpleNamespace(is_loopback=False)
    )

    async def work(port, open):
        held = [
            await asyncio.open_connection(web.HERE, port, local_addr=(f"127.5.0.{n}", 0))
            for n in range(1, 9)
        ]
        assert await fetched(port) == b"HTTP/1.1 200 OK\r\n"
        assert open.total() <= 5
        for _, writer in held:
            writer.close()

    gated(
        work,
        monkeypatch,
        MAX_CONNECTIONS=6,
        MAX_OF_RANGE=4,
        range_of=lambda host: host.rpartition(".")[0],
    )


def test_a_header_without_an_end_is_cut_off(monkeypatch):
    async def work(port, open):
        reader, writer = await asyncio.open_connection(web.HERE, port)
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"x" * 4096)
        while await reader.read(4096):
            pass
        writer.close()

    gated(work, monkeypatch, LONGEST_HEADER=1024, HEADERS_S=3600.0)
