"""How near the results of a GPU are to the CPU's.

Tests for GPUs run on a real one, and on the stand-in of one (tests/standin), where every bit equals
the CPU's.
"""

import sys

import torch

STANDIN = "standin" in sys.modules


def assert_same(found, expected, rtol=1e-4, atol=1e-5):
    """Compare lists of tensors: bit for bit on the stand-in, within the tolerances on a real GPU,
    which adds in another order.
    """
    for number, (here, there) in enumerate(zip(found, expected, strict=True)):
        here, there = here.detach().cpu(), there.detach().cpu()
        if STANDIN:
            assert torch.equal(here, there), (
                f"tensor {number} differs by up to "
                f"{(here.double() - there.double()).abs().max():.1e}"
            )
        else:
            torch.testing.assert_close(here, there, rtol=rtol, atol=atol)
