"""How far the slow weights of a demo's nodes are apart after each round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file


def consensus_distances(folders: Sequence[Path]) -> list[float]:
    """Return for each round the RMS distance between the peers' slow weights (over all pairs) over
    their RMS norm.
    """
    of_nodes = [{path.name for path in folder.glob("*.safetensors")} for folder in folders]
    # In rounds of seconds a quick node ends sooner, and then has fewer.
    names = sorted(set.intersection(*of_nodes))
    return [_distance([load_file(folder / name) for folder in folders]) for name in names]


def _distance(peers: Sequence[Mapping[str, torch.Tensor]]) -> float:
    apart = torch.zeros(len(peers) * (len(peers) - 1) // 2 or 1, device="cpu")
    size = torch.zeros(len(peers), device="cpu")
    # By tensor, for all of a large model in float64 would need much memory.
    for key in peers[0]:
        # (peers, values)
        flat = torch.stack([tensors[key].double().reshape(-1) for tensors in peers])
        size = size + flat.square().sum(1)
        if len(peers) > 1:
            apart = apart + torch.pdist(flat).square()
    return float((apart.mean() / size.mean()).sqrt())
