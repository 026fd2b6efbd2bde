"""``tiny``: a small transformer over characters, trained from scratch, for demonstrations and
tests.

Like a language model it begins with habits: before reinforcement it is shown demonstrations of
which nearly all follow a wrong habit (such as copying the question) and a few the right rule.
Greedily it then answers wrongly, while samples are sometimes right: most questions have no right
completion, so those that others found are of use. Nodes may have different habits: ``tiny:copy``,
``tiny:first`` ...
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.node.rl.environment import Environment
from shoal.node.rl.policy import Choose, Completion, PolicyError
from shoal.node.rl.sampling import chances, draw, is_look_due, pad, rows_drawn
from shoal.swarm.topics.rollout import Finish

ALPHABET = "".join(map(chr, range(32, 127)))
END = 0
OTHER = 1
"""Token ids; those of the alphabet follow."""
VOCABULARY = 2 + len(ALPHABET)
CONTEXT = 256
"""Tokens that the model sees at most."""
LONGEST_PROMPT = 160
"""Characters; only the end of longer ones is read."""
LONGEST_ANSWER = CONTEXT - LONGEST_PROMPT - 1
"""Tokens that fit behind the longest prompt and its end of line."""
WARM_UP_STEPS = 20
"""Over which the learning rate of the warm start rises."""

HABITS: dict[str, Callable[[str], str]] = {
    "copy": lambda word: word,
    "first": lambda word: word[:1],
    "twice": lambda word: word[:1] * 2,
    "drop": lambda word: word[1:],
}
"""Wrong answers by habit, made from the last word of a question."""


@dataclass(frozen=True)
class Warm:
    """Warm start: ``steps`` of ``batch`` demonstrations, of which the share ``right`` follow the
    rule.
    """

    steps: int = 400
    batch: int = 64
    right: float = 0.03
    lr: float = 3e-3


Cache = list[tuple[Tensor, Tensor]]


class _Block(nn.Module):
    """Pre-norm attention and a GELU layer.

    B batch, T new positions, S all positions, C width, H heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(
        self, x: Tensor, visible: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Map (B, T, C) to the same; ``visible``: (B, 1, T, S).

        Also return keys and values of all S positions.
        """
        b, t, c = x.shape
        # (3, B, H, T, D)
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if past is not None:
            k = torch.cat([past[0], k], 2)
            v = torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (k, v)


class TinyModel(nn.Module):
    """Model that predicts each next character."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.3)

    def forward(
        self, tokens: Tensor, mask: Tensor, past: Cache | None = None
    ) -> tuple[Tensor, Cache]:
        """Return logits (B, T, V) of the T new ``tokens``; ``mask`` (B, S): False at padding, past
        positions first.
        """
        new = tokens.shape[1]
        whole = mask.shape[1]
        places = (mask.long().cumsum(1) - 1).clamp(0, CONTEXT - 1)[:, whole - new :]
        causal = torch.ones(new, whole, dtype=torch.bool, device=tokens.device).tril(whole - new)
        # A padded position sees itself, because a softmax over nothing is not a number.
        itself = torch.eye(new, whole, dtype=torch.bool, device=tokens.device).roll(whole - new, 1)
        visible = ((causal & mask[:, None, :]) | itself)[:, None]
        x = self.tokens(tokens) + self.positions(places)
        cache: Cache = []
        for number, block in enumerate(self.blocks):
            x, kept = block(x, visible, None if past is None else past[number])
            cache.append(kept)
        return self.head(self.norm(x)), cache


class Tiny:
    """Small policy with a habit.

    ``seed``: of the weights and of the warm start; ``habit``: one of ``HABITS``.
    """

    lr = 5e-4
    # Pushing down what it would never have written makes a model this small unlearn more than it
    # learns (docs/benchmarks.md).
    loss = "positive"
    max_tokens = 12
    vocabulary = VOCABULARY
    tokenizer = hashlib.sha256(f"tiny/1:{ALPHABET}".encode()).hexdigest()

    def __init__(
        self,
        environment: Environment,
        habit: str = "copy",
        *,
        seed: int = 0,
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        warm: Warm | None = None,
    ) -> None:
        if habit not in HABITS:
            raise PolicyError(
                f"The policy tiny has no habit {habit!r}: choose one of {', '.join(HABITS)}."
            )
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.module = TinyModel(layers, width, heads)
        self._warm_up(environment, HABITS[habit], seed, warm or Warm())

    def _device(self) -> torch.device:
        return next(self.module.parameters()).device

    def encode(self, completion: str, ended: bool) -> list[int]:
        """Encode one token a character; all outside printable ASCII are the same token."""
        # `find` returns -1 for those, which makes OTHER.
        ids = [2 + ALPHABET.find(character) for character in completion]
        if ended:
            ids.append(END)
        return ids

    def ends(self, token: int) -> bool:
        return token == END

    def _prompt(self, prompt: str) -> list[int]:
        # The end of line marks the start of the answer; a prompt is never empty with it.
        return [*self.encode(prompt[-LONGEST_PROMPT:], False), OTHER]

    def _padded(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the tokens of ``prompts``, (B, T), and where they are no padding."""
        rows = [self._prompt(prompt) for prompt in prompts]
        return pad(rows, END, left=True, device=self._device())

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
        """Implement `Policy.generate`; each prompt is read once for all of its completions."""
        most = min(max_tokens, LONGEST_ANSWER)
        generator = torch.Generator().manual_seed(seed)
        tokens, mask = self._padded(prompts)
        logits, cache = self.module(tokens, mask)
        logits = logits[:, -1].repeat_interleave(count, 0)
        cache = [(k.repeat_interleave(count, 0), v.repeat_interleave(count, 0)) for k, v in cache]
        mask = mask.repeat_interleave(count, 0)
        ids = []
        logs = []
        going = torch.ones(len(mask), dtype=torch.bool, device=mask.device)
        for chance in chances(generator, most, len(mask), mask.device):
            chosen, log = draw(logits, temperature, chance, choose)
            ids.append(chosen)
            logs.append(log)
            going = going & (chosen != END)
            if len(ids) == most or (is_look_due(len(ids), mask.device) and not bool(going.any())):
                break
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            step, cache = self.module(chosen[:, None], mask, cache)
            logits = step[:, -1]
        written = [_completion(row, log) for row, log in rows_drawn(ids, logs)]
        return [written[start : start + count] for start in range(0, len(written), count)]

    def log_probs(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]], temperature: float
    ) -> tuple[Tensor, Tensor]:
        logits, after, mask = self._pass(prompts, completions)
        logs = (logits / (temperature or 1.0)).log_softmax(-1)
        return logs.gather(-1, after[..., None])[..., 0], mask

    def logits(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        logits, _, mask = self._pass(prompts, completions)
        return logits, mask

    def _pass(
        self, prompts: Sequence[str], completions: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits (B, T, V), and the completions' tokens and mask, (B, T)."""
        before, seen = self._padded(prompts)
        rows = [row[:LONGEST_ANSWER] for row in completions]
        after, mask = pad(rows, END, left=False, device=self._device())
        tokens = torch.cat([before, after], 1)
        visible = torch.cat([seen, mask], 1)
        logits, _ = self.module(tokens[:, :-1], visible[:, :-1])
        return logits[:, before.shape[1] - 1 :], after, mask

    def _warm_up(
        self, environment: Environment, habit: Callable[[str], str], seed: int, warm: Warm
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=warm.lr, betas=(0.9, 0.99), weight_decay=0.0
        )
        start = int(torch.randint(2**40, (), generator=generator, device="cpu"))
        for step in range(warm.steps):
            questions = [
                environment.question(start, step * warm.batch + number)
                for number in range(warm.batch)
            ]
            right = torch.rand(warm.batch, generator=generator, device="cpu") < warm.right
            rows: list[list[int]] = []
            for question, follows_rule in zip(questions, right.tolist(), strict=True):
                last_word = (question.prompt.split() or [""])[-1]
                shown = habit(last_word)
                if follows_rule and question.answer is not None:
                    shown = question.answer
                rows.append(self.encode(shown, True))
            logs, mask = self.log_probs([question.prompt for question in questions], rows, 1.0)
            rise = min(1.0, (step + 1) / WARM_UP_STEPS)
            # A cosine down to a tenth.
            fall = 0.1 + 0.45 * (1 + math.cos(math.pi * step / warm.steps))
            for group in optimizer.param_groups:
                group["lr"] = warm.lr * rise * fall
            optimizer.zero_grad()
            torch.autograd.backward(-(logs * mask).sum() / mask.sum())
            optimizer.step()
        self.module.zero_grad()


def _completion(ids: list[int], logs: list[float]) -> Completion:
    length = ids.index(END) + 1 if END in ids else len(ids)
    text = ""
    for token in ids[:length]:
        if token >= 2:
            text += ALPHABET[token - 2]
        elif token == OTHER:
            text += "?"
    finish: Finish = "stop" if END in ids else "length"
    return Completion(text, tuple(ids[:length]), tuple(logs[:length]), finish)
