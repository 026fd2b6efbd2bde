"""A loop in the form of torchft's train_diloco: fragments named by module, a Nesterov outer
optimizer, started by torchrun.
"""

import os

import torch
from torch import nn

import shoal

torch.manual_seed(0)


def rows(seed, number):
    x = torch.randn(number, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True).sin()


model = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 1))
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
outer = {"method": "streaming", "every": 10, "lr": 0.7, "momentum": 0.9}
steps, seed = int(os.environ.get("STEPS", 60)), int(os.environ.get("SEED", 0))
with shoal.create(
    state=model, fragments=list(model.children()), **outer
) as session:  # or shoal.join(LINK, state=model)
    inner = session.optimizer(inner)
    for step in range(steps):
        x, y = rows(1 + seed + 2 * step, 64)
        inner.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        inner.step()
with torch.no_grad():
    x, y = rows(0, 256)
    print("loss", nn.functional.mse_loss(model(x), y).item())
