"""The errors that a user may see."""

import errno

import pytest

from shoal.swarm.errors import write_remedy


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free some space"),
        (OSError(errno.EACCES, "Permission denied"), "let this user write there"),
        (OSError(errno.EROFS, "Read-only file system"), "let this user write there"),
        (ValueError("of another library, without a number"), "free some space"),
    ],
)
def test_advice_where_nothing_can_be_written(error, remedy):
    assert write_remedy(error) == remedy
