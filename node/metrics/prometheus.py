"""Sink for Prometheus: the table of measures, and the page ``http://HOST:PORT/metrics``, served
from a thread.

docs/metrics.md holds the same table, and a test compares them. The server bounds its callers, as
prometheus_client's own does not. A file of its own, for a node without the page loads no
prometheus_client.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any, Literal, NamedTuple

import prometheus_client as prometheus
from prometheus_client.exposition import MetricsHandler

from shoal.node.console import Address
from shoal.node.metrics.log import About, Fields, MetricsError, number
from shoal.swarm.p2p.addresses import host_asked, is_loopback_host, range_of

CONSTANT = ("swarm", "node", "method")
"""Labels that every measure has; the same throughout a run."""
WAITS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Bounds of the histogram of waiting, seconds."""
MOST_CALLERS, MOST_OF_RANGE = (
    32,
    8,
)  # connections at a time, of all and of one address range; further ones are closed
CALL_S = 10.0  # seconds for which a caller may stay, whatever it sends or reads meanwhile
POLL_S = 0.05  # seconds between two checks for the end


class Measure(NamedTuple):
    """Measure with one name in Prometheus."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    takes: str = ""
    """Fields of events that it is set to, as ``event.field``.

    With a label, the label's value is the field's name; ``*``: each.
    """
    adds: bool = False
    """Of a counter: the value is added, and not the total."""
    labels: tuple[str, ...] = ()
    """Labels besides those of all measures."""


INFO = Measure(
    "shoal_info",
    "gauge",
    "Always 1; says who this is.",
    labels=("peer", "swarm_id", "task", "device", "version"),
)
ROUNDS = Measure(
    "shoal_rounds_total",
    "counter",
    "Exchanges that ended: in a round one for each fragment.",
    adds=True,
)
ALONE = Measure(
    "shoal_rounds_alone_total", "counter", "Exchanges of those in which nobody answered.", adds=True
)
LATE = Measure(
    "shoal_rounds_late_total",
    "counter",
    "Exchanges of those whose mean came after its lag.",
    adds=True,
)
MEASURES = (
    INFO,
    Measure(
        "shoal_inner_steps_total",
        "counter",
        "Inner steps done, with those before a resume.",
        "progress.step round.step end.steps",
    ),
    Measure(
        "shoal_inner_steps_per_second",
        "gauge",
        "Recently, without what was spent waiting for others.",
        "progress.steps_per_s",
    ),
    Measure(
        "shoal_tokens_total",
        "counter",
        "Tokens trained on, with those before a resume.",
        "progress.tokens round.tokens",
    ),
    Measure(
        "shoal_tokens_per_second",
        "gauge",
        "Recently, without what was spent waiting for others.",
        "progress.tokens_per_s end.tokens_per_s",
    ),
    Measure(
        "shoal_model_flops_utilisation",
        "gauge",
        "Recently, without waiting: the share, of 1, of the GPU's published peak; nowhere if that "
        "is not known.",
        "progress.mfu end.mfu",
    ),
    Measure(
        "shoal_loss",
        "gauge",
        "Training loss of the last half second or step, nats; rl: of the policy.",
        "progress.loss",
    ),
    Measure(
        "shoal_evaluation_loss",
        "gauge",
        "Held-out loss; rl: one less the mean reward.",
        "start.loss_first evaluation.loss end.loss_last",
    ),
    Measure(
        "shoal_members",
        "gauge",
        "Members of the swarm in view, with this node.",
        "progress.members",
    ),
    Measure("shoal_round", "gauge", "Number of the exchange that ended last.", "round.round"),
    ROUNDS,
    ALONE,
    LATE,
    Measure(
        "shoal_lag_steps",
        "gauge",
        "Inner steps that training goes on during an exchange; 0: it waits.",
        "progress.lag",
    ),
    Measure(
        "shoal_round_members",
        "gauge",
        "Nodes in the last exchange's mean; 1 when nobody answered.",
        "round.members",
    ),
    Measure(
        "shoal_round_wait_seconds",
        "histogram",
        "For how long training stood still for the network in an exchange.",
        "round.wait_s",
    ),
    Measure(
        "shoal_bytes_sent_total",
        "counter",
        "Bytes sent to peers since the node started.",
        "progress.bytes_sent end.bytes_sent",
    ),
    Measure(
        "shoal_bytes_received_total",
        "counter",
        "Bytes received from peers since the node started.",
        "progress.bytes_received end.bytes_received",
    ),
    Measure(
        "shoal_suspicious_total",
        "counter",
        "Contributions refused because they lay too far away.",
        "round.suspicious",
        adds=True,
    ),
    Measure(
        "shoal_refused_total",
        "counter",
        "Streams, calls and gossiped records of others that were refused, by reason.",
        "refused.*",
        labels=("reason",),
    ),
    Measure(
        "shoal_internal_errors_total",
        "counter",
        "Errors of the node's own code that it survived, by place.",
        "internal.*",
        labels=("place",),
    ),
    Measure(
        "shoal_missing_members",
        "gauge",
        "Members that are thought to be behind a partition of the network.",
        "partition.missing",
    ),
    Measure(
        "shoal_daemon_restarts_total",
        "counter",
        "How often the network daemon had to be started again.",
        "progress.restarts end.restarts",
    ),
    Measure(
        "shoal_reward", "gauge", "rl: mean reward of the last round's own completions.", "rl.reward"
    ),
    Measure(
        "shoal_effective_sample_size",
        "gauge",
        "rl: of the last round, a completion; 1 is as good as own ones.",
        "rl.worth",
    ),
    Measure(
        "shoal_rollout_groups_total",
        "counter",
        "rl: groups of completions learnt from, by who wrote them: own or foreign.",
        "rl.own rl.foreign",
        adds=True,
        labels=("source",),
    ),
    Measure(
        "shoal_claims_total", "counter", "verify: claims that this node made.", "checks.claims"
    ),
    Measure(
        "shoal_checks_total",
        "counter",
        "verify: claims of others that this node checked.",
        "checks.checked",
    ),
    Measure(
        "shoal_invalid_claims_total",
        "counter",
        "verify: those of them that it found invalid.",
        "checks.invalid",
    ),
    Measure(
        "shoal_check_seconds_total", "counter", "verify: what checking took.", "verify.check_s"
    ),
    Measure("shoal_banned_peers", "gauge", "verify: peers that are banned now.", "verify.banned"),
)


def readings(event: str, fields: Fields) -> Iterator[tuple[Measure, float, tuple[str, ...]]]:
    """Yield measures, their values and labels from an event.

    A field that is missing, null or no number gives none.
    """
    for measure in MEASURES:
        for where, _, name in (place.partition(".") for place in measure.takes.split()):
            for key in () if where != event else fields if name == "*" else (name,):
                if (value := number(fields.get(key))) is not None:
                    yield measure, value, (key,) if measure.labels else ()
    if event == "round":
        yield ROUNDS, 1.0, ()
        yield ALONE, float(fields.get("partner") is None), ()
        yield LATE, float(fields.get("late") is True), ()


class Board:
    """Newest values of all measures in ``registry``, which has none before `begin`.

    Any thread may collect them.
    """

    def __init__(self) -> None:
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = prometheus.CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self._constant: tuple[str, ...] = ()

    def begin(self, about: About) -> None:
        """Register the measures, with the labels that are the same throughout the run."""
        self._constant = tuple(getattr(about, name) for name in CONSTANT)
        kinds = {
            "counter": prometheus.Counter,
            "gauge": prometheus.Gauge,
            "histogram": prometheus.Histogram,
        }
        for measure in MEASURES:
            more: dict[str, Any] = {"buckets": WAITS} if measure.kind == "histogram" else {}
            labels = (*CONSTANT, *measure.labels)
            made = kinds[measure.kind](
                measure.name, measure.text, labels, registry=self.registry, **more
            )
            self._metrics[measure.name] = made
        self._metrics[INFO.name].labels(
            *self._constant, *(getattr(about, name) for name in INFO.labels)
        ).set(1)

    def event(self, name: str, fields: Fields) -> None:
        """Take the values of an event; before `begin` there is nobody whose they are."""
        for measure, value, labels in readings(name, fields) if self._metrics else ():
            metric = self._metrics[measure.name].labels(*self._constant, *labels)
            if measure.kind == "gauge":
                metric.set(value)
            elif measure.kind == "histogram":
                metric.observe(value)
            else:
                before = self._totals.get((measure.name, labels), 0.0)
                self._totals[measure.name, labels] = now = (
                    before + value if measure.adds else max(before, value)
                )
                metric.inc(now - before)


class _Handler(MetricsHandler):
    timeout = CALL_S

    def do_GET(self) -> None:
        """Answer, but on loopback for no other host's name: a web site elsewhere may let its own
        point to this machine.
        """
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

    def __init__(
        self, family: socket.AddressFamily, place: tuple[Any, ...], handler: type[MetricsHandler]
    ) -> None:
        self.address_family = family
        self._callers = Counter[str]()
        self._lock = threading.Lock()
        super().__init__(place, handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(
            self
        )  # HTTPServer's looks up this machine's name on the network
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


def _problem(error: OSError | UnicodeError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return (
            "the port is taken by another program, choose another with --metrics or stop that "
            "program"
        )
    if number == errno.EACCES:
        return "ports below 1024 need root, choose a higher one with --metrics"
    if number == errno.EADDRNOTAVAIL or isinstance(error, (socket.gaierror, UnicodeError)):
        return (
            "this machine has no such address, choose 0.0.0.0:PORT for all it has, or PORT for "
            "itself alone"
        )
    return f"{getattr(error, 'strerror', None) or error}, choose another address with --metrics"


class Endpoint:
    """Sink that serves the newest values.

    MetricsError: the port is taken, or this machine has no such address.
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
