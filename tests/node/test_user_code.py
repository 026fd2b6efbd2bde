"""What goes wrong in code of the user's own is called his: every command, every kind of error,
raised from a file of his.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from shoal.node.cli import main as command_line
from shoal.node.commands import pull as pulling
from shoal.node.config.settings import load
from shoal.node.demo.nodes import Nodes
from shoal.node.doctor import swarm_checks
from shoal.node.doctor.check import Check, examine
from shoal.node.exit_code import ExitCode
from shoal.node.rl.loading import load_env
from shoal.node.runtime.join import new_manifest
from shoal.node.runtime.node_run import NodeRun
from shoal.node.task import Shard
from shoal.node.tasks.loader import load_task
from shoal.node.training.trainer import Trainer
from shoal.node.user_code import UserCodeError
from shoal.optim import Alone
from shoal.swarm.identity import Identity
from shoal.swarm.manifest import open_manifest
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.training import TrainSettings

TASK = """
import torch
from shoal import Task

class Good(Task):
    def __init__(self, width=4): self.width = width
    def model(self): return torch.nn.Linear(self.width, 1)
    def batches(self, shard):
        while True: yield torch.ones(2, 4)
    def loss(self, model, batch): return model(batch).square().mean()
    def evaluate(self, model): return 1.0

class Constructor(Good):
    def __init__(self): raise ValueError("no luck")
class Model(Good):
    def model(self): raise ValueError("no luck")
class NoModule(Good):
    def model(self): return lambda x: x
class Frozen(Good):
    def model(self): return super().model().requires_grad_(False)
class Lazy(Good):
    def model(self): return torch.nn.LazyLinear(1)
class Batches(Good):
    def batches(self, shard):
        yield torch.ones(2, 4)
        raise ValueError("no luck")
class BatchList(Good):
    def batches(self, shard): return [torch.ones(2, 4)]
class Loss(Good):
    def loss(self, model, batch): return self.helper()
    def helper(self): raise ValueError("no luck")
class Dtype(Good):
    def model(self): return super().model().half()
class FloatLoss(Good):
    def loss(self, model, batch): return float(super().loss(model, batch))
class VectorLoss(Good):
    def loss(self, model, batch): return model(batch)[:, 0]
class DetachedLoss(Good):
    def loss(self, model, batch): return super().loss(model, batch).detach()
class Exit(Good):
    def loss(self, model, batch): raise SystemExit(7)
class Memory(Good):
    def loss(self, model, batch): return torch.empty(2**60).sum()
class Backward(Good):
    def loss(self, model, batch):
        out = model(batch).exp()
        loss = out.sum()
        out.mul_(2)
        return loss
class Hook(Good):
    def model(self):
        made = super().model()
        made.register_forward_hook(lambda *args: 1 / 0)
        return made
class GradientHook(Good):
    def model(self):
        made = super().model()
        made.weight.register_hook(lambda grad: 1 / 0)
        return made
class Evaluate(Good):
    def evaluate(self, model): raise ValueError("no luck")
class EvaluateNone(Good):
    def evaluate(self, model): pass
class Tokens(Good):
    def tokens(self, batch): return batch["no luck"]
class NoTokens(Good):
    def tokens(self, batch): return 0
class EmptyBatch(Good):
    def batches(self, shard):
        while True: yield torch.empty(0, 4)
class Optimizer(Good):
    def inner_optimizer(self, params): raise ValueError("no luck")
class NoOptimizer(Good):
    def inner_optimizer(self, params): return None
class Own(torch.optim.SGD):
    def step(self, closure=None): raise ValueError("no luck")
class OwnOptimizer(Good):
    def inner_optimizer(self, params): return Own(params, lr=0.1)
class TorchsOptimizer(Good):
    def inner_optimizer(self, params):
        made = torch.optim.SGD(params, lr=0.1)
        made.param_groups[0]["lr"] = "fast"
        return made
class Scheduler(Good):
    def lr_scheduler(self, optimizer, steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 - step))
class NoScheduler(Good):
    def lr_scheduler(self, optimizer, steps): return 0.1
class Results(Good):
    def extra_results(self, loss): return {"accuracy": torch.ones(3)}
class Agreed(Good):
    def agreed_options(self): return ["no luck"]
class StateHook(Good):
    def model(self):
        made = super().model()
        made.register_state_dict_post_hook(lambda *args: 1 / 0)
        return made
"""

FAULTS = {
    "Constructor": ("when it is made", "ValueError: no luck"),
    "Model": ("failed in model()", "ValueError: no luck"),
    "NoModule": ("model() returned an object of type function", None),
    "Frozen": ("every parameter is frozen", None),
    "Lazy": ("has no shape yet (a lazy layer)", None),
    "Batches": ("failed in batches()", "ValueError: no luck"),
    "BatchList": ("batches() returned an object of type list", None),
    "Loss": ("failed in loss()", "in helper"),
    "Dtype": ("failed in loss()", "RuntimeError: mat1 and mat2"),
    "FloatLoss": ("loss() returned an object of type float", None),
    "VectorLoss": ("loss() returned a torch.float32 tensor of shape [2]", None),
    "DetachedLoss": ("without a gradient", None),
    "Exit": ("failed in loss(): SystemExit: 7", "SystemExit"),
    "Memory": ("make the model or its batches smaller", "torch.empty(2**60)"),
    "Backward": ("failed in the backward pass of loss()", "inplace operation"),
    "Hook": ("failed in loss(): ZeroDivisionError", "lambda"),
    "GradientHook": ("failed in the backward pass of loss()", "lambda grad"),
    "Evaluate": ("failed in evaluate()", "ValueError: no luck"),
    "EvaluateNone": ("evaluate() returned None", None),
    "Tokens": ("failed in tokens()", 'batch["no luck"]'),
    "NoTokens": ("tokens() returned 0", None),
    "EmptyBatch": ("batches() yielded an empty batch", None),
    "Optimizer": ("failed in inner_optimizer()", "ValueError: no luck"),
    "NoOptimizer": ("inner_optimizer() returned None", None),
    "OwnOptimizer": ("failed in the optimizer of inner_optimizer()", "ValueError: no luck"),
    "TorchsOptimizer": ("failed in the optimizer of inner_optimizer()", "TypeError"),
    "Scheduler": ("failed in the scheduler of lr_scheduler()", "lambda step"),
    "NoScheduler": ("lr_scheduler() returned an object of type float", None),
    "Results": ("extra_results() returned an object of type dict", None),
    "Agreed": ("agreed_options() returned an object of type list", None),
    "StateHook": ("Your code failed in <lambda>()", "lambda *args: 1 / 0"),
}


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "task.py"
    path.write_text(TASK)
    return path


def live(settings):
    """A node's life without the network: all that `NodeRun` does with a task."""
    made = load_task(settings.task.hooks, settings.task.options)
    trainer = Trainer(made, OuterSettings(every=2), TrainSettings(steps=3))
    trainer.task.agreed_options()
    trainer.connect(Alone(), "run", Shard(0, 1, 0))
    trainer.evaluate()
    trainer.run()
    trainer.state()
    trainer.task.extra_results(1.0)
    raise AssertionError("nothing failed")


def said(arguments, capsys, monkeypatch):
    """Run the command in this process; return its exit code and stderr."""
    monkeypatch.setattr(sys, "argv", ["shoal", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    return ended.value.code, capsys.readouterr().err


def assert_own(code, err, path, words, inside):
    assert code == ExitCode.BAD_INPUT, err
    assert "bug in shoal" not in err
    *trace, last = err.rstrip("\n").split("\n")
    assert last.startswith("Error: ")
    assert words in last
    trace = "\n".join(trace)
    if inside is None:
        assert "Traceback" not in trace
        return
    assert inside in trace
    frames = [line for line in trace.split("\n") if line.startswith('  File "')]
    if str(path) in trace:
        assert str(path) in frames[0], "the first frame is the user's"
    assert "/node/" not in frames[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_failing_task_function_is_named(task, fault, tmp_path, capsys, monkeypatch):
    """A node says in which function of the task it failed and shows its traceback."""
    monkeypatch.setattr(NodeRun, "run", lambda run: live(run.settings))
    code, err = said(
        ["up", "--task", f"{task}:{fault}", "--folder", tmp_path / "run"], capsys, monkeypatch
    )
    assert_own(code, err, task, *FAULTS[fault])


def test_an_option_of_the_wrong_type_is_the_users_error(task, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(NodeRun, "run", lambda run: live(run.settings))
    code, err = said(["up", "--task", f"{task}:Good", "--option", "width=abc"], capsys, monkeypatch)
    assert_own(code, err, task, "failed in model(): TypeError", "torch.nn.Linear(self.width, 1)")


def test_an_error_of_shoals_own_is_still_called_a_bug(task, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(NodeRun, "run", lambda run: 1 / 0)
    code, err = said(["up", "--task", f"{task}:Good"], capsys, monkeypatch)
    assert code == ExitCode.INTERNAL
    assert "this is a bug in shoal" in err


def test_own_error_after_a_users_step_is_a_bug(task):
    """An error of shoal's own after the user's step is still called a bug."""
    made = Trainer(
        load_task(f"{task}:Good"),
        OuterSettings(every=1),
        TrainSettings(steps=3),
        on_round=lambda info: 1 / 0,
    )
    made.connect(Alone(), "run", Shard(0, 1, 0))
    with pytest.raises(ZeroDivisionError):
        made.run()


OF_DEVICES = [
    (
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later",
        "CUDA_LAUNCH_BLOCKING=1",
    ),
    ("CUDA driver error: invalid argument", "CUDA_LAUNCH_BLOCKING=1"),
    ("HIP error: an illegal memory access was encountered", "AMD_SERIALIZE_KERNEL=3"),
    ("Native API failed. Native API returns: 20 (UR_RESULT_ERROR_DEVICE_LOST)", None),
    ("MPS error: command buffer exited with error status 4", None),
]


@pytest.mark.parametrize(("text", "variable"), OF_DEVICES)
@pytest.mark.parametrize("users", [False, True])
def test_device_error_is_nobodys_bug(task, text, variable, users, capsys, monkeypatch):
    """What a device reports is nobody's bug wherever it comes up."""
    task.write_text(TASK.replace("raise SystemExit(7)", f"raise RuntimeError({text!r})"))

    def run(node):
        if users:
            live(node.settings)
        raise RuntimeError(text)

    monkeypatch.setattr(NodeRun, "run", run)
    code, err = said(["up", "--task", f"{task}:Exit"], capsys, monkeypatch)
    *trace, last = err.rstrip("\n").split("\n")
    assert code == ExitCode.DEVICE_FAILED == 5
    assert last.startswith(f"Error: An operation on the device failed ({text.splitlines()[0]}), ")
    assert ("LAUNCH_BLOCKING" in last or "SERIALIZE" in last) == (variable is not None)
    assert variable is None or f"; {variable} shows which" in last
    assert "bug in shoal" not in err
    assert bool(trace) == users


def raising(error):
    def run(node):
        raise error

    return run


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch has this error since 2.8")
def test_torchs_own_error_of_devices_is_one_whatever_it_says(capsys, monkeypatch):
    monkeypatch.setattr(NodeRun, "run", raising(torch.AcceleratorError("something new")))
    code, err = said(["up"], capsys, monkeypatch)
    assert (code, err.count("\n")) == (ExitCode.DEVICE_FAILED, 1)


OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "CUDA error: out of memory",
    "MPS backend out of memory (MPS allocated: 1 GB)",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
]


@pytest.mark.parametrize(
    "run", [lambda node: torch.empty(2**60), *(raising(RuntimeError(text)) for text in OF_MEMORY)]
)
def test_running_out_of_memory_is_no_bug(run, capsys, monkeypatch):
    """Memory that runs out is no bug and no failure of a device."""
    monkeypatch.setattr(NodeRun, "run", run)
    code, err = said(["up"], capsys, monkeypatch)
    assert (code, err.count("\n")) == (ExitCode.BAD_INPUT, 1)
    assert "not enough memory" in err


@pytest.mark.parametrize("fault", ["Model", "Frozen", "Constructor"])
@pytest.mark.parametrize("command", ["up", "demo", "join", "pull", "doctor"])
def test_every_command_that_makes_a_task_names_its_fault(
    task, fault, command, tmp_path, capsys, monkeypatch
):
    spec = f"{task}:{fault}"
    settings = load(None, {"task.hooks": f"{task}:Good"})
    manifest = open_manifest(new_manifest(settings, Identity.ephemeral(), "0" * 64))
    renamed = manifest.model_copy(update={"task": f"task.py:{fault}"})
    link = f"shoal://{'a' * 52}?peer=/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}"
    if command in ("up", "join"):
        monkeypatch.setattr(NodeRun, "run", lambda run: live(run.settings))
    if command == "demo":
        # The node's own process is played by its log and exit code, as the test above shows them.
        def start(nodes, arguments, name, **how):
            with pytest.raises(UserCodeError) as caught:
                live(load(None, {"task.hooks": spec}))
            (nodes.folder / f"{name}.log").write_text(
                f"some log\n{caught.value.trace}Error: {caught.value}\n"
            )
            process = SimpleNamespace(
                poll=lambda: 2,
                wait=lambda seconds=None: 2,
                returncode=2,
                stdout=SimpleNamespace(readline=str, close=str),
                pid=1,
            )
            nodes.processes.append(process)
            return process

        monkeypatch.setattr(Nodes, "start", start)
    if command == "pull":
        monkeypatch.setattr(
            pulling, "pull", lambda link, out, hooks, **how: pulling.build_model(renamed, hooks)
        )
    if command == "doctor":
        visit = SimpleNamespace(agreed=lambda: renamed, hooks=spec)
        checks = [Check("model", ExitCode.DIFFERS, lambda tell: swarm_checks.model(visit, tell))]
        monkeypatch.setattr(
            "shoal.node.doctor.diagnose.diagnose",
            lambda link, tell, **options: examine(checks, tell),
        )
    arguments = {
        "up": [], "demo": ["--peers", 2], "join": [link],
        "pull": [link, "--out", tmp_path / "out"], "doctor": [link],
    }[command]  # fmt: skip
    code, err = said([command, *arguments, "--task", spec], capsys, monkeypatch)
    words, inside = FAULTS[fault]
    if command == "doctor":  # its findings are on stdout
        assert code == ExitCode.BAD_INPUT
        assert (inside or "") in err
    else:
        assert_own(code, err, task, words, inside)


ENVIRONMENT = """
from shoal.node.rl.environment import Question

class Good:
    version = "1"
    def question(self, seed, index): return Question(f"{seed} {index}", "a")
    def reward(self, question, completion): return 1.0
class Made(Good):
    def __init__(self): raise ValueError("no luck")
class Asked(Good):
    def question(self, seed, index): raise ValueError("no luck")
class Judged(Good):
    def reward(self, question, completion): raise ValueError("no luck")
class Later(Good):
    def question(self, seed, index): return Question("x", "a") if index < 1 else {}["no luck"]
class NoReward(Good):
    def reward(self, question, completion): return None
class NoQuestion(Good):
    def question(self, seed, index): return "what?"
"""


@pytest.mark.parametrize(
    ("fault", "words", "inside"),
    [
        ("Made", "cannot be made, with ValueError: no luck (env.py, line", "no luck"),
        (
            "Asked",
            "Your environment 'Asked' failed in question(): ValueError: no luck (env.py, line",
            "no luck",
        ),
        (
            "Judged",
            "Your environment 'Judged' failed in reward(): ValueError: no luck (env.py, line",
            "no luck",
        ),
        ("Later", "Your environment 'Later' failed in question(): KeyError", "no luck"),
        ("NoReward", "reward() must return a number from 0 to 1, not None", None),
        ("NoQuestion", "question() must return a Question", None),
    ],
)
@pytest.mark.parametrize("command", ["up", "join", "demo", "verify"])
def test_an_environment_that_fails_is_the_users(
    tmp_path, fault, words, inside, command, capsys, monkeypatch
):
    path = tmp_path / "env.py"
    path.write_text(ENVIRONMENT)
    spec = f"{path}:{fault}"

    def run(settings):
        env = load_env(settings.rl.env, {})
        return [env.made.question(0, index) for index in range(3)]

    monkeypatch.setattr(NodeRun, "run", lambda run_: run(run_.settings))
    monkeypatch.setattr("shoal.node.demo.rl_demo.make_task", run)
    link = f"shoal://{'a' * 52}?peer=/ip4/127.0.0.1/tcp/1/p2p/{Identity.ephemeral().peer_id}"
    arguments = {
        "up": ["up", "--task", "rl"],
        "join": ["join", link, "--task", "rl"],
        "demo": ["demo", "--task", "rl"],
        "verify": [
            "verify",
            "calibrate",
            "--model",
            "tiny:copy:1",
            "--claims",
            20,
            "--out",
            tmp_path / "c",
        ],
    }[command]
    code, err = said([*arguments, "--env", spec], capsys, monkeypatch)
    assert_own(code, err, path, words, inside)
