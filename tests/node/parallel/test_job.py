"""Ranks that a command asks for, and its place among those that a launcher has started."""

import pytest

from shoal.node.config.settings import ConfigError, load
from shoal.node.parallel.launcher import Job, job_of, ranks_wanted

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


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
    assert ranks_wanted(load(None, {f"node.{key}": value for key, value in node.items()}), devices) == ranks


@pytest.mark.parametrize(
    ("node", "devices", "sentence"),
    [
        ({"gpus": "3"}, 2, r"--gpus 3 asks for more than this machine has \(2 GPUs\): use --gpus 2\."),
        ({"gpus": "2"}, 1, r"\(1 GPU\): use --gpus 1\."),
        ({"gpus": "all"}, 0, r"\(no GPU that PyTorch can use\): use --device cpu, to try it on the processor\."),
        ({"gpus": "all", "device": "cpu"}, 0, r"--gpus all counts GPUs, which --device cpu does not use: pass a number"),
        ({"gpus": "2", "device": "cuda:1"}, 2, r"--gpus takes the first GPUs, and 'cuda:1' does not go with it"),
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
    assert job_of({name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"}) is None
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
def test_an_environment_that_no_launcher_of_one_machine_makes_is_refused(wrong, sentence):
    with pytest.raises(ConfigError, match=sentence):
        job_of(TORCHRUN | wrong)
