"""What events mean as numbers, docs/metrics.md, and what Prometheus gets over HTTP, parsed by its
own parser.
"""

import ast
import math
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse

from shoal.node.listen_address import Address, parse_address
from shoal.node.metrics.log import About, MetricsError, RoundRecord
from shoal.node.metrics.prometheus import (
    MEASURES,
    MOST_OF_RANGE,
    WAIT_BUCKETS_S,
    Board,
    Endpoint,
    readings,
)
from shoal.node.metrics.sinks import PROGRESS_S, Curves
from shoal.swarm.identity import Identity
from shoal.swarm.wire.record import (
    Checks,
    Exchanges,
    Faults,
    LinkUse,
    Loss,
    NodeRecord,
    Progress,
    Rollouts,
)
from tests.support.records import GROUPS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_of_measures():
    rows = re.findall(r"^\| `(shoal_\w+)` \| (\w+) \| ?(.*?) ?\| (.+) \|$", PAGE, re.M)
    found = [
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)), text)
        for name, kind, labels, text in rows
    ]
    assert found == [(m.name, m.kind, m.labels, m.text) for m in MEASURES]


def test_the_page_names_measures_that_there_are():
    known = {m.name for m in MEASURES} | {
        f"{m.name}{end}" for m in MEASURES if m.kind == "histogram" for end in ("_sum", "_count")
    }
    assert set(re.findall(r"\bshoal_\w+", PAGE)) <= known


def written():
    """The names of events that the code writes, and the fields that it names there."""
    for file in (ROOT / "node").rglob("*.py"):
        for item in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(item, ast.Call) and item.args and isinstance(item.args[0], ast.Constant):
                called = getattr(item.func, "attr", getattr(item.func, "id", ""))
                if (
                    called in ("write", "_write", "_note", "note")
                    and isinstance(item.args[0].value, str)
                    and item.keywords
                ):
                    yield (
                        item.args[0].value,
                        [keyword.arg for keyword in item.keywords if keyword.arg],
                    )


def test_the_page_has_every_event_with_its_fields():
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", PAGE, re.M))
    found = list(written())
    assert {name for name, _ in found} | {"round"} == set(rows)
    for name, fields in [*found, ("round", list(RoundRecord.model_fields))]:
        assert [field for field in fields if f"`{field}`" not in rows[name]] == []


def test_names_are_as_prometheus_wants_them():
    names = [measure.name for measure in MEASURES]
    assert len(set(names)) == len(names)
    for measure in MEASURES:
        assert re.fullmatch(r"shoal(_[a-z]+)+", measure.name)
        assert (measure.kind == "counter") == measure.name.endswith("_total"), measure.name
        assert measure.text.endswith(".")


@given(
    st.sampled_from(["start", "round", "evaluation", "rl", "end"]),
    st.dictionaries(
        st.sampled_from(["round", "step", "loss", "partner", "own", "foreign", "banned", "x"]),
        st.sampled_from([None, True, "bob", [], [1, 2], (3,), {"a": 1}]) | st.floats(),
    ),
)
def test_no_value_that_is_no_number(event, fields):
    assert all(math.isfinite(value) for _, value, _ in readings(event, fields))
    step, points = Curves().points(event, 1.0, fields)
    assert isinstance(step, int)
    assert all(math.isfinite(value) and name.count("/") == 1 for name, value in points.items())


def test_curves_lie_at_inner_steps():
    curves = Curves()
    start = {"progress": {"step": 40}, "loss": {"held_out": 5.0}, "interrupted": False}
    assert curves.points("start", 0.0, start) == (40, {"evaluation/held_out": 5.0})
    assert curves.points(
        "round", 1.0, {"round": 3, "step": 60, "loss": 4.0, "partner": "bob", "wait_s": None}
    ) == (
        60,
        {"round/loss": 4.0},
    )
    assert curves.points(
        "verify", 2.0, {"round": 29_000_000, "banned": ["a", "b"], "check_s": 0.5}
    ) == (
        60,
        {"verify/banned": 2.0, "verify/check_s": 0.5},
    )
    assert curves.points("rl", 3.0, {"round": 61, "reward": 0.5}) == (61, {"rl/reward": 0.5})
    end = {"progress": {"step": 70}, "loss": {"held_out": 3.0}, "interrupted": True}
    assert curves.points("end", 4.0, end) == (70, {})


def test_progress_is_thinned():
    curves = Curves()
    found = []
    for now in range(60):
        record = {"progress": {"step": now, "mfu": 0.5}, "loss": {"training": 1.0}, "checks": None}
        found += [curves.points("progress", now / 2, record)]
    kept = [(step, points) for step, points in found if points]
    assert kept == [
        (step, {"progress/mfu": 0.5, "loss/training": 1.0}) for step in range(0, 60, 20)
    ]
    assert len(kept) == 30 / PROGRESS_S
    assert curves.points("refused", 30.0, {"rate": 2}) == (59, {"refused/rate": 2.0})


def test_measures_are_of_the_record_and_of_events():
    record = NodeRecord(
        progress=Progress(step=9, mfu=0.25), exchanges=Exchanges(ended=4, lag_auto=True)
    ).model_dump(mode="json")
    found = {measure.name: value for measure, value, _ in readings("progress", record)}
    assert found["shoal_progress_step_total"] == 9.0
    assert found["shoal_progress_mfu"] == 0.25
    assert found["shoal_exchanges_ended_total"] == 4.0
    fields = {"round": 7, "wait_s": 0.5, "late": True, "progress": record["progress"]}
    found = {measure.name: value for measure, value, _ in readings("round", fields)}
    assert found["shoal_round_wait_seconds"] == 0.5
    assert found["shoal_progress_step_total"] == 9.0


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)
def test_a_measure_of_the_record_is_in_the_record(measure):
    """Mutant: a group or a field is renamed in one of both places."""
    group, _, field = measure.source.partition(".")
    groups = {**GROUPS, "round": RoundRecord}
    if group in groups:
        assert field in groups[group].model_fields
    else:
        assert group in ("info", "refused", "internal_errors", "rl", "unused", "verify")


ABOUT = About(
    swarm='a "swarm"\\',
    swarm_id="s" * 52,
    node="anna",
    peer="12D3",
    method="noloco",
    task="text",
    device="cpu",
    version="0.1.0",
)
SAME = {"swarm": ABOUT.swarm, "node": "anna", "method": "noloco"}
ROUND = {"round": 3, "step": 75, "members": 2, "partner": "bob", "wait_s": 0.25, "loss": 2.0}
PEER = Identity.ephemeral().peer_id


@pytest.fixture
def endpoint():
    made = Endpoint(Address("127.0.0.1", 0))
    yield made
    made.close()


def get(endpoint):
    with urllib.request.urlopen(f"http://{endpoint.address}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def samples(text):
    """(name, labels besides those of all) -> value."""
    found = {}
    for family in parse(text):
        for sample in family.samples:
            assert SAME.items() <= sample.labels.items(), sample
            more = tuple(
                sorted((key, value) for key, value in sample.labels.items() if key not in SAME)
            )
            found[sample.name, more] = sample.value
    return found


def test_events_as_prometheus_sees_them(endpoint):
    assert get(endpoint).strip() == ""
    assert endpoint.begin(ABOUT) == f"metrics for Prometheus: http://{endpoint.address}/metrics"
    record = NodeRecord(
        progress=Progress(
            round=4,
            step=100,
            tokens=700,
            steps_per_s=20.0,
            tokens_per_s=200.0,
            mfu=0.25,
            members=4,
        ),
        exchanges=Exchanges(ended=2, with_partner=1, without_partner=1, late=1, lag_steps=7),
        link=LinkUse(bytes_sent=10, bytes_received=20),
        loss=Loss(training=3.0, held_out=5.5),
        faults=Faults(contributions_refused=2, missing=2),
        rollouts=Rollouts(reward=0.5, groups_own=8, groups_foreign=2, groups_seen=12),
        checks=Checks(claims=5, checked=3, invalid=1, banned=(PEER,)),
    )
    endpoint.event("progress", 1.0, record.model_dump(mode="json"))
    endpoint.event("round", 2.0, ROUND)
    endpoint.event("round", 3.0, {**ROUND, "members": 1, "wait_s": 40.0})
    endpoint.event("refused", 4.0, {"rate": 2, "denied": 1})
    endpoint.event("refused", 5.0, {"rate": 3, "denied": 1})
    endpoint.event("internal_errors", 5.0, {"codec": 2})
    endpoint.event("rl", 7.0, {"round": 100, "worth": 0.8, "unused": {"no_spread": 2}})
    endpoint.event("rl", 7.0, {"round": 101, "worth": 0.9, "unused": {"no_spread": 3}})
    endpoint.event("verify", 9.0, {"round": 29_000_000, "banned": ["x"], "check_s": 1.5})
    found = samples(get(endpoint))
    waits = {
        key: found.pop(key) for key in tuple(found) if key[0].startswith("shoal_round_wait_seconds")
    }
    assert found == {
        (
            "shoal_info",
            (
                ("device", "cpu"),
                ("peer", "12D3"),
                ("swarm_id", "s" * 52),
                ("task", "text"),
                ("version", "0.1.0"),
            ),
        ): 1.0,
        ("shoal_progress_step_total", ()): 100.0,
        ("shoal_progress_tokens_total", ()): 700.0,
        ("shoal_progress_steps_per_second", ()): 20.0,
        ("shoal_progress_tokens_per_second", ()): 200.0,
        ("shoal_progress_mfu", ()): 0.25,
        ("shoal_progress_members", ()): 4.0,
        ("shoal_progress_round", ()): 4.0,
        ("shoal_loss_training", ()): 3.0,
        ("shoal_loss_held_out", ()): 5.5,
        ("shoal_exchanges_ended_total", ()): 2.0,
        ("shoal_exchanges_with_partner_total", ()): 1.0,
        ("shoal_exchanges_without_partner_total", ()): 1.0,
        ("shoal_exchanges_failed_total", ()): 0.0,
        ("shoal_exchanges_late_total", ()): 1.0,
        ("shoal_exchanges_lag_steps", ()): 7.0,
        ("shoal_round_members", ()): 1.0,
        ("shoal_link_bytes_sent_total", ()): 10.0,
        ("shoal_link_bytes_received_total", ()): 20.0,
        ("shoal_faults_contributions_refused_total", ()): 2.0,
        ("shoal_faults_daemon_restarts_total", ()): 0.0,
        ("shoal_faults_missing", ()): 2.0,
        ("shoal_refused_total", (("reason", "rate"),)): 3.0,
        ("shoal_refused_total", (("reason", "denied"),)): 1.0,
        ("shoal_internal_errors_total", (("place", "codec"),)): 2.0,
        ("shoal_rollouts_reward", ()): 0.5,
        ("shoal_rollouts_groups_own_total", ()): 8.0,
        ("shoal_rollouts_groups_foreign_total", ()): 2.0,
        ("shoal_rollouts_groups_seen_total", ()): 12.0,
        ("shoal_unused_total", (("reason", "no_spread"),)): 3.0,
        ("shoal_rl_worth", ()): 0.9,
        ("shoal_checks_claims_total", ()): 5.0,
        ("shoal_checks_checked_total", ()): 3.0,
        ("shoal_checks_invalid_total", ()): 1.0,
        ("shoal_checks_banned", ()): 1.0,
        ("shoal_verify_check_seconds_total", ()): 1.5,
    }
    buckets = [
        waits["shoal_round_wait_seconds_bucket", (("le", bound),)]
        for bound in (*map(str, WAIT_BUCKETS_S), "+Inf")
    ]
    assert buckets == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2]
    assert (
        waits["shoal_round_wait_seconds_count", ()],
        waits["shoal_round_wait_seconds_sum", ()],
    ) == (2.0, 40.25)


@given(st.lists(st.floats(0, 1000), max_size=20))
def test_the_histogram_counts_every_wait_once(waits):
    board = Board()
    board.begin(ABOUT)
    for wait in waits:
        board.event("round", {"wait_s": wait})
    families = {family.name: family for family in board.registry.collect()}
    if waits:
        counts = {
            s.labels["le"]: s.value
            for s in families["shoal_round_wait_seconds"].samples
            if "le" in s.labels
        }
        assert counts == {
            str(bound): sum(w <= bound for w in waits) for bound in WAIT_BUCKETS_S
        } | {"+Inf": len(waits)}


def test_taken_port_is_one_sentence(endpoint):
    """A taken port is one sentence and a closed one is free."""
    with pytest.raises(
        MetricsError,
        match=r"^Cannot serve metrics on 127\.0\.0\.1:\d+: the port is taken .* --metrics",
    ) as said:
        Endpoint(endpoint.address)
    assert "\n" not in str(said.value)
    endpoint.close()
    endpoint.close()
    with pytest.raises(urllib.error.URLError):
        get(endpoint)
    Endpoint(endpoint.address).close()


@pytest.mark.parametrize("host", ["203.0.113.77", "no-such-host.invalid", "a" * 80])
def test_an_address_of_another_machine(host, monkeypatch):
    real = socket.getaddrinfo

    def resolve(name, *arguments, **options):
        if name.endswith(".invalid"):  # no test asks the network for a name
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(MetricsError, match=r"this machine has no such address, choose"):
        Endpoint(Address(host, 0))


def answered(endpoint, request, source="127.0.0.1"):
    """The first line of the answer to the bytes of a request; nothing where the caller is hung up
    on.
    """
    with socket.create_connection(
        (endpoint.address.host, endpoint.address.port), 10, (source, 0)
    ) as caller:
        caller.sendall(request)
        return caller.makefile("rb").readline()


OWN_NAMES = ("127.0.0.1:9464", "localhost", "LOCALHOST:1", "[::1]:9464", "127.0.0.2")
FOREIGN_NAMES = (
    "evil.example:9464",
    "[evil",
    "203.0.113.9",
    "localhost.evil.example",
    "[::2]:1",
    "]",
)


@pytest.mark.parametrize(
    ("host", "code"),
    [*((host, b"200") for host in OWN_NAMES), *((host, b"403") for host in FOREIGN_NAMES)],
    ids=[*OWN_NAMES, *FOREIGN_NAMES],
)
def test_names_of_this_machine_alone_are_answered(endpoint, host, code):
    """Any name was answered, so that a page elsewhere could read the metrics by pointing its own
    name to this machine.
    """
    request = f"GET /metrics HTTP/1.0\r\nHost: {host}\r\n\r\n".encode()
    assert answered(endpoint, request).split()[1] == code


def test_an_endpoint_for_other_machines_is_answered_under_any_name():
    shared = Endpoint(Address("0.0.0.0", 0))
    try:
        assert (
            answered(shared, b"GET /metrics HTTP/1.0\r\nHost: box.example\r\n\r\n").split()[1]
            == b"200"
        )
    finally:
        shared.close()


def test_slow_caller_is_hung_up_on(monkeypatch):
    """Each byte began the wait anew, without end."""
    monkeypatch.setattr("shoal.node.metrics.prometheus.CALL_S", 0.5)
    endpoint = Endpoint(Address("127.0.0.1", 0))
    try:
        with socket.create_connection(
            (endpoint.address.host, endpoint.address.port), 0.05
        ) as caller:
            for _ in range(600):
                try:
                    caller.sendall(b"x")
                    assert caller.recv(1) == b""
                except TimeoutError:
                    continue
                except ConnectionError:
                    pass
                break
            else:
                pytest.fail("it was not hung up on")
    finally:
        endpoint.close()


def test_callers_of_one_range_leave_room_for_others(endpoint):
    silent = [
        socket.create_connection(
            (endpoint.address.host, endpoint.address.port), 10, ("127.1.0.2", 0)
        )
        for _ in range(60)
    ]
    try:
        assert (
            answered(endpoint, b"GET /metrics HTTP/1.0\r\n\r\n", "127.0.0.3").split()[1] == b"200"
        )
    finally:
        for caller in silent:
            caller.close()


def test_callers_who_say_nothing_are_bounded(endpoint):
    endpoint.begin(ABOUT)
    place = (endpoint.address.host, endpoint.address.port)
    silent = [socket.create_connection(place, timeout=10) for _ in range(MOST_OF_RANGE)]
    try:
        with socket.create_connection(place, timeout=10) as more:
            assert more.recv(1) == b""  # hung up on
        for caller in silent:
            caller.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert caller.recv(15) == b"HTTP/1.0 200 OK"
    finally:
        for caller in silent:
            caller.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9464", Address("127.0.0.1", 9464)),
        ("0.0.0.0:0", Address("0.0.0.0", 0)),
        ("[::1]:9464", Address("::1", 9464)),
        ("box.example:65535", Address("box.example", 65_535)),
    ],
)
def test_addresses(text, address):
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", ":9464", "65536", "-1", "::1:9464", "http://x:1", "a b:1", "1.2.3.4", "9464\n"]
)
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match="it should be a port or HOST:PORT"):
        parse_address(text)
