"""``hf:PATH_OR_NAME``: any causal language model that transformers loads, GGUF files too; both packages are optional.

With peft installed only a LoRA adapter is trained, and exchanged where weights are.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shoal.node.console import require
from shoal.node.rl.environment import Choose, Completion, PolicyError, chances, draw, drawn, looks, pad
from shoal.node.user_code import calling

ROWS = 16  # sequences at once, forward and backward, which bounds the memory
RANK = 16


class HF:
    """Transformers model with its tokenizer. ``module`` is the model, or the model with its adapter."""

    loss = "sapo"
    max_tokens = 64
    user_subject = "Your policy"

    def __init__(self, model: Any, tokenizer: Any, *, lr: float) -> None:
        self.module: torch.nn.Module = model
        self._tokenizer, self.lr = tokenizer, lr
        if tokenizer.eos_token_id is None:
            raise PolicyError("The model's tokenizer has no end token, so completions would never end: choose another model.")
        stops = getattr(model.generation_config, "eos_token_id", None)
        also = stops if isinstance(stops, list) else [stops]
        self._end: int = tokenizer.eos_token_id
        self._ends = {self._end, *(token for token in also if isinstance(token, int))}
        self.vocabulary: int = _inner(model).get_input_embeddings().weight.shape[0]
        self._keeps = "logits_to_keep" in inspect.signature(_inner(model).forward).parameters
        self.tokenizer = hashlib.sha256(b"hf/1:" + tokenizer.backend_tokenizer.to_str().encode()).hexdigest()

    def encode(self, completion: str, ended: bool) -> list[int]:
        """Encode a completion; special tokens in a stranger's text are text."""
        with calling(self, "its tokenizer"):
            ids = self._tokenizer(completion, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [*ids, *([self._end] if ended else [])]

    def ends(self, token: int) -> bool:
        return token in self._ends

    def _prompt(self, prompt: str) -> list[int]:
        with calling(self, "its tokenizer"):
            if not self._tokenizer.chat_template:
                return list(self._tokenizer(prompt + "\n")["input_ids"])
            said = [{"role": "user", "content": prompt}]
            text = self._tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[str], count: int, *, temperature: float, max_tokens: int, seed: int, choose: Choose | None = None
    ) -> list[list[Completion]]:
        """Implement `Policy.generate`, ROWS sequences at a time."""
        generator = torch.Generator().manual_seed(seed)
        wanted = [prompt for prompt in prompts for _ in range(count)]
        # The longest prompts together, so that little is padded.
        rows = sorted(range(len(wanted)), key=lambda row: len(wanted[row]))
        found: dict[int, Completion] = {}
        was_training = self.module.training
        self.module.eval()
        for start in range(0, len(rows), ROWS):
            part = rows[start : start + ROWS]
            written = self._write([wanted[row] for row in part], temperature, max_tokens, generator, choose)
            found.update(zip(part, written, strict=True))
        self.module.train(was_training)
        return [[found[number * count + one] for one in range(count)] for number in range(len(prompts))]

    def _write(
        self, prompts: list[str], temperature: float, most: int, generator: torch.Generator, choose: Choose | None
    ) -> list[Completion]:
        tokens, mask = pad([self._prompt(prompt) for prompt in prompts], self._end, left=True, device=self._device())
        keep = {"logits_to_keep": 1} if self._keeps else {}
        past: Any = None
        ids: list[Tensor] = []
        logs: list[Tensor] = []
        going = torch.ones(len(prompts), dtype=torch.bool, device=mask.device)
        ends = torch.tensor(sorted(self._ends), device=mask.device)
        for chance in chances(generator, most, len(prompts), mask.device):
            if looks(len(ids), mask.device) and not bool(going.any()):
                break
            places = _places(mask)[:, -tokens.shape[1] :]
            made = self.module(
                input_ids=tokens, attention_mask=mask.long(), position_ids=places, past_key_values=past, use_cache=True, **keep
            )
            past = made.past_key_values
            chosen, log_prob = draw(made.logits[:, -1], temperature, chance, choose)
            ids.append(chosen)
            logs.append(log_prob)
            going = going & ~torch.isin(chosen, ends)
            tokens, mask = chosen[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        return [self._completion(row, of_row) for row, of_row in drawn(ids, logs)]

    def _completion(self, ids: list[int], logs: list[float]) -> Completion:
        length = next((place + 1 for place, token in enumerate(ids) if token in self._ends), len(ids))
        ended = ids[length - 1] in self._ends
        text = self._tokenizer.decode(ids[: length - ended], skip_special_tokens=True)
        return Completion(text, tuple(ids[:length]), tuple(logs[:length]), "stop" if ended else "length")

    def log_probs(self, prompts: Sequence[str], completions: Sequence[Sequence[int]], temperature: float) -> tuple[Tensor, Tensor]:
        """Implement `Policy.log_probs`; activations are computed again in the backward pass, ROWS sequences at a time."""
        after, mask = pad(completions, self._end, left=False, device=self._device())
        parts = []
        for start in range(0, len(prompts), ROWS):
            part = slice(start, start + ROWS)
            before, seen = pad([self._prompt(prompt) for prompt in prompts[part]], self._end, left=True, device=self._device())
            tokens, visible = torch.cat([before, after[part]], 1), torch.cat([seen, mask[part]], 1)
            parts.append(checkpoint(self._part, tokens, visible, after.shape[1], temperature, use_reentrant=False))
        return torch.cat(parts), mask

    def logits(self, prompts: Sequence[str], completions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        after, mask = pad(completions, self._end, left=False, device=self._device())
        before, seen = pad([self._prompt(prompt) for prompt in prompts], self._end, left=True, device=self._device())
        tokens, visible = torch.cat([before, after], 1)[:, :-1], torch.cat([seen, mask], 1)[:, :-1]
        length = after.shape[1]
        keep = {"logits_to_keep": length} if self._keeps else {}
        made = self.module(input_ids=tokens, attention_mask=visible.long(), position_ids=_places(visible), use_cache=False, **keep)
        found: Tensor = made.logits[:, -length:]
        return found, mask

    def _part(self, tokens: Tensor, visible: Tensor, length: int, temperature: float) -> Tensor:
        """Return the log-probabilities (b, length) of the last ``length`` of ``tokens``."""
        keep = {"logits_to_keep": length + 1} if self._keeps else {}
        made = self.module(input_ids=tokens, attention_mask=visible.long(), position_ids=_places(visible), use_cache=False, **keep)
        logs = (made.logits[:, -length - 1 : -1].float() / (temperature or 1.0)).log_softmax(-1)
        of_tokens: Tensor = logs.gather(-1, tokens[:, -length:, None])[..., 0]
        return of_tokens


def _places(mask: Tensor) -> Tensor:
    """Return positions counted from the first that is not padding."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def load_hf(where: str) -> HF:
    """Load the model in a folder or GGUF file, or of that name. PolicyError."""
    require(PolicyError, f"The policy 'hf:{where}'", "transformers", extra="rl", otherwise="choose tiny")
    path = Path(os.path.expanduser(where))
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
        raise PolicyError(f"The policy 'hf:{where}' cannot be loaded ({why}): name a model's folder, GGUF file or name.") from error
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config  # the weights are plain float32 by now
    with calling(HF, "what it was loaded from"):
        adapted, lr = _with_adapter(model)
        return HF(adapted, tokenizer, lr=lr)


def _with_adapter(model: Any) -> tuple[Any, float]:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        return model, 1e-5
    adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapter), 1e-4
