"""Means that arrive a whole round late: CO2-style and eager updates, against float64 references and
the stability limits.
"""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from shoal.optim import CO2, Alone, CO2Rule, DiLoCo, Eager, EagerRule, Every, Faults, OuterOptimizer
from shoal.optim.rules.stability import largest_root, limit, warn_if_unstable

EVERY, ROUNDS = 4, 9
STEPS = EVERY * ROUNDS


def ends(found):
    return found.slow[EVERY - 1 :: EVERY]


def co2(lab, peers, lr, momentum, penalty, clip, keep):
    """Return slow weights, fast weights of each peer, and momentum after each round."""
    slow, velocity, moved, usual = lab.start(), np.zeros(5), 0.0, 0.0
    fast = {peer: lab.start() for peer in peers}
    sent, path = None, []
    for _ in range(ROUNDS):
        before = dict(fast)
        fast = {peer: lab.trained(peer, fast[peer], EVERY) for peer in peers}
        motion = {peer: before[peer] - fast[peer] for peer in peers}
        if sent is not None:
            mean = np.mean(list(sent.values()), axis=0)
            length = np.linalg.norm(mean)
            usual = 0.9 * usual + 0.1 * length if usual else length
            gap = penalty if penalty is not None else 1 + moved / usual
            velocity = momentum * velocity + mean / gap
            if clip is not None:
                velocity = np.clip(velocity, -clip, clip)
            slow, moved = slow - lr * velocity, lr * np.linalg.norm(velocity)
            # Kept: a peer stands where the slow weights are, moved by what is in flight.
            fast = {peer: slow - motion[peer] * keep for peer in peers}
        sent = motion
        path.append((slow, fast, velocity))
    return path


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("penalty", "clip"), [(None, None), (None, 0.02), (1.5, None), (1.2, 0.05)]
)
@pytest.mark.parametrize("count", [1, 4])
def test_co2_is_the_reference(lab, count, penalty, clip, keep):
    peers = lab.PEERS[:count]
    found = lab.run(
        CO2, STEPS, peers, every=EVERY, lr=0.8, momentum=0.3, penalty=penalty, clip=clip, keep=keep
    )
    for round, (slow, fast, _) in enumerate(co2(lab, peers, 0.8, 0.3, penalty, clip, keep)):
        for peer in peers:
            lab.close(ends(found[peer])[round], slow)
            lab.close(found[peer].fast[EVERY - 1 :: EVERY][round], fast[peer])
    assert [info.lag for info in found["anna"].infos] == [EVERY] * (ROUNDS - 1)


def at_once(inner, exchange, *, every, on_round, **knobs):
    return OuterOptimizer(
        inner, exchange, rule=CO2Rule(**knobs), schedule=Every(every), on_round=on_round
    )


@pytest.mark.parametrize("keep", [False, True])
def test_1_plain_co2_is_diloco_with_heavy_ball(lab, keep):
    """Without lag penalty and clip co2 is DiLoCo with heavy ball."""
    found = lab.run(
        at_once, STEPS, every=EVERY, lr=0.7, momentum=0.5, penalty=1.0, clip=None, keep=keep
    )
    for peer, expected in lab.run(
        DiLoCo, STEPS, every=EVERY, lr=0.7, momentum=0.5, nesterov=False
    ).items():
        lab.close(found[peer].slow, expected.slow)
        lab.close(found[peer].fast, expected.fast)


@pytest.mark.parametrize("method", [CO2, partial(CO2, keep=True), partial(Eager, lr=0.3)])
def test_3_transport_within_a_round_is_free(lab, method):
    """A transport that takes up to a round changes no bit and costs no time."""

    def delayed(delay):
        return lab.run(method, STEPS, every=EVERY, faults=Faults(delay=delay))

    prompt = delayed(lambda peer, key: 0.0)
    late = delayed(
        lambda peer, key: (
            lab.STEP_S * (EVERY - 0.01) * ((lab.PEERS.index(peer) + key.round) % 4) / 3
        )
    )
    later = delayed(lambda peer, key: lab.STEP_S * (EVERY + 1))
    for peer in lab.PEERS:
        for other in (late, later):
            assert np.array_equal(prompt[peer].slow, other[peer].slow)
            assert np.array_equal(prompt[peer].fast, other[peer].fast)
        assert prompt[peer].now == late[peer].now == pytest.approx(STEPS * lab.STEP_S)
        assert later[peer].now == pytest.approx((STEPS + ROUNDS - 1) * lab.STEP_S)


def test_4_momentum_stays_within_the_clip(lab):
    """No value of the momentum passes the clip and a wide one changes nothing."""
    peaks = []

    def clipped(inner, exchange, *, on_round, **options):
        def look(info):
            on_round(info)
            peaks.append(max(float(m.abs().max()) for m in opt.rule_state["momentum"]))

        opt = CO2(inner, exchange, on_round=look, **options)
        return opt

    lab.run(clipped, STEPS, every=EVERY, lr=0.5, momentum=0.5, clip=0.03)
    assert len(peaks) == 4 * (ROUNDS - 1)
    assert max(peaks) == pytest.approx(0.03)
    wide, none = (
        lab.run(CO2, STEPS, every=EVERY, lr=0.5, momentum=0.4, clip=clip)["anna"]
        for clip in (100.0, None)
    )
    assert np.array_equal(wide.slow, none.slow)


@pytest.mark.parametrize(
    ("momentum", "penalty", "stable"),
    [(0.5, 1.9, False), (0.5, 2.1, True), (0.2, 1.2, False), (0.2, 1.3, True)],
)
def test_5_one_peer_is_the_scalar_recursion(momentum, penalty, stable):
    """Each round's steps reach the optimum 0, so c = 1."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = CO2(
            torch.optim.SGD([weight], lr=1.0),
            Alone(),
            every=1,
            lr=1.0,
            momentum=momentum,
            penalty=penalty,
            clip=None,
        )
    assert ("may diverge" in "".join(str(w.message) for w in caught)) is not stable
    path, slow, velocity, fast, sent = [], 1.0, 0.0, 1.0, None
    for round in range(250):
        weight.grad = weight.detach().clone()
        opt.step()
        path.append(abs(opt.slow[0].item()))
        before, fast = fast, 0.0
        motion = before - fast
        if sent is not None:
            velocity = momentum * velocity + sent / penalty
            slow = fast = slow - velocity
        sent = motion
        if round < 40:
            assert opt.slow[0].item() == pytest.approx(slow, abs=1e-5)
    assert bool(max(path[-20:]) < max(path[20:40])) is stable
    assert bool(largest_root(1 / penalty, momentum, 1, nesterov=False) < 1) is stable


@pytest.mark.parametrize(
    ("rate", "momentum", "stable"),
    [(0.5, 0.6, True), (1.0, 0.2, True), (1.0, 0.3, True), (1.0, 0.6, False)],
)
def test_gap_penalty_widens_the_stable_region(rate, momentum, stable):
    """One peer, c = 1; without a penalty all of these diverge."""
    assert rate > limit(momentum, 1, nesterov=False)
    weight = nn.Parameter(torch.ones(1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = CO2(
            torch.optim.SGD([weight], lr=1.0),
            Alone(),
            every=1,
            lr=rate,
            momentum=momentum,
            clip=None,
        )
    assert bool(caught) is not stable
    for _ in range(80):
        weight.grad = weight.detach().clone()
        opt.step()
    assert bool(abs(opt.slow[0].item()) < 1) is stable


@pytest.mark.parametrize(
    "method",
    [partial(CO2, penalty=1.6, momentum=0.0, clip=None), partial(Eager, lr=1.0, momentum=0.0)],
)
def test_after_finish_every_motion_has_been_applied_once(lab, method):
    """Constant gradient, no momentum: the slow weights end at the start minus all displacements
    (over the penalty).
    """
    found = lab.run(method, STEPS, every=EVERY, loss=lab.linear, finish=True)
    motion = STEPS * lab.RATE * np.array([lab.problem(peer)[0][0] for peer in lab.PEERS])
    damping = 1.6 if method.func is CO2 else 1.0
    for peer in lab.PEERS:
        lab.close(found[peer].slow[-1], lab.start() - motion.mean(axis=0) / damping)


def rests(rate, momentum, lag, nesterov=True, fresh=0.0):
    """Return whether slow weights come to rest of which a part ``fresh`` counts at once, and the
    others ``lag`` rounds late.
    """
    slow, velocity = [1.0] * (lag + 1), 0.0
    for _ in range(3000):
        g = fresh * slow[-1] + (1 - fresh) * slow[-1 - lag]
        velocity = momentum * velocity + g
        slow.append(slow[-1] - rate * ((g + momentum * velocity) if nesterov else velocity))
        if abs(slow[-1]) > 1e6:
            break
    return max(map(abs, slow[-30:])) < 1


@pytest.mark.parametrize(
    ("nesterov", "lag", "momentum", "table"),
    [
        (True, 0, 0.9, 1.357),
        (True, 1, 0.0, 1.0),
        (True, 1, 0.2, 0.805),
        (True, 1, 0.5, 0.56),
        (True, 1, 0.9, 0.25),
        (True, 2, 0.0, 0.615),
        (True, 2, 0.2, 0.49),
        (True, 2, 0.5, 0.31),
        (True, 2, 0.9, 0.08),
        (False, 0, 0.9, 3.8),
        (False, 1, 0.5, 0.5),
        (False, 1, 0.9, 0.1),
        (False, 2, 0.0, 0.615),
        (False, 2, 0.2, 0.475),
        (False, 2, 0.5, 0.28),
        (False, 2, 0.9, 0.05),
    ],
)
def test_stability_limits_match_the_tables(nesterov, lag, momentum, table):
    """The stability limits are those of the tables and of the recursion itself."""
    found = limit(momentum, lag, nesterov=nesterov)
    assert found == pytest.approx(table, abs=0.006)
    for factor, stable in ((0.97, True), (1.03, False)):
        rate = factor * found
        assert rests(rate, momentum, lag, nesterov) is stable
        assert bool(largest_root(rate, momentum, lag, nesterov=nesterov) < 1) is stable


@pytest.mark.parametrize("share", [0.5, 0.25])
@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.9])
def test_an_eager_part_widens_the_region(share, momentum):
    found = limit(momentum, 1, nesterov=True, fresh=share)
    assert found > limit(momentum, 1, nesterov=True)
    for factor, stable in ((0.97, True), (1.03, False)):
        assert rests(factor * found, momentum, 1, fresh=share) is stable


def test_warnings_name_the_knob():
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.warns(
        UserWarning,
        match=r"lr 1.5 with momentum 0.9 may diverge .*: keep lr below 1.36 or lower the momentum",
    ):
        DiLoCo(inner, Alone(), lr=1.5, momentum=0.9)
    with pytest.warns(
        UserWarning,
        match=r"outer lr 0.7 with momentum 0.9 and a mean that comes 1 round late .* below 0.253",
    ):
        warn_if_unstable(0.7, 0.9, 1, nesterov=True)
    with pytest.warns(UserWarning, match=r"a mean that comes 1 round late .* keep lr below 0.1 or"):
        CO2(inner, Alone(), lr=1.0, momentum=0.9, penalty=2.0)
    with pytest.warns(UserWarning, match=r": lower the momentum$"):
        warn_if_unstable(0.1, 1.0, 1, nesterov=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DiLoCo(inner, Alone())
        DiLoCo(inner, Alone(), lr=3.0, nesterov=False)
        CO2(inner, Alone())
        warn_if_unstable(EagerRule().lr, EagerRule().momentum, 1, nesterov=True)
        warn_if_unstable(0.0, 1.0, 2, nesterov=False)
