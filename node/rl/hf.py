"""``hf:PATH_OR_NAME``: any causal language model that transformers loads, GGUF files too; both
packages are optional.

With peft installed only a LoRA adapter is trained, and exchanged where weights are.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.node.home import expanded
from shoal.node.packages import require
from shoal.node.rl.continuous_batch import ContinuousBatch
from shoal.node.rl.policy import Choose, Completion, PolicyError
from shoal.node.rl.sampling import chances, is_look_due, pad
from shoal.node.user_code import calling
from shoal.swarm.topics.rollout import Finish

LARGE_PARAMETERS = 100_000_000
SEQUENCES = 16
"""Written and learnt from at once, which bounds the memory, with a model of `LARGE_PARAMETERS` or
more; up to 8 times as many with a smaller one.
"""
RANK = 16
"""Of a LoRA adapter."""
FULL_LR = 1e-5
ADAPTER_LR = 1e-4
"""Learning rates that suit the whole model, and an adapter."""


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
        fitting = SEQUENCES * LARGE_PARAMETERS // size
        self._rows: int = min(max(SEQUENCES, fitting), 8 * SEQUENCES)
        parameters = inspect.signature(_inner(model).forward).parameters
        self._keeps = "logits_to_keep" in parameters
        # The old name goes with transformers 5.40.
        self._cache = "cache" if "cache" in parameters else "past_key_values"
        self._has_plain_cache = _is_plain(_inner(model).config)
        described = b"hf/1:" + tokenizer.backend_tokenizer.to_str().encode()
        self.tokenizer = hashlib.sha256(described).hexdigest()

    def encode(self, completion: str, ended: bool) -> list[int]:
        """Encode a completion; special tokens in a stranger's text are text."""
        with calling(self, "its tokenizer"):
            encoded = self._tokenizer(
                completion, add_special_tokens=False, split_special_tokens=True
            )
        ids = list(encoded["input_ids"])
        if ended:
            ids.append(self._end)
        return ids

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
        """Implement `Policy.generate`: a row that has ended makes room for one that waits.

        Rows that begin together share the computation of an equal prompt. With ``choose``, and
        where the cache is not a plain one, no row leaves before all have ended.
        """
        generator = torch.Generator().manual_seed(seed)
        asked = [self._prompt(prompt) for prompt in prompts]
        # Prompts of like length together, so that little is padded.
        by_length = sorted(range(len(prompts) * count), key=lambda row: len(asked[row // count]))
        waiting = deque(by_length)
        leave_together = choose is not None or not self._has_plain_cache
        ends = torch.tensor(sorted(self._ends), device=self._device())
        written: dict[int, Completion] = {}
        was_training = self.module.training
        self.module.eval()
        batch = ContinuousBatch.empty()
        while waiting or batch.rows:
            room = self._room(len(batch.rows), leave_together)
            rows = [waiting.popleft() for _ in range(min(room, len(waiting)))]
            if rows:
                chance = chances(generator, max_tokens, len(rows), ends.device).T
                of_rows = [asked[row // count] for row in rows]
                batch = batch.join(self._begin(rows, of_rows, chance, shared=not leave_together))
            batch.draw(temperature, choose, ends)
            if is_look_due(len(batch.ids), ends.device) or len(batch.ids) == max_tokens:
                is_over = not bool(batch.going.any())
                if is_over or not leave_together:
                    for row, ids, logs in batch.leave(all_rows=is_over):
                        written[row] = self._completion(ids[:max_tokens], logs)
            if batch.rows:
                batch.mask = torch.cat([batch.mask, torch.ones_like(batch.mask[:, :1])], 1)
                batch.logits, batch.cache = self._next(batch.last[:, None], batch.mask, batch.cache)
        self.module.train(was_training)
        in_order = [written[row] for row in range(len(written))]
        return [in_order[start : start + count] for start in range(0, len(in_order), count)]

    def _room(self, running: int, leave_together: bool) -> int:
        """Return how many rows may begin beside those that are ``running``: few at a time would
        cost a pass over the model each.
        """
        if not running:
            return self._rows
        room = self._rows - running
        if leave_together or room < self._rows // 4:
            return 0
        return room

    def _begin(
        self, rows: list[int], asked: list[list[int]], chance: Tensor, *, shared: bool
    ) -> ContinuousBatch:
        """Compute the prompts of ``rows``, if ``shared`` equal ones once."""
        prompts = [tuple(ids) for ids in asked]
        if shared:
            prompts = list(dict.fromkeys(prompts))
        tokens, mask = pad(prompts, self._end, left=True, device=self._device())
        logits, cache = self._next(tokens, mask, None)
        if len(prompts) < len(rows):
            places = torch.tensor([prompts.index(tuple(ids)) for ids in asked], device=mask.device)
            cache.batch_select_indices(places)
            logits = logits[places]
            mask = mask[places]
        return ContinuousBatch.begun(rows, cache, mask, logits, chance)

    def _next(self, tokens: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the logits (b, V) after ``tokens`` (b, t), the last of ``mask`` (b, T), and the
        cache with them.
        """
        options = {self._cache: cache}
        if self._keeps:
            options["logits_to_keep"] = 1
        made = self.module(
            input_ids=tokens,
            attention_mask=mask.long(),
            position_ids=_places(mask)[:, -tokens.shape[1] :],
            use_cache=True,
            **options,
        )
        return made.logits[:, -1], getattr(made, self._cache)

    def _completion(self, ids: list[int], logs: list[float]) -> Completion:
        ends = [place for place, token in enumerate(ids) if token in self._ends]
        length = ends[0] + 1 if ends else len(ids)
        without_end = ids[: ends[0]] if ends else ids
        text = self._tokenizer.decode(without_end, skip_special_tokens=True)
        finish: Finish = "stop" if ends else "length"
        return Completion(text, tuple(ids[:length]), tuple(logs[:length]), finish)

    def log_probs(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]], temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Implement `Policy.log_probs`; activations of more sequences than go at once are computed
        again in the backward pass.
        """
        after, mask = pad(completions, self._end, left=False, device=self._device())
        length = after.shape[1]
        parts = []
        for start in range(0, len(prompts), self._rows):
            part = slice(start, start + self._rows)
            before, seen = self._padded(prompts[part])
            tokens = torch.cat([before, after[part]], 1)
            visible = torch.cat([seen, mask[part]], 1)
            if len(prompts) > self._rows:
                logs = checkpoint(
                    self._part, tokens, visible, length, temperature, use_reentrant=False
                )
            else:
                logs = self._part(tokens, visible, length, temperature)
            parts.append(logs)
        return torch.cat(parts), mask

    def logits(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        after, mask = pad(completions, self._end, left=False, device=self._device())
        before, seen = self._padded(prompts)
        tokens = torch.cat([before, after], 1)[:, :-1]
        visible = torch.cat([seen, mask], 1)[:, :-1]
        return self._last(tokens, visible, after.shape[1]), mask

    def _padded(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the tokens of ``prompts``, (b, T), and where they are no padding."""
        rows = [self._prompt(prompt) for prompt in prompts]
        return pad(rows, self._end, left=True, device=self._device())

    def _part(self, tokens: Tensor, visible: Tensor, length: int, temperature: float) -> Tensor:
        """Return the log-probabilities (b, length) of the last ``length`` of ``tokens``."""
        logits = self._last(tokens, visible, length + 1)[:, :-1].float()
        logs = (logits / (temperature or 1.0)).log_softmax(-1)
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


def _is_plain(config: Any) -> bool:
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

    Raises PolicyError.
    """
    require(
        PolicyError, f"The policy 'hf:{where}'", "transformers", extra="rl", otherwise="choose tiny"
    )
    path = Path(expanded(where))
    source = where
    options: dict[str, Any] = {}
    if path.exists():
        source = str(path.parent if path.suffix == ".gguf" else path)
        options["local_files_only"] = True
    if path.suffix == ".gguf":
        options["gguf_file"] = path.name
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
        # The weights are plain float32 by now.
        del model.config.quantization_config
    with calling(HF, "what it was loaded from"):
        adapted, lr = _with_adapter(model)
        return make(adapted, tokenizer, lr=lr)


def _with_adapter(model: Any) -> tuple[Any, float]:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return model, FULL_LR
    adapter = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, adapter), ADAPTER_LR
