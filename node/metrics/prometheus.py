"""Sink for Prometheus: takes the node's events (`shoal.node.metrics.sinks`), keeps the newest value
of each of `MEASURES`, and serves them from a thread as a page, ``http://HOST:PORT/metrics``.

docs/metrics.md holds the same table, and a test compares them. Unlike prometheus_client's server
this one limits connections and their time. A node without ``--metrics`` does not load this file.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from typing import Any, Literal, NamedTuple

import prometheus_client as prometheus
from prometheus_client.exposition import MetricsHandler

from shoal.node.listen_address import Address
from shoal.node.metrics.log import About, Fields, MetricsError, number
from shoal.swarm.p2p.addresses import host_asked, is_loopback_host, range_of

COMMON_LABELS = ("swarm", "node", "method")
"""Labels that every measure has; the same throughout a run."""
WAIT_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Bounds of the histogram of waiting, seconds."""
# Connections at a time, of all and of one address range; further ones are closed.
MOST_CALLERS = 32
MOST_OF_RANGE = 8
# Seconds for which a caller may stay, whatever it sends or reads meanwhile.
CALL_S = 10.0
# Seconds between two checks whether to close.
POLL_S = 0.05


class Measure(NamedTuple):
    """Measure of a number of the record (`shoal.swarm.wire.record`), or of a field of an event."""

    kind: Literal["counter", "gauge", "histogram"]
    source: str
    """``group.field``: a field of a group that an event carries, or of the event of that name. With
    ``*`` for the field each becomes a series, labelled with its name. The measure's name is made
    from it.
    """
    text: str
    labels: tuple[str, ...] = ()
    """Labels besides those of all measures; those of `INFO` are attributes of `About`."""

    @property
    def name(self) -> str:
        """The source with Prometheus's words for units: ``round.wait_s`` is
        ``shoal_round_wait_seconds``.
        """
        name = "shoal_" + self.source.removesuffix(".*").replace(".", "_")
        name = re.sub("_per_s$", "_per_second", name)
        name = re.sub("_s$", "_seconds", name)
        return f"{name}_total" if self.kind == "counter" else name


INFO = Measure(
    "gauge",
    "info",
    "Always 1; says who this is.",
    labels=("peer", "swarm_id", "task", "device", "version"),
)
MEASURES = (
    INFO,
    Measure("counter", "progress.step", "Inner steps done, with those before a resume."),
    Measure("counter", "progress.tokens", "Tokens trained on, with those before a resume."),
    Measure(
        "gauge",
        "progress.steps_per_s",
        "Inner steps recently, without what was spent waiting for others.",
    ),
    Measure(
        "gauge",
        "progress.tokens_per_s",
        "Tokens recently, without what was spent waiting for others.",
    ),
    Measure(
        "gauge",
        "progress.mfu",
        "Recently, without waiting: the share, of 1, of the GPU's published peak; nowhere if that "
        "is not known.",
    ),
    Measure("gauge", "progress.members", "Members of the swarm in view, with this node."),
    Measure("gauge", "progress.round", "Number of the swarm's exchange that comes next."),
    Measure(
        "gauge",
        "loss.training",
        "Training loss of the last half second or step, nats; rl: of the policy.",
    ),
    Measure("gauge", "loss.held_out", "Held-out loss, nats; rl: one less the mean reward."),
    Measure(
        "counter", "exchanges.ended", "Exchanges that ended: in a round one for each fragment."
    ),
    Measure("counter", "exchanges.with_partner", "Those in which a partner's contribution is."),
    Measure("counter", "exchanges.without_partner", "Those in which nobody answered."),
    Measure("counter", "exchanges.failed", "Those that an error of the node's own code ended."),
    Measure("counter", "exchanges.late", "Those whose mean came after its lag."),
    Measure(
        "gauge",
        "exchanges.lag_steps",
        "Inner steps that training goes on during an exchange; 0: it waits.",
    ),
    Measure("gauge", "round.members", "Nodes in the last exchange's mean; 1 when nobody answered."),
    Measure(
        "histogram",
        "round.wait_s",
        "For how long training stood still for the network in an exchange.",
    ),
    Measure("counter", "link.bytes_sent", "Bytes sent to peers since the node started."),
    Measure("counter", "link.bytes_received", "Bytes received from peers since the node started."),
    Measure(
        "counter",
        "faults.contributions_refused",
        "Contributions refused because they lay too far away.",
    ),
    Measure(
        "counter", "faults.daemon_restarts", "How often the network daemon had to be started again."
    ),
    Measure(
        "gauge",
        "faults.missing",
        "Members that are thought to be behind a partition of the network.",
    ),
    Measure(
        "counter",
        "refused.*",
        "Streams, calls and gossiped records of others that were refused, by reason.",
        labels=("reason",),
    ),
    Measure(
        "counter",
        "internal_errors.*",
        "Errors of the node's own code that it survived, by place.",
        labels=("place",),
    ),
    Measure(
        "gauge", "rollouts.reward", "rl: mean reward of the own completions in the last update."
    ),
    Measure(
        "counter", "rollouts.groups_own", "rl: own groups of completions that were learnt from."
    ),
    Measure("counter", "rollouts.groups_foreign", "rl: those of others that were learnt from."),
    Measure(
        "counter",
        "rollouts.groups_seen",
        "rl: groups that this node drew, or received and is done with.",
    ),
    Measure(
        "counter",
        "unused.*",
        "rl: groups of these that were of no use to it, by reason.",
        labels=("reason",),
    ),
    Measure(
        "gauge",
        "rl.worth",
        "rl: effective sample size of the last update, a completion; 1 is as good as own ones.",
    ),
    Measure("counter", "checks.claims", "verify: claims that this node made."),
    Measure("counter", "checks.checked", "verify: claims of others that this node checked."),
    Measure("counter", "checks.invalid", "verify: those of them that it found invalid."),
    Measure("gauge", "checks.banned", "verify: peers that are banned now."),
    Measure("counter", "verify.check_s", "verify: what checking took."),
)


def readings(event: str, fields: Fields) -> Iterator[tuple[Measure, float, tuple[str, ...]]]:
    """Yield measures, their values and labels from an event: of its own fields, and of the groups
    of the record that it carries.

    A field that is missing, null or no number gives none.
    """
    groups = {event: fields}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            groups[name] = value
    for measure in MEASURES:
        group, _, field = measure.source.partition(".")
        for key in groups.get(group, ()) if field == "*" else (field,):
            value = number(groups.get(group, {}).get(key))
            if value is not None:
                yield measure, value, (key,) if measure.labels else ()


class Board:
    """Newest values of all measures in ``registry``, which is empty before `begin`.

    `begin` and `event` are called in one thread; any thread may read the registry.
    """

    def __init__(self) -> None:
        # For the whole process: no series that say when a counter was made.
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = prometheus.CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self._constant: tuple[str, ...] = ()

    def begin(self, about: About) -> None:
        """Register the measures, with the labels that are the same throughout the run."""
        self._constant = tuple(getattr(about, name) for name in COMMON_LABELS)
        kinds = {
            "counter": prometheus.Counter,
            "gauge": prometheus.Gauge,
            "histogram": prometheus.Histogram,
        }
        for measure in MEASURES:
            more: dict[str, Any] = (
                {"buckets": WAIT_BUCKETS_S} if measure.kind == "histogram" else {}
            )
            labels = (*COMMON_LABELS, *measure.labels)
            made = kinds[measure.kind](
                measure.name, measure.text, labels, registry=self.registry, **more
            )
            self._metrics[measure.name] = made
        self._metrics[INFO.name].labels(
            *self._constant, *(getattr(about, name) for name in INFO.labels)
        ).set(1)

    def event(self, name: str, fields: Fields) -> None:
        """Take the values of an event; before `begin`, when the labels are not known, none.

        A field of a counter holds a total; one that is less than before is not counted.
        """
        for measure, value, labels in readings(name, fields) if self._metrics else ():
            metric = self._metrics[measure.name].labels(*self._constant, *labels)
            if measure.kind == "gauge":
                metric.set(value)
            elif measure.kind == "histogram":
                metric.observe(value)
            else:
                before = self._totals.get((measure.name, labels), 0.0)
                now = max(before, value)
                self._totals[measure.name, labels] = now
                metric.inc(now - before)


class _Handler(MetricsHandler):
    timeout = CALL_S

    def do_GET(self) -> None:
        """Answer; on loopback only if asked by a name of loopback, for a web site may let a name of
        its own point to this machine (DNS rebinding).
        """
        # Empty: the caller is no browser.
        name = host_asked(self.headers.get("Host", ""))
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

    def __init__(
        self, family: socket.AddressFamily, place: tuple[Any, ...], handler: type[MetricsHandler]
    ) -> None:
        self.address_family = family
        self._callers = Counter[str]()
        self._lock = threading.Lock()
        super().__init__(place, handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which looks up this machine's name on the network.
        socketserver.TCPServer.server_bind(self)
        self.server_port = int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        address_range = range_of(client_address[0])
        with self._lock:
            of_range = self._callers[address_range]
            admitted = self._callers.total() < MOST_CALLERS and of_range < MOST_OF_RANGE
            if admitted:
                self._callers[address_range] += 1
        if not admitted:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread could be started for it.
            self._free(client_address)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        late = threading.Timer(CALL_S, self._hang_up, [request])
        late.daemon = True
        try:
            late.start()
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            self._free(client_address)

    def _free(self, client_address: Any) -> None:
        with self._lock:
            self._callers[range_of(client_address[0])] -= 1
            # Drops the ranges without a caller.
            self._callers += Counter()

    def _hang_up(self, request: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has ended just now
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a caller that hangs up is no fault of this node."""


def _problem(error: OSError | UnicodeError) -> str:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return (
            "the port is taken by another program, choose another with --metrics or stop that "
            "program"
        )
    if code == errno.EACCES:
        return "ports below 1024 need root, choose a higher one with --metrics"
    if code == errno.EADDRNOTAVAIL or isinstance(error, (socket.gaierror, UnicodeError)):
        return (
            "this machine has no such address, choose 0.0.0.0:PORT for all it has, or PORT for "
            "itself alone"
        )
    return f"{getattr(error, 'strerror', None) or error}, choose another address with --metrics"


class Endpoint:
    """Sink that serves the newest values: it listens from now on, with an empty page until `begin`.

    Raises:
        MetricsError: it cannot listen, as the port is taken or this machine has no such address.
    """

    name = "Prometheus"

    def __init__(self, address: Address) -> None:
        self._board = Board()
        try:
            found = socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, *_, place = found[0]
            self._server = _Server(family, place, _Handler.factory(self._board.registry))
        except (OSError, UnicodeError) as error:
            raise MetricsError(f"Cannot serve metrics on {address}: {_problem(error)}.") from error
        self.address = Address(address.host, self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def begin(self, about: About) -> str:
        self._board.begin(about)
        return f"metrics for Prometheus: http://{self.address}/metrics"

    def event(self, name: str, time: float, fields: Fields) -> None:
        self._board.event(name, fields)

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
