"""Why some bytes are no message: cut short, nested too deeply, or plain wrong. For counters and sentences only."""

from __future__ import annotations

from typing import Literal

MAX_DEPTH = 8  # containers inside each other: no schema of ours has more than four
MAX_ITEMS = 4096  # looked at, then the diagnosis is left at that: it must cost a hostile sender more than us

# First byte -> bytes of the length that follows it, then (strings, binaries) that many bytes, or (containers) items.
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}


def diagnose(data: bytes) -> Literal["truncated", "nested", "malformed"]:
    """What is wrong with ``data``, which did not decode as msgpack within our limits.

    Walks over the items without building any; never raises, and stops after `MAX_ITEMS` of them.
    """
    at, open_items = 0, [1]  # items still to come in each open container, the innermost last
    for _ in range(MAX_ITEMS):
        while open_items and not open_items[-1]:
            open_items.pop()
        if not open_items:
            return "malformed"  # whole in itself, so what was wrong is something else
        if len(open_items) > MAX_DEPTH + 1:
            return "nested"
        if at >= len(data):
            return "truncated"
        head, at = data[at], at + 1
        open_items[-1] -= 1
        if head <= 0x7F or head >= 0xE0:  # a small integer
            continue
        if head <= 0x9F:  # a short map or array
            open_items.append((head & 0x0F) * (2 if head <= 0x8F else 1))
        elif head <= 0xBF:
            at += head & 0x1F
        elif head in _CONTAINERS:
            width, per_item = _CONTAINERS[head]
            open_items.append(int.from_bytes(data[at : at + width], "big") * per_item)
            at += width
        elif head in _SIZED:
            width = _SIZED[head]
            at += width + int.from_bytes(data[at : at + width], "big")
        elif head in _FIXED:
            at += _FIXED[head]
        else:
            return "malformed"  # extension types, and the byte that msgpack never uses
        if at > len(data):
            return "truncated"
    return "malformed"
