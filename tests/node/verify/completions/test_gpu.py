"""Claims of a policy on a GPU are judged by a verifier on the CPU, and the other way round."""

import copy

import pytest
import torch

from tests.node.verify.completions.attacks import rounded

pytestmark = pytest.mark.gpu


def on_gpu(policy):
    made = copy.deepcopy(policy)
    made.module.cuda()
    return made


def test_what_a_gpu_wrote_is_what_the_cpu_would_have(world):
    for index in range(4):
        there, here = world.proven(index, on_gpu(world.policy)), world.proven(index)
        assert [one.tokens for one in there.completions] == [one.tokens for one in here.completions]
        finding = world.check(there)
        assert finding.accepted, finding.reason


def test_another_model_on_a_gpu_is_found_out(world):
    with torch.no_grad():
        other = on_gpu(world.changed(rounded(3)))
    assert not any(world.check(world.proven(index, other)).accepted for index in range(4))
