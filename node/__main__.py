"""``python -m node``: the same as ``shoal``."""

from node.cli import main

main()
