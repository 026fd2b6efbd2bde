"""What cannot be a session's argument: one sentence that names the thing and the remedy, and
nothing half-applied.
"""

import pytest
import torch
from torch import nn

import shoal
from shoal.optim import NoLoCo
from shoal.swarm.errors import LinkError
from shoal.swarm.identity import Identity
from shoal.swarm.training.session_setup import SessionError, default_name, parameters_of
from tests.support.session_loops import HERE, model, sgd


def meta():
    with torch.device("meta"):
        return nn.Linear(2, 2)


def inferred():
    with torch.inference_mode():
        return nn.Linear(2, 2)


def complex_one():
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    return module


UNUSABLE = [
    (
        lambda: nn.LazyLinear(2),
        "has no shape yet (a lazy layer): call the model once with an example before",
    ),
    (
        complex_one,
        "is complex, and real numbers are averaged: keep torch.view_as_real of it as the parameter",
    ),
    (
        meta,
        "is on the meta device, without values: make the model on a real one, or fill it "
        "(to_empty) before",
    ),
    (
        inferred,
        "was made under torch.inference_mode(), where nothing can be trained: make the model "
        "outside it",
    ),
]


@pytest.mark.parametrize(("make", "fault"), UNUSABLE)
def test_untrainable_parameter_is_named(make, fault):
    """A parameter that cannot be trained is named with the remedy."""
    module = make()
    with pytest.raises(SessionError) as raised:
        parameters_of(module)
    assert str(raised.value) == f"Parameter 'weight' of the state {fault}."
    with pytest.raises(SessionError) as raised:
        parameters_of([nn.Parameter(torch.zeros(1)), module.weight])
    shape = "" if nn.parameter.is_lazy(module.weight) else " of shape (2, 2)"
    assert str(raised.value) == f"Parameter number 1{shape} of the state {fault}."
    with pytest.raises(ValueError, match=r"^parameter 0 of the inner optimizer ") as raised_too:
        NoLoCo(torch.optim.SGD([module.weight], lr=0.1), shoal.Alone(), every=2)
    assert str(raised_too.value) == f"parameter 0 of the inner optimizer {fault}"


def test_what_is_made_under_inference_mode_is_refused_at_once():
    module = model(0)
    inner = sgd(module)
    with torch.inference_mode():
        adagrad = torch.optim.Adagrad(module.parameters())  # its state is made with it
        with pytest.raises(
            ValueError, match=r"^the outer optimizer is made under torch.inference_"
        ):
            NoLoCo(inner, shoal.Alone(), every=2)
    with pytest.raises(
        ValueError, match=r"^the inner optimizer's state was made under torch.infer"
    ):
        NoLoCo(adagrad, shoal.Alone(), every=2)
    with shoal.create(module, every=5, network=HERE) as session:
        with (
            torch.inference_mode(),
            pytest.raises(SessionError, match=r"is made under torch.inference_mode"),
        ):
            session.optimizer(inner)
        session.optimizer(inner)  # nothing is left of the try


@pytest.mark.parametrize(("link", "given"), [(None, "None"), (5, "of type int")])
def test_non_text_link_is_refused(link, given):
    """A link that is no text is said to be none."""
    with pytest.raises(LinkError) as raised:
        shoal.join(link, model(0))
    assert str(raised.value) == (
        f"The link is {given}, and must be a text: pass the link that `shoal up` or the other "
        "session's `link` shows."
    )


def test_who_joins_gives_no_settings():
    with pytest.raises(SessionError) as raised:
        shoal.join("shoal://x", model(0), lr=0.5)
    assert str(raised.value) == (
        "The swarm has fixed lr, or has no such setting: leave it out, for who joins takes the "
        "settings from the swarm."
    )


def test_two_nodes_of_one_machine_have_names_of_their_own():
    one, two = (Identity.ephemeral().peer_id for _ in range(2))
    assert default_name(one) == default_name(one)
    assert default_name(one) != default_name(two)
    assert default_name(one).endswith(one[-4:])
    assert len(default_name(one)) <= 64


def test_equal_group_schedule_takes_muon():
    """A schedule that looks for the same settings in all groups takes muon."""
    inner = shoal.muon(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=0.1, total_steps=20)
    inner.step()
    schedule.step()
    before = [group["lr"] for group in inner.param_groups]
    assert len(before) > 1
    assert len(set(before)) == 1
