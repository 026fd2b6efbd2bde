"""A server of completions at a URL, as people serve models: vLLM, or llama.cpp's server.

Both take tokens at OpenAI's /v1/completions and name those that they draw, with log-probabilities
before the temperature. What a server answers is bounded before it is read, and checked.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, FailFast, FiniteFloat, StringConstraints, ValidationError

from shoal.node.rl.policy import PolicyError

CONNECT_S = 10.0
ANSWER_S = 600.0
SMALL_ANSWER_BYTES = 2**16
MAX_ANSWER_BYTES = 2**28
MAX_REASON_CHARS = 200
"""Of a server's error inside a sentence of ours."""
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
LOOK = "look at what it prints"
NOT_UNDERSTOOD = (404, 405, 422)
"""What servers answer that have no such path, or that take other fields."""
UNFIT = (
    "use vLLM or llama.cpp's own server (llama-server), for it does not understand what is asked: "
    "other servers take no tokens as a prompt, or return no tokens' ids"
)

Row = tuple[list[int], list[float]]
"""Tokens of a completion, and their log-probabilities."""


class _Token(BaseModel):
    id: int
    logprob: FiniteFloat


class _Logs(BaseModel):
    """Tokens of a completion as vLLM names them; ``content`` is llama.cpp's.

    All faults take 250 times its memory.
    """

    tokens: Annotated[
        tuple[Annotated[str, StringConstraints(pattern="^token_id:[0-9]{1,9}$")], ...], FailFast()
    ] = ()
    token_logprobs: Annotated[tuple[FiniteFloat, ...], FailFast()] = ()
    content: Annotated[tuple[_Token, ...], FailFast()] = ()

    def row(self) -> Row:
        ids = [int(one.removeprefix("token_id:")) for one in self.tokens]
        logs = list(self.token_logprobs)
        for token in self.content:
            ids.append(token.id)
            logs.append(token.logprob)
        return ids, logs


class _Choice(BaseModel):
    index: int
    logprobs: _Logs


class _Answer(BaseModel):
    choices: Annotated[list[_Choice], FailFast()]


class CompletionServer:
    """The server at ``url``. Raises PolicyError if that is no URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(self.url)
            host = parts.hostname
            port = parts.port
        except ValueError:
            host = port = None
        has_more = host and (parts.query or parts.fragment or parts.username is not None)
        if not host or has_more or parts.scheme not in CONNECTIONS:
            raise PolicyError(
                f"{url!r} is no address of a server: write it such as http://127.0.0.1:8000."
            )
        self._connect = partial(CONNECTIONS[parts.scheme], host, port, timeout=CONNECT_S)
        self._path = parts.path

    def ask(
        self, path: str, body: Mapping[str, Any], *, most: int = 0, otherwise: str = ""
    ) -> bytes:
        """Post ``body``; return the answer, of at most ``most`` bytes and 64 KiB.

        Raises PolicyError, with the remedy ``otherwise``.
        """
        most = min(most + SMALL_ANSWER_BYTES, MAX_ANSWER_BYTES)
        began = time.monotonic()
        status, data = self._post(path, body, most)
        if time.monotonic() - began >= ANSWER_S:
            raise PolicyError(
                f"The server at {self.url} did not answer {path} within {ANSWER_S:.0f} s: ask for "
                "less at once (rl.local, rl.group, rl.max_tokens), or give it a faster machine."
            )
        if len(data) > most:
            raise PolicyError(
                f"The server at {self.url} answered {path} with more than {most:,} bytes: use "
                "another version of it."
            )
        if status != 200:
            remedy = otherwise or (UNFIT if status in NOT_UNDERSTOOD else LOOK)
            raise PolicyError(
                f"The server at {self.url} failed at {path} ({status or 'no answer'}: "
                f"{_said(data)}): {remedy}."
            )
        return data

    def _post(self, path: str, body: Mapping[str, Any], most: int) -> tuple[int, bytes]:
        """Post ``body``; return the status and at most ``most`` bytes and one; 0 and what is wrong
        if the connection breaks.

        Raises PolicyError if nobody answers at all.
        """
        connection = self._connect()
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise PolicyError(
                f"No server answers at {self.url} ({_line(error)}): start it, or leave "
                f"@{self.url} out."
            ) from error
        connection.sock.settimeout(ANSWER_S)
        # A socket's own deadline begins anew with every byte.
        timer = threading.Timer(ANSWER_S, _cut, (connection.sock,))
        timer.daemon = True
        timer.start()
        try:
            connection.request(
                "POST", self._path + path, json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            return answer.status, answer.read(most + 1)
        except (OSError, http.client.HTTPException) as error:
            return 0, _line(error).encode()
        finally:
            timer.cancel()
            connection.close()

    def read(self, answer: bytes, rows: int, most: int, vocabulary: int) -> list[Row]:
        """Return tokens and log-probabilities of each of ``rows`` completions, at most ``most``.

        Raises PolicyError if the answer has others.
        """
        try:
            choices = sorted(_Answer.model_validate_json(answer).choices, key=lambda one: one.index)
        except ValidationError as error:
            raise self._nonsense(error.errors()[0]["msg"]) from error
        found = [choice.logprobs.row() for choice in choices]
        if [choice.index for choice in choices] != list(range(rows)):
            raise self._nonsense(f"{len(choices)} completions for {rows}")
        for ids, logs in found:
            if not ids or len(ids) != len(logs) or min(ids) < 0 or max(ids) >= vocabulary:
                raise self._nonsense("tokens that are not the model's, or none")
            if len(ids) > most:
                raise self._nonsense(f"{len(ids)} tokens for at most {most}")
        return found

    def _nonsense(self, why: str) -> PolicyError:
        return PolicyError(
            f"The server at {self.url} answered other than completions with their tokens' ids and "
            f"log-probabilities ({why}): use vLLM or llama.cpp's server."
        )


def _cut(connected: socket.socket) -> None:
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _line(error: object) -> str:
    """Return the first line, such that it can stand in a sentence."""
    first = next(iter(str(error).splitlines()), "")
    return first[:MAX_REASON_CHARS].strip().rstrip(".:") or type(error).__name__


def _said(data: bytes) -> str:
    """Return what an answer says of an error, in OpenAI's form or as it is."""
    text = data[:SMALL_ANSWER_BYTES].decode(errors="replace")
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return "".join(letter for letter in _line(text) if letter.isprintable())
