"""JSON as Shoal writes it: NaN and the infinities, which JSON does not have, are null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def finite(value: Any) -> Any:
    """Return ``value``, of mappings, sequences and plain values, with None for each float that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(inner) for inner in value]
    return value


def dumps(value: Any) -> str:
    """Encode ``value`` as one line of JSON."""
    return json.dumps(finite(value), allow_nan=False)
