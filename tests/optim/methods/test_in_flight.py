"""What is in flight when the state is saved: begun anew bit by bit, taken back where it cannot be, checked before it is used."""

import warnings
from functools import partial

import pytest
import torch

from shoal.optim import Alone, GASLoC, LocalSGD, NoLoCo, Simulation, StreamingDiLoCo, codec_named
from tests.optim.methods.test_methods import LATE, PEERS, STEPS, Run, equal, everything


@pytest.mark.parametrize("name", LATE)
def test_what_is_in_flight_is_begun_anew_and_training_goes_on_to_the_same_bits(name):
    """A lag of its own depends on when the others answer, so a peer with one is alone here."""
    size = 2 if isinstance(Run(Nobody(), LATE[name]).opt, NoLoCo | LocalSGD | GASLoC) else 3
    peers = PEERS[:1] if name == "a lag of its own" else PEERS

    def straight(exchange):
        run, saved, under_way = Run(exchange, LATE[name]), [], 0
        for step in range(STEPS):
            saved.append(run.save())
            run.train(step, step + 1)
            under_way += len(list(run.opt._in_flight))
        run.opt.finish()
        return saved, everything(run), under_way

    first = Simulation(peers, size=size, seed=1).run(straight)
    assert all(under_way > 3 for _, _, under_way in first.values())
    for at in (4, 5, 6, 7, 9, 11, 12):

        def onwards(exchange, at=at):
            run = Run(exchange, LATE[name]).load(first[exchange.peer][0][at])
            again = run.save()  # before anything is begun anew
            run = Run(exchange, LATE[name]).load(again)
            run.train(at, STEPS)
            run.opt.finish()
            return everything(run)

        for peer, found in Simulation(peers, size=size, seed=1).run(onwards).items():
            assert equal(found, first[peer][1]), at


class Nobody(Alone):
    peer = "a"


@pytest.mark.parametrize("name", LATE)
def test_a_loader_that_cannot_begin_exchanges_anew_takes_back_what_is_in_flight(name):
    """As with torch.distributed.checkpoint, which reads only what a new optimizer has too."""
    run = Run(Nobody(), LATE[name])
    run.train(0, 4)
    assert any(run.opt.in_flight(fragment) for fragment in range(run.opt.fragments))
    state = run.opt.state_dict()
    for entry in state["state"].values():
        for key in [key for key in entry["outer"] if key.startswith("in_flight")]:
            del entry["outer"][key]
    other = Run(Nobody(), LATE[name])
    other.net.load_state_dict(run.net.state_dict())
    other.opt.load_state_dict(state)
    assert not list(other.opt._in_flight)
    other.train(4, STEPS)
    other.opt.finish()
    assert all(tensor.isfinite().all() for tensor in other.opt.slow)


SPOILT = {
    "a fragment that is not there": (lambda facts, tensors: facts.update(fragment=9), "has fragment 9, which must lie between"),
    "a step to come": (lambda facts, tensors: facts.update(step=99), "has step 99"),
    "a position to come": (lambda facts, tensors: facts.update(position=99), "has position 99"),
    "a lag beyond the round": (lambda facts, tensors: facts.update(lag=5), "has lag 5, which must lie between 0 and 4"),
    "a weight that is none": (lambda facts, tensors: facts.update(weight=float("nan")), "has weight nan"),
    "an arrival to come": (lambda facts, tensors: facts.update(arrived=50), "has arrived 50"),
    "other tensors": (lambda facts, tensors: tensors.update(sent=tensors["sent"][1:]), "has 'sent' of other tensors"),
    "a fast weight less": (lambda facts, tensors: tensors.update(fast=tensors["fast"][1:]), "has 'fast' of other tensors"),
    "a start": (lambda facts, tensors: tensors.update(start=tensors["sent"]), "has 'start' of other tensors"),
    "buffers": (lambda facts, tensors: tensors.update(tail=[torch.ones(2)]), "has 'tail' of other tensors"),
    "a rule for nothing": (lambda facts, tensors: facts["settings"][0][1].clear(), "do not fit together"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "sentence"), SPOILT.values(), ids=SPOILT)
def test_a_saved_exchange_that_does_not_fit_changes_nothing(spoil, sentence):
    run = Run(Nobody(), LATE["gasloc"])
    run.train(0, 5)
    before, state = everything(run), run.opt.whole_state()
    spoil(state["in_flight"][0]["facts"], state["in_flight"][0]["tensors"])
    with pytest.raises(ValueError, match=sentence):
        run.opt.load_state_dict(state)
    assert equal(everything(run), before)
    state = run.opt.whole_state()
    state["in_flight"] *= 2
    with pytest.raises(ValueError, match="do not fit together"):
        run.opt.load_state_dict(state)


def test_another_lag_takes_back_what_its_schedule_would_not_apply():
    run = Run(Nobody(), LATE["noloco"])
    run.train(0, 4)
    assert len(list(run.opt._in_flight)) == 2
    for lag, kept in ((3, 2), (2, 0), (0, 0), ("auto", 2)):
        other = Run(Nobody(), partial(NoLoCo, fragments=2, lag=lag, buffers="average"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the lag is another
            other.opt.load_state_dict(run.opt.state_dict())
        assert len(list(other.opt._in_flight)) == kept
        other.train(4, STEPS)
        other.opt.finish()
        assert not list(other.opt._in_flight)


def test_a_codec_that_does_not_show_what_it_encoded_has_it_taken_back():
    """As one of the user's own, written before exchanges in flight were saved: its contribution is sent again with the next one."""

    class Own:
        name, displacement = "own", True

        def __init__(self):
            self.wrapped = codec_named("topk2+ef")
            for name in ("nbytes", "encode", "decode", "accepted", "rejected", "state_dict", "load_state_dict"):
                setattr(self, name, getattr(self.wrapped, name))

        def fresh(self):
            return Own()

        @property
        def pending(self):
            return self.wrapped.pending

    saved = []

    def two(exchange):
        run = Run(exchange, partial(StreamingDiLoCo, every=4, fragments=2, lag=1, codec=Own()))
        run.train(0, 4)
        assert list(run.opt._in_flight)
        saved.append(run.opt.whole_state()["in_flight"])
        run.opt.finish()

    Simulation(PEERS[:2], seed=1).run(two)
    assert saved == [[], []]
