"""A loop of one's own under accelerate, with accumulation."""

import os

import torch
from accelerate import Accelerator
from torch import nn

import shoal

torch.manual_seed(0)


def rows(seed, number):
    x = torch.randn(number, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True).sin()


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(
    *rows(1 + int(os.environ.get("SEED", 0)), 64 * int(os.environ.get("STEPS", 60)))
)
loader = torch.utils.data.DataLoader(data, batch_size=32)
with shoal.create(state=model, every=10) as session:  # the others: shoal.join(LINK, state=model)
    model, optimizer, loader = accelerator.prepare(model, session.optimizer(optimizer), loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
with torch.no_grad():
    x, y = rows(0, 256)
    print("loss", nn.functional.mse_loss(model(x), y).item())
