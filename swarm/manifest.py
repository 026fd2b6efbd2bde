"""The manifest: the settings that a swarm's creator fixed for all its peers, signed; its hash is
the swarm's id.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)

from shoal.optim.methods import (
    ALONE,
    DEFAULT,
    DEFAULT_LAG,
    METHODS,
    OVERLAPPED,
    Method,
    methods_of,
    methods_with,
    one_of,
)
from shoal.swarm.errors import MessageError, printable
from shoal.swarm.wire.envelope import KIB, MAX_COUNT, Digest, Label, Message, PeerId, peek, unseal

MAX_TOKENS = 2**53  # of a round
# seconds of a round
MIN_S = 0.1
MAX_S = 86_400.0
KNOBS = ("every", "lr", "momentum", "fragments", "lag")
"""Settings that are arguments of the methods' factories."""
MAX_STEPS = 1_000_000
MAX_GROUP = 32
"""Members of a group of a method that averages over everyone, at most; more form several groups."""

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[tuple(METHODS)]
_OVERLAPPING = ", ".join(name for name, method in METHODS.items() if method.schedule == "overlaps")

Unit = Literal["steps", "tokens", "seconds"]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


def _lag(value: object) -> object:
    """Check by hand: of a union of types each would have an error of its own."""
    if value is None or value == "auto" or (type(value) is int and 0 <= value <= MAX_STEPS):
        return value
    raise ValueError(f"it should be auto, or a whole number from 0 to {MAX_STEPS}")


Lag = Annotated[int | Literal["auto"] | None, BeforeValidator(_lag)]


def _numbers(value: object) -> object:
    """Read numbers that are packed as little-endian u16: a list of more than 16 is refused before
    its content is seen.
    """
    if not isinstance(value, bytes):
        return value
    if len(value) % 2:
        raise ValueError("must be numbers of two bytes")
    return struct.unpack(f"<{len(value) // 2}H", value)


def parse_round(text: str) -> tuple[Unit, float | None]:
    """Return the unit of a round and its length; None: ``every`` steps, or seconds that follow the
    peers' speeds.

    ``text``: ``steps``, ``tokens:N``, ``seconds:S`` or ``seconds:auto``. Raises ValueError for
    anything else, or a number out of bounds.
    """
    if text == "steps":
        return "steps", None
    if text == "seconds:auto":
        return "seconds", None
    if re.fullmatch(r"tokens:[0-9]{1,16}", text):
        tokens = int(text.partition(":")[2])
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError(f"a round must have between 1 and {MAX_TOKENS} tokens")
        return "tokens", tokens
    if re.fullmatch(r"seconds:[0-9]{1,9}(\.[0-9]{1,9})?", text):
        seconds = float(text.partition(":")[2])
        if not MIN_S <= seconds <= MAX_S:
            raise ValueError(f"a round must take between {MIN_S:g} and {MAX_S:g} seconds")
        return "seconds", seconds
    raise ValueError("it should be steps, tokens:N, seconds:S or seconds:auto")


def _checked(text: str) -> str:
    parse_round(text)
    return text


RoundSetting = Annotated[str, Field(max_length=32), AfterValidator(_checked)]


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
        le=1024,
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
    finish: Literal["none", "average"] | None = Field(
        default=None,
        description="After the last step: none (each peer keeps its own model), or average (all "
        "that are there take the mean of "
        "their weights, and end with one model).",
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
            from shoal.optim import (
                codec_named,
            )  # here, as below: with torch, which takes a second, and not every command needs it

            codec_named(value)
        return value

    @model_validator(mode="after")
    def _fits_the_method(self) -> OuterSettings:
        if (
            not self.model_fields_set
        ):  # nor does a node that joins, and takes these settings from the manifest
            return self
        from shoal.optim import codec_named

        method = self.row
        for knob in KNOBS:
            if getattr(self, knob) is not None and knob not in method.knobs:
                able = ", ".join(methods_with(knob))
                raise ValueError(
                    f"the method {self.method!r} has no {knob}: leave it out, or choose one that "
                    f"has it ({able})"
                )
        self._fits_the_round()
        if self.codec is not None:
            method.check_codec(codec_named(self.codec))
        wanted = {"clipped-gossip": "pair", "centered-clip": "everyone"}.get(
            self.robust, method.group
        )
        if wanted != method.group:
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
        return self

    @property
    def row(self) -> Method:
        return METHODS[self.method]

    @property
    def alone(self) -> bool:
        return self.method == ALONE

    def _fits_the_round(self) -> None:
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
        usual = OVERLAPPED if pair else method.knobs["fragments"]
        # Each has a step of its own.
        fragments = 1 if pair and lag == 0 else min(usual, self._every)
        return {"fragments": self.fragments or fragments, "lag": lag}

    def guarded(self) -> OuterSettings:
        """Return these settings with the defences of a public swarm, where the user chose no other:
        a robust rule, and with pairs the trial of a partner's weights. Rejection by distance is not
        among them, since it may refuse newcomers.
        """
        group = self.row.group
        if group == "nobody":
            return self
        chosen: dict[str, Any] = {"check_loss": True} if group == "pair" else {}
        if self.weights in (None, "equal") and "-senders" not in (self.codec or ""):
            chosen["robust"] = "clipped-gossip" if group == "pair" else "centered-clip"
        return self.model_copy(
            update={
                name: value for name, value in chosen.items() if name not in self.model_fields_set
            }
        )

    @property
    def weighing(self) -> Literal["equal", "tokens", "rate"]:
        """``weights``, or the default: tokens in rounds of seconds, where peers process unequal
        amounts, otherwise the method's.

        In rounds of steps or tokens all process the same amount, and weights would only cost gossip
        twice the bytes.
        """
        method = self.row
        if (
            method.group == "nobody" or self.robust != "none"
        ):  # a peer's weight is a claim that nobody checks
            return "equal"
        uneven = self.round.startswith("seconds") and method.weights == "equal"
        return self.weights or ("tokens" if uneven else method.weights)

    def knobs(self) -> dict[str, int | float | str]:
        return {
            knob: value for knob in KNOBS if (value := getattr(self, knob)) is not None
        } | self.overlap()

    def resolved(self) -> OuterSettings:
        """Return the settings with the method's defaults written out, as in a manifest, so that
        peers of all versions agree.
        """
        method = self.row
        own = {knob: default for knob, default in method.knobs.items() if knob in KNOBS}
        return self.model_copy(
            update=own
            | self.knobs()
            | {
                "codec": self.codec or method.codec,
                "weights": self.weighing,
                "finish": self.finishing,
            }
        )

    @property
    def finishing(self) -> Literal["none", "average"]:
        """What follows the last step: where peers average in pairs, each would have a model of its
        own without a last average.
        """
        if self.finish is not None:
            return self.finish
        return "average" if self.row.group == "pair" else "none"

    def fitted(self, fragments: int) -> OuterSettings:
        """Return the settings for a model that is cut into so many ``fragments``, fewer where it
        has few layers.
        """
        return self.model_copy(update={"fragments": fragments}) if self.overlap() else self


class TrainSettings(BaseModel):
    """Settings of the training run."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    steps: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="Inner steps of every node; 0 trains until it is stopped.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of the first weights, the shards and the pairing.",
    )
    eval_every: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="Inner steps between two evaluations; 0: only at the start and end.",
    )
    optimizer: Literal["task", "adamw", "muon"] = Field(
        default="task",
        description="Inner optimizer: the task's own (task), adamw (betas 0.9 and 0.99), or muon "
        "(for the matrices of the hidden "
        "layers, with adamw, betas 0.9 and 0.95, for the rest).",
    )
    lr: float | None = Field(
        default=None,
        gt=0,
        le=10,
        description="adamw, muon: peak learning rate; not given, 3e-4 (muon: 0.02).",
    )
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        le=10,
        description="adamw, muon: weight decay; not given, 0.01 (muon: 0).",
    )
    schedule: Literal["task", "constant", "cosine", "wsd"] = Field(
        default="task",
        description="Learning rate after the warm-up: the task's own schedule (task), constant, "
        "cosine (down to a tenth at the "
        "last step), or wsd (constant, and down to 0 over the last fifth of the steps).",
    )
    warmup: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="Inner steps up to the full learning rate, in a schedule other than the "
        "task's.",
    )
    clip: float = Field(
        default=0.0,
        ge=0,
        le=1e9,
        description="Largest norm of all gradients of a step together, which are scaled down to "
        "it; 0: any.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> TrainSettings:
        given = [name for name in ("lr", "weight_decay") if getattr(self, name) is not None]
        if given and self.optimizer == "task":
            raise ValueError(
                f"the task's own optimizer has its own {given[0]}: set it as the task wants it, or "
                "choose adamw"
            )
        if self.warmup and self.schedule == "task":
            raise ValueError(
                "the task's own schedule has its own warmup: leave it out, or choose constant, "
                "cosine or wsd"
            )
        if self.schedule in ("cosine", "wsd") and not self.steps:
            raise ValueError(
                f"the schedule {self.schedule} leads to an end: set steps, or choose constant"
            )
        return self


class VerifySettings(BaseModel):
    """Settings of claims and verifiers that all peers of a swarm share."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    audit_rate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of claims that verifiers are drawn for, such as 0.1: nodes claim what "
        "they generate, with proofs from "
        "hidden states, and check each other's; for the task rl, whose policy all must then have "
        "in common. 0: nothing is claimed.",
    )
    round_s: float = Field(
        default=60.0,
        ge=4,
        le=86_400,
        description="Seconds of such a round; it begins where Unix time is a multiple of it, so "
        "clocks must agree to a few "
        "hundredths.",
    )


class Terms(BaseModel):
    """Policy and sampling of claimed completions.

    The creator sets them; a manifest has them if completions are claimed.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    policy: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,256}$")]
    """Name of all nodes' policy, without folders."""
    base: Digest
    """Hex SHA-256 of the weights that are not trained, and so not in a snapshot."""
    group: Annotated[int, Field(ge=1, le=64)]
    temperature: Annotated[float, Field(gt=0, le=100)]
    max_tokens: Annotated[int, Field(ge=1, le=16_384)]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the creator's policy, in which claims may be computed besides float32; each is
    checked in its own.
    """


MANIFEST_PROTOCOL = "/shoal/manifest/1"
PROTOCOL = 2  # how peers exchange and pair; nodes of different protocols cannot train together

# records; nodes store no more of one key
MIN_BUCKET = 4
MAX_BUCKET = 64
# seconds; members need some 19 to publish and read ahead of an epoch
MIN_EPOCH_S = 30.0
MAX_EPOCH_S = 86_400.0

OptionName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


def _option(value: object) -> object:
    """Check the bounds by hand: a union of types would turn an integer that is too large into a
    float.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("must be within 64 bits")
    if isinstance(value, str) and len(value) > 1024:
        raise ValueError("must be at most 1024 characters")
    return value


def _bucket(value: int) -> int:
    if value and not MIN_BUCKET <= value <= MAX_BUCKET:
        raise ValueError(f"a bucket holds {MIN_BUCKET} to {MAX_BUCKET} members, or 0: no buckets")
    return value


def _epoch_s(value: float) -> float:
    if not MIN_EPOCH_S <= value <= MAX_EPOCH_S:
        raise ValueError(
            f"an epoch takes {MIN_EPOCH_S:g} to {MAX_EPOCH_S:g} seconds, for members publish and "
            "read ahead of it for 19 of them"
        )
    return value


Bucket = Annotated[int, AfterValidator(_bucket)]
EpochSeconds = Annotated[float, AfterValidator(_epoch_s)]
Option = Annotated[int | float | str | bool, BeforeValidator(_option)]


# No slash: a name that the joiner must already have, never the path of a file on its disk.
TASK_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z_][A-Za-z0-9_]*)?$"


class Manifest(Message):
    """Definition of a swarm. Every peer holds the same bytes of it, sealed by the creator."""

    KIND = "manifest"
    LIMIT = 48 * KIB
    AUTHOR = "creator"
    name: Label = Field(description="Name of the swarm, for people.")
    created: float = Field(ge=0, description="When it was created, in Unix seconds.")
    creator: PeerId = Field(description="Peer id of the creator, who signed this.")
    protocol: int = Field(
        default=PROTOCOL, ge=1, le=65_535, description="Protocol that the peers speak."
    )
    task: str = Field(
        max_length=256,
        pattern=TASK_NAME,
        description="Name of the task, such as `text` or `module:Class`; every peer must have it "
        "installed already.",
    )
    task_options: dict[OptionName, Option] = Field(
        default_factory=dict,
        max_length=32,
        description="Options of the task that are the same on all peers.",
    )
    outer: OuterSettings = Field(default_factory=OuterSettings, description="The outer optimizer.")
    train: TrainSettings = Field(default_factory=TrainSettings, description="The training run.")
    verify: VerifySettings = Field(
        default_factory=VerifySettings, description="What is claimed, and checked."
    )
    terms: Terms | None = Field(
        default=None, description="How claimed completions are made; none without claims."
    )
    model: Digest = Field(
        description="Hex SHA-256 of names, types and shapes of the averaged parameters, in their "
        "order."
    )
    fragment_of: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=1024)], ...],
        Field(
            max_length=8192,
            description="Fragment of each parameter, in the model's order, if not by layer; empty: "
            "by layer.",
        ),
        BeforeValidator(_numbers),
        PlainSerializer(lambda numbers: struct.pack(f"<{len(numbers)}H", *numbers)),
    ] = ()
    start_when: int = Field(
        default=1, ge=1, le=65_536, description="Number of peers at which training begins."
    )
    shards: int = Field(
        default=1, ge=1, le=65_536, description="Parts that the training data is divided into."
    )
    invite_only: bool = Field(
        default=False,
        description="Whether only the creator, and whom it has invited, may be members.",
    )
    public: bool = Field(
        default=False,
        description="Whether bootstrap nodes list the swarm, so that anybody may find and join it.",
    )
    bucket: Bucket = Field(
        default=0,
        description="Most members that one peer reads and is paired with in an epoch; 0: all.",
    )
    epoch_s: EpochSeconds = Field(
        default=60.0, description="Seconds of an epoch, after which buckets are drawn anew."
    )

    @model_validator(mode="after")
    def _goes_together(self) -> Manifest:
        if self.public and self.invite_only:
            raise ValueError("a swarm is public or invite_only, not both")
        if self.bucket and self.verify.audit_rate:
            raise ValueError(
                "verifiers are drawn among all members, so a swarm that verifies has no buckets: "
                "leave bucket out"
            )
        if self.fragment_of and {*self.fragment_of} != {*range(self.outer.fragments or 1)}:
            raise ValueError(
                "the manifest's fragments are others than those that its parameters are divided "
                "into"
            )
        return self


class Title(NamedTuple):
    """Short description of a swarm for people."""

    name: str
    task: str
    method: str
    fragments: int = 1
    """Exchanges in a round, at most."""


def title_of(sealed: bytes) -> Title:
    """Return the title of a sealed manifest whose hash was verified.

    It checks no setting, so it needs no torch.

    Raises MessageError if the manifest names no task or method.
    """
    fields = peek(sealed, Manifest.LIMIT)
    outer = fields.get("outer")
    found = (
        fields.get("name"),
        fields.get("task"),
        outer.get("method") if isinstance(outer, dict) else None,
    )
    if not all(isinstance(text, str) for text in found):
        raise MessageError("A malformed manifest was refused: it names no task and method.")
    parts = outer.get("fragments") if isinstance(outer, dict) else None
    name, task, method = (printable(str(text)[:64]) for text in found)
    return Title(name, task, method, parts if type(parts) is int and 1 <= parts <= 1024 else 1)


def creator_of(sealed: bytes) -> str:
    """Return the peer id of the creator in a sealed manifest whose hash was verified.

    It needs no torch. Raises MessageError if the manifest names none.
    """
    creator = peek(sealed, Manifest.LIMIT).get("creator")
    if not isinstance(creator, str):
        raise MessageError("A malformed manifest was refused: it names no creator.")
    return creator


def is_public(sealed: bytes) -> bool:
    """Return whether a sealed manifest, whose hash was verified, says that its swarm is public.

    It needs no torch. MessageError.
    """
    return peek(sealed, Manifest.LIMIT).get("public") is True


def swarm_id(sealed: bytes) -> str:
    """Return the id of the swarm of a sealed manifest: its SHA-256 in lower-case base32, 52
    characters.
    """
    return base64.b32encode(hashlib.sha256(sealed).digest()).decode().rstrip("=").lower()


def open_manifest(
    sealed: bytes, expected_id: str | None = None, *, protocol: int | None = PROTOCOL
) -> Manifest:
    """Return the manifest, verified against its signature and, if given, the swarm id and the
    ``protocol``. Raises MessageError.
    """
    if expected_id is not None and swarm_id(sealed) != expected_id:
        raise MessageError(
            f"The wrong swarm id: the manifest that came belongs to swarm {swarm_id(sealed)}, not "
            f"to {expected_id}: ask for a fresh link."
        )
    _, manifest = unseal(sealed, Manifest)
    if protocol is not None and manifest.protocol != protocol:
        where = "here" if manifest.protocol > protocol else "on its creator's node"
        raise MessageError(
            f"The swarm speaks protocol {manifest.protocol}, this node speaks {protocol}: update "
            f"shoal {where}."
        )
    return manifest
