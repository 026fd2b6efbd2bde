"""Fingerprints of images: four perceptual hashes, robust to noise, JPEG and resizing ("Generative AI Consensus", 2307.01898).

Needs the extra ``verify`` (imagehash, pillow).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.verification.fingerprints.fingerprint import Evidence, Feature
from shoal.verification.fingerprints.text import hamming

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 8
HASH_BYTES = SIDE * SIDE // 8
KINDS = ("average", "difference", "perceptual", "wavelet")
MOST_PIXELS = 1 << 24


class ImageHash:
    """Fingerprint of an image: average, difference, perceptual (DCT) and wavelet hash, 8 bytes each.

    An image is a pillow ``Image``, or a tensor (height, width, 3) uint8; at most 2^24 pixels. Its features are the four shares
    of bits that differ: 0 for the same image, about 0.5 for unlike ones.
    """

    name = "image"
    features = tuple(Feature(f"share of bits of the {kind} hash that differ", 1 / 64) for kind in KINDS)

    def make(self, output: Image | Tensor) -> bytes:
        """Return 32 bytes. Raises ``ValueError`` if ``output`` is not an image as above, or the packages are not installed."""
        library, pillow = _packages()
        image = _picture(output, pillow)
        hashes = (
            library.average_hash(image, SIDE),
            library.dhash(image, SIDE),
            library.phash(image, SIDE),
            library.whash(image, SIDE),
        )
        bits = torch.stack([torch.as_tensor(found.hash).flatten() for found in hashes]).view(-1, 8).int()
        weights = 1 << torch.arange(7, -1, -1, dtype=torch.int32, device="cpu")
        return bytes((bits * weights).sum(dim=1).tolist())

    def compare(self, proof: bytes, output: Image | Tensor) -> Evidence:
        """Measure the four Hamming distances, as shares of 64 bits."""
        own = self.make(output)
        if len(proof) != len(own):
            return Evidence(self.features, fault=f"the proof has {len(proof)} bytes, but one of an image has {len(own)}")
        pieces = [slice(at, at + HASH_BYTES) for at in range(0, len(own), HASH_BYTES)]
        return Evidence.single(self.features, *(hamming(proof[piece], own[piece]) / (8 * HASH_BYTES) for piece in pieces))


def _picture(output: Image | Tensor, pillow: Any) -> Any:
    if isinstance(output, Tensor):
        if output.dtype != torch.uint8 or output.dim() != 3 or output.shape[2] != 3:
            raise ValueError("an image must be a pillow image or a uint8 tensor of shape (height, width, 3)")
        height, width = output.shape[:2]
    elif isinstance(output, pillow.Image):
        width, height = output.size
    else:
        raise ValueError("an image must be a pillow image or a uint8 tensor of shape (height, width, 3)")
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"an image must have 1 to {MOST_PIXELS} pixels, not {width} x {height}")
    return pillow.fromarray(output.cpu().numpy()) if isinstance(output, Tensor) else output.convert("RGB")


def _packages() -> tuple[Any, Any]:
    try:
        import imagehash
        import PIL.Image
    except ImportError:
        raise ValueError(
            "fingerprints of images need the packages imagehash and pillow, of which one is missing: pip install 'shoal[verify]'"
        ) from None
    return imagehash, PIL.Image
