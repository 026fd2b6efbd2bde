"""``shoal sample``: continue texts with weights that ``shoal pull`` wrote, of a swarm of the
built-in task ``text``.

A folder may come from somebody else, so nothing in it is believed: the sizes are compared with the
shapes of the tensors before the model takes memory, and the tokenizer is one by name, or one that
the user gives.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shoal.node.checkpoint.export import ABOUT, README, WEIGHTS
from shoal.node.config.device import resolve_device
from shoal.node.data.source import DataError
from shoal.node.data.task_options import DIGEST, TEXT, TOKENIZER, options_of_member
from shoal.node.data.tokenizer import BYTES, MAX_VOCABULARY, Tokenizer, load_tokenizer
from shoal.node.free_memory import free_memory
from shoal.node.tasks import text_size
from shoal.node.tasks.gpt import GPT, sized
from shoal.swarm.errors import ShoalError

MAX_ABOUT = 2**20  # bytes of shoal.json
MAX_HEADER = 2**24  # bytes in which the file of the weights names its tensors
SIZE = text_size.TextSize._fields
AGAIN = "pull the weights again (shoal pull LINK --out DIR)"


class SampleError(ShoalError):
    """There are no weights that can be sampled from."""


@dataclass(frozen=True)
class PulledModel:
    """The weights of a folder, the tokenizer of their swarm, and what ``shoal.json`` says about
    them.
    """

    model: GPT
    tokenizer: Tokenizer
    about: Mapping[str, Any]


def sample(
    folder: Path,
    *,
    prompt: str = "",
    tokens: int = 200,
    samples: int = 1,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int | None = None,
    tokenizer: str | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Draw ``samples`` continuations of ``prompt``, of so many ``tokens`` each; return a report.

    Args:
        temperature: by which the logits are divided; 0 takes the likeliest token. top_k: draw among
            so many of the likeliest.
        seed: of the draws on the CPU; None: another each time, which the report names.
        tokenizer: this machine's copy of the swarm's.

    Raises SampleError, DataError or ConfigError: the folder, the tokenizer or the device.
    """
    found = load_pulled(folder, tokenizer)
    model = found.model.to(resolve_device(device)).eval()
    seed = secrets.randbits(32) if seed is None else seed
    generator = torch.Generator().manual_seed(seed)
    begun = prompt_tokens(found.tokenizer, prompt)
    texts = []
    for _ in range(samples):
        added = continuation(
            model, begun, tokens, temperature=temperature, top_k=top_k, generator=generator
        )
        texts.append(prompt + found.tokenizer.decode(added))
    names = ("swarm", "name", "round")
    settings = {
        "prompt": prompt,
        "tokens": tokens,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
    }
    return {
        **{name: found.about.get(name) for name in names},
        "folder": str(folder),
        **settings,
        "texts": texts,
    }


def load_pulled(folder: Path, tokenizer: str | None = None) -> PulledModel:
    """Load what `shoal.node.commands.pull` wrote for the task ``text``.

    Raises SampleError or DataError.
    """
    about = _about(folder)
    task = about.get("task")
    size = about.get("model")
    if task != TEXT:
        what = (
            f"are of the task {str(task)[:80]!r}, and `shoal sample` continues texts with those "
            "of the built-in task text"
        )
        raise SampleError(
            f"The weights in {str(folder)!r} {what}: load them as {README} there says."
        )
    if size is None:
        raise SampleError(
            f"The weights in {str(folder)!r} are without the names of the model: {README} there "
            "says why."
        )
    if not _is_size(size) or not isinstance(about.get("task_options"), dict):
        raise SampleError(f"The file {str(folder / ABOUT)!r} is damaged: {AGAIN}.")
    model = _model(folder, size)
    own = {} if tokenizer is None else {TOKENIZER: tokenizer}
    options = options_of_member(TEXT, about["task_options"], own)
    name = str(options.get(TOKENIZER, BYTES))
    made = load_tokenizer(name, str(options.get(DIGEST, "")))
    if made.vocabulary != model.head.out_features:
        raise DataError(
            f"The tokenizer {name!r} has {made.vocabulary} tokens and the model "
            f"{model.head.out_features}: name the swarm's with --tokenizer."
        )
    return PulledModel(model, made, about)


def prompt_tokens(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens of the end of a document, as if one had just ended, and of ``prompt``
    without its own end.
    """
    end = torch.cat(list(tokenizer.encode(b"")))
    whole = torch.cat(list(tokenizer.encode(prompt.encode("utf-8", "replace"))))
    found: list[int] = torch.cat([end, whole[: len(whole) - len(end)]]).tolist()
    return found


@torch.no_grad()
def continuation(
    model: GPT,
    begun: list[int],
    count: int,
    *,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator,
) -> list[int]:
    """Return ``count`` tokens behind ``begun``, each drawn from what the model sees in its context.

    Raises SampleError.
    """
    context = model.positions.num_embeddings
    device = model.positions.weight.device
    tokens = list(begun)
    for _ in range(count):
        window = torch.tensor([tokens[-context:]], device=device)  # (1, T)
        logits = model(window)[0, -1].float().cpu()  # (V,)
        if not bool(torch.isfinite(logits).all()):
            raise SampleError(
                "The model's outputs are not finite, so its weights are of no use: pull others."
            )
        if top_k is not None:
            least = torch.topk(logits, min(top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            scaled = (
                logits - logits.max()
            ) / temperature  # at most 0, so no small temperature makes it infinite
            tokens.append(int(torch.multinomial(torch.softmax(scaled, 0), 1, generator=generator)))
    return tokens[len(begun) :]


def _about(folder: Path) -> dict[str, Any]:
    path = folder / ABOUT
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_ABOUT))
    except FileNotFoundError:
        raise SampleError(
            f"There are no weights of `shoal pull` in {str(folder)!r}: name the folder that it "
            "wrote."
        ) from None
    except OSError as error:
        raise SampleError(
            f"Cannot read {str(path)!r} ({error.strerror}): check its permissions."
        ) from error
    except (ValueError, RecursionError) as error:
        raise SampleError(f"The file {str(path)!r} is damaged: {AGAIN}.") from error
    if not isinstance(found, dict):
        raise SampleError(f"The file {str(path)!r} is damaged: {AGAIN}.")
    return found


def _is_size(size: object) -> bool:
    """Return whether ``size`` is what `GPT` takes, within bounds."""
    if not isinstance(size, dict) or not set(SIZE) <= set(size) <= {*SIZE, "vocabulary"}:
        return False
    vocabulary = size.get("vocabulary", 1)
    if type(vocabulary) is not int or not 1 <= vocabulary <= MAX_VOCABULARY:
        return False
    return (
        all(text_size.is_within(name, size[name]) for name in SIZE)
        and size["width"] % size["heads"] == 0
    )


def _model(folder: Path, size: Mapping[str, int]) -> GPT:
    """Load the weights into a model of this size, once the file has all of its tensors and no
    others.
    """
    path = folder / WEIGHTS
    try:
        _check_header(path)
        model = sized(**size)
        wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            there = {name: list(file.get_slice(name).get_shape()) for name in names}
            if there == wanted:
                _check_memory(folder, model)
                tensors = {name: file.get_tensor(name).float() for name in wanted}
                model.load_state_dict(tensors, assign=True)
                return model
    except (OSError, SafetensorError) as error:
        raise SampleError(
            f"The weights {str(path)!r} cannot be read ({error!s:.200}): {AGAIN}."
        ) from error
    raise SampleError(
        f"The weights {str(path)!r} are not of the model that {ABOUT} names: {AGAIN}."
    )


def _check_header(path: Path) -> None:
    """Raise SampleError if the weights name more tensors than `shoal pull` writes."""
    with path.open("rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
    if nbytes > MAX_HEADER:
        raise SampleError(
            f"The weights {str(path)!r} cannot be read (they name too many tensors): {AGAIN}."
        )


def _check_memory(folder: Path, model: GPT) -> None:
    """Raise SampleError if the weights of ``model`` do not fit into the memory that is free."""
    need = 4 * sum(parameter.numel() for parameter in model.parameters())
    free, _ = free_memory()
    if need > free:
        raise SampleError(
            f"The model in {str(folder)!r} takes {need / 1e9:,.2f} GB of memory, and "
            f"{free / 1e9:.2f} are free: end other programs, or sample from a smaller one."
        )
