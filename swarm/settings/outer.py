"""The settings of the outer optimizer that all peers of a swarm share.

settings = OuterSettings(method="noloco", every=25)
settings.resolved()      # with the method's defaults written out, as in a manifest
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from shoal.optim.methods import (
    ALONE,
    DEFAULT,
    DEFAULT_LAG,
    GOSSIP_FRAGMENTS,
    METHODS,
    Method,
    methods_of,
    methods_with,
    one_of,
)
from shoal.swarm.settings.round_length import parse_round

KNOBS = ("every", "lr", "momentum", "fragments", "lag")
"""Settings that are arguments of the methods' factories."""
MAX_STEPS = 1_000_000
"""Of a round."""
MAX_FRAGMENTS = 1024
MAX_WAIT_S = 86_400.0
MAX_GROUP = 32
"""Members of a group of a method that averages over everyone, at most; more form several groups."""
ROBUST_GROUPS = {"clipped-gossip": "pair", "centered-clip": "everyone"}
"""Robust rule -> the methods that can have it, by whom they average with."""

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[tuple(METHODS)]
_OVERLAPPING = ", ".join(name for name, method in METHODS.items() if method.schedule == "overlaps")

Seconds = Annotated[float, Field(gt=0, le=MAX_WAIT_S)]


def _lag(value: object) -> object:
    """Check by hand: of a union of types each would have an error of its own."""
    if value is None or value == "auto" or (type(value) is int and 0 <= value <= MAX_STEPS):
        return value
    raise ValueError(f"it should be auto, or a whole number from 0 to {MAX_STEPS}")


def _round(text: str) -> str:
    parse_round(text)
    return text


Lag = Annotated[int | Literal["auto"] | None, BeforeValidator(_lag)]
RoundSetting = Annotated[str, Field(max_length=32), AfterValidator(_round)]


class OuterSettings(BaseModel):
    """Settings of the outer optimizer: when peers exchange, and what they do with the mean.

    A knob that is None has the method's own default (`shoal.optim.METHODS`), which `resolved`
    writes out; a knob that the method does not have is refused. A ``lag`` of None is
    ``DEFAULT_LAG``.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    method: MethodName = Field(
        default=DEFAULT,
        description="Outer optimizer: "
        f"{one_of(methods_of('pair', experimental=False))} (averages with one random partner), "
        f"{one_of(methods_of('everyone', experimental=False))} (averages over everyone), or "
        f"{ALONE} (trains alone). Experimental: "
        f"{one_of(methods_of('pair', experimental=True))} (one random partner), "
        f"{one_of(methods_of('everyone', experimental=True))} (everyone).",
    )
    every: int | None = Field(
        default=None,
        ge=1,
        le=MAX_STEPS,
        description="Inner steps in a round, between two exchanges of the same weights.",
    )
    round: RoundSetting = Field(
        default="steps",
        description="Length of a round: steps (as many as every says), tokens:N, seconds:S, or "
        "seconds:auto (so that the slowest "
        "useful peer makes 10 steps). Seconds need clocks synchronised well below wait_s.",
    )
    lr: float | None = Field(default=None, gt=0, le=10, description="Outer learning rate.")
    momentum: float | None = Field(default=None, ge=0, lt=1, description="Outer momentum.")
    fragments: int | None = Field(
        default=None,
        ge=1,
        le=MAX_FRAGMENTS,
        description=f"{_OVERLAPPING}: parts of the model, by layer, sent one after another.",
    )
    lag: Lag = Field(
        default=None,
        description=f"{_OVERLAPPING}: inner steps between sending a part and applying its mean: a "
        "number below every, 0 to wait for each exchange, or auto (each mean is applied once it is "
        "there).",
    )
    weights: Literal["equal", "tokens", "rate"] | None = Field(
        default=None,
        description="Weight of a peer in the mean: equal, tokens, or rate (tokens times tokens "
        "over steps).",
    )
    buffers: Literal["ignore", "average"] = Field(
        default="ignore",
        description="Buffers such as BatchNorm's statistics: each peer its own (ignore), or their "
        "mean (average).",
    )
    codec: str | None = Field(
        default=None,
        max_length=64,
        description="Number format on the wire: float32, float16, bfloat16, int8; for methods with "
        "one partner mod4; for "
        "those that send pseudo-gradients e3m0, topk2[:PART], topk2-senders[:PART], sign or "
        "auto:BITS, each also with +matrices (vectors are sent whole) or +hidden (embeddings and "
        "outputs too), then with +ef or +ef:BETA (error feedback).",
    )
    codec_back: str | None = Field(
        default=None,
        max_length=32,
        description="Methods over everyone with the codec sign+ef, e3m0+ef or int8+ef: number "
        "format of averages. From three members on each averages a share of the values and sends "
        "it back to all in this format (sign+ef, auto:2+ef, e3m0+ef, int8, float32), in place of "
        "whole contributions. Empty: whole contributions, as in swarms with a robust rule.",
    )
    finish: Literal["none", "average"] = Field(
        default="average",
        description="After the last step: average (all that are there take the mean of their "
        "weights, and end with one model), or none (each peer keeps its own model).",
    )
    wait_s: Seconds = Field(
        default=10.0,
        description="Seconds that a node waits for a partner in one round before it goes on "
        "without one; in long rounds a fifth of "
        "their time, if that is more (at most 300).",
    )
    robust: Literal["none", "distance", "clipped-gossip", "centered-clip"] = Field(
        default="none",
        description="Against few hostile peers, of whom each counts the same then: distance "
        "(refuse what lies three times as far "
        "away as usual; a newcomer's first contributions may be), or in place of the mean what "
        "they cannot move far: "
        "clipped-gossip (methods with one partner) or centered-clip (over everyone). Over everyone "
        "both cost more bytes, for "
        "nothing is all-reduced.",
    )
    check_loss: bool = Field(
        default=False,
        description="Methods with one partner: try its weights on two batches; those that make the "
        "loss higher than usual do not "
        "count. A public swarm has it unless it is false. Nodes of several GPUs and rl try "
        "nothing.",
    )

    @field_validator("codec")
    @classmethod
    def _codec(cls, value: str | None) -> str | None:
        if value is not None:
            # Here, as below: it comes with torch, which takes a second that not every command has.
            from shoal.optim import codec_named
            from shoal.optim.codecs.two_way import two_way

            if two_way(codec_named(value)) is not None:
                raise ValueError("the codec of averages is a setting of its own: outer.codec_back")
        return value

    @model_validator(mode="after")
    def _fits_the_method(self) -> OuterSettings:
        # Defaults fit; they are also what a node has that takes its settings from the manifest.
        if not self.model_fields_set:
            return self
        from shoal.optim import codec_named

        self._check_knobs()
        self._check_overlap()
        if self.codec is not None:
            self.row.check_codec(codec_named(self.codec))
        self._check_defences()
        self._check_way_back()
        return self

    def _check_knobs(self) -> None:
        """Raise ValueError if a knob is given that the method does not have."""
        for knob in KNOBS:
            if getattr(self, knob) is not None and knob not in self.row.knobs:
                able = ", ".join(methods_with(knob))
                raise ValueError(
                    f"the method {self.method!r} has no {knob}: leave it out, or choose one that "
                    f"has it ({able})"
                )

    def _check_defences(self) -> None:
        """Raise ValueError if the defences do not fit the method, the weights or the codec."""
        method = self.row
        if ROBUST_GROUPS.get(self.robust, method.group) != method.group:
            able = "clipped-gossip for one partner, centered-clip for everyone"
            raise ValueError(
                f"the method {self.method!r} cannot be robust by {self.robust}: choose what fits "
                f"it ({able})"
            )
        if self.check_loss and method.group != "pair":
            able = ", ".join(methods_of("pair"))
            raise ValueError(
                f"check_loss is for methods with one partner ({able}), and {self.method!r} is "
                "none: leave it out"
            )
        if self.robust != "none" and self.weights not in (None, "equal"):
            raise ValueError(
                "a robust rule counts every peer the same: leave out weights, or robust"
            )
        if self.robust != "none" and "-senders" in (self.codec or ""):
            raise ValueError(
                f"the codec {self.codec} has a mean of its own, clipped to the median norm: leave "
                "out robust, or take topk2"
            )

    def _check_way_back(self) -> None:
        """Raise ValueError if averages cannot be sent back by ``codec_back``."""
        if not self.codec_back:
            return
        from shoal.optim import codec_named

        if self.row.group != "everyone":
            raise ValueError(
                f"the method {self.method!r} does not average over everyone, so nothing is sent "
                f"back: leave out codec_back, or choose one that does "
                f"({', '.join(methods_of('everyone'))})"
            )
        if self.robust != "none":
            raise ValueError(
                "a robust rule needs whole contributions, of which no averages are sent back: "
                "leave out codec_back, or robust"
            )
        codec_named(self.codec_name)

    @property
    def codec_name(self) -> str:
        """The name of the codec of an exchange: that of contributions, and of averages if they have
        one.
        """
        name = self.codec or self.row.codec
        return f"{name},back={self.codec_back}" if self.codec_back else name

    @property
    def row(self) -> Method:
        return METHODS[self.method]

    @property
    def alone(self) -> bool:
        return self.method == ALONE

    def _check_overlap(self) -> None:
        """Raise ValueError if fragments or lag do not fit into a round."""
        overlap = self.overlap()
        if not overlap:
            return
        fragments = overlap["fragments"]
        lag = overlap["lag"]
        every = self._every
        if fragments > every:
            raise ValueError(
                f"a round of {every} steps has no room for {fragments} fragments: choose fewer "
                "fragments, or a longer every"
            )
        if lag != "auto" and lag >= every:
            raise ValueError(
                f"a lag of {lag} steps does not fit into a round of {every}: choose a shorter lag, "
                "auto, or a longer every"
            )

    @property
    def _every(self) -> int:
        return int(self.every or self.row.knobs["every"])

    def overlap(self) -> dict[str, Any]:
        """Return ``fragments`` and ``lag`` with their defaults; nothing if the method has none."""
        method = self.row
        if method.schedule != "overlaps":
            return {}
        pair = method.group == "pair"
        lag = DEFAULT_LAG if self.lag is None else self.lag
        usual = GOSSIP_FRAGMENTS if pair else method.knobs["fragments"]
        # Each has a step of its own.
        fragments = 1 if pair and lag == 0 else min(usual, self._every)
        return {"fragments": self.fragments or fragments, "lag": lag}

    @property
    def fragments_a_round(self) -> int:
        """Parts in which the model is exchanged in a round, one exchange each."""
        return int(self.overlap().get("fragments", 1))

    def guarded(self) -> OuterSettings:
        """Return these settings with the defences of a public swarm, where the user chose no other:
        a robust rule, and with pairs the trial of a partner's weights. Rejection by distance is not
        among them, since it may refuse newcomers.
        """
        group = self.row.group
        if group == "nobody":
            return self
        update: dict[str, Any] = {}
        if group == "pair" and "check_loss" not in self.model_fields_set:
            update["check_loss"] = True
        robust_fits = self.weights in (None, "equal") and "-senders" not in (self.codec or "")
        if robust_fits and "robust" not in self.model_fields_set:
            update["robust"] = "clipped-gossip" if group == "pair" else "centered-clip"
            update["codec_back"] = None  # whole contributions are screened
        return self.model_copy(update=update)

    @property
    def rounds_in_seconds(self) -> bool:
        """Whether a round lasts so many seconds, and not steps or tokens: nobody waits then for a
        slow member.
        """
        return self.round.startswith("seconds")

    @property
    def weighing(self) -> Literal["equal", "tokens", "rate"]:
        """``weights``, or the default: tokens in rounds of seconds, where peers process unequal
        amounts, otherwise the method's.

        In rounds of steps or tokens all process the same amount, and weights would only cost gossip
        twice the bytes.
        """
        method = self.row
        # A robust rule counts all the same: a peer's weight is a claim that nobody checks.
        if method.group == "nobody" or self.robust != "none":
            return "equal"
        if self.weights is not None:
            return self.weights
        if self.rounds_in_seconds and method.weights == "equal":
            return "tokens"
        return method.weights

    def knobs(self) -> dict[str, int | float | str]:
        """Return the arguments of the method's factory that are set, and those of its overlap."""
        given = {knob: getattr(self, knob) for knob in KNOBS}
        return {knob: value for knob, value in given.items() if value is not None} | self.overlap()

    def resolved(self) -> OuterSettings:
        """Return the settings with the method's defaults written out, as in a manifest, so that
        peers of all versions agree.
        """
        method = self.row
        update = {knob: default for knob, default in method.knobs.items() if knob in KNOBS}
        update |= self.knobs()
        update["codec"] = self.codec or method.codec
        update["weights"] = self.weighing
        return self.model_copy(update=update)

    def fitted(self, fragments: int) -> OuterSettings:
        """Return the settings for a model that is cut into so many ``fragments``, fewer where it
        has few layers.
        """
        return self.model_copy(update={"fragments": fragments}) if self.overlap() else self
