"""``hf:PATH_OR_NAME@URL``: a policy whose completions a server beside the node draws.

The node computes the log-probabilities itself: what it learns from are its own, and a server with
other weights is refused. Before completions are drawn by weights that have changed, the adapter
goes to the server, by vLLM's /v1/load_lora_adapter, and is asked for where it moved most
(`shoal.node.rl.moved_places`); a server that answers with older weights all the same is refused too
(`shoal.node.rl.newest_weights`).
"""

from __future__ import annotations

import copy
import hashlib
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.node.packages import require
from shoal.node.rl.completion_server import CompletionServer, Row
from shoal.node.rl.hf import HF
from shoal.node.rl.moved_places import most_moved
from shoal.node.rl.newest_weights import OlderWeights
from shoal.node.rl.policy import Choose, Completion, PolicyError
from shoal.node.user_code import calling

TOKEN_BYTES = 2048
"""Of an answer, for each token that it may have."""
MAX_APART_NATS = 0.15
"""Largest mean difference of log-probabilities, nats a token: with 4-bit weights llama.cpp differs
by .07 from their float32.
"""
PROBED_TOKENS = 2048
"""Of an answer, computed by older weights too."""
NEEDS_LORA = (
    "start vLLM on this machine with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True; a "
    "server whose weights stay, as of llama.cpp's, serves only a node that does not learn (--set "
    "rl.only=share)"
)


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
        self._server = CompletionServer(url)
        # Of the adapter that the server has: a new one is without effect.
        self._held = self._digest()
        self._adapter: tempfile.TemporaryDirectory[str] | None = None
        self._name = ""
        self._pushed: list[Tensor] = []
        """Trained weights as the server has them."""
        self._before: list[Tensor] = []
        """Those of the push before."""
        self._evidence = defaultdict[str, OlderWeights](OlderWeights)
        self._drawn: list[tuple[str, list[int]]] = []
        """Prompts and completions that the server drew last, at most `PROBED_TOKENS`."""

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

        Raises PolicyError if it fails, or has other weights.
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
            self._prove_newest()
        asked = [self._prompt(prompt) for prompt in prompts]
        told = self._draw(asked, count, temperature=temperature, max_tokens=max_tokens)
        return self._own(prompts, count, told, temperature)

    def _draw(
        self, asked: list[list[int]], count: int, *, temperature: float, max_tokens: int
    ) -> list[Row]:
        """Return ``count`` completions by the server of each of the prompts ``asked``."""
        request: dict[str, Any] = {
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
        }
        if self._name:
            # The salt keeps what the server caches of a prompt apart for each adapter.
            request |= {"model": self._name, "cache_salt": self._name}
        rows = len(asked) * count
        most = rows * max_tokens * TOKEN_BYTES
        answer = self._server.ask("/v1/completions", request, most=most)
        return self._server.read(answer, rows, max_tokens, self.vocabulary)

    @torch.no_grad()
    def _prove_newest(self) -> None:
        """Ask the server for one token at each place where the newest adapter moved most.

        Raises PolicyError if it certainly answers as with older weights. Where its rounding is
        larger than the update, what it draws later decides.
        """
        with self._evaluating():
            before = self._before or self._no_adapter()
            places = most_moved(self.logits, lambda: self._weights_of(before), self._drawn)
            if not places:
                return
            asked = [[*self._prompt(one.prompt), *one.prefix] for one in places]
            told = self._draw(asked, 1, temperature=0.0, max_tokens=1)
            prompts = [one.prompt for one in places]
            rows = [[*one.prefix, *ids] for one, (ids, _) in zip(places, told, strict=True)]
            plain, mask = self.log_probs(prompts, rows, 1.0)
            own = plain.cpu()
            last = torch.zeros(mask.shape, dtype=torch.bool, device="cpu")
            error = torch.zeros(own.shape, device="cpu")
            for number, (row, (_, logs)) in enumerate(zip(rows, told, strict=True)):
                last[number, len(row) - 1] = True
                error[number, len(row) - 1] = logs[0] - own[number, len(row) - 1]
            self._check_newest(prompts, rows, own, error, last)

    @torch.no_grad()
    def _own(
        self, prompts: Sequence[str], count: int, told: list[Row], temperature: float
    ) -> list[list[Completion]]:
        """Return the completions with the own log-probabilities.

        Raises PolicyError if the server's are others.
        """
        each: list[str] = []
        for prompt in prompts:
            each += [prompt] * count
        rows = [ids for ids, _ in told]
        logs_told: list[float] = []
        for _, logs in told:
            logs_told += logs
        step = max(1, sum(map(len, rows)) // PROBED_TOKENS)
        self._drawn = list(zip(each, rows, strict=True))[::step]
        with self._evaluating():
            plain, mask = self.log_probs(each, rows, 1.0)
            own = plain
            if temperature not in (0.0, 1.0):
                own, _ = self.log_probs(each, rows, temperature)
            plain = plain.cpu()
            mask = mask.cpu()
            error = torch.zeros(plain.shape, device="cpu")
            error[mask] = torch.tensor(logs_told, device="cpu") - plain[mask]
            self._check_newest(each[::step], rows[::step], plain[::step], error[::step])
        apart = float(error[mask].abs().mean())
        if not apart <= MAX_APART_NATS:
            raise PolicyError(
                f"The server at {self._server.url} has other weights than this node: its "
                f"log-probabilities are {apart:.3f} off for a token on average, where "
                f"{MAX_APART_NATS} is allowed: let it serve the model of --policy."
            )
        flat = [
            self._completion(ids, logs[: len(ids)])
            for ids, logs in zip(rows, own.tolist(), strict=True)
        ]
        return [flat[start : start + count] for start in range(0, len(flat), count)]

    def _check_newest(
        self,
        prompts: Sequence[str],
        rows: Sequence[Sequence[int]],
        own: Tensor,
        error: Tensor,
        counts: Tensor | None = None,
    ) -> None:
        """Raise PolicyError if the server certainly answers without the adapter, or with the one
        before.

        ``error``: the server's log-probabilities minus the ``own``, (B, T); ``counts``: which of
        them it told, (B, T); None: all.
        """
        found: list[tuple[float, str]] = []
        older = (("no adapter", self._no_adapter()), ("the adapter before it", self._before))
        for whose, weights in older:
            if not weights:
                continue
            with self._weights_of(weights):
                logs, mask = self.log_probs(prompts, rows, 1.0)
            width = mask.shape[1]
            mask = mask.cpu() if counts is None else counts
            difference = logs.cpu() - own[:, :width]
            slope = self._evidence[whose].add(error[:, :width], difference, mask)
            if slope is not None:
                found.append((slope, whose))
        if found:
            slope, whose = min(found, key=lambda one: abs(one[0] - 1))
            raise PolicyError(
                f"The server at {self._server.url} took the newest adapter and answers as with "
                f"{whose} ({min(slope, 1.0):.0%} of the way): start it again, as vLLM with "
                "--enable-lora and, if this comes back, --no-enable-prefix-caching."
            )

    def _no_adapter(self) -> list[Tensor]:
        return [torch.zeros_like(weight) for weight in self._pushed]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Return a block in which the module evaluates."""
        was_training = self.module.training
        self.module.eval()
        try:
            yield
        finally:
            self.module.train(was_training)

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

        Raises PolicyError if it takes none.
        """
        held = self._digest()
        folder = tempfile.TemporaryDirectory(prefix="shoal-adapter-")
        name = Path(folder.name).name
        with calling(self, "save_pretrained()"):
            self.module.save_pretrained(  # type: ignore[operator]
                folder.name, save_embedding_layers=False
            )
        self._server.ask(
            "/v1/load_lora_adapter",
            {"lora_name": name, "lora_path": folder.name},
            otherwise=NEEDS_LORA,
        )
        if self._adapter is not None:
            # A server that was started anew has forgotten that one.
            with suppress(PolicyError):
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
