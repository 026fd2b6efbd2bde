"""What each codec costs and saves: MB/s, ratio, relative error, and whether it pays on a link.

    python bench/codecs.py --mb 40 --gbit 1 --device auto --json

A codec pays if encoding and decoding once takes less time than the link needs for the bytes that
are saved against float32. MB are those of the float32 tensors. The relative error is |x - Q(x)| /
|x| (euclidean norms), on Gaussian numbers and on heavy-tailed ones (Student's t with 3 degrees of
freedom, tensors at scales from 1 to 0.01), whose largest values are far from the rest. With error
feedback it is that of the mean of all rounds sent, which falls with their number.
What "auto" needs to measure all its candidates comes on top, once in 20 rounds: "measure". mod4 is
read by the weights of a partner, as far away as its range expects; its error is that of the values
so read, over the distance of the two.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.node.config.device import resolve_device
from shoal.optim import Codec, codec_named
from shoal.optim.codecs.mod4 import Mod4Codec
from shoal.optim.codecs.pair_message import PairMessage

NAMES = (
    "float32,bfloat16,float16,int8,e3m0,sign,topk2,int8+ef,e3m0+ef,sign+ef,"
    "topk2+ef:0.95,auto:2,mod4"
)
WIDTH = 1024
APART = 0.01  # of mod4's two peers, in parts of each tensor's values
ROUNDS = 10  # of error feedback


def gaussian(megabytes: float, generator: torch.Generator) -> list[Tensor]:
    """Matrices and biases, about as a transformer has them."""
    rows = max(round(megabytes * 1e6 / 4 / (WIDTH * WIDTH)), 1)
    return [
        torch.randn(shape, generator=generator)
        for _ in range(rows)
        for shape in [(WIDTH, WIDTH), (WIDTH,)]
    ]


def heavy_tailed(megabytes: float, generator: torch.Generator) -> list[Tensor]:
    tensors = []
    for number, tensor in enumerate(gaussian(megabytes, generator)):
        chi2 = torch.randn((3, *tensor.shape), generator=generator).square().sum(0)
        tensors.append(tensor / (chi2 / 3).sqrt() * 10.0 ** -(number % 3))
    return tensors


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median; a first call is not counted."""
    taken = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def partners(tensors: list[Tensor]) -> tuple[Mod4Codec, PairMessage, PairMessage]:
    """Return a peer's codec, its message, and that of another peer near it."""
    peers = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        moved = [APART * t.cpu().std() * torch.randn(t.shape, generator=generator) for t in tensors]
        codec = Mod4Codec()
        codec.expect("bench", moved)
        peers.append(
            (codec, codec.post([t.cpu() + by for t, by in zip(tensors, moved, strict=True)]))
        )
    return peers[0][0], peers[0][1], peers[1][1]


def relative_error(codec: Codec, tensors: list[Tensor], rounds: int) -> float:
    if isinstance(codec, Mod4Codec):
        _, mine, theirs = partners(tensors)
        read = mine.read(theirs.payload)
        sums = [0.0, 0.0]
        for seen, sent, own in zip(mine.seen(read), theirs.tensors(), mine.tensors(), strict=True):
            sums = [
                so_far + float((one - sent).double().square().sum())
                for so_far, one in zip(sums, (seen, own), strict=True)
            ]
        return math.sqrt(sums[0] / sums[1])
    codec, shapes = codec.fresh(), [tuple(tensor.shape) for tensor in tensors]
    left = [tensor * rounds for tensor in tensors]
    for _ in range(rounds):
        for rest, got in zip(left, codec.decode(codec.encode(tensors), shapes), strict=True):
            rest -= got.to(rest.device)
    norms = [math.fsum(float(t.double().square().sum()) for t in some) for some in (left, tensors)]
    return math.sqrt(norms[0] / norms[1]) / rounds


def measure(
    codec: Codec, data: dict[str, list[Tensor]], device: torch.device, gbit: float, repeats: int
) -> dict[str, Any]:
    tensors = data["gaussian"]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    size, sent = 4 * sum(tensor.numel() for tensor in tensors), codec.nbytes(shapes)
    if isinstance(codec, Mod4Codec):
        codec, mine, theirs = partners(tensors)
        decode = seconds(lambda: mine.read(theirs.payload), device, repeats)
    else:
        payload = codec.encode(tensors)
        decode = seconds(lambda: codec.decode(payload, shapes), device, repeats)
    encode = seconds(lambda: codec.encode(tensors), device, repeats)
    saved = (size - sent) * 8 / (gbit * 1e9)
    row = {
        "codec": codec.name,
        "bytes": sent,
        "ratio": size / sent,
        "encode_mb_s": size / 1e6 / encode,
        "decode_mb_s": size / 1e6 / decode,
        "encode_values_s": size / 4 / encode,
        "decode_values_s": size / 4 / decode,
        "cost_s": encode + decode,
        "saved_s": saved,
        "pays": encode + decode < saved,
    }
    if codec.name.startswith("auto"):
        row["measure_s"] = seconds(lambda: codec.fresh().encode(tensors), device, 1) - encode
    rounds = ROUNDS if codec.name.partition("+")[2] else 1
    row.update(
        {f"error_{kind}": relative_error(codec, some, rounds) for kind, some in data.items()}
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=40, help="megabytes (10^6) of float32 tensors")
    parser.add_argument(
        "--gbit", type=float, default=1, help="speed of the link in Gbit/s, one way"
    )
    parser.add_argument("--codecs", default=NAMES, help="comma-separated names")
    parser.add_argument(
        "--device",
        default="auto",
        help="where the tensors to be encoded are; payloads are decoded on the CPU",
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="threads of PyTorch; 0: its own choice"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = resolve_device(options.device)
    generator = torch.Generator().manual_seed(0)
    data = {
        name: [tensor.to(device) for tensor in make(options.mb, generator)]
        for name, make in (("gaussian", gaussian), ("heavy_tailed", heavy_tailed))
    }
    rows = []
    if not options.json:
        print("         codec   ratio   encode   decode   cost  saved pays  error on  error on")
        print("                           MB/s     MB/s      s      s       gaussian     heavy")
    for name in options.codecs.split(","):
        row = measure(codec_named(name), data, device, options.gbit, options.repeats)
        rows.append(row)
        if not options.json:
            print(
                f"{row['codec']:>14} {row['ratio']:7.2f} {row['encode_mb_s']:8.0f} "
                f"{row['decode_mb_s']:8.0f} {row['cost_s']:6.3f} {row['saved_s']:6.3f} "
                f"{'yes' if row['pays'] else 'no':>4} {row['error_gaussian']:9.5f} "
                f"{row['error_heavy_tailed']:9.5f}"
                + (f"  measure {row['measure_s']:.2f} s" if "measure_s" in row else ""),
                flush=True,
            )
    if options.json:
        chip = (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else platform.processor() or platform.machine()
        )
        about = {"device": chip, "threads": torch.get_num_threads(), "torch": torch.__version__}
        print(json.dumps({**about, "mb": options.mb, "gbit": options.gbit, "rows": rows}))


if __name__ == "__main__":
    main()
