"""A language model of transformers as the world of bench/verification.py: a folder, or a GGUF file.

Questions are windows of 24 tokens of this repository's README. An end token does not end a claim, so that all have one length.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.verification.fingerprints import LastHidden, draw_rows, output_head

ASKED = 24


class HFWorld:
    """See ``_verification_world.World``. Raises ``SystemExit`` with a sentence if the model cannot be loaded."""

    rows = 16

    def __init__(self, path: Path) -> None:
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError:
            raise SystemExit("bench: --policy needs transformers: pip install -e '.[rl]'.") from None
        gguf = path.suffix == ".gguf"
        options: dict[str, Any] = {"local_files_only": True} | ({"gguf_file": path.name} if gguf else {})
        source = str(path.parent if gguf else path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            self._model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options).eval()
        except (OSError, ValueError, ImportError) as error:
            raise SystemExit(f"bench: '{path}' cannot be loaded ({next(iter(str(error).splitlines()), '')}).") from None
        self.name = path.stem
        text = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
        self._text = torch.tensor(tokenizer(text)["input_ids"])

    def model(self, dtype: torch.dtype) -> nn.Module:
        made: nn.Module = copy.deepcopy(self._model).to(dtype)
        return made

    def stranger(self, model: nn.Module) -> nn.Module:
        """No second model of this vocabulary is at hand: this one with a fifth of its layers gone and noise of 10 %."""
        other, random = copy.deepcopy(model), torch.Generator().manual_seed(1)
        layers = self.layers(other)
        del layers[::5]
        with torch.no_grad():
            for weight in layers.parameters():
                if weight.dim() == 2:
                    noise = torch.randn(weight.shape, generator=random) * weight.float().std()
                    weight.add_(noise.to(weight.dtype), alpha=0.1)
        return other

    def layers(self, model: nn.Module) -> nn.ModuleList:
        found = getattr(getattr(model, "model", None), "layers", None)
        if not isinstance(found, nn.ModuleList):
            raise SystemExit("bench: the model's blocks are not where Llama's are (model.layers), so they cannot be changed.")
        return found

    def prompts(self, claims: Iterable[int]) -> Tensor:
        last = len(self._text) - ASKED
        return torch.stack([self._text[at : at + ASKED] for at in (claim * 7919 % last for claim in claims)])

    def _ready(self, model: Any) -> Any:
        """A model that lost layers counts those that are left, for its cache."""
        layers = self.layers(model)
        model.config.num_hidden_layers = len(layers)
        for at, layer in enumerate(layers):
            layer.self_attn.layer_idx = at  # type: ignore[union-attr]
        return model

    def write(
        self, model: nn.Module, asked: Tensor, count: int, seeds: Sequence[bytes], temperature: float
    ) -> tuple[Tensor, Tensor]:
        ready, past, shown = self._ready(model), None, asked
        tokens: list[Tensor] = []
        with torch.no_grad(), LastHidden(model, output_head(model)) as hidden:
            for position in range(count):
                made = ready(input_ids=shown, past_key_values=past, use_cache=True, logits_to_keep=1)
                past = made.past_key_values
                tokens.append(draw_rows(made.logits[:, -1], seeds, position, temperature))
                shown = tokens[-1].unsqueeze(1)
        return torch.stack(tokens, dim=1), hidden.states()

    def read(self, model: nn.Module, asked: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ready, states, logits = self._ready(model), [], []
        with torch.no_grad():
            for prompt, row in zip(asked, tokens, strict=True):  # one by one: logits of all rows would be gigabytes
                with LastHidden(model, output_head(model), every=True) as hidden:
                    made = ready(input_ids=torch.cat((prompt, row[:-1])).unsqueeze(0), use_cache=False, logits_to_keep=len(row))
                states.append(hidden.states()[0, -len(row) :])
                logits.append(made.logits[0])
        return torch.stack(states), torch.stack(logits)
