"""Which method a swarm should take, and the sentence about it under the table of `shoal plan`.

    settings, why = recommended(Situation(4))       # diloco, then streaming, both in one bit
    row, said = advise(Situation(4), Line(2.5e6, 0.05), ModelTensors.of_count(10**8), step_s=1.0)

What was measured for it: docs/methods.md, "Which method for my swarm".
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.node.plan.rows import ModelTensors, Row, row_of
from shoal.swarm.exchange.cost import BUSY, Line, least_every
from shoal.swarm.figures import amount
from shoal.swarm.settings.outer import OuterSettings
from shoal.swarm.settings.round_length import MAX_ROUND_S, MIN_ROUND_S

MAX_EVERY = 10_000
"""Inner steps in a round, at most, that are advised."""
MOST_IN_A_GROUP = 16
"""Peers that are advised to average together, at most: more were not tried, and all wait for who is
late.
"""
AVERAGED_BACK = 5
"""Peers from which averages that come back in four bits take fewer bytes than gathering."""
LR_OF_SEVERAL = 1.4
"""Outer rate of streaming from as many peers on: 8, and 16, ended 0.9 % lower than with 1.0 (one
seed each).
"""
ENOUGH = 0.9
"""Share of its time that a node should compute: the rest costs 0.8 % of loss at equal time, rounds
of 40 steps in place of 16 cost 1.7 %.
"""
WAITED = 0.05
"""Share of its time that a node may compute less than with settings further down the list: these
ended 0.6 to 0.7 % higher, which is worth 0.07 of the time.
"""
PAIRS = OuterSettings(method="noloco", codec="mod4", every=25, lr=1.0, momentum=0.3)
WAITING = OuterSettings(method="diloco", codec="sign+ef", every=16, lr=1.0, momentum=0.3)
STREAMING = OuterSettings(method="streaming", codec="sign+ef", every=16, lr=1.0, momentum=0.3)
THIN = STREAMING.model_copy(update={"codec_back": "sign+ef"})
LONGER_ROUNDS = {
    "streaming": "every 40 costs 1.7 % of loss (one seed), longer rounds were not measured",
    "noloco": "every 200 costs 2.1 % of loss beside every 20 (in int8), longer rounds were not "
    "measured",
}
"""What rounds cost that are longer than a recommended one, by method."""
AVERAGES_BACK = {
    "e3m0+ef": "averages back in 4 bits cost 0.1 % of loss at most (one seed)",
    "sign+ef": "averages back in one bit cost 0.6 to 2.0 % of loss (one seed)",
}
"""What averages that come back in few bits cost, by their codec."""

STRANGERS = (
    "a stranger that is late holds up one other in pairs, all in a group, and a group that judges "
    "whole contributions has to gather them"
)
UNEVEN = "a group waits for its slowest member in every round, pairs in rounds of seconds do not"
MANY = (
    f"groups of more than {MOST_IN_A_GROUP} were not tried, and all in a group wait for one that "
    "is late"
)
TWO = (
    "two peers average with each other either way, and one bit every 16 sends 2.6 times fewer "
    "bytes than mod4 every 25 (the loss of two in one bit was not measured)"
)
FEW = (
    "of 4 peers groups in one bit ended 2.8 to 3.5 % above all-reduce with the same optimizer, "
    "pairs 4.6 % (267,392 parameters, 3 seeds)"
)
SEVERAL = (
    "of 8 peers a group in one bit (DiLoCo) ended 5.6 % above all-reduce with the same optimizer, "
    "streaming 5.8 %, pairs 9.5 % (267,392 parameters, 3 seeds)"
)


@dataclass(frozen=True)
class Situation:
    """What the choice of a method depends on beside the link."""

    peers: int
    uneven: bool = False
    """Whether the slowest machine has less than `shoal.swarm.exchange.cost.UNEVEN_SHARE` of the
    mean speed; from some 0.86 on waiting for it costs four peers less loss than pairs do.
    """
    public: bool = False
    """Whether strangers may join."""


def recommended(swarm: Situation) -> tuple[list[OuterSettings], str]:
    """Return the settings to take, the first that the link carries, and the one reason for them."""
    if swarm.public:
        return [PAIRS], STRANGERS
    if swarm.uneven:
        return [PAIRS], UNEVEN
    if swarm.peers > MOST_IN_A_GROUP:
        return [PAIRS], MANY
    if swarm.peers == 2:
        return [WAITING, STREAMING], TWO
    if swarm.peers < AVERAGED_BACK:
        return [WAITING, STREAMING, THIN], FEW
    waiting = WAITING.model_copy(update={"codec_back": "e3m0+ef"})
    streaming = STREAMING.model_copy(update={"codec_back": "e3m0+ef", "lr": LR_OF_SEVERAL})
    return [waiting, streaming, THIN], SEVERAL


def usual(swarm: Situation) -> OuterSettings | None:
    """Return the settings of a new swarm of 2 peers or more whose creator chooses none of them;
    None: the defaults, pairs.

    Nothing is known of the link then, so it is what computes while it exchanges.
    """
    settings, _ = recommended(swarm)
    return next((outer for outer in settings if outer.method == STREAMING.method), None)


def averages_together(peers: int) -> str:
    """Return what its creator is told of a swarm that has the `usual` settings for ``peers``."""
    return (
        f"this swarm begins with {peers} peers and averages over everyone (streaming, in one bit), "
        "which ends with a lower loss than pairs; where one machine is slower than the others, "
        "begin it with --method noloco --round seconds:auto, where nobody waits for it"
    )


def averages_as_chosen(outer: OuterSettings, peers: int) -> str:
    """Return what its creator is told of a swarm that lacks the `usual` settings only because
    others than the method are set.
    """
    names = " and ".join(sorted(outer.model_fields_set))
    return (
        f"this swarm averages in pairs, because [outer] sets {names}: with nothing set there, its "
        f"{peers} peers would average over everyone (streaming, in one bit), which ends with a "
        "lower loss"
    )


def advise(
    swarm: Situation, line: Line, tensors: ModelTensors, *, step_s: float, every: int | None = None
) -> tuple[Row, str]:
    """Return the row to choose, with longer rounds if the link does not carry the usual ones, and a
    sentence about it.

    What is advised computes ``ENOUGH`` and leaves a fifth of the link (``BUSY``) to all else.
    ``every``: inner steps in a round to begin with; None: as was measured.
    """
    settings, why = recommended(swarm)

    def made(outer: OuterSettings, steps: int) -> Row:
        changed = outer.model_copy(update={"every": steps, **_length(swarm, steps * step_s)})
        if swarm.public:
            changed = changed.guarded()
        return row_of(changed, line, tensors, peers=swarm.peers, step_s=step_s)

    tried = [made(outer, every or outer.every or 1) for outer in settings]
    most = max(row.forecast.utilisation for row in tried)
    for row in tried:
        if row.forecast.enough(max(ENOUGH, most - WAITED)):
            return row, f"{_opening(swarm, row)}: {why}. On this link {_cost(row)}{_caveats(row)}."
    # Where the link is not what is short, the first method that overlaps keeps its averages.
    usual = tried[-1]
    for row in tried[1:]:
        if row.forecast.filled <= BUSY:
            usual = row
            break
    steps = least_every(usual.work, line, ENOUGH, MAX_EVERY)
    if steps is None:
        return usual, (
            f"This link carries none of the settings: with {_named(usual)} {_cost(usual)}; choose "
            "a smaller model, or train a part of it (LoRA)."
        )
    row = made(usual.outer, steps)
    return row, (
        f"{_opening(swarm, row)}: {why}. On this link {_cost(row)}, in place of computing "
        f"{100 * usual.forecast.utilisation:.0f} % of the time and filling "
        f"{100 * usual.forecast.filled:.0f} % of it with every {usual.work.every}{_caveats(row)}."
    )


def _length(swarm: Situation, seconds: float) -> dict[str, str]:
    """Return the setting of a round's length, where it is not a number of steps."""
    if not swarm.uneven:
        return {}
    return {"round": f"seconds:{min(max(seconds, MIN_ROUND_S), MAX_ROUND_S):.6g}"}


def _opening(swarm: Situation, row: Row) -> str:
    speed = "of unlike speed" if swarm.uneven else "alike"
    trust = "public" if swarm.public else "private"
    return f"For {swarm.peers} peers, {speed} and {trust}, choose {_named(row)}"


def _named(row: Row) -> str:
    round_s = row.outer.round.removeprefix("seconds:")
    length = f"every {row.work.every}" if row.outer.round == "steps" else f"rounds of {round_s} s"
    back = f", back {row.outer.codec_back}" if row.outer.codec_back else ""
    return f"{row.outer.method}, {row.outer.codec}{back}, {length}"


def _cost(row: Row) -> str:
    found = row.forecast
    return (
        f"a node computes {100 * found.utilisation:.0f} % of the time, sends "
        f"{amount(found.sent_a_day)} a day and fills {100 * found.filled:.0f} % of the link"
    )


def _caveats(row: Row) -> str:
    """Return what averages in few bits and longer rounds than usual cost."""
    said = ""
    if row.outer.codec_back:
        said += f"; {AVERAGES_BACK[row.outer.codec_back]}"
    for outer in (PAIRS, STREAMING):
        if outer.method == row.outer.method and row.work.every > (outer.every or 1):
            said += f"; {LONGER_ROUNDS[outer.method]}"
    return said
