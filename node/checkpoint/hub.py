"""Uploading exported weights to a repository of the Hugging Face hub (``shoal pull --push``). Needs the package huggingface_hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.node.extras import require
from shoal.swarm.errors import ShoalError

PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
SILENT_S = 60.0  # the hub's library sets no limit to how long a server may be silent
LOGIN = "run `hf auth login`, or set HF_TOKEN to a token that may write"


class PushError(ShoalError):
    """The weights cannot be uploaded to the hub."""


class HubRepository:
    """Repository ``name`` (OWNER/NAME, or NAME for the token's owner) of the hub, to which the user's token may write."""

    def __init__(self, name: str, *, private: bool = False) -> None:
        """Ask the hub whose token it is, so that a fault is known before a long download; nothing is created yet.

        Raises PushError: the name is none, the package or the token is missing, or the hub refuses it or does not answer.
        """
        if not re.fullmatch(rf"{PART}(/{PART})?", name) or "--" in name or ".." in name:
            raise PushError(f"{name!r} names no repository of the hub: write OWNER/NAME.")
        require(PushError, "--push", "huggingface_hub", extra="data")
        import huggingface_hub as hub
        from huggingface_hub.utils import disable_progress_bars, get_session

        get_session().timeout = SILENT_S
        disable_progress_bars()  # stdout and stderr are the command's own
        self.name, self._private, self._api = name, private, hub.HfApi()
        if hub.get_token() is None:
            raise PushError(f"There is no token for the hub on this machine: {LOGIN}.")
        try:
            self._api.whoami()
        except Exception as error:  # of the library, of its HTTP client, of the system
            raise _failed("ask the hub whose token this is", error) from error

    def push(self, folder: Path, files: Sequence[str], message: str) -> str:
        """Upload ``files`` of ``folder`` in one commit, into a new repository or over its files of these names; return its address.

        Raises PushError: nothing of the commit is there then, though the repository may be.
        """
        import huggingface_hub as hub

        try:
            made = self._api.create_repo(self.name, private=self._private or None, exist_ok=True)
            adding = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in files]
            self._api.create_commit(made.repo_id, adding, commit_message=message)
        except Exception as error:  # as above
            raise _failed(f"push to {self.name!r}", error) from error
        return str(made)


def _failed(doing: str, error: Exception) -> PushError:
    answer: Any = getattr(error, "response", None)
    status = getattr(answer, "status_code", None)
    if status in (401, 403):
        return PushError(f"Cannot {doing}, because the hub refuses the token (status {status}): {LOGIN}.")
    why = f"status {status}" if status is not None else _first_line(error)
    return PushError(f"Cannot {doing} ({why}): check the name and the network, and try again.")


def _first_line(error: Exception) -> str:
    said = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return str(said)[:200].rstrip(" .:") or type(error).__name__
