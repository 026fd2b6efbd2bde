"""``python -m shoal``: the same as the command ``shoal``."""

from shoal.node.cli.main import main

main()
