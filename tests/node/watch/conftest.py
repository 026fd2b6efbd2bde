"""Statuses of peers that exist here alone, and the bytes in which they would arrive."""

import pytest

from tests.support import waiting
from tests.support.watched_peers import Author


@pytest.fixture
def authors():
    return [Author(name) for name in ("anna", "bert", "carl")]


@pytest.fixture
def until():
    return waiting.until
