"""Every function that makes something of a stranger's bytes, with good bytes for it and the
exceptions that it may raise.

`test_fuzz` finds such functions in the source, and fails for one that is neither here nor in `OWN`.
"""

import functools

from tests.security.claim_decoders import claim_decoders
from tests.security.file_decoders import file_decoders
from tests.security.payload_decoders import codecs
from tests.security.wire_decoders import wire_decoders


@functools.cache
def decoders():
    """Return all of them."""
    return [*wire_decoders(), *codecs(), *claim_decoders(), *file_decoders()]
