"""Lightning's trainer in a swarm: the callback takes the outer step after each of the trainer's
own.
"""

import re
from importlib.util import find_spec

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import shoal
from shoal.optim import Alone, NoLoCo
from shoal.swarm.errors import ShoalError
from tests.node.integrations.two_peers import (
    EVERY,
    HERE,
    STEPS,
    ended,
    flat,
    joined_late,
    pair,
)
from tests.support.outer_training import GoesBack

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]


@pytest.fixture(scope="module")
def lightning_models():
    from tests.node.integrations import lightning_models

    return lightning_models


def swarm_callback(session, **options):
    from shoal.node.integrations.lightning import SwarmCallback

    return SwarmCallback(session, **options)


BATCHES = torch.randn(2 * STEPS, 5, 4, generator=torch.Generator().manual_seed(0))


def loader(name):
    batches = torch.randn(STEPS, 5, 4, generator=torch.Generator().manual_seed(ord(name)))
    return StatefulDataLoader(
        list(batches), batch_size=None
    )  # which Lightning puts in its place again


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("limits", "patience", "last"),
    [
        ({"max_steps": STEPS}, 9, STEPS),
        ({"max_epochs": 1}, 9, STEPS),
        ({"max_epochs": 1}, 1, 2 * EVERY),
    ],
    ids=["steps", "epochs", "early"],
)
def test_session_finishes_before_the_last_save(lightning_models, tmp_path, limits, patience, last):
    """Were it finished at the end, the last checkpoint would lack the mean, and the best weights be
    overwritten.
    """
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    def train(name, module, session):
        module.callback = callback = swarm_callback(session)
        keeping = ModelCheckpoint(
            tmp_path / name,
            monitor="score",
            mode="max",
            save_last=True,
            save_top_k=-1,
            every_n_epochs=1,
        )
        stopping = EarlyStopping("score", mode="max", patience=patience)
        fitted = lightning_models.trainer(
            tmp_path, callback, stopping, keeping, val_check_interval=EVERY, **limits
        )
        fitted.fit(module, loader(name), loader(name))
        assert fitted.global_step == last
        best = torch.load(keeping.best_model_path, weights_only=True)
        assert best["global_step"] == EVERY
        module.load_state_dict(best["state_dict"])
        return flat(callback.opt.slow), flat(best["state_dict"].values())

    modules = [lightning_models.Scored([3, 2, 1]), lightning_models.Scored([3, 2, 1])]
    (slow, best), (others, others_best) = pair(train, modules, finish="average")
    assert torch.equal(slow, others)
    for name, module, kept in zip("ab", modules, (best, others_best), strict=True):
        assert (flat(module.parameters()) - kept).abs().max() == 0
        assert torch.equal(
            flat(
                torch.load(tmp_path / name / "last.ckpt", weights_only=True)["state_dict"].values()
            ),
            slow,
        )


@pytest.mark.ci
@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_fit_goes_on_bit_by_bit(lightning_models, tmp_path, lag):
    """Were the outer state not in the checkpoint, slow weights, momentum and what is in flight
    would begin anew.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    def train(steps, start, name, module, session):
        callback = swarm_callback(session)
        keeping = ModelCheckpoint(
            tmp_path / name, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1
        )
        fitted = lightning_models.trainer(tmp_path, callback, keeping, max_steps=steps)
        fitted.fit(module, loader(name), ckpt_path=start and tmp_path / name / start)
        return (
            flat([*callback.opt.slow, *callback.opt.rule_state["momentum"]]),
            callback.opt.round,
            flat(module.parameters()),
        )

    straight = pair(
        lambda *peer: train(STEPS, None, *peer),
        [lightning_models.Regression(), lightning_models.Regression()],
        lag=lag,
    )
    resumed = pair(
        lambda *peer: train(STEPS, "step=6.ckpt", *peer),
        [lightning_models.Regression(), lightning_models.Regression()],
        lag=lag,
    )
    for (found, round, weights), (wanted, rounds, their_weights) in zip(
        resumed, straight, strict=True
    ):
        assert round == rounds
        assert torch.equal(found, wanted)
        assert torch.equal(weights, their_weights)


@pytest.mark.parametrize("evaluate", ["fast", "slow"])
def test_the_weights_to_evaluate_are_chosen(lightning_models, tmp_path, evaluate):
    module = lightning_models.Scored()
    with shoal.create(state=module, every=EVERY, lag=0, network=HERE, wait_s=0.5) as s:
        module.callback = callback = swarm_callback(s, evaluate=evaluate)
        fitted = lightning_models.trainer(
            tmp_path,
            callback,
            max_steps=5,
            val_check_interval=4,
            limit_val_batches=1,
            enable_checkpointing=False,
        )
        fitted.fit(module, loader("a"), loader("a"))
        assert torch.equal(flat(module.parameters()), flat(callback.opt.slow))  # the fit's result
        fitted.validate(module, loader("a"), verbose=False)
    assert module.seen == [evaluate == "slow", True]
    with pytest.raises(ShoalError, match='are "fast" or "slow", not \'both\''):
        swarm_callback(None, evaluate="both")


def test_a_fit_is_a_loop_with_the_outer_optimizer(lightning_models, tmp_path):
    module = lightning_models.Regression()
    with shoal.create(state=module, every=EVERY, lag=0, network=HERE, wait_s=0.5) as s:
        callback = swarm_callback(s)
        fitted = lightning_models.trainer(
            tmp_path, callback, max_epochs=1, enable_checkpointing=False, accumulate_grad_batches=2
        )
        fitted.fit(module, torch.utils.data.DataLoader(list(BATCHES), batch_size=None))
        loss = s.status()["members"][0]["loss"]["training"]
    assert (callback.opt.steps, callback.opt.round, callback.opt.tokens) == (
        STEPS,
        STEPS // EVERY,
        BATCHES.numel(),
    )
    assert loss is not None
    twin = lightning_models.Regression()
    opt = NoLoCo(twin.configure_optimizers(), Alone(), every=EVERY, lag=0)
    for number, batch in enumerate(BATCHES):
        (twin.training_step(batch, number) / 2).backward()
        if number % 2:
            opt.step()
            opt.zero_grad()
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_fit_stops_where_the_creator_ends_the_run(lightning_models, tmp_path):
    """Fault: after `shoal end` it trained on to its own last step, with nobody."""
    module = lightning_models.Regression()

    def train(session):
        fitted = lightning_models.trainer(
            tmp_path, swarm_callback(session), max_steps=STEPS, enable_checkpointing=False
        )
        fitted.fit(module, torch.utils.data.DataLoader(list(BATCHES), batch_size=None))
        return fitted.global_step

    assert ended(module, train, EVERY + 1) == EVERY + 1


def test_a_fit_overlaps_and_leaves_nothing_in_flight(lightning_models, tmp_path):
    module, met = lightning_models.Regression(), []
    with shoal.create(state=module, every=EVERY, network=HERE, wait_s=0.5) as s:
        callback = swarm_callback(s, on_round=met.append)
        fitted = lightning_models.trainer(
            tmp_path, callback, max_steps=STEPS, enable_checkpointing=False
        )
        fitted.fit(module, torch.utils.data.DataLoader(list(BATCHES), batch_size=None))
        assert callback.opt.lag_auto
        assert len(met) == callback.opt.round == STEPS // EVERY * callback.opt.fragments


def test_a_trainer_with_several_processes_or_optimizers_is_refused():
    class Several:
        world_size, optimizers = 1, (1, 2)

    with pytest.raises(ShoalError, match="1 processes and 2 optimizers: a peer has one of each"):
        swarm_callback(None).on_train_start(Several(), None)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda module: torch.optim.LBFGS(module.parameters()),
            "This inner optimizer cannot be used: LBFGS compares gradients at weights between "
            "which a round may have moved the model, in steps that need a closure: use an inner "
            "optimizer whose state holds gradients only, such as AdamW.",
        ),
        (
            lambda module: GoesBack(module.parameters(), lr=0.1),
            "This inner optimizer cannot be used: GoesBack remembers earlier weights, to which it "
            "would go back after a round has moved the model (of a move 50% was left after 56 "
            "steps): use an inner optimizer whose state holds gradients only, such as AdamW.",
        ),
        (
            lambda module: torch.optim.AdamW([module.net.weight]),
            "The optimizer trains 1 of the 2 parameters of the session's state, and not 'bias': "
            "hand in as state what it trains, or let it train the rest too (in several optimizers, "
            "as a list).",
        ),
    ],
    ids=["closure", "back", "part"],
)
def test_an_optimizer_that_an_own_loop_cannot_have_is_refused(
    lightning_models, tmp_path, make, sentence
):
    module = lightning_models.OtherOptimizer(make)
    with shoal.create(state=module, every=EVERY, network=HERE) as session:
        fitted = lightning_models.trainer(tmp_path, swarm_callback(session), max_steps=STEPS)
        with pytest.raises(ShoalError, match=f"^{re.escape(sentence)}$"):
            fitted.fit(module, torch.utils.data.DataLoader(list(BATCHES), batch_size=None))


@pytest.mark.parametrize("steps", [3, 10**7], ids=["over", "under way"])
def test_late_trainer_follows_the_swarms_schedule(lightning_models, tmp_path, steps):
    """The schedule of a late trainer begins where the swarm is."""
    module = lightning_models.OneCycle(steps)

    def train(session):
        fitted = lightning_models.trainer(tmp_path, swarm_callback(session), max_steps=steps)
        fitted.fit(module, loader("b"))

    joined_late(lightning_models.Regression(), module, train, steps=4 * EVERY)
    if steps == 3:
        last = torch.optim.lr_scheduler.OneCycleLR(
            torch.optim.AdamW(module.parameters(), lr=0.05), 0.05, total_steps=steps
        )
        last.step(), last.step(), last.step()
        assert module.rates == [last.get_last_lr()[0]] * 3
    else:
        first = module.places[0]
        assert first >= 4 * EVERY
        assert module.places == [first, first + 1, first + 2]
