"""Settings that came later than the first manifests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel


def without_unused(model: type[BaseModel], found: dict[str, Any], later: Sequence[str]) -> dict[str, Any]:
    """Return ``found`` without what came later and is not set: peers of earlier versions read the manifest, its bytes unchanged."""
    return {name: value for name, value in found.items() if name not in later or value != model.model_fields[name].default}
