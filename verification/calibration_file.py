"""Calibration files: safetensors with the honest windows themselves, so that they can be pooled and
judged at any rate.

    save_calibration(calibration, path)
    load_calibration(path)

A file may come from a stranger. Its size is bounded before it is read, and nothing larger than the
file is allocated.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from shoal.verification.calibration import MOST_CLAIMS, Calibration, CalibrationError, Honest, Pair
from shoal.verification.fingerprints.fingerprint import Evidence, Feature

VERSION = "1"
"""Version of the form of a file."""
MOST_BYTES = 1 << 28
"""Bytes of a file, at most."""
MOST_PAIRS = 256
"""Calibrations in a file, at most."""
MOST_GRAIN = 1e6
"""Grain of a feature, at most."""
MOST_FEATURES = 16
"""Features of a calibration, at most."""
_DAMAGED = "is not a calibration of this version, or damaged: calibrate again"


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write ``path`` atomically. Raises ``CalibrationError`` above 256 MiB, and ``OSError``."""
    tensors: dict[str, Tensor] = {}
    described = []
    floats = functools.partial(torch.tensor, dtype=torch.float64, device="cpu")
    pairs = sorted(calibration.pairs.items(), key=lambda item: item[0])
    for number, (pair, honest) in enumerate(pairs):
        claims = honest.claims
        rows = itertools.chain.from_iterable(claim.values for claim in claims)
        sizes = itertools.chain.from_iterable(claim.sizes for claim in claims)
        counts = [len(claim.sizes) for claim in claims]
        tensors[f"{number}.values"] = floats(list(rows))
        tensors[f"{number}.sizes"] = floats(list(sizes))
        tensors[f"{number}.windows"] = torch.tensor(counts, dtype=torch.int64, device="cpu")
        features = [[feature.name, feature.grain] for feature in honest.features]
        described.append({"pair": astuple(pair), "features": features})
    data = save(tensors, metadata={"shoal.calibration": VERSION, "pairs": json.dumps(described)})
    if len(data) > MOST_BYTES or len(described) > MOST_PAIRS:
        raise CalibrationError(
            f"the calibration is too large for a file ({len(data)} bytes): use fewer claims or "
            "pairs"
        )
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def load_calibration(path: Path) -> Calibration:
    """Read a file of ``save_calibration``.

    Raises ``CalibrationError`` for any other file, or if it cannot be read.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CalibrationError(
                f"'{path}' is larger than {MOST_BYTES} bytes: it is not a calibration"
            )
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("shoal.calibration") != VERSION:
                raise CalibrationError(f"'{path}' {_DAMAGED}")
            described = json.loads(metadata["pairs"])
            if not isinstance(described, list) or len(described) > MOST_PAIRS:
                raise CalibrationError(f"'{path}' {_DAMAGED}")
            pairs = [_pair(number, entry, file) for number, entry in enumerate(described)]
            return Calibration(dict(pairs))
    except CalibrationError:
        raise
    except OSError as error:
        raise CalibrationError(f"'{path}' cannot be read: {error.strerror or error}") from None
    # RecursionError: json of many brackets; OverflowError: of many digits. The others: parts that
    # are missing or of another type.
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise CalibrationError(f"'{path}' {_DAMAGED}") from None


def _pair(number: int, entry: Any, file: Any) -> tuple[Pair, Honest]:
    fingerprint, model, prover, verifier = (_text(part) for part in entry["pair"])
    features = tuple(Feature(_text(name), float(grain)) for name, grain in entry["features"])
    values = file.get_tensor(f"{number}.values")
    sizes = file.get_tensor(f"{number}.sizes")
    windows = file.get_tensor(f"{number}.windows")
    if (values.dtype, sizes.dtype, windows.dtype) != (torch.float64, torch.float64, torch.int64):
        raise ValueError("a tensor has another dtype")
    if not 0 < len(features) <= MOST_FEATURES:
        raise ValueError("features are out of range")
    if not all(0 <= feature.grain <= MOST_GRAIN for feature in features):
        raise ValueError("features are out of range")
    if windows.dim() != 1 or not 0 < len(windows) <= MOST_CLAIMS:
        raise ValueError("a tensor has another shape")
    if values.shape != (len(sizes), len(features)) or sizes.dim() != 1:
        raise ValueError("a tensor has another shape")
    # Each is bounded before they are added up: int64 sums wrap around.
    bounded = int(windows.min()) >= 1 and int(windows.max()) <= len(sizes)
    if not bounded or int(windows.sum()) != len(sizes):
        raise ValueError("the claims do not add up to the windows")
    rows = values.tolist()
    parts = sizes.tolist()
    claims = []
    at = 0
    for many in windows.tolist():
        own_rows = tuple(map(tuple, rows[at : at + many]))
        claims.append(Evidence(features, own_rows, tuple(parts[at : at + many])))
        at += many
    return Pair(fingerprint, model, prover, verifier), Honest.of(claims)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value
