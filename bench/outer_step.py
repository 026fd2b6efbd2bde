"""What one NoLoCo outer step costs beside the network: reading the weights, the rule, writing them
back.

    python bench/outer_step.py --params 1e8 --device auto --json

Compares slow weights on the CPU (float32, pinned transfers when the model is on a GPU) with slow
weights on the device.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from shoal.node.config.device import resolve_device
from shoal.optim import Alone, NoLoCo


def measure(
    params: int, device: torch.device, place: torch.device | Path, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    width = 4096
    rows = max(params // width, 1)
    weight = torch.nn.Parameter(torch.randn(rows, width, device=device, dtype=dtype))
    weight.grad = torch.zeros_like(weight)
    inner = torch.optim.SGD([weight], lr=0.0)
    opt = NoLoCo(inner, Alone(), every=1, slow_device=place, lag=0)
    seconds = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        opt.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return {
        "params": rows * width,
        "dtype": str(dtype).removeprefix("torch."),
        "slow": "files" if isinstance(place, Path) else str(place),
        "seconds": statistics.median(seconds[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", default="1e7", help="comma-separated numbers of parameters")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--offload",
        type=Path,
        help="measure also with slow weights and momentum in files in this folder",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = resolve_device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    places: list[torch.device | Path] = (
        [torch.device("cpu")] if device.type == "cpu" else [torch.device("cpu"), device]
    )
    places += [options.offload] if options.offload else []
    rows = [
        measure(int(float(text)), device, place, dtype, options.repeats)
        for text in options.params.split(",")
        for place in places
    ]
    for row in rows:
        print(
            f"{row['params']:>13,} {row['dtype']} parameters, slow weights on {row['slow']}: "
            f"{row['seconds']:.4f} s",
            file=sys.stderr,
        )
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    if options.json:
        print(
            json.dumps(
                {
                    "device": name,
                    "torch": torch.__version__,
                    "repeats": options.repeats,
                    "rows": rows,
                }
            )
        )


if __name__ == "__main__":
    main()
