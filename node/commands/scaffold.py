"""Work of ``shoal init``: a template of `shoal.node.templates`, copied into a new folder."""

from __future__ import annotations

import contextlib
from importlib import resources
from pathlib import Path

from shoal.node.packages import require
from shoal.swarm.errors import ShoalError

FILES = ("README.md", "swarm.toml", "task.py")
TEMPLATES = {
    "pretrain": "shoal demo --task task.py:Pretrain --peers 2 --rounds 8 --every 10",
    "finetune": "shoal demo --task task.py:Finetune --peers 2 --rounds 4 --every 5",
    "rl": "shoal demo --task rl --env task.py:Reverse --peers 2 --rounds 20",
}
"""For each template the command that tries it; its README has the same one."""


class ScaffoldError(ShoalError):
    """The folder cannot be created from the template."""


def scaffold(folder: Path, template: str) -> list[str]:
    """Create ``folder`` with the files of ``template`` and return their names.

    Raises:
        ScaffoldError: the folder is not empty, and then unchanged, or cannot be written; or the
            template needs a missing package.
    """
    if template == "finetune":
        require(ScaffoldError, "The template finetune", "transformers", extra="hf")
    source = resources.files("shoal.node") / "templates" / template
    contents = {name: (source / name).read_bytes() for name in FILES}
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ScaffoldError(
                f"The folder {str(folder)!r} is not empty: name a new one, or empty it."
            )
        for name, content in contents.items():
            with (folder / name).open("xb") as file:
                written.append(folder / name)
                file.write(content)
    except OSError as error:
        # A part of a template is of no use.
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        raise ScaffoldError(
            f"Cannot write the folder {str(folder)!r} ({error.strerror}): choose another place."
        ) from error
    return list(contents)
