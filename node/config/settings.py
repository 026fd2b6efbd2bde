"""All settings of a node: defaults, then a TOML file, then the flags of the command line
(``examples/swarm.toml``).

The tables ``swarm``, ``task``, ``outer``, ``train`` and ``verify`` become the manifest of a swarm
that this node creates, and with the task rl also ``rl.env``; a node that joins takes them from the
manifest, except for the part of ``train`` that is each node's own. The tables ``rl``, ``node`` and
``peers`` concern this node alone.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import reprlib
import socket
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shoal.node.console import parse_address
from shoal.node.home import HomeError, expanded
from shoal.optim.methods import ALONE, one_of
from shoal.swarm.access.address import address_problem
from shoal.swarm.errors import ShoalError
from shoal.swarm.manifest import Bucket, EpochSeconds
from shoal.swarm.settings.outer import Lag, OuterSettings
from shoal.swarm.settings.training import TrainSettings
from shoal.swarm.settings.verification import VerifySettings


def spec_here(spec: str) -> str:
    """Return ``path/file.py:Class`` with the whole path, if there is that file: its code may change
    the folder of the process.
    """
    where, colon, name = spec.rpartition(":")
    file = Path(expanded(where))
    return (
        f"{file.absolute()}:{name}" if colon and where.endswith(".py") and file.is_file() else spec
    )


def served_by(spec: str) -> tuple[str, str]:
    """Return a policy, and the URL of its server, of ``POLICY@URL``; an empty text without one."""
    policy, at, url = spec.partition("@http")
    return policy, at[1:] + url


def policy_here(spec: str) -> str:
    """Return ``hf:PATH`` with the whole path, if there is that folder or file; else ``spec``, which
    may be a name.
    """
    policy, url = served_by(spec)
    kind, _, where = policy.partition(":")
    path = Path(expanded(where))
    return (
        f"hf:{path.absolute()}{url and '@'}{url}"
        if kind == "hf" and where and path.exists()
        else spec
    )


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


def _loss(name: str) -> str:
    from shoal.optim.rl import LOSSES  # with torch

    if name not in LOSSES:
        raise ValueError(f"there is no loss {name[:64]!r}: choose {one_of(LOSSES)}")
    return name


class RLSettings(_Table):
    """Settings of this node with ``--task rl``."""

    env: Annotated[str, AfterValidator(spec_here)] = Field(
        default="strings",
        min_length=1,
        max_length=4096,
        description="Environment to learn in: strings (built in), sapo9 or a family of "
        "reasoning-gym, module:Class, or "
        "path/file.py:Class; its options are those under [task.options].",
    )
    policy: Annotated[str, AfterValidator(policy_here)] = Field(
        default="tiny",
        min_length=1,
        max_length=4096,
        description="Policy that this node trains: tiny[:HABIT[:STEPS]] (built in; so many steps "
        "of a warm start, 400), or "
        "hf:PATH_OR_NAME[@URL] (transformers; the URL of a server of the model, vLLM or "
        "llama.cpp's, to draw completions).",
    )
    local: int = Field(
        default=4, ge=0, le=1024, description="Own groups that this node learns from in a round."
    )
    external: int = Field(
        default=4,
        ge=0,
        le=1024,
        description="Other peers' groups that it learns from in a round, at most.",
    )
    group: int = Field(default=8, ge=2, le=64, description="Completions of each question.")
    temperature: float = Field(
        default=1.0, gt=0, le=100, description="Temperature at which completions are drawn."
    )
    max_tokens: int = Field(
        default=0,
        ge=0,
        le=16_384,
        description="Largest number of tokens of a completion; 0: what suits the policy.",
    )
    loss: Annotated[str, AfterValidator(_loss)] | None = Field(
        default=None,
        description="Loss, by its name in shoal.optim.rl.LOSSES; not given, what suits the policy.",
    )
    lr: float | None = Field(
        default=None, gt=0, le=1, description="Learning rate; not given, what suits the policy."
    )
    held_out: int = Field(
        default=500,
        ge=1,
        le=100_000,
        description="Questions of an evaluation, which nobody trains on.",
    )
    only: Literal["share", "learn"] | None = Field(
        default=None,
        description="share: share rollouts, but do not learn; learn: learn, but share nothing. By "
        "default both.",
    )

    @model_validator(mode="after")
    def _does_something(self) -> RLSettings:
        if self.local == 0 and (self.external == 0 or self.only == "share"):
            raise ValueError(
                "local must be at least 1 for a node that shares only, or has external = 0"
            )
        return self


def env_label(spec: str) -> str:
    """Return the name of an environment in the manifest and in rollouts: without the folder, which
    differs between machines.
    """
    where, colon, name = spec.rpartition(":")
    return PurePath(where).name + colon + name


Precision = Literal["float32", "bfloat16", "float16"]


class OwnTraining(_Table):
    """How this node computes its steps.

    Peers may choose differently: a step is of the same batch whatever is set here.
    """

    precision: Precision = Field(
        default="float32",
        description="Number format in which this node computes: float32, bfloat16, or float16 "
        "(with a scaled loss). The weights "
        "stay as the task made them.",
    )
    accumulate: int = Field(
        default=1,
        ge=1,
        le=65_536,
        description="Equal parts that this node cuts a batch into, one computed after another, "
        "which takes less memory.",
    )
    compile: bool = Field(
        default=False, description="Compile the model with torch.compile on this node."
    )
    recompute: bool = Field(
        default=False,
        description="Compute activations again in the backward pass on this node: less memory, for "
        "about a third more computing.",
    )
    workers: int = Field(
        default=0,
        ge=0,
        le=256,
        description="Processes that draw this node's batches ahead; 0: the training process draws "
        "each when it is needed.",
    )

    def flags(self) -> list[str]:
        """Return the flags of `shoal join` that set what differs from the defaults."""
        fields = OwnTraining.model_fields
        found = {name: getattr(self, name) for name in fields}
        return [
            f"--set=train.{name}={json.dumps(value)}"
            for name, value in found.items()
            if value != fields[name].default
        ]


class TrainTable(TrainSettings, OwnTraining):
    """The whole table ``[train]``: the swarm's settings and this node's own."""

    @property
    def shared(self) -> TrainSettings:
        return TrainSettings(**{name: getattr(self, name) for name in TrainSettings.model_fields})

    def of_swarm(self, fixed: TrainSettings) -> TrainTable:
        """Return this table with the swarm's settings in place of its own, but for what each node
        chooses for itself.
        """
        return self.model_copy(
            update={name: getattr(fixed, name) for name in TrainSettings.model_fields}
        )


MAX_RANKS = 64


def _count(value: str) -> str:
    if value != "all" and not (re.fullmatch(r"[1-9][0-9]?", value) and int(value) <= MAX_RANKS):
        raise ValueError(f"it should be all, or a number from 1 to {MAX_RANKS}")
    return value


# A number in TOML is no text.
Count = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    AfterValidator(_count),
]


class PeersSettings(_Table):
    """Peers that this node meets. The swarm is not informed of them."""

    allow: list[str] = Field(
        default_factory=list,
        max_length=1024,
        description="Peer ids, or files of them (one a line, # begins a comment): if there are "
        "any, no other peer is met.",
    )
    deny: list[str] = Field(
        default_factory=list,
        max_length=1024,
        description="Peer ids, or files of them: nothing is sent to them or taken from them.",
    )


MAX_FILE_BYTES = 2**20
MAX_NAME_CHARS = 64
DATA = (
    "The task's option data on this node: for text, files, folders, FILE.jsonl, FILE.jsonl.gz, "
    "FILE.txt.gz, or hf:DATASET."
)


def _file_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", value):
        raise ValueError(
            "it should be 1 to 64 letters, digits, dots, dashes and underscores, with no dot or "
            "dash first"
        )
    return value


def _absolute(path: Path) -> Path:
    """Return ``path`` whatever folder the user's code changes to; as it is where the current one is
    gone.
    """
    with suppress(FileNotFoundError):
        return Path(expanded(path)).absolute()
    return path


# The node's name is also its folder's, so it must be a plain file name on every system.
Name = Annotated[str, AfterValidator(_file_name)]
# Flags and TOML give a path as text, which strict mode would refuse.
PathSetting = Annotated[Path, Field(strict=False), AfterValidator(_absolute)]
ON_DEVICE = Path("device")
Place = Annotated[
    Path,
    Field(strict=False),
    AfterValidator(lambda path: path if path == ON_DEVICE else _absolute(path)),
]
# 9464 in TOML is a number.
Endpoint = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    AfterValidator(lambda v: str(parse_address(v))),
]


class ConfigError(ShoalError):
    """A setting, the settings file, or the device cannot be used."""


class SwarmSettings(_Table):
    """Settings of a swarm besides its training."""

    name: Name = Field(default="shoal", description="Name of the swarm, for people.")
    start_when: int = Field(
        default=1, ge=1, le=65_536, description="Number of peers at which training begins."
    )
    shards: int = Field(
        default=8,
        ge=1,
        le=65_536,
        description="Number of parts that the data is divided into, one for each peer.",
    )
    invite_only: bool = Field(
        default=False, description="Admit only peers that the creator has invited (shoal invite)."
    )
    public: bool = Field(
        default=False,
        description="Let bootstrap nodes list the swarm (shoal swarms), so that others join it.",
    )
    bucket: Bucket = Field(
        default=0,
        description="Most members that one node reads and is paired with at a time, 4 to 64, such "
        "as 64. That caps "
        "each node's cost at that of 30 peers. 0: all members.",
    )
    epoch_s: EpochSeconds = Field(
        default=60.0,
        description="bucket: seconds after which members are reassigned, at least 30; four rounds "
        "mix 4 to 8 % worse than "
        "all with all.",
    )

    @field_validator("public")
    @classmethod
    def _open_to_all(cls, public: bool, info: ValidationInfo) -> bool:
        if public and info.data.get("invite_only"):
            raise ValueError("a swarm is public or invite_only, not both")
        return public

    @model_validator(mode="after")
    def _fits_together(self) -> SwarmSettings:
        if not self.bucket and self.epoch_s != type(self).model_fields["epoch_s"].default:
            raise ValueError(
                "epoch_s is a setting of buckets: leave it out, or set bucket too, such as 64"
            )
        return self


class TaskSettings(_Table):
    """Settings of the task."""

    hooks: Annotated[str, AfterValidator(spec_here)] = Field(
        default="text", min_length=1, max_length=4096,
        description="The task: text or rl (built in), module:Class, or path/file.py:Class.",
    )  # fmt: skip
    options: dict[str, int | float | str | bool] = Field(
        default_factory=dict, description="Options of the task, handed to its constructor by name."
    )


def host_name() -> str:
    """Return the name of this machine, reduced to the characters of a file name."""
    return _file_characters(socket.gethostname().split(".")[0]) or "node"


def _file_characters(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "-", text).strip("-")[:MAX_NAME_CHARS]


def default_name(folder: Path | None, identity: Path | None) -> str:
    """Return the name of a node that was given none.

    A second node of a machine has a folder or a key file of its own, so the name has that too.
    """
    host = host_name()
    own = ""
    if folder is not None:
        own = _file_characters(folder.name)
    elif identity is not None:
        own = _file_characters(identity.stem)
    if own in ("", host):
        return host
    return f"{host[: MAX_NAME_CHARS // 2]}-{own}"[:MAX_NAME_CHARS]


class NodeSettings(_Table):
    """Settings of this machine. The swarm is informed of the name and the addresses only."""

    name: Name = Field(
        default_factory=host_name,
        description="Name that other peers see; by default the machine's, with that of --folder or "
        "of the --identity file if one is given.",
    )
    device: str = Field(
        default="auto",
        description="Where to train: auto, cpu, cuda, cuda:1 and so on, xpu, or mps.",
    )
    listen: list[str] = Field(
        default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"], max_length=8,
        description="Addresses to listen on; port 0 lets the system choose.",
    )  # fmt: skip
    announce: list[str] = Field(
        default_factory=list,
        max_length=8,
        description="Addresses to tell other peers, where they differ from those listened on (port "
        "forwarding).",
    )
    bootstrap: list[str] = Field(
        default_factory=list,
        max_length=8,
        description="Bootstrap nodes or members to join through besides the link's; bootstrap "
        "nodes go into links printed here.",
    )
    relay: Literal["auto", "only", "off"] = Field(
        default="auto",
        description="Accept connections through a bootstrap node or the link's peers: auto (if "
        "nobody can dial this node), "
        "only (from the start), or off (never, nor does this node forward for others).",
    )
    folder: PathSetting | None = Field(
        default=None,
        description="Folder of checkpoints and metrics; by default runs/ and the node's name.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Threads for computing on the CPU; 0 takes half of the processors.",
    )
    lag: Lag = Field(
        default=None,
        description="Lag of this node's exchanges in place of the swarm's outer.lag: inner steps, "
        "0 to wait for each exchange, or "
        "auto. Peers may differ. By default the swarm's.",
    )
    data: str = Field(default="", description=DATA)
    shard: str | None = Field(
        default=None,
        description="Part of the data to train on, such as 0/8 (counted from 0); by default a free "
        "one.",
    )
    resume: bool = Field(
        default=False, description="Continue from the newest checkpoint in the folder."
    )
    resume_from: PathSetting | None = Field(
        default=None,
        description="Begin another swarm with the weights of this checkpoint, or of the newest one "
        "in this folder.",
    )
    checkpoint_every_rounds: int = Field(
        default=10,
        ge=0,
        le=1_000_000,
        description="Rounds between two checkpoints; 0 saves at the end only.",
    )
    operator: Name | None = Field(
        default=None,
        description="Operator of this node, if one runs several: they are never drawn for the same "
        "vote. "
        "By default each is its own.",
    )
    upload: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Megabits in a second that this node sends at most; 0: as many as go through.",
    )
    offload: Place | None = Field(
        default=None,
        description="Where slow weights and outer state are in place of main memory: device "
        "(faster, for 4 to 8 bytes of its "
        "memory a parameter), or a folder on a fast disk, for files that are gone when the node "
        "ends.",
    )
    ram: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Gigabytes of memory: a model that needs more is not begun with, and queues "
        "shrink with it; 0: no bound.",
    )
    disk: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Gigabytes that the folder may hold: older checkpoints go first, then no more "
        "are written; 0: no bound.",
    )
    metrics: Endpoint | None = Field(
        default=None,
        description="Port, or HOST:PORT, at which Prometheus finds metrics; 0: any free port. By "
        "default nowhere.",
    )
    tensorboard: PathSetting | None = Field(
        default=None,
        description="Folder of curves for TensorBoard, in which the node has one of its own. By "
        "default none.",
    )
    wandb: str | None = Field(
        default=None,
        description="Project, or team/project, of Weights & Biases that the curves go to. By "
        "default none.",
    )
    identity: PathSetting | None = Field(
        default=None,
        description="The key file; by default ~/.config/shoal/identity.key ($XDG_CONFIG_HOME is "
        "respected).",
    )
    gpus: Count | None = Field(
        default=None,
        description="GPUs to train on, a process for each: all, or a number; with the device cpu "
        "that many processes. "
        "By default one process.",
    )
    parallel: Literal["ddp", "fsdp"] | None = Field(
        default=None,
        description="How several GPUs share a model: ddp (each holds all of it; the default) or "
        "fsdp (each holds a part).",
    )

    _runs: Path = PrivateAttr(default_factory=lambda: _absolute(Path("runs")))

    @model_validator(mode="after")
    def _named(self) -> NodeSettings:
        if "name" not in self.model_fields_set:
            self.__dict__["name"] = default_name(self.folder, self.identity)
        return self

    @field_validator("listen", "announce")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        for address in value:
            if not re.fullmatch(
                r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/(tcp|udp)/[0-9]{1,5}(/[^\s]*)?", address
            ):
                raise ValueError(f"{address!r} should be written such as /ip4/0.0.0.0/tcp/4001")
        return value

    @field_validator("bootstrap")
    @classmethod
    def _full_addresses(cls, value: list[str]) -> list[str]:
        for address in value:
            if problem := address_problem(address):
                raise ValueError(f"{address!r} is no address as `shoal seed` prints it, {problem}")
        return value

    @field_validator("wandb")
    @classmethod
    def _project(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"([\w.-]{1,64}/)?[\w. -]{1,128}", value):
            raise ValueError(
                "it should be a name of letters, digits, dots, dashes and underscores, or TEAM/NAME"
            )
        return value

    @field_validator("shard")
    @classmethod
    def _shard(cls, value: str | None) -> str | None:
        if value is not None:
            found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", value)
            if not found or int(found[1]) >= int(found[2]):
                raise ValueError(
                    "it should be written as index/number with index from 0, such as 0/8 ... 7/8"
                )
        return value

    @property
    def shard_pair(self) -> tuple[int, int] | None:
        """``shard`` as (index, of)."""
        if self.shard is None:
            return None
        index, of = self.shard.split("/")
        return int(index), int(of)

    @property
    def slow_on_device(self) -> bool:
        return self.offload == ON_DEVICE

    @property
    def slow_folder(self) -> Path | None:
        return None if self.offload == ON_DEVICE else self.offload

    def slow_in_memory(self, kind: str) -> bool:
        """Whether main memory holds the slow weights of a model on a device of that kind."""
        return self.slow_folder is None and (not self.slow_on_device or kind == "cpu")

    @property
    def run_folder(self) -> Path:
        return self.folder or self._runs / self.name

    @property
    def identity_path(self) -> Path:
        return self.identity or default_identity_path()


def default_identity_path() -> Path:
    """Return the file of this user's key.

    HomeError if neither XDG_CONFIG_HOME nor the home folder says where it is.
    """
    base = os.environ.get("XDG_CONFIG_HOME", "")
    # The XDG specification says to ignore a relative path there.
    if os.path.isabs(base):
        return Path(base) / "shoal" / "identity.key"
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise HomeError(
            "This node's key is kept in the home folder, which is not known (HOME is not set, and "
            "this user has no entry in the system): pass --identity FILE, or set HOME."
        )
    return Path(home) / ".config" / "shoal" / "identity.key"


class Settings(_Table):
    """All settings of a node; `load` returns them."""

    swarm: SwarmSettings = Field(default_factory=SwarmSettings)
    task: TaskSettings = Field(default_factory=TaskSettings)
    outer: OuterSettings = Field(default_factory=OuterSettings)
    train: TrainTable = Field(default_factory=TrainTable)
    verify: VerifySettings = Field(default_factory=VerifySettings)
    rl: RLSettings = Field(default_factory=RLSettings)
    node: NodeSettings = Field(default_factory=NodeSettings)
    peers: PeersSettings = Field(default_factory=PeersSettings)


def known_keys() -> list[str]:
    """Return all keys, dotted, in the order of the tables."""
    tables: dict[str, Any] = {
        name: field.annotation for name, field in Settings.model_fields.items()
    }
    return [f"{name}.{key}" for name, table in tables.items() for key in table.model_fields]


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"There is no settings file {str(path)!r}: check the path.") from None
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"Cannot read the settings file {str(path)!r} ({what}): check the path."
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"The settings file {str(path)!r} is over 1 MiB: name a TOML file of settings."
        )
    try:
        values: dict[str, Any] = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"The settings file {str(path)!r} is not UTF-8 text: save it as UTF-8, as TOML asks "
            "for."
        ) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(
            f"The settings file {str(path)!r} is not TOML ({error}): correct that place."
        ) from error
    return values


def _merge(values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    for dotted, value in overrides.items():
        if value is None:
            continue  # a flag that was not given
        table = values
        *parents, key = dotted.split(".")
        for i, parent in enumerate(parents):
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                name = ".".join(parents[: i + 1])
                raise ConfigError(
                    f"{name!r} must be a table of settings: write [{name}] and its keys below it."
                )
        table[key] = value


def assignment(text: str) -> tuple[str, Any]:
    """Split ``KEY=VALUE``; the value is read as TOML or else as plain text, and the key may be
    dotted. Raises ConfigError.
    """
    key, equals, value = text.partition("=")
    if not equals or not all(part.isidentifier() for part in key.split(".")):
        raise ConfigError(
            f"The option {text!r} is not of the form KEY=VALUE: write it so, such as width=256."
        )
    if re.search(r"[\n#]", value):  # TOML would read on in the next line, or drop a comment
        return key, value
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


SHARED = ("train", "outer", "verify")
"""Tables that a swarm fixes for all its members."""


def _explain(error: ValidationError, joins: bool = False) -> str:
    """Return the first error as one sentence; ``joins``: for a node that joins a swarm."""
    first = error.errors(include_url=False)[0]
    if first["loc"][:2] == ("task", "options") and len(first["loc"]) > 2:
        return (
            f"The option 'task.options.{first['loc'][2]}' must be a number, a text, or true or "
            "false: correct it."
        )
    dotted = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        names = known_keys() + list(Settings.model_fields)
        near = difflib.get_close_matches(dotted, names, 1, cutoff=0.5)
        if "." not in dotted:  # the same key in whatever table, for nothing says which was meant
            same = [name for name in names if name.endswith(f".{dotted}")]
            near = [*same, f"task.options.{dotted}"] if same else near
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"the tables are {', '.join(Settings.model_fields)}."
        )
        return f"There is no setting {dotted!r}: {hint}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{dotted!r} must be a table of settings: write [{dotted}] and its keys below it."
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and isinstance(
        first["input"], Mapping
    ):  # of several settings of a table together
        if joins and dotted in SHARED:
            given = ", ".join(f"{dotted}.{key}" for key in first["input"])
            return (
                f"The swarm fixes the settings of {dotted!r} for all its members, and this node "
                f"was given {given}: leave that out; the creator can change train.lr and "
                "train.steps for all (`shoal change`)."
            )
        return f"The settings of {dotted!r} do not go together: {problem}."
    problem = re.sub(r"^(Input|String|List) should", "it should", problem)
    if first["type"] == "path_type":
        problem = "it should be a path"
    return f"The setting {dotted}={reprlib.repr(first['input'])} cannot be used: {problem}."


def load(
    path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    joins: bool = False,
) -> Settings:
    """Return the defaults, changed by the TOML file at ``path`` and then by ``overrides``.

    The keys of ``overrides`` are dotted, such as ``outer.every``; a value of None means not given.

    ``joins``: for a node that joins a swarm.

    Raises ConfigError: the sentence names the file and line, or the key, its value and the problem.
    """
    values = _read(path) if path is not None else {}
    _merge(values, overrides or {})
    task = values.get("task")
    outer = values.setdefault("outer", {})
    implied = (
        isinstance(task, dict)
        and task.get("hooks") == "rl"
        and isinstance(outer, dict)
        and "method" not in outer
    )
    if implied:
        outer["method"] = ALONE  # rollouts are shared then, weights only if a setting says so
    try:
        settings = Settings.model_validate(values)
        if implied:
            settings.outer.model_fields_set.discard("method")  # the user did not ask for it
        return settings
    except ValidationError as error:
        raise ConfigError(_explain(error, joins)) from None
