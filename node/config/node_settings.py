"""The tables ``[node]`` and ``[peers]``: this machine, and whom it meets.

Settings of ``[node]`` are one table to users, and stand here in groups, as base classes of
`NodeSettings`.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from shoal.node.config.setting_types import (
    MAX_NAME_CHARS,
    Name,
    PathSetting,
    SettingsTable,
    absolute,
    number_as_text,
)
from shoal.node.home import HomeError
from shoal.node.listen_address import parse_address
from shoal.swarm.access.address import address_problem
from shoal.swarm.settings.outer import Lag

MAX_RANKS = 64
MAX_ADDRESSES = 8
"""Of each kind."""
ADDRESS = r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/(tcp|udp)/[0-9]{1,5}(/[^\s]*)?"


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


class _WhoItIs(SettingsTable):
    """Name and folder of a node. The swarm is informed of the name only."""

    name: Name = Field(
        default_factory=host_name,
        description="Name that other peers see; by default the machine's, with that of --folder or "
        "of the --identity file if one is given.",
    )
    operator: Name | None = Field(
        default=None,
        description="Operator of this node, if one runs several: they are never drawn for the same "
        "vote. By default each is its own.",
    )
    identity: PathSetting | None = Field(
        default=None,
        description="The key file; by default ~/.config/shoal/identity.key ($XDG_CONFIG_HOME is "
        "respected).",
    )
    folder: PathSetting | None = Field(
        default=None,
        description="Folder of checkpoints and metrics; by default runs/ and the node's name.",
    )

    _runs: Path = PrivateAttr(default_factory=lambda: absolute(Path("runs")))

    @model_validator(mode="after")
    def _named(self) -> _WhoItIs:
        if "name" not in self.model_fields_set:
            self.__dict__["name"] = default_name(self.folder, self.identity)
        return self

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


class _Reachability(SettingsTable):
    """Where a node listens, and through whom it joins. The swarm is informed of the addresses."""

    listen: list[str] = Field(
        default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"],
        max_length=MAX_ADDRESSES,
        description="Addresses to listen on; port 0 lets the system choose.",
    )
    announce: list[str] = Field(
        default_factory=list,
        max_length=MAX_ADDRESSES,
        description="Addresses to tell other peers, where they differ from those listened on (port "
        "forwarding).",
    )
    bootstrap: list[str] = Field(
        default_factory=list,
        max_length=MAX_ADDRESSES,
        description="Bootstrap nodes or members to join through besides the link's; bootstrap "
        "nodes go into links printed here.",
    )
    relay: Literal["auto", "only", "off"] = Field(
        default="auto",
        description="Accept connections through a bootstrap node or the link's peers: auto (if "
        "nobody can dial this node), only (from the start), or off (never, nor does this node "
        "forward for others).",
    )

    @field_validator("listen", "announce")
    @classmethod
    def _addresses(cls, value: list[str]) -> list[str]:
        for address in value:
            if not re.fullmatch(ADDRESS, address):
                raise ValueError(f"{address!r} should be written such as /ip4/0.0.0.0/tcp/4001")
        return value

    @field_validator("bootstrap")
    @classmethod
    def _full_addresses(cls, value: list[str]) -> list[str]:
        for address in value:
            if problem := address_problem(address):
                raise ValueError(f"{address!r} is no address as `shoal seed` prints it, {problem}")
        return value


def _count(value: str) -> str:
    if value != "all" and not (re.fullmatch(r"[1-9][0-9]?", value) and int(value) <= MAX_RANKS):
        raise ValueError(f"it should be all, or a number from 1 to {MAX_RANKS}")
    return value


Count = Annotated[str, BeforeValidator(number_as_text), AfterValidator(_count)]
"""``all``, or a number of ranks."""


class _Computing(SettingsTable):
    """What a node computes with."""

    device: str = Field(
        default="auto",
        description="Where to train: auto, cpu, cuda, cuda:1 and so on, xpu, or mps.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Threads for computing on the CPU; 0 takes half of the processors.",
    )
    gpus: Count | None = Field(
        default=None,
        description="GPUs to train on, a process for each: all, or a number; with the device cpu "
        "that many processes. By default one process.",
    )
    parallel: Literal["ddp", "fsdp"] | None = Field(
        default=None,
        description="How several GPUs share a model: ddp (each holds all of it; the default) or "
        "fsdp (each holds a part).",
    )
    lag: Lag = Field(
        default=None,
        description="Lag of this node's exchanges in place of the swarm's outer.lag: inner steps, "
        "0 to wait for each exchange, or auto. Peers may differ. By default the swarm's.",
    )


ON_DEVICE = Path("device")


def _place(path: Path) -> Path:
    return path if path == ON_DEVICE else absolute(path)


Place = Annotated[Path, Field(strict=False), AfterValidator(_place)]
"""``device``, or a folder."""


class _Limits(SettingsTable):
    """What a node may take of its machine and its link."""

    upload: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Megabits in a second that this node sends at most; 0: as many as go through.",
    )
    offload: Place | None = Field(
        default=None,
        description="Where slow weights and outer state are in place of main memory: device "
        "(faster, for 4 to 8 bytes of its memory a parameter), or a folder on a fast disk, for "
        "files that are gone when the node ends.",
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

    @property
    def slow_on_device(self) -> bool:
        return self.offload == ON_DEVICE

    @property
    def slow_folder(self) -> Path | None:
        return None if self.offload == ON_DEVICE else self.offload

    def slow_in_memory(self, kind: str) -> bool:
        """Whether main memory holds the slow weights of a model on a device of that kind."""
        return self.slow_folder is None and (not self.slow_on_device or kind == "cpu")


DATA = (
    "The task's option data on this node: for text, files, folders, FILE.jsonl, FILE.jsonl.gz, "
    "FILE.txt.gz, or hf:DATASET."
)


class _Data(SettingsTable):
    """What a node trains on."""

    data: str = Field(default="", description=DATA)
    shard: str | None = Field(
        default=None,
        description="Part of the data to train on, such as 0/8 (counted from 0); by default a free "
        "one.",
    )

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


class _Checkpoints(SettingsTable):
    """Where a node begins, and how often it saves."""

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


Endpoint = Annotated[
    str,
    BeforeValidator(number_as_text),
    AfterValidator(lambda value: str(parse_address(value))),
]
"""A port, or HOST:PORT."""


class _Curves(SettingsTable):
    """Where else the curves of a node go."""

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

    @field_validator("wandb")
    @classmethod
    def _project(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"([\w.-]{1,64}/)?[\w. -]{1,128}", value):
            raise ValueError(
                "it should be a name of letters, digits, dots, dashes and underscores, or TEAM/NAME"
            )
        return value


class NodeSettings(_Curves, _Checkpoints, _Data, _Limits, _Computing, _Reachability, _WhoItIs):
    """Settings of this machine. The swarm is informed of the name and the addresses only."""


class PeersSettings(SettingsTable):
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
