"""``shoal doctor`` names what is wrong: the faults of issue 7, planted in this machine and in
swarms of one real host.
"""

import asyncio
import errno
import json
import queue
import shutil
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from shoal.node.cli.main import cli
from shoal.node.commands.plan import measured_line
from shoal.node.config.settings import load
from shoal.node.doctor import diagnose as diagnosis
from shoal.node.doctor import machine_checks, network_checks, swarm_checks
from shoal.node.doctor.check import Check, CheckOutcome, Note, Skip, examine
from shoal.node.doctor.diagnose import diagnose
from shoal.node.doctor.visit import Visit
from shoal.node.exit_code import ExitCode
from shoal.node.runtime.join import new_manifest
from shoal.node.tasks.loader import load_task
from shoal.optim.parameters import AveragedParameters
from shoal.swarm.access.invitation import issue
from shoal.swarm.access.link import Link
from shoal.swarm.errors import NetworkError
from shoal.swarm.exchange.contribution import model_digest
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import swarm_id
from shoal.swarm.membership.directory import Directory
from shoal.swarm.membership.manifest_exchange import serve_manifest
from shoal.swarm.membership.membership import OWN_LOOP, SHOAL_VERSION
from shoal.swarm.membership.records import MemberValidator
from shoal.swarm.p2p.daemon import Daemon
from shoal.swarm.p2p.host import Host
from shoal.swarm.p2p.reachability import DIAL_PROTOCOL, DialBackView, ReachabilityProbe
from shoal.swarm.p2p.seed_request import ask_seed
from shoal.swarm.p2p.throughput import SPEED_PROTOCOL, ThroughputProbe
from shoal.swarm.seed.bootstrap_node import Seed
from shoal.swarm.state.state_server import StateServer
from shoal.swarm.wire.envelope import seal
from shoal.swarm.wire.messages import SEED_PROTOCOL

NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}"


class Clock:
    ahead = 0.0

    def __call__(self):
        return time.time() + self.ahead


class Peer:
    """A member of a swarm that trains a small text model, as far as a doctor sees it.

    ``width``: of its own model.
    """

    def __init__(self, width, says=16, optimizer="task"):
        self.identity, self.clock = Identity.ephemeral(), Clock()
        params = AveragedParameters.of(load_task("text", {"width": width, "layers": 1}).model())
        settings = load(
            None,
            {"task.options.width": says, "task.options.layers": 1, "train.optimizer": optimizer},
        )
        sealed = new_manifest(settings, self.identity, model_digest(params))
        self.swarm, self.model = swarm_id(sealed), model_digest(params)
        self.host = Host.start(
            self.identity, validator=MemberValidator(self.swarm), must_join=False
        )
        self.directory = Directory(self.host, self.identity, self.swarm)
        serve_manifest(self.host, self.swarm, sealed)
        StateServer(self.host, self.swarm, self.model, params.shapes, names=params.names)
        self.host.serve(DIAL_PROTOCOL, ReachabilityProbe(self.clock).answer)
        self.host.serve(SPEED_PROTOCOL, ThroughputProbe().answer)

    def announce(self, version=SHOAL_VERSION):
        self.directory.announce(
            name="x",
            round=1,
            step=5,
            loss=None,
            steps_per_s=0.0,
            shard=0,
            shards=8,
            model=self.model,
            state="training",
            version=version,
        )
        assert self.directory.wait_for(1, 10.0, lambda: False)

    def link(self, *more):
        return str(Link(self.swarm, (*more, self.host.addresses()[0])))

    def close(self):
        self.directory.close()
        self.host.close()


@pytest.fixture(scope="module")
def healthy():
    peer = Peer(width=16)
    peer.announce()
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def strange():
    """Its clock is ahead, its version is another, and its model is wider than its options say."""
    peer = Peer(width=32)
    peer.clock.ahead = 3600.0
    peer.announce("9.9.9")
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def with_muon():
    peer = Peer(width=16, optimizer="muon")
    peer.announce()
    yield peer
    peer.close()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def examined(*arguments, **options):
    findings, code = diagnose(*arguments, **options)
    return {finding.check: finding for finding in findings}, code


def test_nothing_is_wrong_with_a_healthy_swarm(healthy):
    found, code = examined(healthy.link(NOBODY))
    wrong = {
        name: finding for name, finding in found.items() if finding.outcome in ("failed", "skipped")
    }
    assert (wrong, code) == ({}, ExitCode.OK)
    assert "connected back to 127.0.0.1" in found["dialled back"].said
    assert "in the same network as its peers" in found["nat"].said
    assert "Mbit/s" in found["bandwidth"].said
    assert "trains text by noloco" in found["swarm"].said
    assert "as in the swarm" in found["model"].said
    # One of the link's two peers is dead, which is named, and does not matter.
    assert found[f"peer {NOBODY}"].outcome == found["bootstrap"].outcome == "note"
    assert "refused the connection" in found[f"peer {NOBODY}"].said


def test_muon_and_adamw_parameters_are_counted(with_muon):
    """What muon and AdamW train is counted and on request named."""
    found, _ = examined(with_muon.link())
    assert (
        "as in the swarm; Muon trains 3,072 parameters (4 matrices), AdamW 9,312 parameters (9 "
        "tensors)" in found["model"].said
    )
    assert "muon" not in found
    named, _ = examined(with_muon.link(), parameters=True)
    assert named["muon"].said == (
        "blocks.0.attention.qkv.weight (768), blocks.0.attention.out.weight (256), "
        "blocks.0.up.weight (1,024), blocks.0.down.weight (1,024)"
    )
    assert named["adamw"].said.startswith("bytes.weight (4,096), positions.weight (")


def test_plan_measures_without_joining(healthy):
    """A plan measures the way to a member and joins nothing."""
    before = set(healthy.directory.members())
    found = measured_line(Link.parse(healthy.link(NOBODY)))
    assert found.round_trip > 0
    assert (found.rate or 1) > 0
    assert (found.rate is None) == bool(found.why)
    assert set(healthy.directory.members()) == before


def test_own_loops_have_no_task_to_compare():
    """In a swarm of own loops there is no task to compare."""
    with pytest.raises(Skip, match=r"own: shoal\.join compares the model"):
        swarm_checks.model(SimpleNamespace(agreed=lambda: SimpleNamespace(task=OWN_LOOP)), None)


def dealt(peer, *reached):
    """What a doctor has found when it looks into the buckets of the swarm of ``peer``."""
    manifest = SimpleNamespace(bucket=64, epoch_s=60.0)
    return SimpleNamespace(
        agreed=lambda: manifest,
        link=Link.parse(peer.link()),
        running=lambda: peer.host,
        now=time.time,
        reached=list(reached),
    )


def test_member_missing_from_its_bucket_is_named(healthy):
    """A member that never shows up in its bucket is named."""
    here = healthy.host.addresses()[0]
    found = swarm_checks.bucket(dealt(healthy, here), None)
    assert found == "1 member looked for, and found in the bucket of this epoch"
    with pytest.raises(Note) as said:
        swarm_checks.bucket(dealt(healthy, here, NOBODY), None)
    wanted = (
        f"…{NOBODY[-8:]} never showed up in the bucket of this epoch, so nobody is paired "
        "with it: if it has run for"
    )
    assert str(said.value).startswith(wanted)
    assert "set its clock by NTP" in str(said.value)
    with pytest.raises(Skip, match="no member answered"):
        swarm_checks.bucket(dealt(healthy), None)


def test_reach_of_members_in_view_is_reported():
    """Of members in view it says by which way they are reached and what that moves."""
    met = [
        ("punched", 1e6),
        ("direct", 9e6),
        ("punched", 0.0),
        ("relayed", 0.0),
        ("punched", 3e6),
        ("direct", 0.0),
        ("unknown", 0.0),
    ]
    members = {
        str(number): SimpleNamespace(reach=reach, bytes_per_s=moved)
        for number, (reach, moved) in enumerate(met)
    }
    assert (
        swarm_checks.in_view(members, 7)
        == ", 7 peers in view (3 punched, 2 MB/s; 2 direct, 9 MB/s; 1 relayed)"
    )


def test_bucketed_swarm_figures_are_estimates():
    """Of a swarm of buckets it says that size and speed are estimated."""
    known = {
        "state": "training",
        "loss": 2.0,
        "tokens_per_s": 10.0,
        "steps_per_s": 1.0,
        "reach": "unknown",
    }
    members = {str(number): SimpleNamespace(**known) for number in range(48)}
    assert swarm_checks.in_view(members, 48) == ", 48 peers in view"
    estimated = (
        ": about 1,536 peers (± 14 %), estimated from the 48 in view: about 15,360 tokens a second "
        "in all, median loss 2.0000"
    )
    assert swarm_checks.in_view(members, 1536) == estimated


def test_a_skewed_clock_another_version_and_other_shapes_are_named(strange):
    found, code = examined(strange.link())
    assert {name for name, finding in found.items() if finding.outcome == "failed"} == {
        "clock",
        "version",
        "model",
    }
    assert (
        "clock is 3600.0 s behind that of the only peer that answered, so yours or theirs is wrong"
        in found["clock"].said
    )
    assert (
        f"this is shoal {SHOAL_VERSION}, the members run another (9.9.9 on 1): install"
        in found["version"].said
    )
    assert "does not fit the swarm" in found["model"].said
    assert "16" in found["model"].said  # the shape here and the one there
    assert "32" in found["model"].said
    assert code == ExitCode.UNFIT_MACHINE


def test_a_wrong_swarm_id_is_named(healthy):
    other = "b" * 51 + "a"
    found, code = examined(healthy.link().replace(healthy.swarm, other))
    assert found["bootstrap"].outcome == "ok"
    assert (
        f"belongs to swarm {healthy.swarm}, the link asks for {other}; ask for a fresh link"
        in found["swarm"].said
    )
    assert {found[name].outcome for name in ("version", "model")} == {"skipped"}
    assert code == ExitCode.DIFFERS


def test_a_dead_bootstrap_peer_is_named():
    found, code = examined(str(Link("a" * 52, (NOBODY,))))
    assert "refused the connection: no node listens there" in found[f"peer {NOBODY}"].said
    assert "no bootstrap peer can be reached" in found["bootstrap"].said
    assert {
        found[name].said for name in ("clock", "dialled back", "nat", "swarm", "version", "model")
    } == {"needs 'bootstrap', see there"}
    assert code == ExitCode.UNREACHED


@pytest.fixture
def seed():
    """A seed in a thread of its own; what it is reached by."""
    loop, told = asyncio.new_event_loop(), queue.Queue()
    made = Seed(Identity.ephemeral(), listen=["/ip4/127.0.0.1/tcp/0"], on_ready=told.put)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    running = asyncio.run_coroutine_threadsafe(made.run(), loop)
    yield told.get(timeout=30)[0]

    async def end():
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(end(), loop).result(60)
    assert running.cancelled()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


def test_members_are_found_through_a_seed_which_dials_back_too(healthy, seed):
    found, code = examined(str(Link(healthy.swarm, (seed,))))
    assert found["bootstrap"].said.startswith(
        "only bootstrap nodes answer, and they name no member"
    )
    assert code == ExitCode.UNREACHED

    async def report():
        stream = await healthy.host.open(
            seed.rpartition("/p2p/")[2], SEED_PROTOCOL, addresses=(seed,), timeout=10.0
        )
        try:
            await ask_seed(stream, healthy.swarm, seal(healthy.directory.own(), healthy.identity))
        finally:
            stream.close()

    healthy.host.call(report(), 60)
    found, code = examined(str(Link(healthy.swarm, (seed,))))
    assert {name for name, finding in found.items() if finding.outcome != "ok"} == set()
    assert found["bootstrap"].said == "1 member and 1 bootstrap node answer"
    assert "the clock of 2 peers" in found["clock"].said
    assert code == ExitCode.OK


class TestThisMachine:
    """Without a link; where the network is of no concern no daemon is started."""

    @pytest.fixture(autouse=True)
    def no_daemon(self, monkeypatch):
        async def launch(*arguments, **options):
            raise NetworkError("no daemon in this test.")

        monkeypatch.setattr(Daemon, "launch", launch)

    def test_a_missing_daemon(self, monkeypatch, tmp_path):
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("shoal.swarm.p2p.daemon.daemon_path", lambda: tmp_path / "p2pd")
        found, code = examined(str(Link("a" * 52, (NOBODY,))))
        assert (
            f"the network daemon is missing: there is no {tmp_path / 'p2pd'}; reinstall it with"
            in found["daemon"].said
        )
        assert found["bootstrap"].said == found["model"].said == "needs 'daemon', see there"
        assert code == ExitCode.NO_DAEMON

    def test_a_taken_port(self):
        with socket.socket() as other:
            other.bind(("0.0.0.0", 0))
            other.listen()
            found, code = examined(None, port=other.getsockname()[1])
        assert (
            "the port is taken by another program, choose another with --listen or stop that"
            in found["port"].said
        )
        assert code == ExitCode.NO_DAEMON

    def test_a_full_disk(self, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e6))
        found, code = examined(None)
        assert "the disk is full, 0.00 GB are free" in found["disk"].said
        assert code == ExitCode.UNFIT_MACHINE

    def test_a_disk_on_which_nothing_can_be_written(self, monkeypatch):
        def full(*arguments, **options):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(machine_checks.tempfile, "TemporaryFile", full)
        found, code = examined(None)
        assert (
            "(No space left on device): free some space, or use --folder elsewhere."
            in found["disk"].said
        )
        assert code == ExitCode.UNFIT_MACHINE

    def test_little_memory(self, monkeypatch):
        monkeypatch.setattr(machine_checks, "free_memory", lambda: (1e8, 8e9))
        found, code = examined(None)
        assert "only 0.1 of 8.0 GB free" in found["memory"].said
        assert code == ExitCode.UNFIT_MACHINE

    def test_the_command_says_one_line_each_or_one_object(self):
        shown = CliRunner().invoke(cli, ["doctor"], standalone_mode=False)
        lines = shown.output.splitlines()
        assert shown.return_value == ExitCode.NO_DAEMON
        named = " ".join(words.split()[1] for words in lines[:-1])
        assert named == "python: torch: device: memory: disk: run: port: daemon:"
        assert lines[-1] == "1 of 8 checks failed"
        runner = CliRunner()
        shown = runner.invoke(cli, ["doctor", "--json"], standalone_mode=False)
        report = json.loads(shown.stdout.splitlines()[-1])
        assert (report["ok"], report["exit_code"]) == (False, 11)
        assert {"check", "outcome", "said", "seconds"} == set(report["checks"][0])


# -- the checkup itself ----------------------------------------------------------------------------


def says(text, error=None):
    def run(tell):
        if error is not None:
            raise error(text)
        return text

    return run


def test_checks_run_on_after_a_failure():
    """All checks run though one fails and those that need it are skipped."""
    checks = [
        Check("a", ExitCode.UNFIT_MACHINE, says("fine")),
        Check("b", ExitCode.NO_DAEMON, says("broken: mend it.", NetworkError)),
        Check("c", ExitCode.UNREACHED, says("never"), needs=("a", "b")),
        Check("d", ExitCode.DIFFERS, says("never"), needs=("c",)),
        Check("e", ExitCode.DIFFERS, says("well known", Note), needs=("a",)),
        Check("f", ExitCode.DIFFERS, says("not here", Skip)),
        Check("g", ExitCode.DIFFERS, says("oh", ZeroDivisionError), needs=("e",)),
    ]
    told = []
    findings, code = examine(checks, told.append)
    assert told == findings
    assert [(f.check, f.outcome) for f in findings] == [
        ("a", "ok"),
        ("b", "failed"),
        ("c", "skipped"),
        ("d", "skipped"),
        ("e", "note"),
        ("f", "skipped"),
        ("g", "failed"),
    ]
    assert findings[3].said == "needs 'b', see there"
    assert "this check itself failed (ZeroDivisionError: oh, in test_doctor.py:" in findings[6].said
    assert code == ExitCode.NO_DAEMON


def test_a_check_that_hangs_is_given_up():
    free = threading.Event()

    def hang(tell):
        free.wait()
        tell(CheckOutcome("late", "ok", "too late"))
        return "never"

    findings, code = examine(
        [
            Check("a", ExitCode.UNREACHED, hang, seconds=0.05),
            Check("b", ExitCode.DIFFERS, says("fine")),
        ]
    )
    free.set()
    assert [(f.check, f.outcome) for f in findings] == [("a", "failed"), ("b", "ok")]
    assert "longer than 0.05 s and was given up" in findings[0].said
    assert code == ExitCode.UNREACHED


def test_invitation_is_shown_with_its_key_only(monkeypatch, tmp_path):
    """An invitation for one peer is shown with the key of that peer and with no other."""
    mine, creator, visits = Identity.load_or_create(tmp_path / "mine.key"), Identity.ephemeral(), []
    monkeypatch.setattr(diagnosis, "checks", lambda visit: visits.append(visit) or [])
    for options in ({"peer": mine.peer_id}, {}):
        link = Link("a" * 52, (NOBODY,), issue(creator, "a" * 52, lives=60.0, **options))
        diagnose(str(link), identity=tmp_path / "mine.key")
    diagnose(str(Link("a" * 52, (NOBODY,))), identity=tmp_path / "mine.key")
    assert [visit.identity.peer_id == mine.peer_id for visit in visits] == [True, False, False]


def test_checks_that_were_skipped_are_not_said_to_be_well(monkeypatch):
    outcomes = [CheckOutcome("python", "ok", "3.11"), CheckOutcome("swarm", "skipped", "no link")]
    monkeypatch.setattr(diagnosis, "diagnose", lambda *_, **__: (outcomes, ExitCode.OK))
    assert (
        CliRunner()
        .invoke(cli, ["doctor"])
        .output.endswith("nothing that was checked is in the way; skipped: 1 of 2\n")
    )
    outcomes.pop()
    assert CliRunner().invoke(cli, ["doctor"]).output.endswith("nothing is in the way\n")


class TestRouterThatOpensPorts:
    """The addresses of the daemon, and what a peer says that sees this machine at 9.9.9.9 and tries
    ports there.
    """

    def dialled(self, monkeypatch, opened, outcomes, seen="9.9.9.9"):
        tried = []

        async def rung(host, peer, number, token=b""):
            tried.append(number)
            return outcomes[bool(token)]

        monkeypatch.setattr(network_checks, "_rung", rung)
        monkeypatch.setattr(network_checks, "OPENED_S", 0.0)
        addresses = ("/ip4/192.168.0.7/tcp/4001/p2p/x", *opened)
        host = SimpleNamespace(
            addresses=lambda: addresses, call=lambda work, seconds: asyncio.run(work)
        )
        visit = Visit(None, host=host, seen=[DialBackView("peer-one", seen, 0.0, 0.0)])
        try:
            return network_checks.dialled(visit, None), network_checks.nat(visit, None), tried
        except Note as note:
            return str(note), None, tried

    def test_its_port_is_tried_after_the_one_given_and_named(self, monkeypatch):
        here = ("/ip4/9.9.9.9/tcp/31000/p2p/x",)
        said, nat, tried = self.dialled(monkeypatch, here, {True: "silent", False: "other"})
        assert (
            said
            == "…peer-one connected back to 9.9.9.9 port 31000, which the router opened (UPnP or "
            "NAT-PMP)"
        )
        assert (
            nat == "behind a NAT, seen as 9.9.9.9, whose router opens a port by itself: nothing to "
            "forward or to announce"
        )
        assert tried[1:] == [31000]

    def test_one_that_nobody_answers_at_or_elsewhere_is_none(self, monkeypatch):
        for opened, outcomes, more in (
            (("/ip4/9.9.9.9/tcp/31000/p2p/x",), {True: "silent", False: "silent"}, [31000]),
            (("/ip4/8.8.8.8/tcp/31000/p2p/x",), {True: "silent", False: "other"}, []),
            ((), {True: "silent", False: "other"}, []),
        ):
            said, _, tried = self.dialled(monkeypatch, opened, outcomes)
            assert said.startswith("the connection of …peer-one to 9.9.9.9 port ")
            assert tried[1:] == more


@pytest.fixture
def run_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(*events):
        folder = tmp_path / "runs" / "anna"
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(event) + "\n" for event in events)
        (folder / "metrics.jsonl").write_text(text + '{"event": "diagn')  # it is writing just now

    return write


START = {"event": "start"}
OWN = {
    "event": "diagnosis",
    "about": "internal",
    "said": "an error in this node's own code, its traceback is in node.log",
}


def test_errors_of_the_newest_run_here_are_noted(run_here):
    assert machine_checks.last_run(None, None) == "none is in the folder 'runs' here"
    run_here(OWN, START)  # of an earlier run in the same folder
    assert machine_checks.last_run(None, None) == "'runs/anna' met no error of its own"
    run_here(START, OWN)
    with pytest.raises(Note) as noted:
        machine_checks.last_run(None, None)
    assert str(noted.value) == f"'runs/anna': {OWN['said']}."
    run_here(START, OWN, {"event": "end", "trained_alone": "this node trained alone"})
    with pytest.raises(Note, match="this node trained alone"):
        machine_checks.last_run(None, None)


@pytest.mark.parametrize(
    ("cuda", "hip", "platform", "says"),
    [
        ("12.8", None, "linux", "for CUDA 12.8"),
        (None, "6.3", "linux", "for ROCm 6.3"),
        (None, None, "linux", "a build for the processor only"),
        (None, None, "darwin", "for Apple's GPU"),
    ],
)
def test_build_of_torch_is_named(monkeypatch, cuda, hip, platform, says):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("sys.platform", platform)
    assert machine_checks.torch(Visit(None), print) == f"{torch.__version__}, {says}"
