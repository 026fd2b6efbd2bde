"""What the layers of a model are: the blocks that it repeats, its hidden matrices, its embeddings
and outputs.

    hidden_matrices(model)            # names: what Muon trains
    embeddings_and_outputs(model)     # parameters: what a codec with +hidden sends whole
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost blocks that ``model`` repeats, such as a transformer's layers, in the
    order of its modules.

    They are modules of one class, themselves of several modules with parameters, that stand
    together in a ModuleList, ModuleDict or Sequential.
    """
    kinds = Counter(type(child) for child in model.children() if _is_block(child))
    listed = isinstance(model, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    found: list[nn.Module] = []
    for child in model.children():
        if listed and kinds[type(child)] > 1:
            found.append(child)
        else:
            found += repeated_blocks(child)
    return found


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # they are never called
        return False
    parts = sum(any(True for _ in child.parameters()) for child in module.children())
    return parts > 1


def hidden_matrices(model: nn.Module) -> list[str]:
    """Return the names of the parameters that Muon trains by default, in the model's order.

    They are the trained parameters of two dimensions called ``weight``, or ``..._weight``, in the
    blocks that the model repeats; in a model without such blocks, the weights of all its
    ``nn.Linear`` but the last, which is its output. Never among them:

    * weights of an ``nn.Embedding`` or ``nn.EmbeddingBag``, also where another layer shares them
      (tied heads);
    * what stands outside of the blocks, such as an untied head, or what ``get_output_embeddings()``
      returns, which models of transformers have;
    * vectors and numbers (norms, biases), kernels of convolutions, recurrent layers' weights, and
      frozen parameters.

    The two matrices of a LoRA adapter in a block are matrices like any other.
    """
    blocks = repeated_blocks(model)
    within: list[nn.Module] = []
    for block in blocks:
        within += block.modules()
    if not blocks:
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        within += linear[:-1]
    hidden: set[Tensor] = set()
    for module in within:
        hidden.update(_weights(module))
    for module in _embeddings_and_named_outputs(model):
        hidden -= set(module.parameters())
    names = []
    for name, parameter in model.named_parameters():
        if parameter in hidden and parameter.requires_grad and parameter.ndim == 2:
            names.append(name)
    return names


def embeddings_and_outputs(model: nn.Module) -> set[Tensor]:
    """Return the parameters of the model's embeddings and output layers.

    They are those of each ``nn.Embedding`` and ``nn.EmbeddingBag``, also where another layer shares
    them, of what ``get_output_embeddings()`` returns, and of the ``nn.Linear`` outside of the
    blocks that the model repeats; in a model without such blocks, of its last ``nn.Linear``.
    """
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    blocks = repeated_blocks(model)
    if blocks:
        within: set[nn.Module] = set()
        for block in blocks:
            within.update(block.modules())
        outputs = [module for module in linear if module not in within]
    else:
        outputs = linear[-1:]
    found: set[Tensor] = set()
    for module in [*_embeddings_and_named_outputs(model), *outputs]:
        found |= set(module.parameters())
    return found


def _embeddings_and_named_outputs(model: nn.Module) -> list[nn.Module]:
    """Return the embeddings, and the outputs that ``get_output_embeddings()`` of a module names."""
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            found.append(module)
        output = _output(module)
        if output is not None:
            found.append(output)
    return found


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for name, parameter in module.named_parameters(recurse=False):
        if name == "weight" or name.endswith("_weight"):
            yield parameter


def _output(module: nn.Module) -> nn.Module | None:
    own = getattr(module, "get_output_embeddings", None)
    output = own() if callable(own) else None
    return output if isinstance(output, nn.Module) else None
