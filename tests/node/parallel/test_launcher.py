"""Ranks that a command asks for: started and stopped together, waiting for one another, with the
steps of one process.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shoal.node.config.settings import ConfigError, load
from shoal.node.parallel import layouts, node_ranks
from shoal.node.parallel.job import Job, job_of, rank_device, ranks_wanted
from shoal.node.parallel.rank_process import RankLostError, RankMissingError
from shoal.node.training.training_error import TrainingError
from tests.support.coded_tensor import Coded

PROGRAM = str(Path(__file__).with_name("rank_program.py"))
LAUNCH = """
import sys
from shoal.node.parallel.launcher import Launcher, RanksFailedError
from shoal.node.runtime.run_options import handle_all
launcher = Launcher(2, [sys.argv[1]], int(sys.argv[2]), [sys.argv[3]])
handle_all(launcher.forward)
try:
    sys.exit(int(launcher.run()))
except RanksFailedError as error:
    sys.stderr.write(f"Error: {error}\\n")
    sys.exit(int(error.exit_code))
"""


@pytest.fixture
def launch():
    started = []

    def start(how, restarts=0):
        command = [sys.executable, "-c", LAUNCH, how, str(restarts), PROGRAM]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def starts(said):
    return sorted(
        line for line in said.splitlines() if line.startswith("rank ") and ", start " in line
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "code", "sentence"),
    [
        ("mend", 2, "Error: Mend it.\n"),
        (
            "device",
            5,
            "Error: An operation on the device failed (CUDA error: an illegal memory access was "
            "encountered)",
        ),
    ],
)
def test_user_error_is_shown_once_without_retry(launch, how, code, sentence):
    """What the user can mend is shown once and never tried again."""
    process = launch(how, 3)
    _, said = process.communicate(timeout=120)
    assert process.returncode == code
    assert {line.rpartition(", ")[2] for line in starts(said)} == {
        "start 0"
    }  # one of them may have been ended before it began
    (line,) = [line for line in said.splitlines(keepends=True) if "rank" not in line]
    assert line.startswith(sentence)


@pytest.mark.ci
def test_a_run_that_ended_alone_is_not_started_again(launch):
    process = launch("alone", 1)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 6, said
    assert not [line for line in starts(said) if line.endswith("start 1")]


@pytest.mark.ci
def test_killed_rank_restarts_all(launch):
    """A rank that is killed restarts all of whom only rank 0 is heard."""
    process = launch("killed-once", 1)
    out, said = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "only rank 0 is heard\n"), said
    assert {"rank 0 of 2, start 1", "rank 1 of 2, start 0", "rank 1 of 2, start 1"} <= set(
        starts(said)
    )
    assert "rank 1 was ended by SIGKILL: starting all 2 ranks again (1 of 1 times)" in said


@pytest.mark.ci
def test_restarts_end_with_one_sentence(launch):
    process = launch("killed", 1)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 3
    assert said.splitlines()[-1].startswith(
        "Error: This node ended again after 1 restart, because rank 1 was ended by SIGKILL: "
    )


@pytest.mark.ci
def test_a_bug_keeps_its_traceback_and_its_exit_code(launch):
    process = launch("bug")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "RuntimeError: oops" in said


@pytest.mark.ci
def test_signal_goes_to_rank_0_alone(launch):
    """A signal goes to rank 0 alone and its exit code comes through."""
    process = launch("signal", 3)
    assert process.stdout.readline() == "ready\n"
    said = ""
    while len(starts(said)) < 2:  # rank 1 is ended with rank 0, however far it came
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGTERM)
    out, rest = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "asked\n"), said + rest
    assert starts(said + rest) == ["rank 0 of 2, start 0", "rank 1 of 2, start 0"]


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.mark.parametrize(
    ("node", "devices", "ranks"),
    [
        ({}, 8, 1),
        ({"gpus": "1"}, 8, 1),
        ({"gpus": "8"}, 8, 8),
        ({"gpus": "all"}, 3, 3),
        ({"gpus": "2", "device": "cpu"}, 0, 2),
    ],
)
def test_a_command_starts_as_many_ranks_as_it_asks_for(node, devices, ranks):
    assert (
        ranks_wanted(load(None, {f"node.{key}": value for key, value in node.items()}), devices)
        == ranks
    )


@pytest.mark.parametrize(
    ("node", "devices", "sentence"),
    [
        (
            {"gpus": "3"},
            2,
            r"--gpus 3 asks for more than this machine has \(2 GPUs\): use --gpus 2\.",
        ),
        ({"gpus": "2"}, 1, r"\(1 GPU\): use --gpus 1\."),
        (
            {"gpus": "all"},
            0,
            r"\(no GPU that PyTorch can use\): use --device cpu, to try it on the processor\.",
        ),
        (
            {"gpus": "all", "device": "cpu"},
            0,
            r"--gpus all counts GPUs, which --device cpu does not use: pass a number",
        ),
        (
            {"gpus": "2", "device": "cuda:1"},
            2,
            r"--gpus takes the first GPUs, and 'cuda:1' does not go with it",
        ),
        ({"gpus": "all"}, 128, r"A peer has at most \d+ ranks"),
        ({"parallel": "ddp"}, 2, r"--parallel says how several GPUs share the model: pass --gpus"),
    ],
)
def test_ranks_that_this_machine_cannot_have_are_one_sentence(node, devices, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ranks_wanted(load(None, {f"node.{key}": value for key, value in node.items()}), devices)


def test_a_process_of_torchrun_knows_its_place():
    assert job_of(TORCHRUN) == Job(1, 4)
    assert job_of(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}) == Job(1, 4, 2)
    assert job_of({}) is None
    assert (
        job_of({name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"}) is None
    )
    assert job_of(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"RANK": "one"}, "must be numbers"),
        ({"LOCAL_WORLD_SIZE": "2"}, "must be on one machine"),
        ({"RANK": "4", "LOCAL_RANK": "4"}, "has RANK=4 of WORLD_SIZE=4"),
        ({"WORLD_SIZE": "1000000"}, "must be on one machine, at most"),
    ],
)
def test_foreign_launcher_environment_is_refused(wrong, sentence):
    """An environment that no launcher of one machine makes is refused."""
    with pytest.raises(ConfigError, match=sentence):
        job_of(TORCHRUN | wrong)


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_rank_takes_the_requested_device_kind(monkeypatch, device):
    """Fault: with --device cuda on a machine with Intel GPUs the ranks took those without a
    word.
    """
    monkeypatch.setattr("shoal.node.config.device.accelerator", lambda: ("xpu", 2))
    settings, job = load(None, {"node.device": device, "node.gpus": "2"}), Job(1, 2, 0, None)
    if device == "xpu":
        assert rank_device(settings, job) == torch.device("xpu", 1)
        return
    with pytest.raises(
        ConfigError, match=r"^The device 'cuda' is not available here \(there is xpu\): "
    ):
        rank_device(settings, job)


def test_tensors_that_ranks_cannot_share_are_named():
    """Fault: an 8-bit optimizer with --gpus met "a bug in shoal" at the first checkpoint."""
    plain = torch.nn.Parameter(torch.ones(2))
    layouts.check_one_form("model", [plain, 3])
    with pytest.raises(TrainingError) as caught:
        layouts.check_one_form("inner optimizer", [plain, Coded.of(torch.ones(2))])
    assert str(caught.value) == (
        "The inner optimizer keeps tensors of the class Coded, which the ranks of one node cannot "
        "share: leave --gpus out, or use another."
    )


LAYOUT_PROGRAM = str(Path(__file__).with_name("layout_program.py"))


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """The tensors of each layout and number of parts."""
    folder = tmp_path_factory.mktemp("layouts")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launch, LAYOUT_PROGRAM, str(folder)],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return {file.name: load_file(file) for file in folder.iterdir()}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("parts", [1, 2])
def test_two_ranks_equal_one_process(taken, how, parts):
    """Two ranks take the steps of one process and load its weights."""
    one, two = taken[f"one-{parts}"], taken[f"{how}-{parts}"]
    assert one.keys() == two.keys()
    exact = how == "ddp" and parts == 1  # more parts are added up in another order
    for name in one:
        torch.testing.assert_close(
            two[name],
            one[name],
            rtol=0,
            atol=0 if exact else 1e-6,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.thinned(1)
@pytest.mark.parametrize("parts", [1, 2])
def test_skipped_layer_equals_one_process(taken, parts):
    """Fault: a branch that was unused in every third step ended the ranks in an abort of gloo,
    after three restarts.
    """
    one, two = taken[f"one-branched-{parts}"], taken[f"ddp-branched-{parts}"]
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-6)
    assert not torch.equal(two["branch.weight"], two["never.weight"])


CONFIG = """
[task.options]
width = 16
heads = 2
layers = 1
context = 16
"""


@pytest.mark.ci
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_lonely_rank_names_the_missing_ones(tmp_path, rank, number):
    """A rank without the others names them and ends at a signal."""
    (tmp_path / "swarm.toml").write_text(CONFIG)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal", "up", "swarm.toml", "--device", "cpu"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **{name: str(value) for name, value in place.items()}},
    )
    try:
        said = ""
        while f"waiting for rank {1 - rank} of 2" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == 130
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("rank", "heard"), [(0, True), (1, False)])
def test_wait_for_a_rank_is_limited(monkeypatch, rank, heard):
    """The wait for a rank has a limit and one rank says which it was."""
    monkeypatch.setattr(node_ranks, "MEET_S", 0.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.PrefixStore("shoal/0", store).set(
        f"started/{1 - rank}", ""
    )  # of three the third is missing
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RankLostError, match="rank 2 of 3 did not start within") as caught:
        node_ranks._Meeting(Job(rank, 3)).all_started()
    assert isinstance(caught.value, RankMissingError) is heard
