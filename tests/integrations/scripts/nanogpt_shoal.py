"""A training script in the form of nanoGPT's: decay and no-decay groups, accumulation, clipping, a
cosine rate, a checkpoint.
"""

import math
import os

import torch
from torch import nn

import shoal

steps, warmup, accumulate, batch, context, width = int(os.environ.get("STEPS", 60)), 5, 2, 8, 32, 32
until = int(os.environ.get("UNTIL", steps))  # to stop before
text = torch.tensor(
    list(b"The quick brown fox jumps over the lazy dog, and a shoal of fish turns at once. " * 50)
)
torch.manual_seed(int(os.environ.get("SEED", 0)))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(context, width)
        self.block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        self.head.weight = self.tokens.weight  # tied, as GPT-2's

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        hidden = self.block(
            self.tokens(x) + self.places(torch.arange(context)), mask, is_causal=True
        )
        return nn.functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


def get_batch(at=None):
    at = torch.randint(len(text) - context - 1, (batch,)) if at is None else at
    return torch.stack([text[i : i + context] for i in at]), torch.stack(
        [text[i + 1 : i + context + 1] for i in at]
    )


def get_lr(step):
    if step < warmup:
        return 1e-2 * (step + 1) / warmup
    return 1e-3 + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) * 9e-3


model, start = GPT(), 0
decay, rest = (
    [p for p in model.parameters() if (p.dim() >= 2) is wanted] for wanted in (True, False)
)
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
    betas=(0.9, 0.95),
)
with shoal.create(state=model, every=10) as session:  # the others: shoal.join(LINK, state=model)
    optimizer = session.optimizer(optimizer)
    if os.path.exists("ckpt.pt"):
        checkpoint = torch.load("ckpt.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["step"]
        torch.set_rng_state(checkpoint["rng"])
    for step in range(start, until):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        for _ in range(accumulate):
            (model(*get_batch()) / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": until,
        "rng": torch.get_rng_state(),
    }
    torch.save(state, "ckpt.pt")
with torch.no_grad():
    print("loss", model(*get_batch(torch.arange(batch) * 7)).item())
