"""Checkpoints of sharded peers by torch.distributed.checkpoint: exact in every layout, and from one
layout into another.
"""

from pathlib import Path

import pytest
import torch

JOBS = Path(__file__).with_name(
    "checkpoint_jobs.py"
)  # not imported here: what it imports takes a second
LAYOUTS, METHODS = ["fsdp", "hsdp", "tp"], ["diloco", "noloco", "co2", "sparseloco", "decoupled"]


EACH = [
    # Not co2 with tensor parallelism: its penalty is of the local parts, so what is replicated
    # differs from rank to rank.
    *(
        (layout, method, {})
        for layout in LAYOUTS
        for method in METHODS
        if (layout, method) != ("tp", "co2")
    ),
    ("fsdp", "diloco, two ways", {}),
    *(
        (layout, "diloco", {"dtype": "bfloat16"}) for layout in LAYOUTS
    ),  # with the rounding errors of a coarse model
    # Gathered whole. Torch does not cut a whole tensor into uneven parts for FSDP over tensor
    # parallelism.
    *((layout, "co2", {"full": True}) for layout in ("fsdp", "hsdp")),
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("layout", "method", "options"), EACH)
def test_resumed_run_is_bit_equal(four, layout, method, options, tmp_path):
    found = four.call(
        JOBS, "saved_and_loaded", folder=str(tmp_path), layout=layout, method=method, **options
    )
    assert found == [{"equal": [True, True], "alike": "full" not in options, "fresh": 16}] * 4


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("one", "other"), [("fsdp", "tp"), ("tp", "hsdp"), ("hsdp", "whole"), ("whole", "fsdp")]
)
def test_a_checkpoint_of_one_layout_loads_in_another(four, one, other, tmp_path):
    saved = four.call(JOBS, "save", folder=str(tmp_path), layout=one)
    loaded = four.call(JOBS, "load", folder=str(tmp_path), layout=other)
    assert loaded == [[saved[0], 9]] * 4
    assert any(torch.tensor(tensor).any() for tensor in saved[0][1])


def test_peers_of_several_shards_each_save_their_own(four, tmp_path):
    found = four.call(JOBS, "peers", folder=str(tmp_path))
    assert [equal for equal, _ in found] == [True] * 4
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1]
