"""Name of the folder of stored claims; loads nothing else, for a node without verification asks for
it too.
"""

CLAIMS = "claims"
"""Within a node's folder. It bounds itself (`shoal.node.verify.claim_file.KEPT_BYTES`)."""
