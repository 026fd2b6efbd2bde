"""Page for Prometheus: ``http://HOST:PORT/metrics``, served from a thread, whatever the training does."""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import threading
from collections import Counter
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler

from shoal.node.config.endpoint import Address
from shoal.node.metrics.catalogue import Fields
from shoal.node.metrics.gauges import Gauges
from shoal.node.metrics.sink import About, MetricsError
from shoal.swarm.p2p.multiaddr import host_asked, is_loopback_host, range_of

MOST_CALLERS, MOST_OF_RANGE = 32, 8  # connections at a time, of all and of one address range; further ones are closed
CALL_S = 10.0  # seconds for which a caller may stay, whatever it sends or reads meanwhile
POLL_S = 0.05  # seconds between two checks for the end


class _Handler(MetricsHandler):
    timeout = CALL_S

    def do_GET(self) -> None:
        """Answer, but on loopback for no other host's name: a web site elsewhere may let its own point to this machine."""
        name = host_asked(self.headers.get("Host", ""))  # none: that caller is no browser
        own = str(self.server.server_address[0])  # type: ignore[index]
        if name and is_loopback_host(own) and not is_loopback_host(name):
            self.send_error(403, "Open this page under http://127.0.0.1 or http://localhost.")
        else:
            super().do_GET()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False  # newer Pythons set it, and a taken port would go unnoticed
    request_queue_size = 128

    def __init__(self, family: socket.AddressFamily, place: tuple[Any, ...], handler: type[MetricsHandler]) -> None:
        self.address_family = family
        self._callers, self._lock = Counter[str](), threading.Lock()
        super().__init__(place, handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's looks up this machine's name on the network
        self.server_port = int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        where = range_of(client_address[0])
        with self._lock:
            free = self._callers.total() < MOST_CALLERS and self._callers[where] < MOST_OF_RANGE
            self._callers[where] += free
        if free:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        late = threading.Timer(CALL_S, self._hang_up, [request])
        late.daemon = True
        late.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            with self._lock:
                self._callers[range_of(client_address[0])] -= 1
                self._callers += Counter()  # without those that have none

    def _hang_up(self, request: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has ended just now
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a caller that hangs up is no fault of this node."""


def bind(address: Address, handler: type[MetricsHandler] = _Handler) -> _Server:
    """Return a server that holds the port. MetricsError: it is taken, or this machine has no such address."""
    try:
        family, _, _, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return _Server(family, place, handler)
    except (OSError, UnicodeError) as error:
        raise MetricsError(f"Cannot serve metrics on {address}: {_problem(error)}.") from error


def _problem(error: OSError | UnicodeError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return "the port is taken by another program, choose another with --metrics or stop that program"
    if number == errno.EACCES:
        return "ports below 1024 need root, choose a higher one with --metrics"
    if number == errno.EADDRNOTAVAIL or isinstance(error, (socket.gaierror, UnicodeError)):
        return "this machine has no such address, choose 0.0.0.0:PORT for all it has, or PORT for itself alone"
    return f"{getattr(error, 'strerror', None) or error}, choose another address with --metrics"


class Endpoint:
    """Sink that serves the newest values. MetricsError: the port is not available."""

    name = "Prometheus"

    def __init__(self, address: Address) -> None:
        registry = CollectorRegistry()
        self._board = Gauges()
        registry.register(self._board)
        self._server = bind(address, type("Handler", (_Handler,), {"registry": registry}))
        self.address = Address(address.host, self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True)
        self._thread.start()

    def begin(self, about: About) -> str:
        """Return a sentence with the address."""
        self._board.begin(about)
        return f"metrics for Prometheus: http://{self.address}/metrics"

    def event(self, name: str, time: float, fields: Fields) -> None:
        """Store the values of an event."""
        self._board.event(name, fields)

    def close(self) -> None:
        """Free the port."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
