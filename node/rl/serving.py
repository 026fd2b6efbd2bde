"""``hf:PATH_OR_NAME@URL``: a server beside the node draws the completions, as people serve models:
vLLM, or llama.cpp's server.

Both take tokens at OpenAI's /v1/completions and name those that they draw, with log-probabilities
before the temperature. The node computes the same log-probabilities itself: what it learns from are
its own, and a server with other weights is refused. Before completions are drawn by weights that
have changed, the adapter goes to the server, by vLLM's /v1/load_lora_adapter; one that answers with
older weights all the same is refused too (`shoal.node.rl.newest_weights`).
"""

from __future__ import annotations

import copy
import hashlib
import http.client
import json
import socket
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import torch
from pydantic import BaseModel, FailFast, FiniteFloat, StringConstraints, ValidationError
from torch import Tensor

from shoal.node.console import require
from shoal.node.rl.environment import Choose, Completion, PolicyError
from shoal.node.rl.hf import HF
from shoal.node.rl.newest_weights import OlderWeights
from shoal.node.user_code import calling

CONNECT_S = 10.0
ANSWER_S = 600.0
TOKEN_BYTES, MOST_BYTES = (
    2048,
    2**28,
)  # of an answer: for each token that it may have, besides 64 KiB, and at most
APART = 0.15
"""Largest mean difference of log-probabilities, nats a token: with 4-bit weights llama.cpp differs
by .07 from their float32.
"""
PROBED_TOKENS = 2048  # of an answer, computed by older weights too
FIXED = (
    "start vLLM on this machine with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; a "
    "server whose weights stay, as of llama.cpp's, serves only a node that does not learn (--set "
    "rl.only=share)"
)
CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
_Row = tuple[list[int], list[float]]


class Served(HF):
    """HF whose completions the server at ``url`` draws; claims, which peers repeat draw by draw, it
    draws itself.
    """

    def __init__(self, model: Any, tokenizer: Any, *, lr: float, url: str) -> None:
        require(
            PolicyError,
            f"A policy served at {url}",
            "peft",
            extra="rl",
            otherwise=f"leave @{url} out of --policy",
        )
        super().__init__(model, tokenizer, lr=lr)
        self._server = _Server(url)
        self._held = (
            self._digest()
        )  # of the adapter that the server has: a new one is without effect
        self._adapter: tempfile.TemporaryDirectory[str] | None = None
        self._name = ""
        self._pushed: list[Tensor] = []  # trained weights as the server has them
        self._before: list[Tensor] = []  # those of the push before
        self._evidence = defaultdict[str, OlderWeights](OlderWeights)

    def __deepcopy__(self, memo: dict[int, Any]) -> HF:
        """Return a policy that draws itself, for checks of claims."""
        return HF(copy.deepcopy(self.module, memo), self._tokenizer, lr=self.lr)

    def generate(
        self,
        prompts: Sequence[str],
        count: int,
        *,
        temperature: float,
        max_tokens: int,
        seed: int,
        choose: Choose | None = None,
    ) -> list[list[Completion]]:
        """Implement `Policy.generate`; the server draws by a seed of its own.

        PolicyError if it fails, or has other weights.
        """
        if choose is not None:
            return super().generate(
                prompts,
                count,
                temperature=temperature,
                max_tokens=max_tokens,
                seed=seed,
                choose=choose,
            )
        if self._digest() != self._held:
            self.push()
        asked = [self._prompt(prompt) for prompt in prompts]
        answer = self._server.ask(
            "/v1/completions",
            {
                # The salt keeps what the server caches of a prompt apart for each adapter.
                **({"model": self._name, "cache_salt": self._name} if self._name else {}),
                "prompt": asked,
                "n": count,
                "max_tokens": max_tokens,
                "temperature": temperature,
                "logprobs": 1,
                "return_tokens_as_token_ids": True,
                # Else the defaults of the server or of the model's generation_config.json; the last
                # line is for llama.cpp.
                "top_p": 1,
                "top_k": -1,
                "min_p": 0,
                "repetition_penalty": 1,
                "presence_penalty": 0,
                "frequency_penalty": 0,
                "stop_token_ids": sorted(self._ends),
                "samplers": ["temperature"],
            },
            most=len(asked) * count * max_tokens * TOKEN_BYTES,
        )
        return self._own(
            prompts,
            count,
            self._server.read(answer, len(asked) * count, max_tokens, self.vocabulary),
            temperature,
        )

    @torch.no_grad()
    def _own(
        self, prompts: Sequence[str], count: int, told: list[_Row], temperature: float
    ) -> list[list[Completion]]:
        """Return the completions with the own log-probabilities.

        PolicyError if the server's are others.
        """
        each = [prompt for prompt in prompts for _ in range(count)]
        rows = [ids for ids, _ in told]
        was_training = self.module.training
        self.module.eval()
        try:
            plain, mask = self.log_probs(each, rows, 1.0)
            own = plain if temperature in (0.0, 1.0) else self.log_probs(each, rows, temperature)[0]
            plain, mask = plain.cpu(), mask.cpu()
            error = torch.zeros(plain.shape, device="cpu")
            error[mask] = torch.tensor([log for _, logs in told for log in logs], device="cpu")
            error[mask] -= plain[mask]
            self._check_newest(each, rows, plain, error)
        finally:
            self.module.train(was_training)
        apart = float(error[mask].abs().mean())
        if not apart <= APART:
            raise PolicyError(
                f"The server at {self._server.url} has other weights than this node: its "
                f"log-probabilities are {apart:.3f} off for a token on average, where {APART} is "
                "allowed: let it serve the model of --policy."
            )
        flat = [
            self._completion(ids, logs[: len(ids)])
            for ids, logs in zip(rows, own.tolist(), strict=True)
        ]
        return [flat[start : start + count] for start in range(0, len(flat), count)]

    def _check_newest(
        self, prompts: Sequence[str], rows: Sequence[Sequence[int]], own: Tensor, error: Tensor
    ) -> None:
        """Raise PolicyError if the server certainly answers without the adapter, or with the one
        before.

        ``error``: the server's log-probabilities minus the ``own``, (B, T).
        """
        part = slice(None, None, max(1, sum(map(len, rows)) // PROBED_TOKENS))
        none = [torch.zeros_like(weight) for weight in self._pushed]
        found: list[tuple[float, str]] = []
        for whose, weights in (("no adapter", none), ("the adapter before it", self._before)):
            if not weights:
                continue
            with self._weights_of(weights):
                older, mask = self.log_probs(prompts[part], rows[part], 1.0)
            width = mask.shape[1]
            difference = older.cpu() - own[part, :width]
            slope = self._evidence[whose].add(error[part, :width], difference, mask.cpu())
            if slope is not None:
                found.append((slope, whose))
        if found:
            slope, whose = min(found, key=lambda one: abs(one[0] - 1))
            raise PolicyError(
                f"The server at {self._server.url} took the newest adapter and answers as with "
                f"{whose} ({min(slope, 1.0):.0%} of the way): start it again, as vLLM with "
                "--enable-lora and, if this comes back, --no-enable-prefix-caching."
            )

    @contextmanager
    def _weights_of(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Return a block in which the trained parameters are ``weights``."""
        trained = self._trained()
        held = [parameter.data for parameter in trained]
        try:
            for parameter, weight in zip(trained, weights, strict=True):
                parameter.data = weight.to(parameter.device)
            yield
        finally:
            for parameter, own in zip(trained, held, strict=True):
                parameter.data = own

    def _trained(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self.module.parameters() if weight.requires_grad]

    def push(self) -> None:
        """Give the server the adapter as it is, by a new name, since it caches by name.

        PolicyError if it takes none.
        """
        held = self._digest()
        folder = tempfile.TemporaryDirectory(prefix="shoal-adapter-")
        name = Path(folder.name).name
        with calling(self, "save_pretrained()"):
            self.module.save_pretrained(folder.name, save_embedding_layers=False)  # type: ignore[operator]
        self._server.ask(
            "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder.name}, otherwise=FIXED
        )
        if self._adapter is not None:
            with suppress(PolicyError):  # it was started anew, and has forgotten that one
                self._server.ask("/v1/unload_lora_adapter", {"lora_name": self._name})
            self._adapter.cleanup()
        self._adapter = folder
        self._name = name
        self._held = held
        self._before = self._pushed
        self._pushed = [weight.detach().clone() for weight in self._trained()]

    def _digest(self) -> bytes:
        """Return a digest of what is trained."""
        made = hashlib.sha256()
        for weight in self._trained():
            made.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return made.digest()


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

    def row(self) -> _Row:
        ids = [int(one.removeprefix("token_id:")) for one in self.tokens] + [
            one.id for one in self.content
        ]
        return ids, [*self.token_logprobs, *(one.logprob for one in self.content)]


class _Choice(BaseModel):
    index: int
    logprobs: _Logs


class _Answer(BaseModel):
    choices: Annotated[list[_Choice], FailFast()]


LOOK = "look at what it prints"
NOT_UNDERSTOOD = (404, 405, 422)
"""What servers answer that have no such path, or that take other fields."""
UNFIT = (
    "use vLLM or llama.cpp's own server (llama-server), for it does not understand what is asked: "
    "other servers take no tokens as a prompt, or return no tokens' ids"
)


class _Server:
    """HTTP server at ``url``. PolicyError if that is no URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(self.url)
            host = parts.hostname
            port = parts.port
        except ValueError:
            host = port = None
        if (
            not host
            or parts.scheme not in CONNECTIONS
            or parts.query
            or parts.fragment
            or parts.username is not None
        ):
            raise PolicyError(
                f"{url!r} is no address of a server: write it such as http://127.0.0.1:8000."
            )
        self._connect = partial(CONNECTIONS[parts.scheme], host, port, timeout=CONNECT_S)
        self._path = parts.path

    def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        most: int = 0,
        otherwise: str = "",
    ) -> bytes:
        """Post ``body``; return the answer, of at most ``most`` bytes and 64 KiB.

        PolicyError, with the remedy ``otherwise``.
        """
        connection, most, began = self._connect(), min(most + 2**16, MOST_BYTES), time.monotonic()
        timer = None
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_S)
            # A socket's own deadline begins anew with every byte.
            timer = threading.Timer(ANSWER_S, _cut, (connection.sock,))
            timer.daemon = True
            timer.start()
            connection.request(
                "POST", self._path + path, json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            status = answer.status
            data: bytes = answer.read(most + 1)
        except (OSError, http.client.HTTPException) as error:
            if timer is None:
                raise PolicyError(
                    f"No server answers at {self.url} ({_line(error)}): start it, or leave "
                    f"@{self.url} out."
                ) from error
            status = 0
            data = _line(error).encode()
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()
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

    def read(self, answer: bytes, rows: int, most: int, vocabulary: int) -> list[_Row]:
        """Return tokens and log-probabilities of each of ``rows`` completions, at most ``most``.

        PolicyError if it has others.
        """
        try:
            choices = sorted(_Answer.model_validate_json(answer).choices, key=lambda one: one.index)
        except ValidationError as error:
            raise self._nonsense(error.errors()[0]["msg"]) from error
        found = [choice.logprobs.row() for choice in choices]
        if [choice.index for choice in choices] != list(range(rows)):
            raise self._nonsense(f"{len(choices)} completions for {rows}")
        if not all(
            ids and len(ids) == len(logs) and min(ids) >= 0 and max(ids) < vocabulary
            for ids, logs in found
        ):
            raise self._nonsense("tokens that are not the model's, or none")
        return [(ids[:most], logs[:most]) for ids, logs in found]

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
    return (
        next(iter(str(error).splitlines()), "")[:200].strip().rstrip(".:") or type(error).__name__
    )


def _said(data: bytes) -> str:
    """Return what an answer says of an error, in OpenAI's form or as it is."""
    text = data[: 2**16].decode(errors="replace")
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        text = str(json.loads(text)["error"]["message"])
    return "".join(letter for letter in _line(text) if letter.isprintable())
