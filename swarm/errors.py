"""The errors that a user may see: each message is one sentence that says what happened and what to
do.
"""

import errno

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def write_remedy(error: Exception) -> str:
    """Return what to do if nothing can be written because of ``error``, without a capital."""
    if isinstance(error, OSError) and error.errno in _FORBIDDEN:
        return "let this user write there"
    return "free some space"


def printable(text: str, kept: str = "", other: str = "?") -> str:
    """Return ``text`` with ``other`` for control characters but those ``kept``: a stranger's could
    drive the terminal.
    """
    return "".join(c if c.isprintable() or c in kept else other for c in text)


class ShoalError(Exception):
    """An error that the user can understand and mend.

    The command line prints it as it is and exits with code 2.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), "\n")  # what it quotes may be a stranger's


class IdentityError(ShoalError):
    """A key file that is missing, damaged, or readable by others."""


class LinkError(ShoalError):
    """A malformed ``shoal://`` link."""


class AdmissionError(ShoalError):
    """Refusal of this node by the swarm: no invitation, a wrong one, or one that others use."""


class MessageError(ShoalError):
    """A message from a peer that is too large, malformed, of another version, or wrongly signed.

    ``reason`` is one word for counters: malformed, oversized, truncated, nested, kind, version,
    forged; handlers that judge the content of messages add others.
    """

    def __init__(self, text: str, reason: str = "malformed") -> None:
        super().__init__(text)
        self.reason = reason


class StartupError(ShoalError):
    """A failure to get on the network: daemon, port, or bootstrap."""


class ListenError(StartupError):
    """An address that cannot be listened on, as when another program has its port."""


class NetworkError(ShoalError):
    """A failed or late call to a peer or the own daemon.

    ``reason``: its kind, one of `shoal.swarm.wire.envelope.FAILURES`.
    """

    def __init__(self, text: str = "", reason: str = "broken") -> None:
        super().__init__(text)
        self.reason = reason


class OuterError(ShoalError):
    """Settings of the outer optimizer that do not fit together, or do not fit the model."""
