"""Errors by the word that programs judge them by, not by their text."""

import contextlib

import pytest


@contextlib.contextmanager
def raises_for(reason, kind):
    """Expect an error of this kind whose ``reason`` is that word."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.reason == reason
