"""The memory of payloads is used again, but never while anything still refers to it."""

import torch

from shoal.optim.codecs import base as codec
from shoal.optim.codecs.base import FLOAT32, SMALL, buffer

SIZE = 4 * SMALL


def test_memory_is_not_given_out_again_while_a_view_is_left() -> None:
    first = buffer(SIZE)
    address = first.data_ptr()
    view = first.view(torch.float32)[3:9]
    exported = view.numpy().data
    del first, view
    assert buffer(SIZE).data_ptr() != address
    del exported
    assert buffer(SIZE).data_ptr() == address


def test_no_more_is_kept_than_an_exchange_with_one_partner_takes() -> None:
    held = [buffer(SIZE) for _ in range(5)]
    assert len({tensor.data_ptr() for tensor in held}) == 5
    del held
    assert len(codec._kept) == 1


def test_memory_of_another_size_is_let_go() -> None:
    small = buffer(SIZE)
    del small
    large = buffer(3 * SIZE)
    assert large.numel() == 3 * SIZE
    assert not codec._kept
    del large
    assert buffer(SIZE).numel() == SIZE
    assert not any(len(memory) > SIZE for memory in codec._kept)


def test_an_encoded_payload_survives_the_next_encodings() -> None:
    weights = torch.arange(SIZE // 4, dtype=torch.float32)
    payload = FLOAT32.encode([weights])
    decoded = FLOAT32.decode(payload, [tuple(weights.shape)])
    del payload
    for _ in range(4):
        FLOAT32.encode([torch.zeros_like(weights)])
    assert torch.equal(decoded[0], weights)
