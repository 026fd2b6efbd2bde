"""Models for Lightning and a trainer of it, in a module of their own: Lightning takes some three
seconds of a processor to import, and whoever collects the tests needs none of it.
"""

import lightning.pytorch as lightning
import torch

from tests.node.integrations.two_peers import flat


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Scored(Regression):
    """Validated by the given scores, in turn; notes which weights were validated: those trained, or
    the slow ones.
    """

    def __init__(self, scores=()):
        super().__init__()
        self.scores, self.seen, self.callback = iter(scores), [], None

    def validation_step(self, batch, batch_idx):
        self.seen.append(
            self.callback.opt is not None
            and torch.equal(flat(self.parameters()), flat(self.callback.opt.slow))
        )
        self.log("score", float(next(self.scores, 0)))


class OtherOptimizer(Regression):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self)


class OneCycle(Regression):
    """Notes where its schedule is after each step; fitting ends after three of ``steps``."""

    def __init__(self, steps):
        super().__init__()
        self.steps, self.places, self.rates = steps, [], []

    def configure_optimizers(self):
        inner = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(inner, 0.05, total_steps=self.steps)
        return {"optimizer": inner, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer):
        self.places.append(self.lr_schedulers().last_epoch)
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.trainer.should_stop = len(self.places) == 3


def trainer(folder, callback, *more, **options):
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback, *more],
        num_sanity_val_steps=0,
        **options,
    )
