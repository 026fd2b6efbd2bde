"""TensorBoard's files are read back by TensorBoard; W&B by its own offline mode if it is here, and
in any case by a stand-in.
"""

import importlib.util
import sys
from contextlib import closing
from types import ModuleType, SimpleNamespace

import pytest

from shoal.node.metrics.log import About, MetricsError, Sinks
from shoal.node.metrics.sinks import FINISH_S, TensorBoardFile, WandbRun

ABOUT = About(
    swarm="common",
    swarm_id="x" * 52,
    node="anna",
    peer="12D3",
    method="noloco",
    task="text",
    device="cpu",
    version="0.1.0",
)
EVENTS = [
    ("start", {"progress": {"step": 0}, "loss": {"held_out": 5.5}, "interrupted": False}),
    ("round", {"round": 0, "step": 25, "loss": 4.0, "wait_s": 0.25, "partner": "bob"}),
    ("round", {"round": 1, "step": 50, "loss": 3.0, "wait_s": 0.5, "partner": None}),
    (
        "end",
        {
            "progress": {"step": 60},
            "loss": {"held_out": 2.5},
            "interrupted": False,
            "rl": {"x": {"y": 1}},
        },
    ),
]
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="tensorboard is not installed: pip install 'shoal[tensorboard]'",
)
needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None,
    reason="wandb is not installed: pip install 'shoal[wandb]'",
)


def tell(sink):
    said = []
    with closing(Sinks([sink], said.append)) as sinks:
        sinks.begin(ABOUT)
        for number, (name, fields) in enumerate(EVENTS):
            sinks.event(name, 1_000.5 + number, fields)
    return said


@needs_tensorboard
def test_tensorboard_reads_the_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert tell(TensorBoardFile(tmp_path / "curves", "anna")) == [
        f"curves for TensorBoard: tensorboard --logdir {tmp_path / 'curves'}"
    ]
    read = EventAccumulator(str(tmp_path / "curves" / "anna"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {"evaluation/held_out", "round/loss", "round/wait_s"}
    found = [(event.wall_time, event.step, event.value) for event in read.Scalars("round/loss")]
    assert found == [(1_001.5, 25, 4.0), (1_002.5, 50, 3.0)]
    assert [(event.step, event.value) for event in read.Scalars("evaluation/held_out")] == [
        (0, 5.5),
        (60, 2.5),
    ]


@needs_tensorboard
def test_a_folder_for_tensorboard_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        MetricsError,
        match=r"^Cannot write for TensorBoard into .*: choose another folder with --tensorboard\.$",
    ):
        TensorBoardFile(tmp_path / "file", "anna")
    sink = TensorBoardFile(tmp_path / "curves", "anna")
    (tmp_path / "curves" / "anna").rmdir()
    with pytest.raises(MetricsError, match=r"No such file or directory"):
        sink.begin(ABOUT)
    sink.close()


@needs_tensorboard
def test_a_full_disk_is_one_sentence(tmp_path, capfd):
    sink, said = TensorBoardFile(tmp_path, "anna"), []
    with closing(Sinks([sink], said.append)) as sinks:
        sinks.begin(ABOUT)
        sink._records.close()
        sink._records._writer = open("/dev/full", "wb")  # noqa: SIM115
        for name, fields in EVENTS:
            sinks.event(name, 1_000.0, fields)
        sink._records._writer = open("/dev/null", "wb")  # noqa: SIM115
    assert said[1].startswith(
        "TensorBoard gets no metrics any more (No space left on device); training goes on"
    )
    assert len([line for line in said if "any more" in line]) == 1
    assert capfd.readouterr().err == ""


class Stand:
    """What W&B is asked for, in the order of the calls."""

    def __init__(self, fails=None, offline=False):
        self.calls, self.fails, self.offline = [], fails, offline
        self.url, self.sync_dir = "https://wandb.example/run", "wandb/offline-run-1"
        self.summary = SimpleNamespace(update=lambda values: self.calls.append(("summary", values)))

    def module(self):
        made = ModuleType("wandb")
        made.Settings = lambda **settings: settings
        made.init = self.init
        made.__spec__ = importlib.util.spec_from_loader("wandb", None)
        return made

    def init(self, **options):
        if self.fails is not None:
            raise self.fails
        self.calls.append(("init", options))
        return self

    def define_metric(self, name, **options):
        self.calls.append(("define", name, options))

    def log(self, values):
        self.calls.append(("log", values))

    def finish(self):
        self.calls.append(("finish",))


def run_with(stand, monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "wandb", stand.module())
    monkeypatch.delenv("WANDB_DIR", raising=False)
    return WandbRun("team/project", "anna", folder)


def test_what_wandb_is_asked_for(tmp_path, monkeypatch):
    stand = Stand()
    assert tell(run_with(stand, monkeypatch, tmp_path / "run")) == [
        f"curves for Weights & Biases: {stand.url}"
    ]
    (_, options), *calls = stand.calls
    assert {key: options[key] for key in ("project", "entity", "name", "group", "dir")} == {
        "project": "project",
        "entity": "team",
        "name": "anna",
        "group": "common",
        "dir": tmp_path / "run",
    }
    assert options["config"]["swarm_id"] == ABOUT.swarm_id
    assert options["settings"]["finish_timeout"] == FINISH_S
    assert calls == [
        ("define", "step", {}),
        ("define", "*", {"step_metric": "step"}),
        ("log", {"step": 0, "evaluation/held_out": 5.5}),
        ("log", {"step": 25, "round/loss": 4.0, "round/wait_s": 0.25}),
        ("log", {"step": 50, "round/loss": 3.0, "round/wait_s": 0.5}),
        ("log", {"step": 60, "evaluation/held_out": 2.5}),
        ("summary", {"end/progress/step": 60, "end/loss/held_out": 2.5, "end/interrupted": False}),
        ("finish",),
    ]


def test_wandb_offline_and_in_a_folder_of_the_users(tmp_path, monkeypatch):
    stand = Stand(offline=True)
    run = run_with(stand, monkeypatch, tmp_path / "run")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert run.begin(ABOUT) == f"curves for Weights & Biases: wandb sync {stand.sync_dir}"
    assert stand.calls[0][1]["dir"] is None
    run.close()
    run.close()
    assert stand.calls.count(("finish",)) == 1


def test_nobody_logged_in_ends_the_start(tmp_path, monkeypatch):
    run = run_with(
        Stand(fails=RuntimeError("No API key configured.\nLog in.")), monkeypatch, tmp_path
    )
    with pytest.raises(MetricsError) as said:
        run.begin(ABOUT)
    assert str(said.value) == (
        "Weights & Biases cannot be started (No API key configured. Log in): run wandb login, or "
        "set WANDB_MODE=offline."
    )
    run.close()


def test_a_run_that_wandb_ends_costs_one_sentence(tmp_path, monkeypatch):
    stand, said = Stand(), []
    sink = run_with(stand, monkeypatch, tmp_path)
    stand.log = lambda values: (_ for _ in ()).throw(ConnectionError("the service is gone"))
    with closing(Sinks([sink], said.append)) as sinks:
        sinks.begin(ABOUT)
        for name, fields in EVENTS:
            sinks.event(name, 0.0, fields)
    assert said[1:] == [
        "Weights & Biases gets no metrics any more (the service is gone); training goes on, and "
        "metrics.jsonl has them all."
    ]
    assert stand.calls[-1] == ("finish",)


@needs_wandb
def test_wandb_itself_offline(tmp_path, monkeypatch, capfd):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    (said,) = tell(WandbRun("project", "anna", tmp_path))
    assert said.startswith("curves for Weights & Biases: wandb sync ")
    # ends its service, as the end of a program does; until then the file may not be whole
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    written = file.read_bytes()
    assert all(
        word in written
        for word in (b"round/loss", b"evaluation/held_out", b"noloco", b"end/loss/held_out")
    )
    assert "wandb:" not in "".join(capfd.readouterr())
