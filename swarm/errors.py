"""The one family of errors that a user may see: each message is one sentence that says what happened and what to do."""


class ShoalError(Exception):
    """Something the user can understand and mend. The command line prints it as it is and exits with code 2."""


class IdentityError(ShoalError):
    """The key file is missing, damaged, or readable by others."""


class LinkError(ShoalError):
    """A ``shoal://`` link is malformed."""


class AdmissionError(ShoalError):
    """This node may not come into the swarm: no invitation, a wrong one, or one that others use."""


class MessageError(ShoalError):
    """A message from a peer is too large, malformed, of another version, or wrongly signed.

    ``reason`` is one word for counters: malformed, oversized, truncated, nested, kind, version, forged; and what those who
    judge the content of messages add to these.
    """

    def __init__(self, text: str, reason: str = "malformed") -> None:
        super().__init__(text)
        self.reason = reason


class StartupError(ShoalError):
    """The node could not get on the network: daemon, port, or bootstrap."""


class NetworkError(ShoalError):
    """A call to a peer or to the own daemon failed or ran out of time. ``reason``: the kind of failure (swarm/health.py)."""

    def __init__(self, text: str = "", reason: str = "broken") -> None:
        super().__init__(text)
        self.reason = reason
