"""A hook of mkdocs: the README is the start page of the site."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the README as ``index.md``: links into docs/ lose that folder, and those to files beside
    it become their names.
    """
    page = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    page = re.sub(r"\[([^]]*)\]\((?:[A-Z]+\.md|LICENSE|examples/[^)]*)\)", r"`\1`", page)
    files.append(File.generated(config, "index.md", content=page))
    return files
