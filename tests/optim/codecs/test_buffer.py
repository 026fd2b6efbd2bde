"""The memory of payloads is nobody else's, and goes back to the system."""

import mmap
from pathlib import Path

import pytest
import torch

from shoal.optim.codecs.base import FLOAT32, SMALL, buffer

SIZE = 4 * SMALL
STATM = Path("/proc/self/statm")


@pytest.mark.skipif(not STATM.exists(), reason="the system does not tell how much memory the process has")
def test_memory_goes_back_to_the_system_with_the_last_view() -> None:
    def resident() -> int:
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    first = buffer(16 * SIZE).fill_(1)
    exported = first.view(torch.float32)[3:9].numpy().data
    del first
    assert resident() - before > 12 * SIZE
    del exported
    assert resident() - before < 4 * SIZE


def test_an_encoded_payload_survives_the_next_encodings() -> None:
    weights = torch.arange(SIZE // 4, dtype=torch.float32)
    payload = FLOAT32.encode([weights])
    decoded = FLOAT32.decode(payload, [tuple(weights.shape)])
    del payload
    for _ in range(4):
        FLOAT32.encode([torch.zeros_like(weights)])
    assert torch.equal(decoded[0], weights)
