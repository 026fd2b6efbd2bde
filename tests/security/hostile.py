"""What strangers send: bytes at random, and valid ones that were cut, flipped, or have another
value in one place.

A `Form` opens bytes into a tree of dicts, lists and scalars, and makes bytes of a tree again. What
was signed in it is signed anew, so that a signature does not shield what lies behind it.
"""

import base64
import contextlib
import hashlib
import json
import math
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
from hypothesis import strategies as st

from shoal.swarm.identity import Identity

RAW = {
    "<deep>": "[" * 5000 + "]" * 5000,
    "<long>": "9" * 400,
    "<longer>": "9" * 5000,
    "<beyond>": "1e999",
}
"""What JSON can say, and Python's writer of it cannot."""
DEEP: Any = ()
for _ in range(200):
    DEEP = [DEEP]
ODD = (
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    1,
    0.5,
    5e-324,
    -1.7e308,
    2**31,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    None,
    True,
    False,
    "",
    "x" * 70,
    "x" * 3000,
    "\x1b[2J",
    "../x",
    "\ud800",
    b"",
    b"x" * 70,
    b"\xff" * 70,
    [],
    [0],
    [[0]],
    {},
    {"x": 0},
    DEEP,
    *RAW,
)
"""Of a wrong type, or of no use as what they stand for."""
WHOLE = (
    b"",
    b"[" * 10**5,
    b'{"a":' * 10**5,
    b"\x91" * 10**5,
    b"\x81\xa1a" * 10**5,
    b"9" * 10**5,
    b"\xdd\x7f\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc1",
    b"\xff" * 8,
    b"\xff\xff\xff\x7f" + bytes(60),
    b"null",
    b"NaN",
    bytes(10**6),
    b"x" * 10**6,
)
"""In place of all there is: deep nesting, long numbers, containers and byte strings that claim to
be long.
"""
MILLION = ([0] * 10**6, "x" * 10**6, b"\x00" * 10**6)
SIGNERS: dict[str, Identity] = {}
"""Peer id -> the key with which what it signed is signed anew."""


class Form(NamedTuple):
    """How bytes are opened into a tree, and made of one; ``make`` raises one of `CANNOT` for a
    value that it cannot hold.
    """

    open: Callable[[bytes], Any]
    make: Callable[[Any], bytes]


class Sealed(list):
    """What a message's seal holds: signer, the message's tree, signature."""


class Inner(list):
    """A byte string that is msgpack itself: its tree."""


def _opened(tree):
    if isinstance(tree, (list, tuple)):
        parts = [_opened(part) for part in tree]
        kinds = [type(part) for part in tree]
        return Sealed(parts) if kinds == [str, bytes, bytes] and tree[0] in SIGNERS else parts
    if isinstance(tree, dict):
        return {name: _opened(value) for name, value in tree.items()}
    if isinstance(tree, bytes) and len(tree) > 8:
        try:
            found = msgpack.unpackb(tree, strict_map_key=False)
        except Exception:  # it is no msgpack
            return tree
        return Inner([_opened(found)]) if isinstance(found, list) else tree
    return tree


def _made(tree):
    if isinstance(tree, Inner):
        return _packed(tree[0]) if len(tree) == 1 else b""
    if isinstance(tree, Sealed) and len(tree) == 3:
        signer, payload, _ = (_made(part) for part in tree)
        key = SIGNERS.get(signer) if isinstance(signer, str) else None
        found = tree[1][0] if isinstance(tree[1], Inner) and tree[1] else None
        if (
            key is None
            or not isinstance(found, list)
            or len(found) < 2
            or not isinstance(payload, bytes)
        ):
            return [signer, payload, _made(tree[2])]
        return [
            signer,
            payload,
            key.sign(f"shoal/{found[0]}/{found[1]}".encode("ascii", "replace").decode(), payload),
        ]
    if isinstance(tree, (list, tuple)):
        return [_made(part) for part in tree]
    if isinstance(tree, dict):
        return {name: _made(value) for name, value in tree.items()}
    return tree


def _packed(tree):
    return msgpack.packb(_made(tree), unicode_errors="surrogatepass")


MSGPACK = Form(lambda data: _opened(msgpack.unpackb(data, strict_map_key=False)), _packed)


def _json(tree):
    text = json.dumps(_plain(tree))
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text


def _plain(tree):
    """Return a tree that JSON can hold; a byte string becomes a text."""
    if isinstance(tree, dict):
        return {str(name): _plain(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_plain(part) for part in tree]
    return tree.decode("latin-1") if isinstance(tree, bytes) else tree


JSON = Form(json.loads, lambda tree: _json(tree).encode())


def _tensors(data):
    size = int.from_bytes(data[:8], "little")
    return [json.loads(data[8 : 8 + size]), data[8 + size :]]


def _tensor_file(tree):
    header, body = tree
    text = _json(header).encode()
    return len(text).to_bytes(8, "little") + text + (body if isinstance(body, bytes) else b"")


SAFETENSORS = Form(_tensors, _tensor_file)


def frames(width):
    """Return the form of messages one after the other, each behind its length of ``width``
    bytes.
    """

    def opened(data):
        found, at = [], 0
        while at < len(data):
            start = at + width
            at = start + int.from_bytes(data[at:start], "big")
            found.append(_opened(msgpack.unpackb(data[start:at])))
        return found

    def made(tree):
        return b"".join(len(frame).to_bytes(width, "big") + frame for frame in map(_packed, tree))

    return Form(opened, made)


PARTS = Form(
    lambda data: re.split(r"([/?&=:\s])", data.decode()),
    lambda tree: "".join(part if isinstance(part, str) else str(part) for part in tree).encode(
        "utf-8", "surrogatepass"
    ),
)
"""A text in parts, between slashes and the like."""
INVITE = Form(
    lambda data: MSGPACK.open(base64.urlsafe_b64decode(data + b"=" * (-len(data) % 4))),
    lambda tree: base64.urlsafe_b64encode(_packed(tree)).rstrip(b"="),
)


def _digested(tree):
    text = _json(tree)
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}\n".encode()


DIGESTED = Form(lambda data: json.loads(data.partition(b"\n")[2]), _digested)
"""JSON behind the line with its digest."""


def places(tree, path=()):
    """Yield the path to each part of a tree, itself included."""
    yield path
    parts = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for name, part in parts:
        yield from places(part, (*path, name))


def at(tree, path):
    for step in path:
        tree = tree[step]
    return tree


def put(tree, path, value):
    """Return a tree with ``value`` at ``path``; ... removes what is there, and `Twice` repeats
    it.
    """
    if not path:
        return value
    first, *rest = path
    if isinstance(tree, dict):
        changed = {
            name: put(part, rest, value) if name == first else part for name, part in tree.items()
        }
        return {name: part for name, part in changed.items() if part is not ...}
    parts = []
    for place, part in enumerate(tree):
        new = put(part, rest, value) if place == first else part
        parts += (
            []
            if new is ...
            else [new, new]
            if value is Twice and place == first and not rest
            else [new]
        )
    made = type(tree)(parts)
    return type(tree)([part if part is not Twice else at(tree, (first,)) for part in made])


class Twice:
    """Stands for a part that is to be there twice."""


def near(value):
    """Return values beside one that was right."""
    if isinstance(value, bool) or value is None:
        return (not value,)
    if isinstance(value, (int, float)):
        return (value + 1, value - 1, -value, value * 2, float(value), str(value))
    if isinstance(value, (str, bytes)):
        return (value[:-1], value + value, value[1:])
    if isinstance(value, list):
        return (value * 2, value[::-1], value[:-1])
    return ()


CANNOT = (
    ValueError,
    TypeError,
    OverflowError,
    LookupError,
    AttributeError,
    msgpack.exceptions.PackException,
)
"""What the maker of a form raises for a value that the form cannot hold."""


def changes(form, data, most=500):
    """Yield what comes of one other value in one place of ``data``: all, or so many drawn ones,
    always the same.
    """
    tree = form.open(data)
    every = [
        (path, value)
        for path in places(tree)
        for value in (*ODD, *near(at(tree, path)), *((..., Twice) if path else ()))
    ]
    for path, value in every if len(every) <= most else random.Random(7).sample(every, most):
        with contextlib.suppress(*CANNOT):
            yield form.make(put(tree, path, value))


def millions(form, data, most=3):
    """Yield ``data`` with 10^6 entries, characters or bytes in each of ``most`` places."""
    tree = form.open(data)
    every = list(places(tree))
    for path in random.Random(8).sample(every, min(most, len(every))):
        for value in MILLION:
            with contextlib.suppress(*CANNOT):
                yield form.make(put(tree, path, value))


@st.composite
def damaged(draw, data):
    """``data`` with a few bytes changed, cut out or put in, or its end cut off."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(found)))
        size = draw(st.sampled_from([0, 1, 1, 2, 5, 4000]))
        found[place : place + size] = draw(st.binary(max_size=6))
    return bytes(found)


@st.composite
def flipped(draw, data):
    """``data`` with one bit flipped."""
    found = bytearray(data)
    bit = draw(st.integers(0, 8 * len(found) - 1))
    found[bit // 8] ^= 1 << bit % 8
    return bytes(found)


@st.composite
def mixed(draw, form, data):
    """``data`` with other values in up to three places."""
    tree = form.open(data)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(tree))))
        value = draw(st.sampled_from([*ODD, *near(at(tree, path)), *((...,) if path else ())]))
        changed = put(tree, path, value)
        try:
            form.make(changed)
        except CANNOT:
            continue
        tree = changed
    return form.make(tree)


def hostile(form, samples):
    """Return a strategy of all that a stranger may send in place of ``samples``."""
    ways = [st.binary(max_size=300)]
    for data in samples:
        cuts = st.integers(0, max(len(data) - 1, 0)).map(lambda size, data=data: data[:size])
        ways += [
            damaged(data),
            flipped(data),
            cuts,
            *([mixed(form, data)] if form is not None else []),
        ]
    return st.one_of(ways)
