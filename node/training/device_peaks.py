"""Published peaks of devices, by which model FLOPs utilisation is measured.

A device that is not listed has none: no guesses. They are of dense matrix products (half of what
data sheets give "with sparsity"), in TFLOPS of one device as torch lists it, from NVIDIA's data
sheets of each product and its architecture white papers (Ampere GA102, Ada), and AMD's data sheet
of the MI300X. For float16 and bfloat16 of the GeForce cards it is the figure with accumulation in
float32, which torch uses.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """Peaks in TFLOPS; None: not supported.

    ``half``: float16; ``brain``: bfloat16; ``tensor``: TF32; ``single``: float32.
    """

    half: float
    brain: float | None
    tensor: float | None
    single: float


# Names are whole: a laptop's version, a MIG slice or a cut-down export model is another device.
PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"NVIDIA B200", Peak(2250, 2250, 1125, 75)),
    (r"NVIDIA (H200|H100 80GB HBM3|GH200 480GB)", Peak(989.4, 989.4, 494.7, 66.9)),
    (r"NVIDIA H100 NVL", Peak(835, 835, 417.5, 60)),
    (r"NVIDIA H100 PCIe", Peak(756, 756, 378, 51)),
    (r"(NVIDIA )?A100-(SXM4|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe", Peak(312, 312, 156, 19.5)),
    (r"NVIDIA A10", Peak(125, 125, 62.5, 31.2)),
    (r"NVIDIA L40S", Peak(362, 362, 183, 91.6)),
    (r"NVIDIA L4", Peak(121, 121, 60, 30.3)),
    (r"NVIDIA RTX A6000", Peak(154.8, 154.8, 77.4, 38.7)),
    (r"NVIDIA GeForce RTX 4090", Peak(165.2, 165.2, 82.6, 82.6)),
    (r"NVIDIA GeForce RTX 3090", Peak(71, 71, 35.6, 35.6)),
    (r"Tesla V100-SXM2-(16|32)GB", Peak(125, None, None, 15.7)),
    (r"Tesla V100-PCIE-(16|32)GB", Peak(112, None, None, 14)),
    (r"Tesla T4", Peak(65, None, None, 8.1)),
    (r"AMD Instinct MI300X", Peak(1307.4, 1307.4, 653.7, 163.4)),
)


def peak_flops(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """Return the peak of the device ``name`` for matrix products in ``dtype``, FLOPs a second; None
    if it is not known.

    ``tf32``: products of float32 are computed in TF32, where the device has it.
    """
    for pattern, found in PEAKS:
        if not re.fullmatch(pattern, name):
            continue
        single = found.single
        if tf32 and found.tensor is not None:
            single = found.tensor
        peaks = {torch.float16: found.half, torch.bfloat16: found.brain, torch.float32: single}
        peak = peaks.get(dtype)
        return None if peak is None else peak * 1e12
    return None


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of ``device``, FLOPs a second, for matrix products in ``dtype`` as torch is
    set now; None if not known.
    """
    if device.type != "cuda":
        return None
    matmul = torch.backends.cuda.matmul
    # The older question is an error in torch 2.9 and later where the format was chosen in the newer
    # way.
    if hasattr(matmul, "fp32_precision"):
        tf32 = matmul.fp32_precision == "tf32"
    else:
        tf32 = matmul.allow_tf32
    return peak_flops(torch.cuda.get_device_name(device), dtype, tf32=tf32)
