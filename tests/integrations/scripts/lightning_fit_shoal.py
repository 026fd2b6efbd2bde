"""A module trained by Lightning's Trainer, with accumulation and clipping."""

import os

import lightning
import torch
from torch import nn

import shoal
from shoal.node.integrations.lightning import SwarmCallback

torch.manual_seed(0)


class Lines(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(seed, number):
    x = torch.randn(number, 8, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True).sin()


module, data = (
    Lines(),
    torch.utils.data.TensorDataset(*rows(1 + int(os.environ.get("SEED", 0)), 512)),
)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
steps = int(os.environ.get("STEPS", 60))
quiet = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
with shoal.create(state=module, every=10) as session:  # the others: shoal.join(LINK, state=module)
    callbacks = [SwarmCallback(session)]
    trainer = lightning.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        **quiet,
    )
    trainer.fit(module, loader)
with torch.no_grad():
    x, y = rows(0, 256)
    print("loss", nn.functional.mse_loss(module.net(x), y).item())
