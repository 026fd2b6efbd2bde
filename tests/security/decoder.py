"""What a decoder of a stranger's bytes is, and what all of them share."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shoal.node.verify.material import decode_material as decode_material
from shoal.swarm.identity import Identity
from tests.security.hostile import (
    SIGNERS,
    Form,
)

ME, OTHER = Identity.ephemeral(), Identity.ephemeral()


SIGNERS.update({one.peer_id: one for one in (ME, OTHER)})


ASIDE = tempfile.TemporaryDirectory(prefix="fuzz-")  # it goes when this process ends


SWARM, HERE = "a" * 52, Path(ASIDE.name)


TINY = {"layers": 1, "width": 8, "heads": 2, "context": 8}


class Decoder(NamedTuple):
    """A decoder.

    ``covers``: the functions, as ``path:name``, that it goes through and that call what opens
    bytes.
    """

    name: str
    covers: tuple[str, ...]
    read: Callable[[bytes], Any]
    samples: Callable[[], list[bytes]]
    form: Form | None = None
    refuses: tuple[type[Exception], ...] = ()
    sentence: bool = True
    """Whether the exception's text is for people."""
    sound: Callable[[Any], bool] = lambda value: True
    """Whether a value is within its bounds."""
    tree: bool = True
    """Whether other values in one place are tried; not of messages, for which `test_message_fields`
    does that.
    """
    cases: int = 300
    """Of these, at most."""
    times: int = 24
    """How many bytes Python may hold for one that comes: a list of small numbers in JSON takes up
    to 20.
    """


def one(name, covers, read, sample, form=None, *refuses, **more):
    """Return a decoder of which ``sample`` makes good bytes; ``covers``: its functions, between
    spaces.
    """
    return Decoder(name, tuple(covers.split()), read, lambda: [sample()], form, refuses, **more)


def text(read):
    """Return a reader of text, of which a user passes any."""
    return lambda data: read(data.decode("utf-8", "surrogateescape"))


class Folder:
    """A folder in which one file is a stranger's; the others are as they should be."""

    def __init__(self, name: str, **files: bytes):
        self.path = HERE / name
        self.path.mkdir(exist_ok=True)
        for other, data in files.items():
            (self.path / other.replace("__", ".")).write_bytes(data)

    def reader(self, name, read):
        def put(data):
            (self.path / name).write_bytes(data)
            return read(self.path)

        return put
