"""``hf:PATH_OR_NAME``: any causal language model that transformers loads, GGUF files too; both
packages are optional.

With peft installed only a LoRA adapter is trained, and exchanged where weights are.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shoal.node.console import require
from shoal.node.home import expanded
from shoal.node.rl.environment import (
    Choose,
    Completion,
    PolicyError,
    chances,
    draw,
    drawn,
    looks,
    pad,
)
from shoal.node.user_code import calling

ROWS, LARGE = (
    16,
    100_000_000,
)  # sequences at once, written and learnt from, which bounds the memory; of so large a model
RANK = 16


class HF:
    """Transformers model with its tokenizer.

    ``module`` is the model, or the model with its adapter.
    """

    loss = "sapo"
    max_tokens = 64
    user_subject = "Your policy"

    def __init__(self, model: Any, tokenizer: Any, *, lr: float) -> None:
        self.module: torch.nn.Module = model
        self._tokenizer = tokenizer
        self.lr = lr
        if tokenizer.eos_token_id is None:
            raise PolicyError(
                "The model's tokenizer has no end token, so completions would never end: choose "
                "another model."
            )
        stops = getattr(model.generation_config, "eos_token_id", None)
        also = stops if isinstance(stops, list) else [stops]
        self._end: int = tokenizer.eos_token_id
        self._ends = {self._end, *(token for token in also if isinstance(token, int))}
        self.vocabulary: int = _inner(model).get_input_embeddings().weight.shape[0]
        size = sum(parameter.numel() for parameter in model.parameters())
        self._rows = min(max(ROWS, ROWS * LARGE // size), 8 * ROWS)
        parameters = inspect.signature(_inner(model).forward).parameters
        self._keeps = "logits_to_keep" in parameters
        self._cache = (
            "cache" if "cache" in parameters else "past_key_values"
        )  # the old name goes with transformers 5.40
        self._plain_cache = _plain(_inner(model).config)
        self.tokenizer = hashlib.sha256(
            b"hf/1:" + tokenizer.backend_tokenizer.to_str().encode()
        ).hexdigest()

    def encode(self, completion: str, ended: bool) -> list[int]:
        """Encode a completion; special tokens in a stranger's text are text."""
        with calling(self, "its tokenizer"):
            ids = self._tokenizer(completion, add_special_tokens=False, split_special_tokens=True)[
                "input_ids"
            ]
        return [*ids, *([self._end] if ended else [])]

    def ends(self, token: int) -> bool:
        return token in self._ends

    def _prompt(self, prompt: str) -> list[int]:
        with calling(self, "its tokenizer"):
            if not self._tokenizer.chat_template:
                return list(self._tokenizer(prompt + "\n")["input_ids"])
            said = [{"role": "user", "content": prompt}]
            text = self._tokenizer.apply_chat_template(
                said, add_generation_prompt=True, tokenize=False
            )
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    @torch.no_grad()
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
        """Implement `Policy.generate` by continuous batching (Orca, OSDI 2022): a row that has
        ended makes room for one that waits.

        Rows that begin together share the computation of an equal prompt. With ``choose``, and
        where the cache is not a plain one, no row leaves before all have ended.
        """
        generator = torch.Generator().manual_seed(seed)
        asked = [self._prompt(prompt) for prompt in prompts]
        # The longest prompts together, so that little is padded.
        waiting = deque(
            sorted(range(len(prompts) * count), key=lambda row: len(asked[row // count]))
        )
        together = choose is not None or not self._plain_cache
        ends = torch.tensor(sorted(self._ends), device=self._device())
        found: dict[int, Completion] = {}
        was_training = self.module.training
        self.module.eval()
        batch = _Batch.empty()
        while waiting or batch.rows:
            room = self._rows - len(batch.rows)
            if waiting and (not batch.rows or (not together and room >= self._rows // 4)):
                rows = [waiting.popleft() for _ in range(min(room, len(waiting)))]
                chance = chances(generator, max_tokens, len(rows), ends.device).T
                batch = batch.join(
                    self._begin(
                        rows, [asked[row // count] for row in rows], chance, shared=not together
                    )
                )
            batch.draw(temperature, choose, ends)
            if looks(len(batch.ids), ends.device) or len(batch.ids) == max_tokens:
                over = not bool(batch.going.any())
                if over or not together:
                    found |= {
                        row: self._completion(ids[:max_tokens], logs)
                        for row, ids, logs in batch.leave(over)
                    }
            if batch.rows:
                batch.mask = torch.cat([batch.mask, torch.ones_like(batch.mask[:, :1])], 1)
                batch.logits, batch.cache = self._next(batch.last[:, None], batch.mask, batch.cache)
        self.module.train(was_training)
        return [
            [found[number * count + one] for one in range(count)] for number in range(len(prompts))
        ]

    def _begin(
        self, rows: list[int], asked: list[list[int]], chance: Tensor, *, shared: bool
    ) -> _Batch:
        """Compute the prompts of ``rows``, if ``shared`` equal ones once."""
        prompts = (
            list(dict.fromkeys(map(tuple, asked))) if shared else [tuple(ids) for ids in asked]
        )
        tokens, mask = pad(prompts, self._end, left=True, device=self._device())
        logits, cache = self._next(tokens, mask, None)
        if len(prompts) < len(rows):
            places = torch.tensor([prompts.index(tuple(ids)) for ids in asked], device=mask.device)
            cache.batch_select_indices(places)
            logits, mask = logits[places], mask[places]
        none = torch.zeros(len(rows), dtype=torch.int64, device=mask.device)
        return _Batch(
            rows,
            [([], []) for _ in rows],
            cache,
            mask,
            logits,
            chance,
            none,
            none,
            none == 0,
            [],
            [],
        )

    def _next(self, tokens: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the logits (b, V) after ``tokens`` (b, t), the last of ``mask`` (b, T), and the
        cache with them.
        """
        made = self.module(
            input_ids=tokens,
            attention_mask=mask.long(),
            position_ids=_places(mask)[:, -tokens.shape[1] :],
            use_cache=True,
            **{self._cache: cache},
            **({"logits_to_keep": 1} if self._keeps else {}),
        )
        return made.logits[:, -1], getattr(made, self._cache)

    def _completion(self, ids: list[int], logs: list[float]) -> Completion:
        length = next(
            (place + 1 for place, token in enumerate(ids) if token in self._ends), len(ids)
        )
        ended = ids[length - 1] in self._ends
        text = self._tokenizer.decode(ids[: length - ended], skip_special_tokens=True)
        return Completion(
            text, tuple(ids[:length]), tuple(logs[:length]), "stop" if ended else "length"
        )

    def log_probs(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Implement `Policy.log_probs`; activations of more sequences than go at once are computed
        again in the backward pass.
        """
        after, mask = pad(completions, self._end, left=False, device=self._device())
        parts = []
        for start in range(0, len(prompts), self._rows):
            part = slice(start, start + self._rows)
            before, seen = pad(
                [self._prompt(prompt) for prompt in prompts[part]],
                self._end,
                left=True,
                device=self._device(),
            )
            tokens = torch.cat([before, after[part]], 1)
            visible = torch.cat([seen, mask[part]], 1)
            again = len(prompts) > self._rows
            parts.append(
                checkpoint(
                    self._part, tokens, visible, after.shape[1], temperature, use_reentrant=False
                )
                if again
                else self._part(tokens, visible, after.shape[1], temperature)
            )
        return torch.cat(parts), mask

    def logits(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        after, mask = pad(completions, self._end, left=False, device=self._device())
        before, seen = pad(
            [self._prompt(prompt) for prompt in prompts],
            self._end,
            left=True,
            device=self._device(),
        )
        tokens = torch.cat([before, after], 1)[:, :-1]
        visible = torch.cat([seen, mask], 1)[:, :-1]
        return self._last(tokens, visible, after.shape[1]), mask

    def _part(self, tokens: Tensor, visible: Tensor, length: int, temperature: float) -> Tensor:
        """Return the log-probabilities (b, length) of the last ``length`` of ``tokens``."""
        logs = (
            self._last(tokens, visible, length + 1)[:, :-1].float() / (temperature or 1.0)
        ).log_softmax(-1)
        return logs.gather(-1, tokens[:, -length:, None])[..., 0]

    def _last(self, tokens: Tensor, visible: Tensor, count: int) -> Tensor:
        """Return the last ``count`` logits of one pass over ``tokens``, (b, count, V)."""
        keep = {"logits_to_keep": count} if self._keeps else {}
        made = self.module(
            input_ids=tokens,
            attention_mask=visible.long(),
            position_ids=_places(visible),
            use_cache=False,
            **keep,
        )
        found: Tensor = made.logits[:, -count:]
        return found


@dataclass
class _Batch:
    """Rows b that are written at once: T tokens of each by now, its padding included."""

    rows: list[int]
    past: list[tuple[list[int], list[float]]]
    """Of each row tokens and log-probabilities, without those in ``ids`` and ``logs``."""
    cache: Any
    mask: Tensor
    """bool (b, T)."""
    logits: Tensor
    """(b, V), of the next token."""
    chance: Tensor
    """(b, most tokens of a row)."""
    written: Tensor
    last: Tensor
    going: Tensor
    ids: list[Tensor]
    logs: list[Tensor]

    @classmethod
    def empty(cls) -> _Batch:
        nothing = torch.empty(0, device="cpu")
        return cls([], [], None, nothing, nothing, nothing, nothing, nothing, nothing, [], [])

    def draw(self, temperature: float, choose: Choose | None, ends: Tensor) -> None:
        most = self.chance.shape[1]
        chance = self.chance.gather(1, self.written.clamp(max=most - 1)[:, None])[:, 0]
        self.last, log = draw(self.logits, temperature, chance, choose)
        self.ids.append(self.last)
        self.logs.append(log)
        self.written = self.written + 1
        self.going = self.going & ~torch.isin(self.last, ends) & (self.written < most)

    def leave(self, over: bool) -> Iterator[tuple[int, list[int], list[float]]]:
        """Yield the rows that have ended, with their tokens and log-probabilities, and drop them;
        all if it is ``over``.
        """
        for (tokens, logs), (new, new_logs) in zip(
            self.past, drawn(self.ids, self.logs), strict=True
        ):
            tokens += new
            logs += new_logs
        self.ids = []
        self.logs = []
        going = [False] * len(self.rows) if over else self.going.tolist()
        yield from (
            (row, *past)
            for row, past, goes in zip(self.rows, self.past, going, strict=True)
            if not goes
        )
        if all(going):
            return
        self.rows = [row for row, goes in zip(self.rows, going, strict=True) if goes]
        self.past = [past for past, goes in zip(self.past, going, strict=True) if goes]
        if self.rows:
            kept = self.going.nonzero()[:, 0]
            self.cache.batch_select_indices(kept)
            self.mask, self.chance, self.written, self.last, self.going = (
                each[kept] for each in (self.mask, self.chance, self.written, self.last, self.going)
            )
            self._widen(self.mask.shape[1] - int(self.mask.any(0).long().argmax()))

    def join(self, new: _Batch) -> _Batch:
        """Return both together."""
        if not self.rows:
            return new
        length = max(self.mask.shape[1], new.mask.shape[1])
        for batch in (self, new):
            batch._widen(length)
        for mine, other in zip(self.cache.layers, new.cache.layers, strict=True):
            mine.keys, mine.values = (
                torch.cat([mine.keys, other.keys]),
                torch.cat([mine.values, other.values]),
            )
        names = ("mask", "logits", "chance", "written", "last", "going")
        both = {name: torch.cat([getattr(self, name), getattr(new, name)]) for name in names}
        return _Batch(
            self.rows + new.rows, self.past + new.past, self.cache, **both, ids=[], logs=[]
        )

    def _widen(self, length: int) -> None:
        """Put padding before all rows, or take it away, so that they are ``length`` tokens long."""
        more = length - self.mask.shape[1]
        self.mask = functional.pad(self.mask, (more, 0))
        for layer in self.cache.layers if more else ():
            layer.keys, layer.values = (
                functional.pad(each, (0, 0, more, 0)) for each in (layer.keys, layer.values)
            )


def _plain(config: Any) -> bool:
    """Return whether all layers keep keys and values of all tokens, so that rows can be added."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def _places(mask: Tensor) -> Tensor:
    """Return positions counted from the first that is not padding."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def load_hf(where: str, make: Callable[..., HF] = HF) -> HF:
    """Load the model in a folder or GGUF file, or of that name, and ``make`` a policy of it.

    PolicyError.
    """
    require(
        PolicyError, f"The policy 'hf:{where}'", "transformers", extra="rl", otherwise="choose tiny"
    )
    path = Path(expanded(where))
    options: dict[str, Any] = {"local_files_only": True} if path.exists() else {}
    if path.suffix == ".gguf":
        options["gguf_file"] = path.name
    source = str(path.parent if path.suffix == ".gguf" else path) if path.exists() else where
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise PolicyError(
            f"The policy 'hf:{where}' cannot be loaded ({why}): name a model's folder, GGUF file "
            "or name."
        ) from error
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config  # the weights are plain float32 by now
    with calling(HF, "what it was loaded from"):
        adapted, lr = _with_adapter(model)
        return make(adapted, tokenizer, lr=lr)


def _with_adapter(model: Any) -> tuple[Any, float]:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return model, 1e-5
    adapter = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, adapter), 1e-4
