"""The one family of errors that a user may see: each message is one sentence that says what happened and what to do."""


class ShoalError(Exception):
    """Something the user can understand and mend. The command line prints it as it is and exits with code 2."""


class IdentityError(ShoalError):
    """The key file is missing, damaged, or readable by others."""


class LinkError(ShoalError):
    """A ``shoal://`` link is malformed."""


class MessageError(ShoalError):
    """A message from a peer is too large, malformed, of another version, or wrongly signed."""


class StartupError(ShoalError):
    """The node could not get on the network: daemon, port, or bootstrap."""


class NetworkError(ShoalError):
    """A call to a peer or to the own daemon failed or ran out of time."""
