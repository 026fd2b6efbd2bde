"""NoLoCo in a training loop of your own: wrap the inner optimizer, change nothing else.

Run: python examples/own_loop.py

Four peers each hold eight noisy points of one line in 16 dimensions: too few for a single peer to
find it, enough together. They are simulated in this process. To train over the internet, start one
process per peer, each with two more lines:

    # everywhere else: shoal.join(link, state=model)
    with shoal.create(state=model, every=10) as s:
        opt = NoLoCo(inner, s.exchange(), every=10)

The loop itself stays as it is (docs/python-api.md).
"""

import torch
from torch import nn

from shoal import Alone, Exchange, NoLoCo, Simulation

PEERS = ["anna", "bert", "cleo", "dora"]
TRUTH = torch.linspace(-1, 1, 16)


def points(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (count, 16) and noisy targets (count, 1)."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 16, generator=generator)
    return inputs, (inputs @ TRUTH + 0.1 * torch.randn(count, generator=generator)).unsqueeze(1)


def train(peer: str, exchange: Exchange) -> float:
    """Train one peer on its own points; return the loss of its slow weights on held-out points."""
    inputs, targets = points(8, seed=PEERS.index(peer))
    held_out = points(500, seed=99)
    torch.manual_seed(0)  # all peers start from the same weights
    model = nn.Linear(16, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    opt = NoLoCo(inner, exchange, every=10)
    for _ in range(400):
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()  # in 10 steps each part of the model is also averaged, with a random peer
        opt.zero_grad()
    with opt.averaged(), torch.no_grad():
        return float(nn.functional.mse_loss(model(held_out[0]), held_out[1]))


def main() -> None:
    """Print the mean held-out loss of the peers, alone and together."""
    alone = [train(peer, Alone()) for peer in PEERS]
    together = Simulation[float](PEERS).run(lambda exchange: train(exchange.peer, exchange))
    print(f"alone:    {sum(alone) / len(alone):.4f}")
    print(f"averaged: {sum(together.values()) / len(together):.4f}")


if __name__ == "__main__":
    main()
