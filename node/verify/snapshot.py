"""Snapshots: a policy's trained weights as bytes, so that others can compute what it computed.

Of tiny these are all parameters, of a model with an adapter the adapter's. They travel as float32
safetensors, whatever the module computes in (float32 holds bfloat16 and float16 exactly), and a
policy is known by the SHA-256 of these bytes.
"""

from __future__ import annotations

import hashlib

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from shoal.node.rl.policy import Policy
from shoal.node.verify.errors import VerifyError

MAX_SNAPSHOT_BYTES = 64 * 2**20
HEADER_BYTES = 1024
HEADER_BYTES_PER_TENSOR = 256
"""That safetensors' header has at most, besides the names."""


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a snapshot holds, in the order of names."""
    return {name: value for name, value in sorted(module.named_parameters()) if value.requires_grad}


def snapshot(policy: Policy) -> bytes:
    """Encode the trained parameters in at most 64 MiB; equal weights give equal bytes.

    Raises VerifyError if they are more, none, or not finite.
    """
    found = trained(policy.module)
    nbytes = sum(4 * value.numel() for value in found.values())
    if not found or nbytes > MAX_SNAPSHOT_BYTES - HEADER_BYTES:
        raise VerifyError(
            f"The policy has {nbytes:,} bytes of trained weights, and claims need 1 to "
            f"{MAX_SNAPSHOT_BYTES:,}: train a small adapter (with peft installed) of a smaller "
            "model, or turn verification off."
        )
    tensors: dict[str, Tensor] = {}
    for name, value in found.items():
        tensor = value.detach().to("cpu", torch.float32, copy=True).contiguous()
        if not bool(tensor.isfinite().all()):
            raise VerifyError(
                "The policy's weights are not all finite: its training failed, so nothing can be "
                "claimed of it."
            )
        tensors[name] = tensor
    return save(tensors)


def base_hash(module: nn.Module) -> str:
    """Return the hex SHA-256 of the untrained state, which no snapshot holds: equal for peers that
    can check each other.
    """
    found = hashlib.sha256(b"shoal policy base 1\0")
    own = trained(module)
    state = module.state_dict()
    for name in sorted(state.keys() - own.keys()):
        # What a module keeps beside tensors (get_extra_state) may be of any type.
        if not isinstance(state[name], Tensor):
            continue
        tensor = state[name].detach().to("cpu").contiguous()
        found.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def digest(data: bytes) -> bytes:
    """Return the SHA-256 of a snapshot or of a claim's material, by which others fetch it."""
    return hashlib.sha256(data).digest()


def most_bytes(module: nn.Module) -> int:
    """Return how large a snapshot of ``module`` can be; names are escaped in the header."""
    nbytes = HEADER_BYTES
    for name, value in trained(module).items():
        nbytes += 4 * value.numel() + HEADER_BYTES_PER_TENSOR + 6 * len(name)
    return nbytes


def load_snapshot(module: nn.Module, data: bytes) -> None:
    """Give ``module`` the weights in ``data``, cast to its dtype: whole or not at all.

    Raises VerifyError unless ``data`` holds exactly its trained parameters, by name and shape, as
    float32, and all are finite in the module's dtype. Nothing larger than the module is allocated.
    """
    own = trained(module)
    if len(data) > most_bytes(module):
        raise VerifyError(
            f"The snapshot has {len(data):,} bytes where at most {most_bytes(module):,} fit this "
            "policy: refuse it."
        )
    try:
        found = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise VerifyError(
            f"The snapshot is no safetensors file ({type(error).__name__}): refuse it."
        ) from None
    if found.keys() != own.keys():
        other = min(found.keys() ^ own.keys())
        raise VerifyError(
            f"The snapshot is of another policy, which differs in {other[:80]!a}: refuse it."
        )
    cast: dict[str, Tensor] = {}
    for name, value in own.items():
        tensor = found[name]
        if tensor.dtype != torch.float32 or tensor.shape != value.shape:
            shown = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
            raise VerifyError(
                f"The snapshot has {name} as {shown}, not as float32 of shape "
                f"{tuple(value.shape)}: refuse it."
            )
        cast[name] = tensor.to(value.dtype)
        if not bool(cast[name].isfinite().all()):
            raise VerifyError(f"The snapshot has numbers in {name} that are not finite: refuse it.")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(cast[name])
