"""Distances of claims of a real language model, honest and not, one unit of work at a time, kept in
a file to go on from.

A claim is ``TOKENS`` tokens after a question of ``ASKED`` tokens. What is kept of it is evidence
(the six features of both fingerprints, as each verifier sees them), not a verdict, so thresholds
are a matter of the report. A unit is ``ROWS`` claims of one prover in one way, read by a verifier
of each dtype. The noise of the draws takes as long as the model; all ways share it.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import math
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench._questions import question
from bench._verification_claims import ACTIVATIONS, CHEATING, FRESH, SAMPLING
from bench._verification_world import DTYPES, noisy, rounded, seed_of
from shoal.verification.fingerprints.last_hidden import LastHidden, output_head
from shoal.verification.fingerprints.sampling import FARTHEST, gumbel

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "bench" / "results" / "verification_135m.json.gz"
SIDES = ("fp32", "bf16")  # float16 takes nine times as long on the processors at hand
ROWS, ASKED, TOKENS = 32, 16, 32
VARIANT = 30_000_000  # first claim written in another honest way
HONEST = "honest"
STEPS, RANK = 8, 8  # of the short fine-tunes, and of the adapter
Rows = dict[str, list[list[float]]]
"""Features of claims, by "prover verifier way"."""


@dataclass(frozen=True)
class Way:
    """How claims are written.

    ``change``: of the weights; ``reads``: the states are those of the right weights for this text.
    """

    change: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    shift: int = 0  # to another question
    reads: bool = False
    half: bool = False
    batch: int = ROWS
    threads: int = 1


CHEATS = {
    "int8 weights": Way("int8"),
    "int4 weights": Way("int4"),
    "fp8 weights": Way("fp8"),
    "weights + 0.1 % noise": Way("noise"),
    f"an adapter merged, {STEPS} steps": Way("adapter"),
    f"fine-tuned, {STEPS} steps": Way("tuned"),
    "temperature 0.9": Way(temperature=0.9),
    "top-p 0.9": Way(top_p=0.9),
    "another prompt": Way(shift=1),
    "int4's text, prefilled": Way("int4", reads=True),
    "the fine-tuned model's text, prefilled": Way("tuned", reads=True),
    "truncated, then filler": Way(half=True, reads=True),
}
VARIANTS = {
    "honest, one at a time": Way(batch=1),
    "honest, 8 at a time": Way(batch=8),
    "honest, 2 threads": Way(threads=2),
}
WAYS = {HONEST: Way(), **CHEATS, **VARIANTS}


# -- weights ---------------------------------------------------------------------------------------


def to_fp8(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Round to float8_e4m3fn, one scale for each row, as weight-only quantisation does."""
    scale = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


CHANGES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "int8": rounded(8),
    "int4": rounded(4),
    "fp8": to_fp8,
    "noise": noisy(0.001),
}


class Adapted(nn.Module):
    """``layer(x) + 2 B A x``, with A and B of rank ``RANK``; B starts as zero."""

    def __init__(self, layer: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(
            torch.randn(RANK, layer.in_features, generator=generator) / math.sqrt(layer.in_features)
        )
        self.b = nn.Parameter(torch.zeros(layer.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * (x @ self.a.T @ self.b.T)  # type: ignore[no-any-return]

    def merged(self) -> nn.Linear:
        with torch.no_grad():
            self.layer.weight.add_(2 * self.b @ self.a)
        return self.layer


class Policy:
    """A causal language model of transformers, from a folder, in all the ways that claims are
    written or read with it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            self._model = AutoModelForCausalLM.from_pretrained(
                str(folder), local_files_only=True, dtype=torch.float32
            ).eval()
        except ImportError:
            raise SystemExit(
                "bench: --policy needs transformers: pip install -e '.[rl]'."
            ) from None
        except (OSError, ValueError) as error:
            raise SystemExit(
                f"bench: '{folder}' cannot be loaded ({next(iter(str(error).splitlines()), '')})."
            ) from None
        self.changes: dict[str, float] = {}  # norm of the change over that of the changed matrices
        self.right = {side: self._cast(self._model, side) for side in SIDES}
        self.changed = lru_cache(maxsize=4)(
            self._changed
        )  # two of them were trained, which takes a minute

    def digest(self) -> str:
        """SHA-256 of all weights."""
        found = hashlib.sha256()
        for name, value in sorted(self._model.state_dict().items()):
            found.update(name.encode() + value.contiguous().numpy().tobytes())
        return found.hexdigest()

    @staticmethod
    def _cast(model: nn.Module, side: str) -> nn.Module:
        return model if DTYPES[side] == torch.float32 else copy.deepcopy(model).to(DTYPES[side])

    def writer(self, change: str, side: str) -> nn.Module:
        return self._cast(self.changed(change), side) if change else self.right[side]

    def _changed(self, change: str) -> nn.Module:
        other: Any = copy.deepcopy(self._model)
        if change in CHANGES:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for weight in other.model.layers.parameters():
                    if weight.dim() == 2:
                        weight.copy_(CHANGES[change](weight, generator))
        else:
            self._train(other, change == "adapter")
        before, after = self._model.model.layers.state_dict(), other.model.layers.state_dict()
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        lengths = [
            sum(float(part[name].square().sum()) for name in moved)
            for part in (_minus(after, before, moved), before)
        ]
        self.changes[change] = math.sqrt(lengths[0] / lengths[1])
        made: nn.Module = other
        return made

    def _train(self, model: Any, adapter: bool) -> None:
        """Do ``STEPS`` steps of AdamW on sentences that are no questions of claims: of all weights,
        or of an adapter of q and v.
        """
        generator = torch.Generator().manual_seed(1)
        adapted: list[tuple[nn.Module, str, Adapted]] = []
        if adapter:
            model.requires_grad_(False)
            for layer in model.model.layers:
                for name in ("q_proj", "v_proj"):
                    made = Adapted(getattr(layer.self_attn, name), generator)
                    setattr(layer.self_attn, name, made)
                    adapted.append((layer.self_attn, name, made))
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3 if adapter else 1e-5)
        for step in range(STEPS):
            tokens = self.prompts(range(-8 * step - 8, -8 * step), 24)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for parent, name, made in adapted:
            setattr(parent, name, made.merged())
        model.requires_grad_(False)

    def prompts(self, claims: Sequence[int], length: int = ASKED) -> Tensor:
        return torch.tensor(
            [self._tokenizer(question(claim))["input_ids"][:length] for claim in claims]
        )

    @torch.no_grad()
    def write(
        self, model: Any, asked: Tensor, count: int, choose: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """``count`` tokens (B, count) with a KV cache, and the states (B, count, width) from which
        ``choose`` drew them.
        """
        past, shown, tokens = None, asked, []
        with LastHidden(model) as hidden:
            for position in range(count):
                made = model(
                    input_ids=shown, past_key_values=past, use_cache=True, logits_to_keep=1
                )
                past = made.past_key_values
                tokens.append(choose(made.logits[:, -1], position))
                shown = tokens[-1].unsqueeze(1)
        return torch.stack(tokens, dim=1), hidden.states()

    @torch.no_grad()
    def read(self, model: Any, asked: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States (B, n, width) and logits (B, n, V) that ``tokens`` (B, n) come from, in one
        call.
        """
        many = tokens.shape[1]
        with LastHidden(model, every=True) as hidden:
            shown = torch.cat((asked, tokens[:, :-1]), dim=1)
            logits = model(input_ids=shown, use_cache=False, logits_to_keep=many).logits
        return hidden.states()[:, -many:], logits


def _minus(
    left: dict[str, Tensor], right: dict[str, Tensor], names: Sequence[str]
) -> dict[str, Tensor]:
    return {name: left[name] - right[name] for name in names}


# -- claims ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def noise_of(claims: tuple[int, ...], vocabulary: int) -> Tensor:
    """Gumbel noise (TOKENS, B, V) of the seeds of ``claims``."""
    found = torch.empty(TOKENS, len(claims), vocabulary, dtype=torch.float64)
    for row, claim in enumerate(claims):
        for position in range(
            TOKENS
        ):  # one at a time: all of them at once take four times the memory
            found[position, row] = gumbel(
                seed_of(claim), range(position, position + 1), vocabulary
            )[0]
    return found


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """``logits`` (B, V), but those outside the smallest set of tokens with a probability of
    ``top_p`` -inf.
    """
    ranked, places = logits.sort(dim=-1, descending=True)
    shares = ranked.softmax(dim=-1)
    out = torch.zeros_like(logits, dtype=torch.bool).scatter(
        -1, places, shares.cumsum(dim=-1) - shares >= top_p
    )
    return logits.masked_fill(out, float("-inf"))


def chooser(noise: Tensor, way: Way) -> Callable[[Tensor, int], Tensor]:
    def choose(logits: Tensor, position: int) -> Tensor:
        wide = logits.double() / way.temperature
        return (
            nucleus(wide, way.top_p) + noise[position] if way.top_p < 1 else wide + noise[position]
        ).argmax(dim=-1)

    return choose


def margins(tokens: Tensor, logits: Tensor, noise: Tensor) -> Tensor:
    """What `fingerprint.margins` finds at temperature 1, (B, n), with noise (n, B, V) already
    made.
    """
    found = []
    for at, part in enumerate(noise):
        scores = logits[:, at].double() + part
        found.append(
            (scores.amax(dim=1) - scores.gather(1, tokens[:, at : at + 1]).squeeze(1)).clamp_max(
                FARTHEST
            )
        )
    return torch.stack(found, dim=1)


def unit(
    policy: Policy, way: Way, prover: str, sides: Sequence[str], claims: Sequence[int]
) -> tuple[Rows, dict[str, float]]:
    """Features (claims, 6) by verifier of ``sides``, and the processor's seconds of writing and of
    each reading.
    """
    right = policy.right[prover]
    noise = noise_of(tuple(claims), int(output_head(right).weight.shape[0]))  # type: ignore[index]
    asked, seconds = policy.prompts(claims), {}
    answered = policy.prompts([claim + way.shift for claim in claims])
    model, count = policy.writer(way.change, prover), TOKENS // 2 if way.half else TOKENS
    torch.set_num_threads(way.threads)
    begin, parts = time.process_time(), []
    for at in range(0, len(claims), way.batch):
        rows = slice(at, at + way.batch)
        parts.append(policy.write(model, answered[rows], count, chooser(noise[:, rows], way)))
    seconds[f"write {prover} {way.batch} at a time"] = time.process_time() - begin
    torch.set_num_threads(1)
    tokens, states = (torch.cat(part) for part in zip(*parts, strict=True))
    if way.half:
        tokens = torch.cat((tokens, tokens), dim=1)[:, :TOKENS]
    seen = {}
    for side in sides:
        begin = time.process_time()
        seen[side] = policy.read(policy.right[side], asked, tokens)
        seconds[f"read {side} {len(claims)} at a time"] = time.process_time() - begin
    states = seen[prover][0] if way.reads else states
    proofs = [ACTIVATIONS.make(row) for row in states]
    found: Rows = {}
    for side, (own, logits) in seen.items():
        drawn = margins(tokens, logits, noise)
        told = [
            ACTIVATIONS.compare(proof, row).means() for proof, row in zip(proofs, own, strict=True)
        ]
        both = [
            (*one, *SAMPLING.measured(row).means()) for one, row in zip(told, drawn, strict=True)
        ]
        found[side] = [[float(f"{mean:.4g}") for mean in row] for row in both]
    return found, seconds


# -- a file to go on from --------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Claims of each prover: honest, of each cheat, and written in each other honest way;
    ``rounds`` of about equal parts.

    Of the honest claims the first ``across`` are read in the other dtype too. ``provers``: their
    dtypes.
    """

    honest: int
    across: int
    cheats: int
    variants: int
    rounds: int = 8
    provers: tuple[str, ...] = SIDES

    def sides(self, way: str, prover: str, claims: range) -> tuple[str, ...]:
        """Dtypes that read these claims, the prover's among them."""
        return SIDES if way != HONEST or claims.start < FRESH + self.across else (prover,)

    def units(self) -> list[tuple[str, str, range]]:
        """(way, prover, claims), in the order of work: after each round there is about the same
        share of everything.
        """
        found = []
        for number in range(self.rounds):
            for ways, first, many in (
                ({HONEST: Way()}, FRESH, self.honest),
                (CHEATS, CHEATING, self.cheats),
                (VARIANTS, VARIANT, self.variants),
            ):
                step = ROWS // 2 if ways is VARIANTS else ROWS
                starts = range(0, many, step)
                # Cheats in the first round already; the honest variants, of which one takes long,
                # later.
                early = self.rounds - 1 if ways is not VARIANTS else 0
                begin, end = (
                    (len(starts) * part + early) // self.rounds for part in (number, number + 1)
                )
                for at in starts[begin:end]:
                    claims = range(first + at, first + min(at + step, many))
                    found += [(way, prover, claims) for way in ways for prover in self.provers]
        return found


def load(path: Path) -> dict[str, Any]:
    """What earlier runs kept: "about", "rows" (see `Rows`), "seconds" by work, "changes"."""
    if not path.exists():
        return {"about": {}, "rows": {}, "seconds": {}, "changes": {}}
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def save(path: Path, kept: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress(json.dumps(kept, separators=(",", ":")).encode(), mtime=0))
    os.replace(part, path)


def measure(folder: Path, path: Path, plan: Plan, seconds: float) -> bool:
    """Do what the file lacks of ``plan``, for so many ``seconds``; return whether all is done.

    Raises SystemExit if the file is of another model or machine.
    """
    torch.set_num_threads(1)
    kept, begin = load(path), time.perf_counter()
    policy = Policy(folder)
    sizes = {"rows": ROWS, "asked": ASKED, "tokens": TOKENS, "steps": STEPS, "rank": RANK}
    about = {
        "weights": policy.digest(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        **sizes,
    }
    about["capability"] = torch.backends.cpu.get_cpu_capability()
    if kept["about"] not in ({}, about):
        raise SystemExit(
            f"bench: '{path}' is of {kept['about']}, this is {about}: name another file with "
            "--kept."
        )
    kept["about"] = about
    spent = defaultdict(list, kept["seconds"])
    done: dict[tuple[str, str], int] = {
        (way, prover): len(kept["rows"].get(f"{prover} {prover} {way}", []))
        for way in WAYS
        for prover in SIDES
    }
    reached: dict[tuple[str, str], int] = defaultdict(int)
    for way, prover, claims in plan.units():
        reached[way, prover] += len(claims)
        if reached[way, prover] <= done[way, prover]:
            continue
        if time.perf_counter() - begin > seconds:
            return False
        found, times = unit(policy, WAYS[way], prover, plan.sides(way, prover, claims), claims)
        for side, rows in found.items():
            kept["rows"].setdefault(f"{prover} {side} {way}", []).extend(rows)
        for work, time_s in times.items():
            spent[work].append(round(time_s, 2))
        kept |= {"seconds": dict(spent), "changes": {**kept["changes"], **policy.changes}}
        save(path, kept)
        shown = (
            f"{way}, {prover}: {reached[way, prover]} claims, {time.perf_counter() - begin:.0f} s"
        )
        print(shown, file=sys.stderr, flush=True)
    return True
