"""A saved state that is loaded into a session's optimizer: of its weights and the swarm's, those of
the later round count.
"""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import shoal
from shoal.optim import NoLoCo
from tests.support.session_loops import EVERY, HERE, ROUNDS, beside, loop, model, sgd


def load(form, mine, module, earlier, old):
    """Load the state of ``earlier``, the optimizer of the model ``old``, into ``mine``, that of
    ``module``.
    """
    if form == "dcp":
        set_optimizer_state_dict(module, mine, get_optimizer_state_dict(old, earlier))
    else:
        mine.load_state_dict(getattr(earlier, form)())


@pytest.mark.parametrize("form", ["state_dict", "whole_state", "dcp"])
@pytest.mark.parametrize("model_first", [True, False])
def test_of_an_older_checkpoint_only_the_inner_state_counts(caplog, form, model_first):
    """Whichever of model and optimizer is loaded first, the swarm's weights are trained on, in its
    round.
    """
    begin = model(0)
    first = shoal.create(state=begin, every=EVERY, lag=0, network=HERE, wait_s=1.0)
    opt = first.optimizer(sgd(begin))
    loop(opt, begin, 1, steps=EVERY)
    old = model(7)
    earlier = NoLoCo(torch.optim.AdamW(old.parameters()), shoal.Alone(), every=EVERY, lag=0)
    loop(earlier, old, 1, steps=EVERY)
    loop(opt, begin, 1)

    def bert(end):
        other = model(8)
        with shoal.join(first.link, state=other, network=HERE) as s:
            mine = s.optimizer(torch.optim.AdamW(other.parameters(), lr=0.0))
            joined, slow = mine.round, [t.clone() for t in mine.slow]
            if model_first:
                other.load_state_dict(old.state_dict())
            load(form, mine, other, earlier, old)
            if not model_first:
                other.load_state_dict(old.state_dict())
            assert mine.listens
            assert float(mine.inner.state_dict()["state"][0]["step"]) == EVERY
            for group in mine.param_groups:
                group["lr"] = 0.0
            loop(mine, other, 2, steps=1)
            assert (mine.round, mine.steps) == (joined, 1)
            for wanted, kept, trained in zip(slow, mine.slow, other.parameters(), strict=True):
                assert torch.equal(kept, wanted)
                assert torch.equal(trained, wanted)
            end()
            return joined

    joined = beside(first, lambda: loop(opt, begin, 1, steps=1), bert)
    assert joined >= ROUNDS
    assert (
        f"the swarm is at round {joined}, beyond the saved 1: its weights count, and of what is "
        "loaded the inner optimizer's state" in caplog.messages
    )


def test_loaded_checkpoint_goes_on_in_the_present_round(caplog):
    """Round 40,000 of another swarm: nobody here would ever meet it there."""
    begin, met = model(0), []
    first = shoal.create(state=begin, every=EVERY, lag=0, codec="float32", network=HERE, wait_s=1.0)
    opt = first.optimizer(sgd(begin))
    loop(opt, begin, 1, steps=2 * EVERY)

    def bert(end):
        other, old = model(8), model(9)
        with shoal.join(first.link, state=other, network=HERE) as s:
            mine = s.optimizer(sgd(other), on_round=lambda info: met.append(info.key.round))
            joined = mine.round
            earlier = NoLoCo(sgd(old), shoal.Alone(), every=EVERY, lag=0)
            other.load_state_dict(old.state_dict())
            mine.load_state_dict({**earlier.whole_state(), "round": 40_000})
            assert mine.round == joined
            slow = zip(mine.slow, old.parameters(), strict=True)
            assert all(torch.equal(kept, wanted) for kept, wanted in slow)
            loop(mine, other, 2, steps=2 * EVERY)
            end()
            return joined

    joined = beside(first, lambda: loop(opt, begin, 1, steps=1), bert)
    assert met
    assert max(met) < joined + 40  # one that is alone may go back or ahead by some rounds
    assert (
        "the saved round 40000 is beyond the swarm's: goes on from the saved weights in its round "
        f"{joined}" in caplog.messages
    )
