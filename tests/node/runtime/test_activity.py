"""A node that computes or waits in silence, fails before it trains, returns to nobody, trains alone
to compare, or is ended.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.node.config.settings import load
from shoal.node.metrics.log import Metrics
from shoal.node.runtime import display, node_run, training_node
from shoal.node.runtime import join as node_membership
from shoal.node.runtime.compute_last import COMPUTING_NICENESS, compute_last
from shoal.node.runtime.display import BEAT_S, Activity, make_display, processor_time
from shoal.node.runtime.join import await_company, await_others, new_manifest
from shoal.node.runtime.run_options import ShutdownSignals, network
from shoal.node.runtime.task_setup import make_task
from shoal.node.runtime.train_alone import train_alone
from shoal.node.task import Shard
from shoal.node.training.trainer import Trainer
from shoal.node.user_code import UserCodeError
from shoal.optim import Alone as Nobody
from shoal.swarm.access.link import Link
from shoal.swarm.errors import StartupError
from shoal.swarm.identity import Identity
from shoal.swarm.membership.membership import create, join


class Shown:
    def __init__(self):
        self.lines = []

    def activity(self, text):
        self.lines.append(text)


class Node:
    """An activity by clocks of the test."""

    def __init__(self, folder, monkeypatch):
        self.now = self.used = 0.0
        self.path, self.shown = folder / "metrics.jsonl", Shown()
        for kind in (Metrics, Activity):
            monkeypatch.setattr(kind, "_clock", lambda one: self.now)
        monkeypatch.setattr(display, "processor_time", lambda: lambda: self.used)
        self.metrics = Metrics(self.path)
        self.activity = Activity(self.metrics, self.shown)

    def pass_time(self, seconds, used=0.0):
        self.now += seconds
        self.used += used
        self.activity.beat()

    def events(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@pytest.fixture
def node(tmp_path, monkeypatch):
    node = Node(tmp_path, monkeypatch)
    yield node
    node.metrics.close()


def test_long_evaluation_reports_and_is_alive(node):
    """A long evaluation is reported every few seconds and is alive while it computes."""
    with node.activity.doing("training"), node.activity.doing("evaluating"):
        node.pass_time(BEAT_S, used=1.0)
        node.pass_time(BEAT_S, used=0.0)
    found = [(e["event"], e["doing"], e["seconds"], e["busy_s"], e["alive"]) for e in node.events()]
    assert found == [
        ("activity", "evaluating", 10.0, 1.0, True),
        ("activity", "evaluating", 20.0, 0.0, False),
    ]
    assert node.shown.lines == [
        "evaluating, 10 s so far",
        "evaluating, 20 s so far (idle: nothing computed or received)",
    ]


def test_how_far_a_download_is_is_shown_while_it_lasts(node):
    with node.activity.doing("fetching the swarm's weights", bounded=True):
        node.activity.detail = lambda: "118 MB of 500 MB, about 51 min to go"
        node.pass_time(BEAT_S)
    with node.activity.doing("training"):
        node.pass_time(BEAT_S, used=1.0)
    assert node.shown.lines == [
        "fetching the swarm's weights, 10 s so far: 118 MB of 500 MB, about 51 min to go",
        "training, 10 s so far",
    ]


def test_startup_is_written_once(node):
    """What a node did up to its first step is written once."""
    with node.activity.doing("joining the swarm"):
        pass
    for _ in range(2):
        node.activity.stepped()
        with node.activity.doing("evaluating"):
            pass
    (event,) = node.events()
    assert (event["event"], [one["doing"] for one in event["phases"]]) == (
        "begun",
        ["starting", "joining the swarm", "starting", "first step done"],
    )
    assert all(
        before["cpu_s"] <= after["cpu_s"] for before, after in itertools.pairwise(event["phases"])
    )


def test_a_node_that_writes_anyway_reports_nothing_more(node):
    for _ in range(10):
        node.pass_time(BEAT_S / 2)
        node.metrics.write("round")
    assert {event["event"] for event in node.events()} == {"round"}
    assert node.shown.lines == []


@pytest.mark.parametrize(
    ("progress", "alive"), [((1, 0), True), ((0, 1_000_000), True), ((0, 5_000), False)]
)
def test_steps_and_bytes_are_progress_without_the_processor(node, progress, alive):
    node.activity.progress = lambda: progress
    node.pass_time(BEAT_S)
    assert [event["alive"] for event in node.events()] == [alive]


def test_wait_with_a_deadline_counts_as_alive(node):
    """A wait with a deadline of its own counts as alive and only that."""
    with node.activity.doing("saving", bounded=True):
        node.pass_time(BEAT_S)
        with node.activity.doing("evaluating"):
            node.pass_time(BEAT_S)
        node.pass_time(BEAT_S)
    node.pass_time(BEAT_S)
    assert [(e["doing"], e["alive"]) for e in node.events()] == [
        ("saving", True), ("evaluating", False), ("saving", True), ("starting", False)
    ]  # fmt: skip


def test_each_change_is_announced(node):
    told = []
    node.activity.on_change = told.append
    with node.activity.doing("training"), node.activity.doing("evaluating"):
        pass
    assert told == ["training", "evaluating", "training", "starting"]


def test_processor_time_is_the_asking_threads():
    """Processor time is that of the thread that asked for the clock."""
    if not hasattr(time, "pthread_getcpuclockid"):
        pytest.skip("this system has no clock of a thread's processor time")
    clock, ended = processor_time(), threading.Event()

    def compute():
        begun = time.thread_time()
        while time.thread_time() - begun < 0.2:
            pass
        ended.set()

    before = clock()
    threading.Thread(target=compute).start()
    ended.wait()
    assert clock() - before < 0.1


TASK = """
import torch
from shoal import Task
class Mine(Task):
    def model(self): return torch.nn.Linear(4, 1)
    def batches(self, shard): raise OSError("no such disk")
    def loss(self, model, batch): return model(batch).mean()
    def evaluate(self, model): return 1.0
"""


class Part:
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


def test_empty_task_closes_verification_and_metrics(tmp_path, monkeypatch):
    """Verification and metrics are closed if the task has no batches."""
    (tmp_path / "task.py").write_text(TASK)
    verification, files = Part(), []
    monkeypatch.setattr(training_node, "start_verification", lambda *args: verification)

    class Watched(Metrics):
        def __init__(self, *args):
            super().__init__(*args)
            files.append(self._file)

    monkeypatch.setattr(node_run, "Metrics", Watched)
    own = {
        "folder": str(tmp_path / "run"),
        "identity": str(tmp_path / "key"),
        "listen": ["/ip4/127.0.0.1/tcp/0"],
        "name": "n",
    }
    settings = load(
        None,
        {
            **{f"node.{key}": value for key, value in own.items()},
            "task.hooks": f"{tmp_path / 'task.py'}:Mine",
        },
    )
    run = node_run.NodeRun(settings, None, make_display(), ShutdownSignals())
    with pytest.raises(
        UserCodeError, match=r"failed in batches\(\): OSError: no such disk \(task\.py, line 6\)"
    ):
        run.run()
    assert verification.closed == 1
    assert [file.closed for file in files] == [True]


ABOUT = {
    "name": "x",
    "round": 1,
    "step": 1,
    "loss": None,
    "steps_per_s": 1.0,
    "shard": 0,
    "shards": 1,
    "model": "0" * 64,
    "state": "training",
    "version": "0",
}


class Alone:
    """A membership with as many members in sight, and to come, as a test wants."""

    swarm = "a" * 52
    peer_id = "me"

    def __init__(self, entry=(), here=(), come=False):
        self.host = self.directory = self
        self._entry, self._here, self._come, self.waited = entry, here, come, 0

    def entry(self):
        return self._entry

    def known(self):
        return ["/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/1"]

    def members(self):
        return dict.fromkeys(self._here)

    def link(self):
        return "shoal://LINK"

    def wait_for(self, count, timeout, should_stop):
        self.waited, self.awaited = timeout, count
        return self._come


def logged_by(membership, stopped=False):
    logged = []
    await_others(membership, logged.append, lambda: stopped)
    return logged


def test_lonely_node_waits_once_and_shows_its_link():
    """Who is alone waits once and tells by which link it is found."""
    alone = Alone()
    first, second = logged_by(alone)
    assert first.endswith("looking for its peers for 20 s, at 2 addresses where they were")
    assert second.endswith("or by the link shoal://LINK")
    assert alone.waited == node_membership.AWAIT_S
    assert len(logged_by(Alone(come=True))) == 1
    assert len(logged_by(Alone(), stopped=True)) == 1
    for met in (Alone(entry=("somebody",)), Alone(here=("bert",))):
        assert logged_by(met) == []
        assert met.waited == 0


def test_one_other_is_enough_for_who_returns():
    """Fault: a node that was not announced yet waited 20 s for a second other one, and so in each
    swarm of two.
    """
    alone = Alone(come=True)
    logged_by(alone)
    assert alone.awaited == 1


class Returning:
    """A membership of a node that returns to a swarm that began with three; ``looks``: the states
    of the others at each look.
    """

    swarm, peer_id = "s", "me"
    manifest = SimpleNamespace(start_when=3)

    def __init__(self, *looks, entry=()):
        self.host = self.directory = self
        self._looks, self._entry, self.looked = list(looks), entry, 0

    def entry(self):
        return self._entry

    def members(self):
        states = {"me": "waiting", **self._looks[0]}
        return {peer: SimpleNamespace(peer=peer, state=states[peer]) for peer in states}

    def size(self):
        return len(self.members())

    def wait_for(self, count, timeout, should_stop):
        assert (count, timeout) == (3, node_membership.LOOK_S)
        self.looked += 1
        if len(self._looks) > 1:
            self._looks.pop(0)


BERT, CARL = {"bert": "waiting"}, {"carl": "waiting"}


def test_who_returns_with_others_awaits_the_rest():
    """Fault: of three nodes that were resumed together the first trained without the others."""
    said = []
    all_come = Returning(BERT, BERT, BERT | CARL)
    await_company(all_come, said.append, lambda: False)
    assert all_come.looked == 2
    assert said == ["waiting at most 20 s for 1 more peer to return, as the swarm began with 3"]
    one_trains = Returning({}, BERT, {"bert": "training"}, entry=("bert",))
    await_company(one_trains, said.append, lambda: False)
    assert one_trains.looked == 2
    for alone in (Returning({}), Returning({"bert": "training"})):
        await_company(alone, said.append, lambda: False)
        assert alone.looked == 0


@pytest.mark.parametrize(("swarm", "looks"), [("s", 1), ("another", 0)])
def test_a_resumed_run_awaits_those_that_it_began_with(swarm, looks):
    """One that begins another swarm from a checkpoint has nobody to wait for.

    Fault: it gave its weights to none of them meanwhile, for which they waited to come in.
    """
    node = training_node.TrainingNode.__new__(training_node.TrainingNode)
    node.membership = Returning(BERT, BERT | CARL)
    node.options = SimpleNamespace(
        display=SimpleNamespace(message=lambda line: None),
        shutdown=SimpleNamespace(requested=False),
        ranks=None,
    )
    rested = []

    @contextlib.contextmanager
    def at_rest():
        before = node.membership.looked
        yield
        rested.append(node.membership.looked - before)

    node.member = SimpleNamespace(at_rest=at_rest)
    node.trainer = SimpleNamespace(whole=SimpleNamespace(round=7), opt=SimpleNamespace(round=7))
    node._saved = SimpleNamespace(swarm=swarm)
    node._activity = SimpleNamespace(doing=lambda *what, **how: contextlib.nullcontext())
    node._wait_for_peers()
    assert node.membership.looked == looks == sum(rested)


def test_the_wait_for_others_that_return_has_a_deadline(monkeypatch):
    clock = itertools.count(0.0, node_membership.AWAIT_S / 4)
    monkeypatch.setattr(node_membership, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    some = Returning(BERT)
    await_company(some, lambda line: None, lambda: False)
    assert some.looked == 3


@pytest.mark.slow(reason="real nodes that return")
def test_manifest_holder_comes_in_unanswered(
    tmp_path,
):
    """Only who has the manifest comes in while nobody answers and both meet on the old port."""

    def settings(name):
        return load(None, {"node.folder": tmp_path / name, "node.listen": ["/ip4/127.0.0.1/tcp/0"]})

    creator, other = Identity.ephemeral(), Identity.ephemeral()
    first = create(
        creator, new_manifest(settings("anna"), creator, "0" * 64), network(settings("anna"))
    )
    link, sealed = Link(first.swarm, first.link().bootstrap), first.sealed
    first.close()
    with pytest.raises(StartupError, match="no bootstrap peer can be reached"):
        join(other, link, network(settings("bert")))
    back = join(other, link, network(settings("bert")), sealed)
    try:
        back.directory.announce(**ABOUT)
        assert set(back.directory.members()) == {other.peer_id}
        again = create(creator, sealed, network(settings("anna")))
        try:
            assert again.link().bootstrap == link.bootstrap
            again.directory.announce(**ABOUT)
            back.host.call(
                back.host.meet(link.bootstrap), 60
            )  # as it does every 10 s while it is alone
            assert back.directory.wait_for(2, 30.0)
        finally:
            again.close()
    finally:
        back.close()


TEACHER = f"{Path(__file__).parents[3] / 'examples' / 'custom_model.py'}:Teacher"


def test_ended_run_frees_gradients_and_optimizer():
    """The run that is over gives back gradients and optimizer state and keeps its weights."""
    settings = load(None, {"task.hooks": TEACHER, "train.steps": 3, "outer.every": 2})
    task = make_task(settings)
    trainer = Trainer(task, settings.outer, settings.train, own=settings.train)
    shard, stop = Shard(0, 2, 0), lambda: False
    trainer.connect(Nobody(), "run", shard)
    trainer.run()
    trainer.params[0].grad = torch.ones_like(trainer.params[0])
    assert any(trainer.opt.inner.state.values())
    before = [parameter.detach().clone() for parameter in trainer.params]
    assert train_alone(settings, trainer, stop) is not None
    assert not any(trainer.opt.inner.state.values())
    assert all(parameter.grad is None for parameter in trainer.params)
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.params, strict=True))
    trainer.close()


@pytest.mark.parametrize("method", ["noloco", "diloco", "streaming"])
def test_alone_is_the_same_method_without_partners(method):
    """Else the outer optimizer's own gain would be called the swarm's: "61.8 % better together" of
    one node.

    Mutant: the baseline trains by the method "none".
    """
    settings = load(
        None,
        {"task.hooks": TEACHER, "train.steps": 12, "outer.every": 4, "outer.method": method},
    )
    trainer = Trainer(make_task(settings), settings.outer, settings.train, own=settings.train)
    trainer.connect(Nobody(), "run", Shard(0, 2, 0))
    trainer.run()
    loss = trainer.evaluate()
    assert train_alone(settings, trainer, lambda: False) == loss
    trainer.close()


CHILD = """
import sys, threading
from shoal.node.runtime.run_options import ShutdownSignals, end_with_parent
signals = ShutdownSignals()
signals.install()
if sys.argv[1] == "parent":
    end_with_parent(int(sys.argv[2]), 0.05)
asked = threading.Event()
if sys.argv[1] in ("orderly", "terminal"):
    signals.orderly(lambda: (print("asked", flush=True), asked.set()))
try:
    print("ready", flush=True)  # within: the signal may come as soon as this is read
    if sys.argv[1] == "terminal":
        asked.wait(60)
        print("the end", file=sys.stderr, flush=True)
        print("written", flush=True)
    threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""


def child(*arguments, hang_up=signal.SIG_DFL, **how):
    usual = lambda: signal.signal(signal.SIGHUP, hang_up)  # noqa: E731 (a test run under nohup ignores it)
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=usual,
        **how,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_at_once(number):
    with child("orderly") as process:
        process.send_signal(number)
        assert process.stdout.readline() == "asked\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == 130  # by the signal: the child's own end is 0


def test_hang_up_asks_once():
    """A hang up asks once however often it comes and spares who ignores it."""
    with child("orderly") as process:
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "asked\n"
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            process.send_signal(number)
        assert (
            process.wait(60) == 130
        )  # by the second signal that is none of the terminal's: -1 if one of those had ended it
        assert process.stdout.read() == ""
    with child("orderly", hang_up=signal.SIG_IGN) as spared:
        spared.send_signal(signal.SIGHUP)
        spared.send_signal(signal.SIGTERM)
        assert spared.stdout.readline() == "asked\n"
        spared.send_signal(signal.SIGTERM)
        assert spared.wait(60) == 130


def test_after_a_hang_up_nothing_is_written_to_the_terminal():
    master, slave = os.openpty()
    with child("terminal", stderr=slave) as process:
        os.close(slave)
        os.close(master)
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "asked\n"
        assert process.stdout.readline() == "written\n"  # to a terminal that is gone: OSError
        process.kill()


def test_before_there_is_anything_to_drain_the_first_signal_interrupts():
    with child("early") as process:
        process.send_signal(signal.SIGTERM)
        assert (process.wait(60), process.stdout.read()) == (7, "interrupted\n")


def test_a_node_ends_with_the_process_that_started_it():
    script = (
        "import os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {CHILD!r}, 'parent', str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        lines = {parent.stdout.readline(), parent.stdout.readline()}
        assert "ready\n" in lines
        parent.kill()
        parent.wait(60)
        assert (
            parent.stdout.read() == ""
        )  # ends when nobody holds the pipe any more: the child is gone


linux = pytest.mark.skipif(
    sys.platform != "linux", reason="the niceness of a single thread is Linux's"
)


def niceness(*calls):
    """Return the niceness of a thread, before and after it made ``calls``."""
    found = []

    def run():
        thread = threading.get_native_id()
        for call in (lambda: None, *calls):
            call()
            found.append(os.getpriority(os.PRIO_PROCESS, thread))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


@linux
def test_only_the_thread_that_asks_comes_last():
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert niceness(compute_last) == [mine, max(mine, COMPUTING_NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == mine


@linux
def test_a_lower_priority_is_kept():
    def lower():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPUTING_NICENESS + 5)

    assert niceness(lower, compute_last)[1:] == [COMPUTING_NICENESS + 5] * 2


@linux
def test_where_it_is_forbidden_training_goes_on(monkeypatch):
    def forbidden(*_):
        raise PermissionError("no")

    monkeypatch.setattr(os, "setpriority", forbidden)
    assert len(set(niceness(compute_last))) == 1


def test_what_other_lines_tell_of_is_in_the_metrics_only(node):
    with node.activity.doing("waiting for peers", bounded=True, told=True):
        node.pass_time(BEAT_S, used=0.0)
    assert [(e["doing"], e["alive"]) for e in node.events()] == [("waiting for peers", True)]
    assert node.shown.lines == []
