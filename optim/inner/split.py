"""Which parameters of a model Muon trains: the matrices of its hidden layers. All else is AdamW's.

The rule is that of Muon's author (https://kellerjordan.github.io/posts/muon/): no embeddings, no output layer, no vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from shoal.optim.inner.blocks import repeated_blocks


def hidden_matrices(model: nn.Module) -> list[str]:
    """Return the names of the parameters that Muon trains by default, in the model's order.

    They are the trained parameters of two dimensions called ``weight``, or ``..._weight``, in the blocks that the model repeats; in
    a model without such blocks, the weights of all its ``nn.Linear`` but the last, which is its output. Never among them:

    * weights of an ``nn.Embedding`` or ``nn.EmbeddingBag``, also where another layer shares them (tied heads);
    * what stands outside of the blocks, such as an untied head, or what ``get_output_embeddings()`` returns, which models of
      transformers have;
    * vectors and numbers (norms, biases), kernels of convolutions, recurrent layers' weights, and frozen parameters.

    The two matrices of a LoRA adapter in a block are matrices like any other.
    """
    modules, blocks = list(model.modules()), repeated_blocks(model)
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    within = [inner for block in blocks for inner in block.modules()] if blocks else linear[:-1]
    hidden = {id(parameter) for module in within for parameter in _weights(module)}
    outputs = [found for module in modules if (found := _output(module)) is not None]
    looked_up = [module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    hidden -= {id(parameter) for module in [*looked_up, *outputs] for parameter in module.parameters()}
    return [name for name, p in model.named_parameters() if id(p) in hidden and p.requires_grad and p.ndim == 2]


def _weights(module: nn.Module) -> Iterator[Tensor]:
    return (p for name, p in module.named_parameters(recurse=False) if name == "weight" or name.endswith("_weight"))


def _output(module: nn.Module) -> nn.Module | None:
    own = getattr(module, "get_output_embeddings", None)
    found = own() if callable(own) else None
    return found if isinstance(found, nn.Module) else None


@dataclass(frozen=True)
class Split:
    """The trained parameters of a model by name, each with its number of values, in the model's order."""

    muon: dict[str, int]
    adamw: dict[str, int]

    def __str__(self) -> str:
        """Return how many values each trains, in how many parameters."""
        return f"Muon trains {_counted(self.muon, 'matrix', 'matrices')}, AdamW {_counted(self.adamw, 'tensor', 'tensors')}"


def _counted(found: dict[str, int], one: str, several: str) -> str:
    return f"{sum(found.values()):,} parameters ({len(found)} {one if len(found) == 1 else several})"


def split(model: nn.Module, matrices: Iterable[str] | None = None) -> Split:
    """Return which parameters Muon and AdamW train. ``matrices``: names of Muon's; None: those of ``hidden_matrices``.

    Raises:
        ValueError: a name is no trained matrix of the model, or there is none.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    chosen = set()
    for name in hidden_matrices(model) if matrices is None else matrices:
        if name not in every:
            raise ValueError(f"the model has no parameter {name!r}, which Muon is to train")
        if every[name].ndim != 2 or not every[name].requires_grad:
            shape = "x".join(map(str, every[name].shape)) or "one number"
            what = f"is not a matrix ({shape})" if every[name].ndim != 2 else "is frozen"
            raise ValueError(f"the parameter {name!r}, which Muon is to train, {what}: leave it to AdamW")
        chosen.add(id(every[name]))
    if not chosen:
        raise ValueError(
            "the model has no matrix for Muon (weights of hidden layers that are trained): choose AdamW, or name its matrices"
        )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    muon, adamw = ({n: p.numel() for n, p in trained.items() if (id(p) in chosen) is mine} for mine in (True, False))
    return Split(muon, adamw)
