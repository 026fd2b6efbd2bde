"""Images: how often four perceptual hashes take a changed image for the same one, and another image for it.

Images are procedural, as a small generative model's would be alike: one smooth field of colour for each seed, with a few shapes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench._interval import rate_interval
from shoal.verification.calibration.calibration import Honest
from shoal.verification.fingerprints import Evidence, ImageHash
from shoal.verification.fingerprints.text import hamming

SIDE, RATE = 128, 1e-4
FRESH = 1_000_000
HASHES = ImageHash()
Change = Callable[[Tensor, torch.Generator], Tensor]


def picture(seed: int) -> Tensor:
    """(128, 128, 3) uint8: a smooth random field, and two to five discs and rectangles upon it."""
    random = torch.Generator().manual_seed(seed)
    coarse = torch.rand((1, 3, 5, 5), generator=random)
    field = torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic", align_corners=True)[0]
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    for _ in range(int(torch.randint(2, 6, (), generator=random))):
        top, left = (int(torch.randint(SIDE, (), generator=random)) for _ in range(2))
        size = int(torch.randint(10, 40, (), generator=random))
        if torch.rand((), generator=random) < 0.5:
            inside = (y - top) ** 2 + (x - left) ** 2 < size**2
        else:
            inside = ((y - top).abs() < size) & ((x - left).abs() < size // 2 + 5)
        field = torch.where(inside, torch.rand((3, 1, 1), generator=random), field)
    return (field.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def noise(image: Tensor, random: torch.Generator) -> Tensor:
    """Normal, of 8 levels of 255."""
    return (image.float() + 8 * torch.randn(image.shape, generator=random)).round().clamp(0, 255).to(torch.uint8)


def jpeg(image: Tensor, random: torch.Generator) -> Tensor:
    """Quality 30 to 90."""
    from PIL import Image

    held = io.BytesIO()
    Image.fromarray(image.numpy()).save(held, "JPEG", quality=int(torch.randint(30, 91, (), generator=random)))
    with Image.open(held) as found:
        pixels = torch.frombuffer(bytearray(found.convert("RGB").tobytes()), dtype=torch.uint8)
    return pixels.view(image.shape)


def resized(image: Tensor, random: torch.Generator) -> Tensor:
    """To 40 to 250 % of its side."""
    side = int(torch.randint(int(0.4 * SIDE), int(2.5 * SIDE) + 1, (), generator=random))
    planes = image.permute(2, 0, 1).unsqueeze(0).float()
    made = torch.nn.functional.interpolate(planes, size=(side, side), mode="bilinear", antialias=True)
    return made[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8).contiguous()


CHANGES: dict[str, Change] = {"noise": noise, "jpeg": jpeg, "resize": resized}


def _rate(found: list[bool]) -> dict[str, Any]:
    return {"rate": sum(found) / len(found), "of": len(found), "interval": rate_interval(sum(found), len(found))}


def compared(count: int) -> dict[str, Any]:
    """Of ``count`` images: each under one change of each kind, and ``count`` pairs of unlike images.

    As many more are changed to calibrate, all kinds together. The four distances are tested as in ``verification.calibration``.
    """

    def same(first: int, change: Change) -> list[Evidence]:
        found = []
        for seed in range(first, first + count):
            image = picture(seed)
            changed = change(image, torch.Generator().manual_seed(seed))
            found.append(HASHES.compare(HASHES.make(image), changed))
        return found

    honest = Honest.of([one for change in CHANGES.values() for one in same(0, change)])
    threshold = honest.threshold(RATE)

    def accepted(evidence: Evidence) -> bool:
        return honest.statistic(evidence)[0] <= threshold

    shown: dict[str, Any] = {}
    for name, change in CHANGES.items():
        shown[f"same, {name}"] = _rate([accepted(one) for one in same(FRESH, change)])
    # Each of some images against many others: hashes are made once.
    others = [picture(seed) for seed in range(2 * FRESH, 2 * FRESH + count)]
    proofs = [HASHES.make(image) for image in others]
    shown["another image"] = _rate(
        [accepted(distance(proofs[at], proofs[(at + step) % count])) for step in (1, 2, 3, 5) for at in range(count)]
    )
    shown["comparisons"] = sum(row["of"] for row in shown.values())
    return {"rate": RATE, "accepted": shown, "warning": honest.warning(RATE)}


def distance(one: bytes, other: bytes) -> Evidence:
    """As ``ImageHash.compare``, of two proofs."""
    pieces = [slice(at, at + 8) for at in range(0, 32, 8)]
    return Evidence.single(HASHES.features, *(hamming(one[piece], other[piece]) / 64 for piece in pieces))
