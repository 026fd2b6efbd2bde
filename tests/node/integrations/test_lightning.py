"""Lightning's trainer in a swarm: the callback takes the outer step after each of the trainer's own."""

import warnings

import pytest
import torch

import shoal
from shoal.optim import Alone, NoLoCo
from shoal.swarm.errors import ShoalError

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from shoal.node.integrations.lightning import SwarmCallback  # noqa: E402

HERE = shoal.NetworkOptions(listen=("/ip4/127.0.0.1/tcp/0",), relay="off")
EVERY, STEPS = 3, 9


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


BATCHES = torch.randn(2 * STEPS, 5, 4, generator=torch.Generator().manual_seed(0))


def test_a_fit_is_a_loop_with_the_outer_optimizer(tmp_path):
    module = Regression()
    with shoal.create(state=module, every=EVERY, lag=0, network=HERE, wait_s=0.5) as s, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback = SwarmCallback(s)
        trainer = lightning.Trainer(
            max_epochs=1, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, accumulate_grad_batches=2,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(list(BATCHES), batch_size=None))
        loss = s.status()["members"][0]["loss"]
    assert (callback.opt.steps, callback.opt.round, callback.opt.tokens) == (STEPS, STEPS // EVERY, BATCHES.numel())
    assert loss is not None
    twin = Regression()
    opt = NoLoCo(twin.configure_optimizers(), Alone(), every=EVERY, lag=0)
    for number, batch in enumerate(BATCHES):
        (twin.training_step(batch, number) / 2).backward()
        if number % 2:
            opt.step()
            opt.zero_grad()
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_fit_overlaps_and_leaves_nothing_in_flight(tmp_path):
    module, met = Regression(), []
    with shoal.create(state=module, every=EVERY, network=HERE, wait_s=0.5) as s, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback = SwarmCallback(s, on_round=met.append)
        trainer = lightning.Trainer(
            max_steps=STEPS, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(list(BATCHES), batch_size=None))
        assert callback.opt.lag_auto
        assert len(met) == callback.opt.round == STEPS // EVERY * callback.opt.fragments


def test_a_trainer_with_several_processes_or_optimizers_is_refused():
    class Several:
        world_size, optimizers = 1, (1, 2)

    with pytest.raises(ShoalError, match="1 processes and 2 optimizers: a peer has one of each"):
        SwarmCallback(None).on_train_start(Several(), None)
